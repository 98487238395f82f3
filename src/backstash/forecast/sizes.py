"""Steps at any size, from steps at three: what each operation takes is a polynomial of the size of a batch or a text.

Note: [three sizes]
    The bytes of a tensor are a product of its dimensions. A batch, or the length of a text, is one of them, or two
    where each word looks at each other. So bytes and operations are polynomials of the size of no more than the second
    degree, and three sizes tell them exactly. All of a program's sizes have to do the same operations in the same
    order. A size of one does not always: torch leaves out copies of tensors that have one row.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from backstash.errors import MeasureError
from backstash.forecast.tracing import StepTrace, TracedSteps
from backstash.saved import TensorSpec

TRACED = (2, 3, 4)
"""The sizes that are traced, in units."""


class SizedSteps:
    """The steps of a program at any size (Note: [three sizes]).

    Args:
        traces: the steps at the sizes of TRACED; at one alone, where the program has no size.

    Raises:
        MeasureError: the program does something else at another size in its plain steps.
    """

    def __init__(self, traces: Sequence[TracedSteps]) -> None:
        if differs := _difference(traces, "plain"):
            raise MeasureError(
                f"a forecast was asked for any size, but {differs}. Leave {{size}} out for a forecast of one size, or "
                f"choose a --unit above which steps are alike."
            )
        uncut, unplanned = (_first_of(getattr(each, why) for each in traces) for why in ("uncut", "unplanned"))
        uncut, unplanned = uncut or _difference(traces, "checkpoint"), unplanned or _difference(traces, "dropped")
        self.traces = tuple(
            replace(
                each,
                checkpoint=None if uncut else each.checkpoint,
                dropped=None if unplanned else each.dropped,
                uncut=uncut,
                unplanned=unplanned,
            )
            for each in traces
        )

    @property
    def has_size(self) -> bool:
        """Whether the program takes a size."""
        return len(self.traces) > 1

    def at(self, units: int) -> TracedSteps:
        """Returns the steps at a size, in units."""
        if not self.has_size or units in TRACED:
            return self.traces[TRACED.index(units) if self.has_size else 0]
        found: dict[str, Any] = {}
        for name in ("plain", "dropped", "checkpoint"):
            steps = [step for step in _all(self.traces, name) if step is not None]
            found[name] = _between(steps, units) if steps else None
        return replace(self.traces[0], **found)

    def peak_nbytes(self, way: str, units: int) -> int:
        """Returns the most bytes that are alive in a plain step, or in one with checkpoints, without the rest of it."""
        if not self.has_size:
            return int(getattr(self.traces[0], way).peak_nbytes)
        most = [np.array([each.most_nbytes for each in getattr(traced, way).operations]) for traced in self.traces]
        return int(_extended(np.array(most, float), units).max())


def _difference(traces: Sequence[TracedSteps], name: str) -> str:
    """What a step does at one size and not at another; empty where it does the same."""
    first, *others = (
        [each.name for each in step.operations] if step is not None else [] for step in _all(traces, name)
    )
    for number, other in zip(TRACED[1:], others, strict=False):
        if other != first:
            return (
                f"the program does other operations at {number} units than at {TRACED[0]}: {len(other)} there and "
                f"{len(first)} here"
            )
    return ""


def _all(traces: Sequence[TracedSteps], name: str) -> list[StepTrace | None]:
    return [getattr(each, name) for each in traces]


def _first_of(reasons: Iterable[str]) -> str:
    return next(filter(None, reasons), "")


def _extended(numbers: NDArray[np.float64], units: int) -> NDArray[np.float64]:
    """Returns numbers at a size from those at the sizes of TRACED, [3, N] to [N]."""
    first, second, third = numbers
    once, twice = second - first, third - 2 * second + first
    beyond = units - TRACED[0]
    found: NDArray[np.float64] = np.rint(first + beyond * once + beyond * (beyond - 1) / 2 * twice)
    return found


def _between(steps: Sequence[StepTrace], units: int) -> StepTrace:
    first = steps[0]
    columns = np.array(
        [[(each.work.nbytes, each.work.flops, each.most_nbytes) for each in step.operations] for step in steps], float
    )
    numbers = _extended(columns.reshape(len(steps), -1), units).reshape(-1, 3).astype(np.int64).tolist()
    operations = [
        replace(each, work=replace(each.work, nbytes=nbytes, flops=flops), most_nbytes=most)
        for each, (nbytes, flops, most) in zip(steps[-1].operations, numbers, strict=True)
    ]
    sizes = np.array([[step.nbytes.get(key, 0) for key in first.nbytes] for step in steps], float)
    nbytes = dict(zip(first.nbytes, _extended(sizes, units).astype(np.int64).tolist(), strict=True))
    specs = np.array([[(use.spec.nbytes, use.spec.numel) for use in step.uses] for step in steps], float)
    found = (
        _extended(specs.reshape(len(steps), -1), units).reshape(-1, 2).astype(np.int64).tolist() if first.uses else []
    )
    uses = [
        replace(use, spec=_flat(use.spec, numel, size)) for use, (size, numel) in zip(first.uses, found, strict=True)
    ]
    before = int(_extended(np.array([[step.before_nbytes] for step in steps], float), units)[0])
    return StepTrace(operations, before, uses, first.died, nbytes)


def _flat(spec: TensorSpec, numel: int, nbytes: int) -> TensorSpec:
    """Returns the spec of as many elements in one dimension: how they are laid out is not asked for."""
    return TensorSpec((numel,), (1,), spec.dtype, spec.device, nbytes)
