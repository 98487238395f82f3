"""The cost of making a plan, and its promises: ``python -m studies.plan_times [--json FILE] [--only NAME]``.

Seven networks, on one thread. For each network and each share of the plain step's peak:

1. The profile and the plan are made, as a user makes them. Counted are the steps that this runs, the time in these
   steps, and the time beside them: the search, and records that are read.
2. In a build of its own the step runs under the plan. Its gradients and buffers must have the bits of a plain step's.
   The peak of two more steps is counted.
3. Some more steps run, until training has settled down. Then come five interleaved rounds of plain steps and of steps
   under the plans, with the second of two steps timed.

Times are of the processor, because other work of the machine only adds to the clock; both are in the JSON.
"""

from __future__ import annotations

import argparse
import ctypes
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

import backstash as bs
from backstash.bits import equal_bits
from backstash.capture.learned import EQUAL_PASSES
from backstash.errors import BudgetError
from backstash.planning.search.planner import Planner
from backstash.report.meter import CountedPeak
from bench.cases import SEED, Case, Workload, build
from bench.results import Results
from bench.rounds import Effort, Summary, interleave, mib, summarise, table
from bench.step_table import uncollected

FORMAT = 1
"""Version of the JSON's layout."""

CASES = (
    Case("mobilenet_v2", "mobilenet_v2", 4, 224),
    Case("resnet50", "resnet50", 2, 224),
    Case("densenet121", "densenet121", 2, 224),
    Case("convnext_tiny", "convnext_tiny", 2, 224, needs="transformers"),
    Case("vit_b16", "vit_b16", 1, 224, needs="transformers"),
    Case("vgg16", "vgg16", 1, 224),
    Case("gpt2-50257_words", "gpt2_words", 1, 256, needs="transformers"),
)

SETTLING = EQUAL_PASSES + 2
"""After so many equal steps a Session has settled down to them."""

SHARES = (0.9, 0.6)
"""Budgets, as shares of the plain step's peak."""


@dataclass(frozen=True)
class Effects:
    """What making a profile or a plan has taken.

    Attributes:
        seconds: by the clock.
        processor_seconds: of the processor.
        steps: how many steps of the program ran.
        step_seconds: of the processor, in these steps.
    """

    seconds: float
    processor_seconds: float
    steps: int
    step_seconds: float


@dataclass(frozen=True)
class Budget:
    """A plan for one budget.

    Attributes:
        share: the budget as a share of plain's peak.
        nbytes: the budget.
        made: what the plan has taken to make, once there is a profile. The first one includes the search.
        predicted_nbytes, reached_nbytes: peaks; None where the budget was refused.
        smallest_nbytes: the smallest budget, where this one was refused.
        predicted_times_plain: the predicted time of a step over plain's.
        times_plain: the measured one.
        differing: gradients and buffers with other bits than plain's.
    """

    share: float
    nbytes: int
    made: Effects
    predicted_nbytes: int | None = None
    reached_nbytes: int | None = None
    smallest_nbytes: int | None = None
    predicted_times_plain: float | None = None
    times_plain: Summary | None = None
    differing: tuple[str, ...] = ()


@dataclass(frozen=True)
class Network:
    """One network.

    Attributes:
        case: the network and its batch.
        values: how many values are planned.
        plain_nbytes: the counted peak of a plain step.
        plain_seconds: processor time of a plain step.
        profiled: what the profile has taken.
        budgets: the plans.
    """

    case: Case
    values: int
    plain_nbytes: int
    plain_seconds: Summary
    profiled: Effects
    budgets: tuple[Budget, ...]


class Step:
    """A step that counts how often it runs, and times itself.

    Args:
        workload: what it trains.
        plan: what it runs under; None for plain PyTorch.
    """

    def __init__(self, workload: Workload, plan: bs.Plan | None = None) -> None:
        self.workload = workload
        self.session = None if plan is None else bs.Session(bs.Plan.from_json(plan.to_json()))
        self._counted = ctypes.c_int64(), ctypes.c_double()  # plain numbers would be undone with the step

    @property
    def count(self) -> int:
        """How often it has run."""
        return self._counted[0].value

    @property
    def seconds(self) -> float:
        """Processor time of all runs."""
        return self._counted[1].value

    def __call__(self) -> None:
        """Runs the step."""
        began = time.process_time()
        with self.session or nullcontext():
            self.workload.loss().backward()
        self._counted[1].value += time.process_time() - began
        self._counted[0].value += 1

    def timed(self) -> float:
        """Returns the processor time of the second of two steps: the first finds the memory of another candidate."""
        self()
        before = self.seconds
        self()
        return self.seconds - before

    def state(self) -> dict[str, torch.Tensor]:
        """Returns copies of all gradients and buffers, by name."""
        model = self.workload.model
        found = {name: x.detach().clone() for name, x in model.named_buffers()}
        return found | {name: x.grad.clone() for name, x in model.named_parameters() if x.grad is not None}

    def peak(self) -> int:
        """Returns the most that two steps take."""
        most = 0
        for _ in range(2):
            with CountedPeak() as counter:
                self()
            most = max(most, counter.peak_nbytes)
        return most


