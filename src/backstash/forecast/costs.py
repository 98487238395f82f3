"""The time that operations take on a card: the larger of what their bytes and their arithmetic take there.

Note: [two clocks]
    The host launches kernels one after the other, and the card runs them in that order. Where kernels are long, the
    host is ahead, and a step takes what the kernels take. Where they are short, the card waits, and a step takes what
    the host takes. So a step takes the longer of both sums. What a saved tensor's hook or a checkpoint costs is the
    host's.

Note: [shares of a peak]
    No kernel reaches what a card's maker states. The shares in :class:`Rates` were chosen by hand so that the plain
    steps in docs/results/gpu-cuda-2026-11-23.json come out about right, and are the same for all cards, for want of
    other measurements. ``python -m bench.costs`` shows by how much every row of that file is missed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from backstash.forecast.cards import Card

Arithmetic = Literal["half", "tf32", "float32"]


@dataclass(frozen=True, slots=True)
class Rates:
    """Which share of a card's peaks kernels reach, and what the host needs.

    Attributes:
        memory: share of the memory's bandwidth.
        half, tf32, float32: share of the operations per second.
        unaligned: what is left of it where the rows of a matrix are no multiple of 16 bytes.
        kernel_seconds: the least time of a kernel on the card.
        host_seconds: of the host for an operation that launches a kernel, with autograd and Python.
        view_seconds: of the host for one that launches none.
        hook_seconds: of the host for a saved tensor that a hook in Python packs and unpacks.
        link: share of the link's bytes per second.
    """

    memory: float = 0.80
    half: float = 0.60
    tf32: float = 0.15
    float32: float = 0.75
    unaligned: float = 0.11
    kernel_seconds: float = 3e-6
    host_seconds: float = 33e-6
    view_seconds: float = 4e-6
    hook_seconds: float = 90e-6
    link: float = 0.85


RATES = Rates()
"""The shares that forecasts use (Note: [shares of a peak])."""


@dataclass(frozen=True, slots=True)
class Work:
    """What an operation asks of a card.

    Attributes:
        nbytes: bytes that it reads and writes.
        flops: its additions and multiplications, of products alone.
        arithmetic: in which numbers these are.
        kernels: how many kernels it launches; 0 for a view.
        is_aligned: whether the rows of its matrices are multiples of 16 bytes.
    """

    nbytes: int = 0
    flops: int = 0
    arithmetic: Arithmetic = "float32"
    kernels: int = 0
    is_aligned: bool = True


@dataclass(frozen=True, slots=True)
class Clock:
    """Seconds of operations on one card.

    Attributes:
        rates: which shares of its peaks are reached.
    """

    card: Card
    rates: Rates = RATES

    def on_card(self, work: Work) -> float:
        """Returns the time that the card is busy with an operation."""
        if not work.kernels:
            return 0.0
        rates, card = self.rates, self.card
        peak = {"half": card.half, "tf32": card.tf32, "float32": card.float32}[work.arithmetic]
        share = {"half": rates.half, "tf32": rates.tf32, "float32": rates.float32}[work.arithmetic]
        share *= 1.0 if work.is_aligned else rates.unaligned
        seconds = max(work.nbytes / (card.bandwidth * rates.memory), work.flops / (peak * share))
        return max(seconds, work.kernels * rates.kernel_seconds)

    def on_host(self, work: Work) -> float:
        """Returns the time that the host needs for an operation."""
        return work.kernels * self.rates.host_seconds if work.kernels else self.rates.view_seconds

    def step(self, works: Iterable[Work], hooked: int = 0) -> float:
        """Returns the time of a step (Note: [two clocks]).

        Args:
            hooked: how many saved tensors go through a hook in Python.
        """
        card = host = 0.0
        for work in works:
            card += self.on_card(work)
            host += self.on_host(work)
        return max(card, host + hooked * self.rates.hook_seconds)

    def moved(self, nbytes: int) -> float:
        """Returns the time that bytes take to the host's memory or back, with nothing beside it."""
        return nbytes / (self.card.link * self.rates.link)
