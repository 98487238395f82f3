"""Every exception of backstash, with one class for each cause.

Each message has three parts: what was asked, what was got, and what to do.
"""

from __future__ import annotations


class BackstashError(Exception):
    """Base of every error that backstash raises on purpose."""


class UnknownNameError(BackstashError, ValueError):
    """A policy, codec or store was asked for by a name that is not registered."""


class NeedNotMetError(BackstashError, ValueError):
    """A policy chose a codec that preserves less than the backward pass reads."""


class CodecRefusedError(BackstashError, TypeError):
    """A codec was given a tensor that it does not accept."""


class DamagedPlanesError(BackstashError, RuntimeError):
    """The planes of a stashed value do not fit together, so it cannot be decoded."""


class StoreError(BackstashError, RuntimeError):
    """A store could not write a value or bring it back."""


class StoreFullError(StoreError):
    """A store was given a value for which it has no room left."""


class SavedTensorModifiedError(BackstashError, RuntimeError):
    """A tensor that is kept by reference was changed in place after it was saved."""


class SavedTensorFreedError(BackstashError, RuntimeError):
    """A tensor that is kept by reference has lost its memory after it was saved."""


class SessionError(BackstashError, RuntimeError):
    """A Session was nested, re-entered, or opened where it would switch other hooks off."""


class GraphError(BackstashError, RuntimeError):
    """A step cannot be captured in a graph, or a replay of one could not do what the captured step did."""


class IntegrationError(BackstashError, ValueError):
    """A model or a framework was to be connected with a Session in a way that cannot work."""


class RewriteError(BackstashError, ValueError):
    """A rewrite was asked for, but it cannot be proven on this model with this step."""


class MeasureError(BackstashError, RuntimeError):
    """A measurement was asked for that this system cannot make."""


class ScriptError(BackstashError, FileNotFoundError):
    """A training script or a benchmark was asked for that is not there."""


class ScriptFailedError(BackstashError, RuntimeError):
    """A script that was to be measured ended with an error."""


class RecomputedDifferentlyError(BackstashError, RuntimeError):
    """A value that was computed again has other bits than it had in the forward pass."""


class PrecisionChangedError(BackstashError, RuntimeError):
    """A setting was changed between forward and backward, so that backward would read more than was stored."""


class PlanError(BackstashError, ValueError):
    """A plan was asked for in a way that means nothing, or the data of a plan or a profile is damaged."""


class BudgetError(PlanError):
    """No plan fits into the budget.

    Attributes:
        smallest_nbytes: the smallest budget for which a plan was found.
        seconds: predicted time of a step under that plan.
        plan: that plan.
    """

    def __init__(self, message: str, smallest_nbytes: int, seconds: float, plan: object) -> None:
        super().__init__(message)
        self.smallest_nbytes = smallest_nbytes
        self.seconds = seconds
        self.plan = plan


class BatchTooLargeError(BudgetError, RuntimeError):
    """No plan fits the steps of a running loop, as :class:`BudgetError`; a smaller batch may fit.

    Programs that look for the largest batch, as accelerate's ``find_executable_batch_size`` and Lightning's
    ``BatchSizeFinder``, know a failed allocation by the words of its error. This one has these words, so they try the
    next batch.

    Args:
        error: what was found for the budget.
    """

    def __init__(self, error: BudgetError) -> None:
        message = (
            f"{error} (A program that looks for a batch which fits reads this as 'CUDA out of memory.' or as "
            f'"DefaultCPUAllocator: can\'t allocate memory".)'
        )
        super().__init__(message, error.smallest_nbytes, error.seconds, error.plan)


class AllocatorError(BackstashError, ValueError):
    """An allocator was asked for that is not installed, or is no shared library."""


class SettingError(BackstashError, ValueError):
    """A setting in ``pyproject.toml`` has a name or a value that no command takes."""