def effects(step: Step, make: Callable[[], Any]) -> tuple[Any, Effects]:
    """Returns what ``make`` returns, and what it has taken."""
    count, seconds = step.count, step.seconds
    began = time.perf_counter(), time.process_time()
    found = make()
    took = time.perf_counter() - began[0], time.process_time() - began[1]
    return found, Effects(*took, step.count - count, step.seconds - seconds)


def measure(case: Case, rounds: int) -> Network:
    """Measures one network."""

    def begin(plan: bs.Plan | None = None) -> Step:
        torch.manual_seed(SEED)
        return Step(build(case, "cpu"), plan)

    def state_after_two(step: Step) -> dict[str, torch.Tensor]:
        torch.manual_seed(SEED)
        step()
        step()
        return step.state()

    plain, profiled = begin(), begin()
    reference = state_after_two(plain)
    profiled()  # what libraries prepare for a shape is nobody's
    profile, first = effects(profiled, lambda: bs.profile(profiled, profiled.workload.model))
    planner = Planner(profile)
    found: list[tuple[Budget, Step | None]] = []
    for share in SHARES:
        nbytes = int(share * profile.plain_peak_nbytes)
        plan, made = effects(profiled, partial(_plan, planner, nbytes))
        if not isinstance(plan, bs.Plan):
            found.append((Budget(share, nbytes, made, smallest_nbytes=plan.smallest_nbytes), None))
            continue
        step = begin(plan)
        other = state_after_two(step)
        differing = tuple(sorted(name for name, x in reference.items() if not equal_bits(x, other[name])))
        predicted = plan.seconds / plan.plain_seconds
        row = Budget(share, nbytes, made, plan.peak_nbytes, step.peak(), None, predicted, None, differing)
        found.append((row, step))
    for _ in range(SETTLING):
        for _, begun in found:
            if begun is not None:
                begun()
    tasks: dict[str, Callable[[], float]] = {"plain": plain.timed}
    tasks |= {str(row.share): step.timed for row, step in found if step is not None}
    with uncollected():
        times = interleave(tasks, Effort(rounds))

    def timed(row: Budget) -> Budget:
        if str(row.share) not in times:
            return row
        ratios = [own / of_plain for own, of_plain in zip(times[str(row.share)], times["plain"], strict=True)]
        return Budget(**{**vars(row), "times_plain": summarise(ratios)})

    rows = tuple(timed(row) for row, _ in found)
    counts = len(profile.values), profile.plain_peak_nbytes
    return Network(case, *counts, summarise(times["plain"]), first, rows)


def _plan(planner: Planner, nbytes: int) -> bs.Plan | BudgetError:
    try:
        return planner.plan(nbytes)
    except BudgetError as error:
        return error


HEADER = ("network", "values", "plain s", "profile s", "steps", "budget", "plan s", "steps", "predicted", "reached")


def show(networks: Sequence[Network]) -> str:
    """A line for each plan."""
    lines = []
    for network in networks:
        for row in network.budgets:
            first, made = network.profiled, row.made
            times = "" if row.times_plain is None else f"{row.times_plain.median:.3f}"
            foretold = "" if row.predicted_times_plain is None else f"{row.predicted_times_plain:.3f}"
            lines.append(
                (
                    network.case.name,
                    str(network.values),
                    f"{network.plain_seconds.median:.2f}",
                    f"{first.processor_seconds:.1f}",
                    str(first.steps),
                    mib(row.nbytes),
                    f"{made.processor_seconds:.1f}",
                    str(made.steps),
                    mib(row.predicted_nbytes),
                    mib(row.reached_nbytes),
                    foretold,
                    times,
                    ", ".join(row.differing[:2]),
                )
            )
    return table((*HEADER, "predicted x", "x plain", "other bits"), lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures every network, prints a table, writes the JSON; returns 1 if a budget is not kept or a bit differs."""
    parser = argparse.ArgumentParser(prog="python -m studies.plan_times", description="Times plans.")
    parser.add_argument("--json", type=Path, help="the file to write (default: none)")
    parser.add_argument("--resume", action="store_true", help="go on with what the file has")
    parser.add_argument("--rounds", type=int, default=5, help="of timed steps (default: 5)")
    names = [case.name for case in CASES]
    parser.add_argument("--only", action="append", choices=names, help="this network (may be given several times)")
    asked = parser.parse_args(arguments)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message=".*(?:torch.jit|fast path|nested tensor).*")
    results = Results("studies.plan_times", asked.json, arguments, format=FORMAT, resume=asked.resume)
    known: list[Any] = list(results.found.get("networks", []))
    done = {found["case"]["name"] for found in known}
    fails = False
    for case in CASES:
        if case.name in done or (asked.only and case.name not in asked.only):
            continue
        network = measure(case, asked.rounds)
        known.append(network)
        fails |= any(
            row.differing or (row.reached_nbytes or 0) > max(row.nbytes, row.smallest_nbytes or 0)
            for row in network.budgets
        )
        print(show([network]), flush=True)
        results.write(networks=known)
    print(results.close())
    return int(fails)


if __name__ == "__main__":
    raise SystemExit(main())
