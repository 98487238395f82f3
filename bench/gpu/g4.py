"""Whole steps, forward and backward, captured by ``bs.graphed``: bits of replays, memory, times.

A replay asks the host for one call, so the peer of a graphed step is another graphed step, such as one with torch's
checkpoint. Dropout is off, because each replay draws other numbers, and algorithms are deterministic. A way that does
what a graph cannot hold, such as to wait for the device, is refused, and the page says by what.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib.util import find_spec

import torch
from torch import Tensor, nn

import backstash as bs
from bench.gpu import steps
from bench.gpu.device import deterministic
from bench.gpu.networks import NETWORKS, Training
from bench.gpu.parts import Run
from bench.gpu.ways import PLAIN, PLANS, WAYS, Maker, Way, checkpoint
from bench.rounds import Effort, Summary, interleave, summarise

CHOSEN = ("resnet50", "gpt2")
GRAPHED = ("plain", "checkpoint", "keep", "lossless", "lossless_stored", "quantized, 4 bits", "offload")
REPLAYS = 3


@dataclass(frozen=True)
class Captured:
    """A graph.

    Attributes:
        is_exact: whether its gradients must have plain's bits.
        differing: numbers of the gradients that have not, in any of the replays.
        allocated_nbytes: held by the graph when it is done, gradients and weights not included.
        reserved_nbytes: that torch took from the device for it; None where that is not known.
        peak_nbytes: of the eager step.
    """

    is_exact: bool
    differing: tuple[int, ...]
    allocated_nbytes: int
    reserved_nbytes: int | None
    peak_nbytes: int


def measure(run: Run) -> None:
    """Captures each way of each network, then times the replays."""
    for name in CHOSEN:
        if find_spec(NETWORKS[name].needs) is not None:
            with deterministic():
                _network(run, name)


def _network(run: Run, name: str) -> None:
    @cache
    def training() -> Training:
        made = Training(NETWORKS[name], run.device, run.small)
        for module in made.module.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        return made

    @cache
    def expected() -> list[Tensor]:
        Way(training()).step()
        return training().gradients()

    replays: dict[str, Callable[[], object]] = {}
    makers: dict[str, Maker] = {**{of: WAYS[of] for of in GRAPHED}, "plan, 50%": PLANS["plan, 50%"]}
    makers["checkpoint"] = partial(checkpoint, preserve_rng_state=False)

    def capture(of: str) -> Captured:
        way = makers[of](training())
        for _ in range(steps.LEARNING):
            way.step()
        peak = run.device.peaks(way.step)
        run.device.clean()
        allocated, reserved = torch.accelerator.memory_allocated(), run.device.reserved_nbytes()
        replays[of] = _graphed(way)
        run.device.clean()
        more = run.device.reserved_nbytes()
        found = Captured(
            way.is_exact,
            _differing(replays[of], training(), expected()),
            torch.accelerator.memory_allocated() - allocated,
            None if more is None or reserved is None else more - reserved,
            peak,
        )
        if found.is_exact and found.differing and of != PLAIN:
            del replays[of]
        return found

    for of in makers:
        run.part(f"{name}/{of}", lambda of=of: capture(of))  # type: ignore[misc]

    def times() -> dict[str, Summary]:
        for of in makers:
            if of not in replays and run.parts.get(f"{name}/{of}", {}).get("result"):
                capture(of)  # an earlier process has captured it
        return _times(run, training(), replays)

    run.part(f"{name}/times", times)


def _graphed(way: Way) -> Callable[[], object]:
    """Captures a step in a graph, and returns what replays it."""
    session = way.context if isinstance(way.context, bs.Session) else None
    inside = replace(way, context=nullcontext())
    step = bs.graphed(lambda: inside.step(seed=None), session, model=way.training.module, learning=steps.LEARNING)
    for _ in range(steps.LEARNING + 1):
        step()
    return step


def _differing(replay: Callable[[], object], training: Training, expected: list[Tensor]) -> tuple[int, ...]:
    found: set[int] = set()
    for _ in range(REPLAYS):
        replay()
        training.device.wait()
        found |= set(steps.differing([training.gradients()], [expected]))
    return tuple(sorted(found))


def _times(run: Run, training: Training, replays: dict[str, Callable[[], object]]) -> dict[str, Summary]:
    """Seconds of the replays of all graphs that this process has captured, and of plain's eager step."""
    works: dict[str, Callable[[], object]] = {"plain, eager": Way(training).step, **replays}
    if PLAIN not in replays:
        raise RuntimeError("plain's step could not be captured, so there is nothing to compare with")

    def of(work: Callable[[], object]) -> Callable[[], float]:
        def seconds() -> float:
            work()
            return run.device.seconds(work, 3)

        return seconds

    found = interleave({name: of(work) for name, work in works.items()}, Effort(run.rounds))
    return {name: summarise(seconds) for name, seconds in found.items()}
