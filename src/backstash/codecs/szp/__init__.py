"""Values within a bound at a width per block: a codec and its kernels."""

from backstash.codecs.szp import reference as reference
from backstash.codecs.szp.codec import Szp as Szp
