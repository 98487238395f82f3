"""COMET's closed loop: error bounds from the gradients' own statistics while training runs, and the batch size."""

from backstash.papers.comet.batch_size import BatchSize
from backstash.papers.comet.bound import bound_for, comet_bound, predicted_sigma
from backstash.papers.comet.controller import Comet, comet
from backstash.papers.comet.record import Record

__all__ = ["BatchSize", "Comet", "Record", "bound_for", "comet", "comet_bound", "predicted_sigma"]
