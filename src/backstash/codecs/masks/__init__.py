"""A bit per element: the codecs Bitmask and Binary, and their kernels."""

from backstash.codecs.masks import reference as reference
from backstash.codecs.masks.codec import Binary as Binary
from backstash.codecs.masks.codec import Bitmask as Bitmask
