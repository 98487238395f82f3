"""Peak against the time of a step: ``python -m benchmarks.frontier [--json FILE] [--seconds N] [--only NAME]``.

For each network: plain PyTorch, ``torch.utils.checkpoint`` around each block and around every second block, saved
tensors on the host (``save_on_cpu``), the policy ``lossless``, and a plan for each of several budgets. The budgets are
shares of plain's peak, the peak of the checkpoint, and the smallest budget for which there is a plan.

1. The gate: the gradients of each candidate have the bits of plain's.
2. The peak of each candidate is counted in a step of its own, above what is held before the step; gradients are there.
3. The rounds are interleaved: every candidate once per round, each round in another order.

A plan is made from a profile that is taken before the rounds; what that takes is stated apart.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

import backstash as bs
from backstash.errors import BudgetError
from backstash.planning.plan import Planner
from backstash.planning.record import record
from benchmarks import cases, steptime
from benchmarks.cases import Case, Workload
from benchmarks.machine import load
from benchmarks.results import Results
from benchmarks.rounds import Deadline, Effort, Summary, interleave, spread, summarise, table
from benchmarks.step_table import uncollected
from benchmarks.steptime import CASES, build

FORMAT = 1
SHARES = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3)
"""Budgets, as shares of plain's peak."""

NAMES = ("resnet50", "gpt2", "vgg16", "vit_b16", "convnext_tiny")


@dataclass(frozen=True)
class Row:
    """One candidate on one network.

    Attributes:
        candidate: its name.
        budget_nbytes: for a plan, its budget; else None.
        predicted_nbytes: for a plan, the peak that it predicts; else None.
        peak_nbytes: the counted peak above what is held before the step.
        seconds: wall time of a step.
        times_plain: the same over plain's in the same round.
        predicted_times_plain: for a plan, the predicted time over plain's; else None.
    """

    candidate: str
    budget_nbytes: int | None
    predicted_nbytes: int | None
    peak_nbytes: int
    seconds: Summary
    times_plain: Summary
    predicted_times_plain: float | None


@dataclass(frozen=True)
class Measured:
    """All candidates on one network.

    Attributes:
        case: the network, and the batch that it was trained on.
        profile_seconds: time to take the profile.
        plan_seconds: time to make all plans, rehearsals included.
        smallest_nbytes: the smallest budget for which there is a plan.
        load_before, load_after: load averages of the machine, 1, 5 and 15 minutes.
        rows: the results, plain first.
    """

    case: Case
    profile_seconds: float
    plan_seconds: float
    smallest_nbytes: int
    load_before: tuple[float, ...]
    load_after: tuple[float, ...]
    rows: tuple[Row, ...]


