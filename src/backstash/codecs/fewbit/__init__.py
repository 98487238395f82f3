"""Intervals of a function's derivative in few bits: a codec and its kernels."""

from backstash.codecs.fewbit import reference as reference
from backstash.codecs.fewbit.codec import FewBit as FewBit
