"""Positions in pooling windows: kernels of Narrow, and of a pooling's backward pass."""

from backstash.codecs.narrow.windows import reference as reference