@dataclass(eq=False)
class Candidate(steptime.Candidate):
    """A way to run a step.

    Attributes:
        loss: runs the forward pass; None for the network as it is.
        plan: the plan that it runs under, if there is one.
    """

    loss: Callable[[], Tensor] | None = None
    plan: bs.Plan | None = None

    def forward(self, workload: Workload) -> Tensor:
        """Returns the loss."""
        self.last = self.context()
        with self.last:
            return (self.loss or workload.loss)()


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The blocks that a user would put checkpoints around: the entries of the longest lists of equal modules."""
    named = [(module, type(module)) for module in model.modules()]
    lists_of = (nn.ModuleList, nn.Sequential)
    repeated = [kind for _, kind in named if kind not in lists_of and sum(other is kind for _, other in named) >= 4]
    lists: list[list[nn.Module]] = []
    for module in model.modules():
        is_list = isinstance(module, lists_of) and len(module) >= 2
        if is_list and all(type(child) in repeated and len(list(child.modules())) > 3 for child in module.children()):
            lists.append(list(module.children()))
    return [block for found in lists for block in found]


def candidates(workload: Workload) -> tuple[dict[str, Candidate], float, float, int]:
    """All candidates by name, the seconds of the profile and of all plans, and the smallest budget."""
    blocks = blocks_of(workload.model)
    found = {
        "plain": Candidate(nullcontext),
        "plain again": Candidate(nullcontext),
        "checkpoint": Candidate(nullcontext, loss=workload.checkpointed_loss),
        "save_on_cpu": Candidate(torch.autograd.graph.save_on_cpu),
        "lossless": Candidate(_opening(bs.Session("lossless"))),
    }
    if workload.checkpointed_loss is workload.loss:
        found["checkpoint"] = Candidate(lambda: cases.recomputed(blocks))
    if len(blocks) >= 4:
        found["checkpoint, every second block"] = Candidate(lambda: cases.recomputed(blocks[::2]))
    started = time.perf_counter()
    profile = bs.profile(lambda: workload.loss().backward(), workload.model)
    profiled = time.perf_counter()
    checkpoint_nbytes = peak(workload, found["checkpoint"])
    budgets = {f"{share:.0%}": int(share * profile.plain_peak_nbytes) for share in SHARES}
    budgets["checkpoint's peak"] = checkpoint_nbytes
    planner, smallest = Planner(profile), 0
    for name, budget in budgets.items():
        try:
            plan = planner.plan(budget)
        except BudgetError as error:
            smallest = error.smallest_nbytes
            plan = error.plan  # type: ignore[assignment]
            name = "smallest budget"
        if name == "smallest budget" and "plan, smallest budget" in found:
            continue
        found[f"plan, {name}"] = Candidate(_opening(bs.Session(plan)), plan=plan)
    return found, profiled - started, time.perf_counter() - profiled, smallest


def _opening(session: bs.Session) -> Callable[[], bs.Session]:
    """Opens the same Session in each step."""
    return lambda: session


def peak(workload: Workload, candidate: Candidate) -> int:
    """The counted peak of a step, after one step that warms up."""
    return record(lambda: candidate.forward(workload).backward()).peak_nbytes


def measure(case: Case, effort: Effort) -> Measured:
    """Measures all candidates on one network."""
    before = load()
    workload = cases.build(case, "cpu") if case.network.startswith("gpt2") else build(case)
    compared, profile_seconds, plan_seconds, smallest = candidates(workload)
    steptime.gate(workload, compared)
    peaks = {name: peak(workload, candidate) for name, candidate in compared.items()}
    with uncollected():
        seconds = interleave(
            {name: partial(steptime.second_step, workload, one) for name, one in compared.items()}, effort
        )
    rows = []
    for name, candidate in compared.items():
        ratios = [own / plain for own, plain in zip(seconds[name], seconds["plain"], strict=True)]
        plan = candidate.plan
        rows.append(
            Row(
                name,
                None if plan is None else plan.budget,
                None if plan is None else plan.peak_nbytes,
                peaks[name],
                summarise(seconds[name]),
                summarise(ratios),
                None if plan is None else plan.seconds / plan.plain_seconds,
            )
        )
    return Measured(case, profile_seconds, plan_seconds, smallest, before, load(), tuple(rows))


def show(measured: Sequence[Measured]) -> str:
    """A line for each candidate of each network."""
    header = ("network", "candidate", "budget MiB", "predicted", "peak MiB", "x plain", "predicted x")
    lines = [
        (
            str(found.case),
            row.candidate,
            "" if row.budget_nbytes is None else f"{row.budget_nbytes / 2**20:.1f}",
            "" if row.predicted_nbytes is None else f"{row.predicted_nbytes / 2**20:.1f}",
            f"{row.peak_nbytes / 2**20:.1f}",
            spread(row.times_plain, digits=3),
            "" if row.predicted_times_plain is None else f"{row.predicted_times_plain:.3f}",
        )
        for found in measured
        for row in found.rows
    ]
    return table(header, lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures each network, prints a table, writes the JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.frontier", description="Peak against step time.")
    parser.add_argument("--json", type=Path, help="the file to write (default: none)")
    parser.add_argument("--seconds", type=float, default=1800.0, help="for everything (default: 1800)")
    parser.add_argument("--rounds", type=int, default=5, help="of each network, at most (default: 5)")
    parser.add_argument("--only", action="append", choices=NAMES, help="this network (may be given several times)")
    asked = parser.parse_args(arguments)
    deadline = Deadline.after(asked.seconds)
    results = Results("frontier", asked.json, arguments, format=FORMAT)
    chosen = [case for case in CASES if case.name in (asked.only or NAMES) and case.absent() is None]
    measured: list[Measured] = []
    for index, case in enumerate(chosen):
        part = deadline.part(case.share / sum(other.share for other in chosen[index:]))
        measured.append(measure(case, Effort(asked.rounds, part)))
        results.write(networks=measured)
    print(f"{show(measured)}\n\n{results.close()}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
