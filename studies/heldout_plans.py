"""Judges plans by programs that the planner was not built on: ``python -m studies.heldout_plans [--json FILE]``.

For each program of `studies.unseen`, on one thread:

1. The gate: three steps of plain PyTorch, from the same weights and seeds, in two builds of the program. What differs
   between them is not compared later.
2. The profile of a step, and plans for two shares of plain's peak. A budget of one byte has to be refused; the refusal
   names the smallest budget, and there has to be a plan for that one.
3. For each plan, in a build of its own and after a journey through JSON: three steps. Afterwards all parameters,
   gradients and buffers, and the state of the generator, have to have the bits of plain's. The peak is counted in a
   fourth and fifth step.
4. Interleaved rounds of plain steps and of steps under each plan.

The exit code is 1 if a bit differs, a budget is not kept, or a predicted peak is below the counted one or off by more
than 0.5 %, 256 KiB and what the plan reserves for numbers that encode worse.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import backstash as bs
from backstash.bits import equal_bits
from backstash.errors import BudgetError
from backstash.planning.search.planner import Planner
from backstash.report.meter import CountedPeak
from bench.results import Results
from bench.rounds import Effort, Summary, interleave, mib, summarise, table
from bench.step_table import uncollected
from studies import unseen
from studies.unseen import Program

FORMAT = 1
"""Version of the JSON's layout."""

SHARES = (0.75, 0.5)
"""Budgets, as shares of plain's peak. The smallest budget that there is comes beside them."""

COMPARED_STEPS, COUNTED_STEPS = 3, 2

SEED = 11
"""Of the first step; each step has its own."""


@dataclass(frozen=True)
class Row:
    """One program under the plan for one budget.

    Attributes:
        budget: ``"75%"`` of plain's peak, or ``"smallest"``; ``"50%, infeasible"`` for one that was refused.
        budget_nbytes: the budget.
        predicted_nbytes: the peak that the plan predicts; None where there is no plan.
        reached_nbytes: the counted peak of a step under the plan.
        predicted_times_plain: the predicted time of a step over plain's.
        times_plain: the measured one.
        differing: parameters, gradients and buffers with other bits than plain's, and ``"generator"``.
        reserve_nbytes: bytes of the predicted peak that the plan leaves free for numbers which encode worse.
    """

    budget: str
    budget_nbytes: int
    predicted_nbytes: int | None = None
    reached_nbytes: int | None = None
    predicted_times_plain: float | None = None
    times_plain: Summary | None = None
    differing: tuple[str, ...] = ()
    reserve_nbytes: int = 0

    @property
    def flaws(self) -> list[str]:
        """What is wrong with the plan, in words."""
        if self.predicted_nbytes is None or self.reached_nbytes is None:
            return []
        off = self.predicted_nbytes - self.reached_nbytes
        found = ["bits"] if self.differing else []
        if self.reached_nbytes > self.budget_nbytes:
            found.append("over budget")
        if off < 0:
            found.append("predicted too little")
        if off > self.reserve_nbytes + 0.005 * self.reached_nbytes + (256 << 10):
            found.append("predicted too much")
        return found


@dataclass(frozen=True)
class Judged:
    """All plans of one program.

    Attributes:
        program: its name.
        plain_nbytes: counted peak of a plain step.
        values: how many values are planned.
        profile_seconds: time to take the profile.
        plan_seconds: time to make all plans, rehearsals included.
        unstable: what plain PyTorch itself computes differently a second time, and what was therefore not compared.
        error: what was raised, if the program could not be judged.
        rows: the plans.
    """

    program: str
    plain_nbytes: int = 0
    values: int = 0
    profile_seconds: float = 0.0
    plan_seconds: float = 0.0
    unstable: tuple[str, ...] = ()
    error: str = ""
    rows: tuple[Row, ...] = ()


def peak_of(step: Callable[[], object], steps: int) -> int:
    """The counted peak of so many steps."""
    most = 0
    for _ in range(steps):
        with CountedPeak() as counter:
            step()
        most = max(most, counter.peak_nbytes)
    return most


