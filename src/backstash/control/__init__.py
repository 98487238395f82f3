"""What is decided while training runs: error bounds from the gradients' own statistics, and the batch size."""

from backstash.control.batch import BatchSize
from backstash.control.bound import bound_for, comet_bound, predicted_sigma

__all__ = ["BatchSize", "bound_for", "comet_bound", "predicted_sigma"]
