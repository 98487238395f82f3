"""Run lengths of zeros: a codec and its kernels."""

from backstash.codecs.rle import reference as reference
from backstash.codecs.rle.codec import Rle as Rle