class Trained:
    """A program and a number of its steps, each of them with its own seed.

    Args:
        program: the program.
        plan: what its steps run under; None for plain PyTorch.
    """

    def __init__(self, program: Program, plan: bs.Plan | None = None) -> None:
        self.program, self.plan = program, plan
        self.session = None if plan is None else bs.Session(bs.Plan.from_json(plan.to_json()))
        self._number = SEED

    def step(self) -> None:
        """Runs the next step."""
        torch.manual_seed(self._number)
        self._number += 1
        with self.session or nullcontext():
            self.program.step()

    def state(self) -> dict[str, Tensor]:
        """Copies of all parameters, gradients and buffers, and of the generator's state, by name."""
        model = self.program.model
        found = {name: x.detach().clone() for name, x in (*model.named_parameters(), *model.named_buffers())}
        found |= {f"{name}.grad": x.grad.clone() for name, x in model.named_parameters() if x.grad is not None}
        return {**found, "generator": torch.get_rng_state()}

    def state_after(self, steps: int) -> dict[str, Tensor]:
        """The state after so many steps."""
        for _ in range(steps):
            self.step()
        return self.state()

    def peak(self) -> int:
        """The counted peak of the next steps."""
        return peak_of(self.step, COUNTED_STEPS)

    def seconds(self) -> float:
        """Time of the second of two steps: the first finds the memory as another candidate has left it."""
        self.step()
        started = time.perf_counter()
        self.step()
        return time.perf_counter() - started


