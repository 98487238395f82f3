"""Rewrites of a model, which the user asks for and can undo. No Session changes a model by itself."""

from backstash.rewrites.chunked_loss import ChunkedLoss, chunked_loss
from backstash.rewrites.inplace import COPYING, OVERWRITING, Inplace, inplace

__all__ = ["COPYING", "OVERWRITING", "ChunkedLoss", "Inplace", "chunked_loss", "inplace"]
