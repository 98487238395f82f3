"""Integers of few bits between the extremes of each group: a codec and its kernels."""

from backstash.codecs.blockquant import reference as reference
from backstash.codecs.blockquant.codec import BlockQuant as BlockQuant
