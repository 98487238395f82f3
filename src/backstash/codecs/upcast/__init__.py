"""Float32 numbers that are numbers of bfloat16, stored as these: a codec and its kernels."""

from backstash.codecs.upcast import reference as reference
from backstash.codecs.upcast.codec import Upcast as Upcast
from backstash.codecs.upcast.operand import Operand as Operand
