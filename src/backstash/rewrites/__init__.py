"""Explicit changes of a model that can be undone: what no Session does by itself."""

from backstash.rewrites.chunked_loss import ChunkedLoss, chunked_loss
from backstash.rewrites.inplace import COPYING, OVERWRITING, Inplace, inplace

__all__ = ["COPYING", "OVERWRITING", "ChunkedLoss", "Inplace", "chunked_loss", "inplace"]
