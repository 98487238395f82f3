"""What channels last would give a training step: memory and time, measured in both layouts in turn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

from torch import nn

from backstash.report.meter import Measurement, measure
from backstash.rewrites import channels_last
from backstash.session import Session

SLOWER = 1.05
"""A step in channels last may take this many times the step's time in the model's own layout, and is still offered."""

SMALLER = 0.98
"""Channels last is offered if it takes at most this share of the peak."""


@dataclass(frozen=True)
class LayoutGain:
    """A training step in the model's own layout and in channels last.

    Attributes:
        peak_nbytes: counted peak in the model's own layout.
        peak_nbytes_after: counted peak in channels last.
        seconds: median time of a step in the model's own layout.
        seconds_after: median time in channels last.
        distance: the largest relative distance between the numbers of a step in the two layouts.
        convolutions: number of convolutions whose weights change.
    """

    peak_nbytes: int
    peak_nbytes_after: int
    seconds: float
    seconds_after: float
    distance: float
    convolutions: int

    @property
    def is_worth_it(self) -> bool:
        """Whether the peak is smaller in channels last and the step is about as fast."""
        is_smaller = self.peak_nbytes_after <= SMALLER * self.peak_nbytes
        return is_smaller and self.seconds_after <= SLOWER * self.seconds

    def __str__(self) -> str:
        peaks = f"{self.peak_nbytes_after / 2**20:.1f} MiB instead of {self.peak_nbytes / 2**20:.1f} MiB"
        advice = "use backstash.rewrites.channels_last" if self.is_worth_it else "it would not help here"
        return (
            f"channels last: peak {peaks}, step time x{self.seconds_after / self.seconds:.2f}, "
            f"numbers {self.distance:.1g} apart; {advice}"
        )


def layout_gain(
    model: nn.Module, step: Callable[[], object], *, session: Session | None = None, rounds: int = 3
) -> LayoutGain:
    """Measures a step in the model's own layout and in channels last, and leaves the model as it was.

    The layouts take turns, so that a machine whose speed changes does not favour one of them.

    Args:
        model: the model.
        step: one forward and backward pass, as :func:`backstash.rewrites.channels_last` takes it. It should leave as
            much memory in use as it found.
        session: the Session that the model will be trained under, or one like it.
        rounds: number of times that each layout is measured.

    Raises:
        RewriteError: channels last would change the numbers of the step, or there is no convolution to change.
        MeasureError: ``rounds`` is below 1.
    """

    def run() -> None:
        if session is None:
            step()
            return
        with session:
            step()

    def measured() -> Measurement:
        return measure(run, repeats=1, warmup=1)

    own = [measure(run, repeats=1 if rounds > 0 else 0, warmup=2)]
    after = []
    for number in range(rounds):
        with channels_last(model, step, session=session) as rewrite:
            after.append(measured())
        if number < rounds - 1:
            own.append(measured())
    return LayoutGain(
        peak_nbytes=min(one.peak_nbytes for one in own),
        peak_nbytes_after=min(one.peak_nbytes for one in after),
        seconds=median(one.seconds for one in own),
        seconds_after=median(one.seconds for one in after),
        distance=rewrite.distance,
        convolutions=len(rewrite.changed),
    )
