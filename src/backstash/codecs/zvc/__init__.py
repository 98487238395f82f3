"""Zero-value compression: a codec and its kernels."""

from backstash.codecs.zvc import reference as reference
from backstash.codecs.zvc.codec import Zvc as Zvc
