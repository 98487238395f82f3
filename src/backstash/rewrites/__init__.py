"""Rewrites of a model, which the user asks for and can undo. No Session changes a model by itself."""

from backstash.rewrites.channels_last import CONVOLUTIONS, ChannelsLast, channels_last
from backstash.rewrites.chunked_loss import ChunkedLoss, chunked_loss
from backstash.rewrites.chunked_rows import LogitRows, chunked_rows
from backstash.rewrites.inplace import COPYING, OVERWRITING, Inplace, inplace

__all__ = [
    "CONVOLUTIONS",
    "COPYING",
    "OVERWRITING",
    "ChannelsLast",
    "ChunkedLoss",
    "Inplace",
    "LogitRows",
    "channels_last",
    "chunked_loss",
    "chunked_rows",
    "inplace",
]
