"""A cheap look at a tensor's data, by which codecs decide whether a pass over it would pay."""

from __future__ import annotations

from torch import Tensor

from backstash.ops import backends

_RUNS, _RUN, _WHOLE = 32, 32, 4096


def sample(x: Tensor) -> Tensor:
    """All of a flat tensor of up to 4,096 elements; of a larger one 32 evenly spread runs of 32 neighbours."""
    runs, run, step = _layout(x.numel())
    return x.as_strided((runs, run), (step, 1)).reshape(-1)


def look(x: Tensor) -> tuple[int, int, int]:
    """What a sample of the flat tensor ``x`` shows. On CUDA the host waits for it.

    Returns:
        (elements looked at, how many of them are not zero, how many different bit patterns: 0, 1, 2, or 3 for more).
    """
    runs, run, step = _layout(x.numel())
    nonzeros, patterns = backends.serving(x.device.type).sample_counts(x, runs, run, step) if x.numel() else (0, 0)
    return runs * run, nonzeros, patterns


def _layout(numel: int) -> tuple[int, int, int]:
    """The number of runs, the elements of a run, and the elements from one run's beginning to the next one's."""
    return (1, numel, 1) if numel <= _WHOLE else (_RUNS, _RUN, (numel - _RUN) // (_RUNS - 1))
