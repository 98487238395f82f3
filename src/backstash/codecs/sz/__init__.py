"""Differences from predictions, entropy-coded within a bound: a codec and its kernels."""

from backstash.codecs.sz import reference as reference
from backstash.codecs.sz.codec import Sz as Sz
