"""Small floating-point formats: a codec and its kernels."""

from backstash.codecs.minifloat import reference as reference
from backstash.codecs.minifloat.codec import Minifloat as Minifloat
