"""The cost of watching a step: ``python -m bench.verify [--json FILE] [--rounds N]``.

Each network takes steps as it is and with checkpoints, each alone and watched by ``backstash verify``. They take turns,
each round in another order. A step is a forward and a backward pass. The counted peak is what torch
allocates above what is held before the step. The run without savers takes what the plain step takes.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from backstash.report.meter import CountedPeak
from backstash.verifying.watch import WatchedRun
from bench import cases
from bench.cases import Case, Workload
from bench.machine import load
from bench.results import Results
from bench.rounds import Effort, Summary, interleave, summarise, table

CASES = (Case("resnet50", "resnet50", 2, 128), Case("gpt2", "gpt2", 2, 128, needs="transformers"))


@dataclass(frozen=True)
class Cost:
    """One way to take a step of one network.

    Attributes:
        network: the case's name.
        way: ``"plain"``, ``"checkpoint"``, ``"plain, watched"`` or ``"checkpoint, watched"``.
        seconds: of a step.
        processor_seconds: of all threads of the process in a step, which other programs' load changes little.
        peak_nbytes: counted peak of a step.
        values: how many values were compared; 0 where nothing is watched.
        value_nbytes: bytes of these.
    """

    network: str
    way: str
    seconds: Summary
    processor_seconds: Summary
    peak_nbytes: int
    values: int
    value_nbytes: int


def ways(workload: Workload) -> dict[str, tuple[Callable[[], Tensor], Callable[[], AbstractContextManager[Any]]]]:
    """The forward pass and the context of a step, by the way's name."""
    return {
        "plain": (workload.loss, nullcontext),
        "plain, watched": (workload.loss, WatchedRun),
        "checkpoint": (workload.checkpointed_loss, nullcontext),
        "checkpoint, watched": (workload.checkpointed_loss, WatchedRun),
    }


def step(
    forward: Callable[[], Tensor], context: Callable[[], AbstractContextManager[Any]]
) -> tuple[float, float, int, int]:
    """Takes a step. Returns its seconds, those of the processor, and how many values and bytes were compared."""
    gc.collect()
    watching = context()
    with watching:
        begun, at_work = time.perf_counter(), time.process_time()
        forward().backward()
        seconds = time.perf_counter() - begun, time.process_time() - at_work
    if isinstance(watching, WatchedRun):
        assert not watching.log.differing, watching.log.differences[0]
        return *seconds, watching.log.values, watching.log.nbytes
    return *seconds, 0, 0


def measure(case: Case, rounds: int) -> list[Cost]:
    """Measures every way of a network."""
    workload = cases.build(case, "cpu")
    found = ways(workload)
    peaks = {}
    for name, (forward, context) in found.items():
        step(forward, context)
        watching = context()
        with watching, CountedPeak() as counter:
            forward().backward()
        peaks[name] = counter.peak_nbytes
    runs = interleave({name: partial(step, *way) for name, way in found.items()}, Effort(rounds))
    return [
        Cost(
            case.name,
            name,
            summarise([each[0] for each in taken]),
            summarise([each[1] for each in taken]),
            peaks[name],
            *taken[0][2:],
        )
        for name, taken in runs.items()
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures every network, and prints and writes what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", choices=[case.name for case in CASES])
    asked = parser.parse_args(arguments)
    results = Results("bench.verify", asked.json, arguments, rounds=asked.rounds)
    costs: list[Cost] = []
    for case in CASES:
        if asked.only in (None, case.name) and not case.absent():
            costs += measure(case, asked.rounds)
            results.write(costs=costs, load=load())
            print(show(costs), flush=True)
    print(results.close())
    return 0


def show(costs: Sequence[Cost]) -> str:
    """Times and peaks as a table, beside those of the same step that is not watched."""
    rows = []
    by_way = {(cost.network, cost.way): cost for cost in costs}
    for cost in costs:
        base = by_way[cost.network, cost.way.removesuffix(", watched")]
        rows.append(
            (
                cost.network,
                cost.way,
                f"{cost.seconds.median * 1e3:.0f}",
                f"{cost.seconds.median / base.seconds.median:.2f}",
                f"{cost.processor_seconds.median / base.processor_seconds.median:.2f}",
                f"{cost.peak_nbytes / 2**20:.1f}",
                f"{cost.peak_nbytes / base.peak_nbytes:.3f}",
                str(cost.values),
            )
        )
    return table(("network", "step", "ms", "times", "processor, times", "peak MiB", "times", "values"), rows)


if __name__ == "__main__":
    raise SystemExit(main())
