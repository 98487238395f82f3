"""Ways of running a step: plain, torch's own means, and ours."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

import backstash as bs
from backstash.errors import BudgetError
from bench.cases import SEED, recomputed
from bench.gpu.networks import Training

PLAIN, AGAIN = "plain", "plain again"
"""The way that others are compared with, and once more, which shows the noise."""

ALLOW = ("lossless", "recompute", "offload")
"""What plans may do."""


@dataclass(eq=False)
class Way:
    """A way of running steps of a training.

    Attributes:
        training: whose steps.
        context: what the forward pass runs in.
        is_exact: whether gradients have plain's bits.
        loss: another forward pass than the training's.
        predicted_nbytes: the peak that a plan predicts.
        note: what is to be said of it.
        is_compiled: whether another setting of torch compiles it anew; its bits are then compared as it usually runs.
    """

    training: Training
    context: AbstractContextManager[Any] = field(default_factory=nullcontext)
    is_exact: bool = True
    loss: Callable[[], Tensor] | None = None
    predicted_nbytes: int | None = None
    note: str = ""
    is_compiled: bool = False

    def step(self, seed: int | None = SEED) -> None:
        """Runs a forward and a backward pass from gradients of zero. Nothing in it waits for the device.

        Args:
            seed: of dropout; None leaves the generator alone, as a captured step has to.
        """
        self.training.zero()
        if seed is not None:
            torch.manual_seed(seed)
        with self.context:
            loss = (self.loss or self.training.loss)()
        torch.autograd.backward([loss])


Maker = Callable[[Training], Way]


def _session(policy: str | Callable[[], bs.Policy], is_exact: bool = True) -> Maker:
    def make(training: Training) -> Way:
        asked = policy if isinstance(policy, str) else policy()
        return Way(training, bs.Session(asked, model=training.module, min_nbytes=training.min_nbytes), is_exact)

    return make


def checkpoint(training: Training, preserve_rng_state: bool = True) -> Way:
    """Returns torch's checkpoint around each block. A captured step must not ask a generator for its state."""

    def loss() -> Tensor:
        with recomputed(training.model.blocks, preserve_rng_state):
            return training.loss()

    return Way(training, loss=loss, note=f"{len(training.model.blocks)} blocks")


def _save_on_cpu(training: Training) -> Way:
    return Way(training, torch.autograd.graph.save_on_cpu(pin_memory=True))


WAYS: Mapping[str, Maker] = {
    PLAIN: Way,
    AGAIN: Way,
    "checkpoint": checkpoint,
    "save_on_cpu": _save_on_cpu,
    "keep": _session("keep"),
    "lossless": _session("lossless"),
    "lossless_stored": _session("lossless_stored"),
    "offload": _session("offload"),
    "cdma": _session("cdma"),
    "quantized, 8 bits": _session(partial(bs.policies.quantized, bits=8), is_exact=False),
    "quantized, 4 bits": _session(partial(bs.policies.quantized, bits=4), is_exact=False),
}
"""All but plans and compiled models."""


def plan(training: Training, budget: str) -> Way:
    """Returns a plan for a step, for a share of its peak; of the smallest budget where that one cannot be met."""
    plain = Way(training)
    device, small = training.device.kind, training.min_nbytes
    limit: dict[str, Any] = {} if small is None else {"min_nbytes": small}
    profile = bs.profile(plain.step, training.module, allow=ALLOW, device=device, **limit)
    note = ""
    try:
        found = bs.plan(profile, budget, ALLOW)
    except BudgetError as error:
        found, note = cast(bs.Plan, error.plan), f"{budget} cannot be met"
    session = bs.Session(found, model=training.module, min_nbytes=small)
    return Way(training, session, predicted_nbytes=found.peak_nbytes, note=note)


PLANS: Mapping[str, Maker] = {"plan, 70%": partial(plan, budget="70%"), "plan, 50%": partial(plan, budget="50%")}


def budgeted(training: Training, nbytes: int) -> Way:
    """Returns a training that keeps itself within a budget, and learns to in steps of the batch that there is now."""
    device, small = training.device.kind, training.min_nbytes
    session = bs.Budgeted(nbytes, ALLOW, device=device, min_nbytes=small)
    way = Way(training, session)
    for _ in range(LEARNING):
        way.step()
        if session.found.plans:
            break
    return way


LEARNING = 60
"""Steps within which a loop has its plan."""
