"""Integers in as few bits as they need, and pooling indices as places in windows: a codec and its kernels."""

from backstash.codecs.narrow import reference as reference
from backstash.codecs.narrow import windows as windows
from backstash.codecs.narrow.codec import Narrow as Narrow
