"""Differences from predictions, entropy-coded within a bound: a codec and its kernels."""

from backstash.codecs.sz import reference
from backstash.codecs.sz.codec import KeptModel, Sz

__all__ = ["KeptModel", "Sz", "reference"]