def differing(plain: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> tuple[str, ...]:
    """Names of what has other bits, or is in one of them only."""
    both = plain.keys() & found.keys()
    other = {name for name in both if not equal_bits(plain[name], found[name])}
    return tuple(sorted(other | (plain.keys() ^ found.keys())))


def plans(planner: Planner, plain_nbytes: int, shares: Sequence[float] = SHARES) -> list[tuple[Row, bs.Plan | None]]:
    """The plans for these shares of plain's peak and for the smallest budget; no plan for a share that was refused.

    Raises:
        AssertionError: one byte was enough.
        BudgetError: there is no plan for the smallest budget that a refusal has named.
    """
    found: list[tuple[Row, bs.Plan | None]] = []
    for share in shares:
        nbytes = int(share * plain_nbytes)
        try:
            found.append((Row(f"{share:.0%}", nbytes), planner.plan(nbytes)))
        except BudgetError:
            found.append((Row(f"{share:.0%}, infeasible", nbytes), None))
    try:
        planner.plan(1)
    except BudgetError as error:
        smallest = error.smallest_nbytes
    else:
        raise AssertionError("a plan was made for a budget of one byte")
    found.append((Row("smallest", smallest), planner.plan(smallest)))
    return found


def judge(name: str, effort: Effort, make: Callable[[], Program] | None = None) -> Judged:
    """Judges the plans of one program.

    Args:
        name: a name of `studies.unseen`.
        effort: the rounds.
        make: makes the program anew, if it is another one.
    """
    build = make or partial(unseen.build, name)
    plain = Trained(build())
    reference = plain.state_after(COMPARED_STEPS)
    unstable = differing(reference, Trained(build()).state_after(COMPARED_STEPS))
    profiled = Trained(build())
    profiled.step()  # gradients are there, as they are in every step but the first
    started = time.perf_counter()
    profile = bs.profile(profiled.program.step, profiled.program.model)
    planned = time.perf_counter()
    planner = Planner(profile)
    made = plans(planner, profile.plain_peak_nbytes)
    ended = time.perf_counter()
    rows: list[tuple[Row, Trained | None]] = []
    for row, plan in made:
        if plan is None:
            rows.append((row, None))
            continue
        trained = Trained(build(), plan)
        other = set(differing(reference, trained.state_after(COMPARED_STEPS))) - set(unstable)
        predicted = plan.peak_nbytes, trained.peak(), plan.seconds / plan.plain_seconds
        found = Row(row.budget, row.budget_nbytes, *predicted, None, tuple(sorted(other)), plan.reserve_nbytes)
        rows.append((found, trained))
    tasks: dict[str, Callable[[], float]] = {"plain": plain.seconds}
    tasks |= {row.budget: trained.seconds for row, trained in rows if trained is not None}
    with uncollected():
        times = interleave(tasks, effort)

    def timed(row: Row) -> Row:
        if row.budget not in times:
            return row
        ratios = [own / of_plain for own, of_plain in zip(times[row.budget], times["plain"], strict=True)]
        return Row(**{**vars(row), "times_plain": summarise(ratios)})

    return Judged(
        name,
        profile.plain_peak_nbytes,
        len(profile.values),
        planned - started,
        ended - planned,
        unstable,
        rows=tuple(timed(row) for row, _ in rows),
    )


def show(judged: Sequence[Judged]) -> str:
    """A line for each plan."""
    header = ("program", "budget", "MiB", "predicted", "reached", "off", "x plain", "predicted x", "flaws")
    lines = []
    for program in judged:
        for row in program.rows:
            cells = [program.program, row.budget, mib(row.budget_nbytes)]
            if row.predicted_nbytes is None or row.reached_nbytes is None:
                lines.append((*cells, *[""] * 6))
                continue
            off = (row.predicted_nbytes - row.reached_nbytes) / row.reached_nbytes
            times = "" if row.times_plain is None else f"{row.times_plain.median:.2f}"
            cells += [mib(row.predicted_nbytes), mib(row.reached_nbytes), f"{off:+.2%}", times]
            lines.append((*cells, f"{row.predicted_times_plain:.2f}", ", ".join(row.flaws)))
    errors = [f"{program.program}: {program.error}" for program in judged if program.error]
    return "\n".join([table(header, lines), *errors])


def read(found: Any) -> Judged:
    """A program's results from JSON."""
    rows = []
    for row in found["rows"]:
        times = None if row["times_plain"] is None else Summary(**row["times_plain"])
        rows.append(Row(**{**row, "times_plain": times, "differing": tuple(row["differing"])}))
    return Judged(**{**found, "unstable": tuple(found["unstable"]), "rows": tuple(rows)})


def main(arguments: Sequence[str] | None = None) -> int:
    """Judges every program, prints a table, writes the JSON; returns 1 if anything is wrong, else 0."""
    parser = argparse.ArgumentParser(prog="python -m studies.heldout_plans", description="Judges plans.")
    parser.add_argument("--json", type=Path, help="the file to write (default: none)")
    parser.add_argument("--resume", action="store_true", help="go on with what the file has")
    parser.add_argument("--rounds", type=int, default=5, help="of timed steps (default: 5)")
    names = list(unseen.PROGRAMS)
    parser.add_argument("--only", action="append", choices=names, help="this program (may be given several times)")
    asked = parser.parse_args(arguments)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message=".*(?:torch.jit|fast path|nested tensor).*")
    results = Results("studies.heldout_plans", asked.json, arguments, format=FORMAT, resume=asked.resume)
    judged = [read(found) for found in results.found.get("programs", [])]
    done = {program.program for program in judged}
    for name in asked.only or names:
        if name in done:
            continue
        try:
            judged.append(judge(name, Effort(asked.rounds)))
        except Exception as error:  # the others are judged all the same
            judged.append(Judged(name, error=f"{type(error).__name__}: {error}"))
        print(show(judged[-1:]), flush=True)
        results.write(programs=judged)
    flawed = [program for program in judged if program.error or any(row.flaws for row in program.rows)]
    pairs = sum(row.predicted_nbytes is not None for program in judged for row in program.rows)
    print(f"\n{show(judged)}\n\n{pairs} pairs of {len(judged)} programs, {len(flawed)} programs with flaws")
    print(results.close())
    return int(bool(flawed))


if __name__ == "__main__":
    raise SystemExit(main())
