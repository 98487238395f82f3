"""Networks in two regimes: where the host sets the pace, and where they fill the memory.

1. Bits of all gradients in three steps against plain's, but for those that plain itself computes differently a second
   time; the peak of a step; then rounds of all ways whose bits are right.
2. The same at four times the size, where the device sets the pace.
3. The largest batch, or sequence, that fits; then rounds, in which each way trains at its own size.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from backstash.forecast.cards import CARDS, card_called
from backstash.forecast.costs import Clock
from backstash.forecast.tracing import StepTracer
from bench.gpu import filling, steps
from bench.gpu.device import find
from bench.gpu.networks import NETWORKS, Training
from bench.gpu.parts import Run
from bench.gpu.ways import AGAIN, PLAIN, PLANS, WAYS, Maker, Way, budgeted

FILLING = ("plain", "checkpoint", "save_on_cpu", "lossless", "offload", "cdma", "quantized, 4 bits")
"""The ways that are worth filling the memory with."""

LARGE = 4
"""Times the usual size: then the device sets the pace."""

OFFERED = 0.9
"""The share of the free memory that a loop within a budget is given: its first steps are a little off."""

ROUNDS = 5
"""Of steps that fill the memory, which are long."""


def measure(run: Run) -> None:
    """Measures every network."""
    for name, network in NETWORKS.items():
        if find_spec(network.needs) is None:
            continue
        _host_bound(run, name)
        _large(run, name)
        _filling(run, name)


def predicted(run: Run, name: str) -> dict[str, Any]:
    """Returns what the cost model says of plain and checkpointed steps on the card that is here, or on an H100."""
    card = CARDS["h100-80gb"]
    if run.device.kind == "cuda":
        properties = torch.cuda.get_device_properties(0)
        card = card_called(properties.name, properties.total_memory) or card
    blocks: list[torch.nn.Module] = []
    with StepTracer(blocks) as tracer:
        training = Training(NETWORKS[name], find("cpu"), run.small)
        blocks += training.model.blocks
        while not tracer.is_done:
            training.zero()
            torch.autograd.backward([training.loss()])
    steps, clock = tracer.found(), Clock(card)
    assert steps.checkpoint is not None and steps.dropped is not None
    ways = {PLAIN: (steps.plain, 0), "checkpoint": (steps.checkpoint, len(steps.dropped.uses))}
    rows = {
        way: {
            "peak_nbytes": step.peak_nbytes - step.before_nbytes,
            "seconds": clock.step(step.works, hooked),
        }
        for way, (step, hooked) in ways.items()
    }
    return {"card": card.name, **rows}


def _host_bound(run: Run, name: str) -> None:
    run.part(f"{name}/predicted", lambda: predicted(run, name))

    @cache
    def training() -> Training:
        return Training(NETWORKS[name], run.device, run.small)

    compare(run, f"{name}/steps", training, {**WAYS, **PLANS})


def _large(run: Run, name: str) -> None:
    @cache
    def training() -> Training:
        made = Training(NETWORKS[name], run.device, run.small)
        made.resize(LARGE * made.size)
        return made

    compare(run, f"{name}/large", training, {of: WAYS[of] for of in (PLAIN, AGAIN, *FILLING[1:])})


def compare(run: Run, prefix: str, training: Callable[[], Training], makers: dict[str, Maker]) -> None:
    """Judges and times some ways, plain first."""

    @cache
    def expected() -> list[list[Tensor]]:
        return steps.gradients(way(PLAIN))

    @cache
    def way(of: str) -> Way:
        return makers[of](training())

    for of in makers:
        run.part(f"{prefix}/{of}", lambda of=of: steps.judge(way(of), expected()))  # type: ignore[misc]
    found = {of: run.parts.get(f"{prefix}/{of}", {}).get("result") for of in makers}
    unstable = set((found.get(AGAIN) or {}).get("differing", ()))
    right = [of for of, row in found.items() if row and (not row["is_exact"] or set(row["differing"]) <= unstable)]
    if PLAIN in right:
        run.part(f"{prefix}/times", lambda: steps.times({of: way(of) for of in right}, run.rounds))


def small_training(run: Run, name: str) -> Callable[[], Training]:
    """Returns what makes a training of a quarter of the usual size, once, from which larger ones are searched for."""

    @cache
    def training() -> Training:
        made = Training(NETWORKS[name], run.device, run.small)
        made.resize(max(1, made.size // 4))
        return made

    return training


def _filling(run: Run, name: str) -> None:
    makers: dict[str, Maker] = {of: WAYS[of] for of in FILLING}
    makers["budget of the memory"] = _within_the_memory
    fill(run, f"{name}/filling", small_training(run, name), makers)


def _within_the_memory(training: Training) -> Way:
    room = training.device.room()
    assert room is not None, "the memory of this device is not known"
    return budgeted(training, int(OFFERED * (room - torch.accelerator.memory_allocated())))


def fill(
    run: Run, prefix: str, training: Callable[[], Training], makers: dict[str, Maker], trials: int = filling.TRIALS
) -> None:
    """Finds the largest size of each way, then times them, each at its own.

    Args:
        run: the run.
        prefix: of the names of its parts.
        training: what is trained; its size is a small one at first.
        makers: the ways. The first is what others are compared with.
        trials: how many sizes are tried after the first ones.
    """

    @cache
    def first() -> int:
        return training().size

    ways: dict[str, Way] = {}

    def find(of: str) -> filling.Largest:
        training().resize(first())
        found, way = filling.largest(training(), lambda: makers[of](training()), trials)
        if way is not None:
            ways[of] = way
        return found

    def made(of: str) -> Way:
        if of not in ways:  # its size was found by an earlier process
            training().resize(first())
            ways[of] = makers[of](training())
        return ways[of]

    for of in makers:
        run.part(f"{prefix}/{of}", lambda of=of: find(of))  # type: ignore[misc]
    found = {of: run.parts.get(f"{prefix}/{of}", {}).get("result") for of in makers}
    sizes = {of: row["size"] for of, row in found.items() if row and row["size"]}
    if next(iter(makers)) in sizes:
        run.part(
            f"{prefix}/throughput",
            lambda: filling.throughput(
                training(), {of: (size, made(of)) for of, size in sizes.items()}, min(ROUNDS, run.rounds)
            ),
        )
