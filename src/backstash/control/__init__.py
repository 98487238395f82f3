"""What is decided while training runs: error bounds from the gradients' own statistics, and the batch size."""

from backstash.control.batch import BatchSize
from backstash.control.bound import bound_for, comet_bound, predicted_sigma
from backstash.control.controller import Comet, Record, comet

__all__ = ["BatchSize", "Comet", "Record", "bound_for", "comet", "comet_bound", "predicted_sigma"]
