"""COMET's closed loop: error bounds from the gradients' own statistics while training runs, and the batch size."""

from backstash.policies.comet.batch_size import BatchSize
from backstash.policies.comet.bound import bound_for, comet_bound, predicted_sigma
from backstash.policies.comet.controller import Comet, comet
from backstash.policies.comet.record import Record

__all__ = ["BatchSize", "Comet", "Record", "bound_for", "comet", "comet_bound", "predicted_sigma"]
