"""Exponents as codes into a window for each block: a codec and its kernels."""

from backstash.codecs.exponents import reference as reference
from backstash.codecs.exponents.codec import Exponents as Exponents
