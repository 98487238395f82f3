"""Cosine transforms of 8x8 blocks: a codec and its kernels."""

from backstash.codecs.dct import reference as reference
from backstash.codecs.dct.codec import Dct as Dct
