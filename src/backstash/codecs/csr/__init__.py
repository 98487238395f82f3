"""Compressed sparse rows: a codec and its kernels."""

from backstash.codecs.csr import reference as reference
from backstash.codecs.csr.codec import Csr as Csr
