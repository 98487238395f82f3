"""Checks of the contracts that codecs, stores and policies must keep, for your own as well as for the built-in ones.

The checks need neither pytest nor hypothesis. Each raises an AssertionError that says what was asked, what was got, and
what to do. The built-in tensors are small, and no check measures how fast a codec is.

Example:
    >>> from backstash import codecs
    >>> check_codec(codecs.get("zvc")).encoded > 100
    True
"""

from backstash.bits import equal_bits
from backstash.testing.codec import CodecCheck, check_codec
from backstash.testing.gradients import GradientsEqual, gradients_equal
from backstash.testing.store import check_store
from backstash.testing.tensors import FLOATS, INTEGERS, probes

__all__ = [
    "FLOATS",
    "INTEGERS",
    "CodecCheck",
    "GradientsEqual",
    "check_codec",
    "check_store",
    "equal_bits",
    "gradients_equal",
    "probes",
]
