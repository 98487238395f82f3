"""Costs of a step for the host, its requests to the device, times of single calls, and the speed of the link.

The networks are small here, with the graphs of large ones, so the host sets the pace and the time of a step is the
host's. A step begins with an empty queue and is timed without a wait at its end; how long the device then still works
is in the column beside it, and has to be small.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from backstash.ops import backends
from backstash.saved import Test
from bench.gpu import counters
from bench.gpu.device import Counts, Device
from bench.gpu.networks import NETWORKS, Training
from bench.gpu.parts import Run
from bench.gpu.ways import PLANS, WAYS, Way
from bench.rounds import Effort, Summary, interleave, summarise
from bench.step_table import uncollected

STEPS = 12
"""Steps before those that are looked at: by then a pass that repeats itself runs a script."""

CALLS = 200
"""Calls between two waits: fewer than CUDA's queue takes before the host has to wait for a place in it."""

SIZES_MIB = (1, 16, 256)
"""Of copies."""


@dataclass(frozen=True)
class Host:
    """A way on one network.

    Attributes:
        seconds: of the host, in a step.
        drain_seconds: which the device goes on working after the step.
        times_plain: the host's seconds over plain's in the same round.
    """

    seconds: Summary
    drain_seconds: Summary
    times_plain: Summary


def measure(run: Run) -> None:
    """Measures everything."""
    for name, network in NETWORKS.items():
        if find_spec(network.needs) is not None:
            _network(run, name)
    run.part("calls", partial(_calls, run))
    run.part("link", partial(_link, run))


def _network(run: Run, name: str) -> None:
    @cache
    def training() -> Training:
        return Training(NETWORKS[name], run.device, small=True)

    @cache
    def way(of: str) -> Way:
        made = {**WAYS, **PLANS}[of](training())
        for _ in range(STEPS):
            made.step()
        return made

    ways = [*WAYS, "plan, 50%"]
    for of in ways:
        run.part(f"{name}/counts/{of}", lambda of=of: _counts(run.device, way(of)))  # type: ignore[misc]
    works = [of for of in ways if "result" in run.parts.get(f"{name}/counts/{of}", {})]
    if works:
        run.part(f"{name}/host", lambda: _host({of: way(of) for of in works}, run.rounds))


def _counts(device: Device, way: Way) -> tuple[Counts, counters.Counted | None]:
    return device.count(way.step), counters.count(way.step)


def _host(ways: dict[str, Way], rounds: int) -> dict[str, Host]:
    def of(way: Way) -> Callable[[], tuple[float, float]]:
        def seconds() -> tuple[float, float]:
            way.step()
            way.training.device.wait()
            started = time.perf_counter()
            way.step()
            done = time.perf_counter()
            way.training.device.wait()
            return done - started, time.perf_counter() - done

        return seconds

    with uncollected():
        found = interleave({name: of(way) for name, way in ways.items()}, Effort(rounds))
    plain = [seconds for seconds, _ in next(iter(found.values()))]
    return {
        name: Host(
            summarise([seconds for seconds, _ in rows]),
            summarise([drained for _, drained in rows]),
            summarise([own / its for (own, _), its in zip(rows, plain, strict=True)]),
        )
        for name, rows in found.items()
    }


# -- single calls ------------------------------------------------------------------------------------------------------


def _calls(run: Run) -> dict[str, Summary]:
    """Seconds of the host for single calls on little data."""
    device = run.device
    x = torch.randn(1024, device=device.kind)
    host = torch.empty(1024, pin_memory=True)
    event = torch.Event()
    event.record()
    ours, of_torch = backends.serving(device.kind).bitmask_encode, torch.ops.backstash.bitmask_encode
    test = Test.NOT_LE.code, 0.0, 0.0
    calls: dict[str, Callable[[], Any]] = {
        "x.add_(1)": lambda: x.add_(1),
        "torch.empty": lambda: torch.empty(1024, device=device.kind),
        "x.clone()": x.clone,
        "bitmask_encode, called directly": lambda: ours(x, *test),
        "bitmask_encode, by torch's dispatcher": lambda: of_torch(x, *test),
        "copy to pinned memory": lambda: host.copy_(x, non_blocking=True),
        "Event.record": event.record,
        "Event.query": event.query,
        "x[0].item(), a wait": lambda: x[0].item(),
    }

    def of(call: Callable[[], Any]) -> Callable[[], float]:
        def seconds() -> float:
            call()
            device.wait()
            started = time.perf_counter()
            for _ in range(CALLS):
                call()
            return (time.perf_counter() - started) / CALLS

        return seconds

    found = interleave({name: of(call) for name, call in calls.items()}, Effort(run.rounds))
    return {name: summarise(seconds) for name, seconds in found.items()}


# -- the link ----------------------------------------------------------------------------------------------------------


def _link(run: Run) -> dict[str, dict[str, Summary]]:
    """Bytes per second over the link, by the size of a copy and by its kind."""
    sizes = SIZES_MIB[:1] if run.small else SIZES_MIB
    return {f"{size} MiB": _copies(run.device, size << 20, run.rounds) for size in sizes}


def _copies(device: Device, nbytes: int, rounds: int) -> dict[str, Summary]:
    x, y = (torch.empty(nbytes, dtype=torch.uint8, device=device.kind) for _ in range(2))
    pinned, other = (torch.empty(nbytes, dtype=torch.uint8, pin_memory=True) for _ in range(2))
    pageable = torch.empty(nbytes, dtype=torch.uint8)
    out, back = torch.Stream(), torch.Stream()

    def both() -> None:
        for stream in (out, back):
            stream.wait_stream(torch.accelerator.current_stream())
        with out:
            pinned.copy_(x, non_blocking=True)
        with back:
            y.copy_(other, non_blocking=True)

    def copy(to: Tensor, of: Tensor) -> None:
        to.copy_(of, non_blocking=True)

    copies: dict[str, Callable[[], None]] = {
        "out, pinned": partial(copy, pinned, x),
        "back, pinned": partial(copy, y, other),
        "both ways at once, pinned, each": both,
        "out, pageable": partial(copy, pageable, x),
        "back, pageable": partial(copy, y, pageable),
    }
    for work in copies.values():
        work()
    found = interleave({name: partial(device.seconds, work, 4) for name, work in copies.items()}, Effort(rounds))
    return {name: summarise([nbytes / each for each in seconds]) for name, seconds in found.items()}
