"""Counts of a sample of a tensor: kernels by which codecs decide whether they take it."""

from backstash.ops.samples import reference as reference
