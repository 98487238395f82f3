"""Training steps on a GPU: ``python -m benchmarks.gpu [--json FILE] [--seconds N] [--only NAME] [--device cuda|cpu]``.

For each network, every way of keeping less: bits, peak and time of a step beside plain PyTorch's, a checkpoint's and
those of ``torch.autograd.graph.save_on_cpu``.

1. Three steps from the same weights, data and dropout. After each of them, all gradients of an exact way must have the
   bits of plain's, but for those that plain PyTorch itself computes differently a second time. A difference is reported
   with the row, and the row has no times. In a fourth step the peak is counted: of the GPU's allocator, above what it
   held before the step.
2. Plans: a profile of a step, then a plan for each share of plain's peak. What they take is reported too.
3. Rounds: every way once per round, each round in another order, each a few steps between two waits for the GPU.

The small networks have little work for each kernel: Python sets their pace. ``--device cpu`` only shows that
everything runs.
"""

from __future__ import annotations

import argparse
import gc
import os
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

import backstash as bs
from backstash.errors import BudgetError
from backstash.planning.plan import Planner
from benchmarks import cases
from benchmarks.cases import SEED, Case
from benchmarks.hostcost import count_saved
from benchmarks.results import Results
from benchmarks.rounds import Deadline, Effort, Summary, interleave, mib, spread, summarise, table
from benchmarks.step_table import same_bits, uncollected

FORMAT = 2
"""Version of the JSON's layout."""

SHARES = (0.7, 0.5)
"""Budgets of plans, as shares of plain's peak."""

COMPARED_STEPS, TIMED_STEPS = 3, 2


@dataclass(frozen=True)
class Work:
    """A network and how it is trained.

    Attributes:
        case: the network and its batch.
        autocast: whether products are computed in bfloat16.
        has_plans: whether plans are made for it.
    """

    case: Case
    autocast: bool = False
    has_plans: bool = True


WORK = (
    Work(Case("resnet50", "resnet50", 64, 224)),
    Work(Case("resnet50, small", "resnet50", 8, 64), has_plans=False),
    Work(Case("gpt2, small", "gpt2", 2, 128, needs="transformers"), has_plans=False),
    Work(Case("gpt2, bf16", "gpt2_words", 16, 512, needs="transformers"), autocast=True),
    Work(Case("vit_b16, bf16", "vit_b16", 64, 224, needs="transformers"), autocast=True),
    Work(Case("vgg16", "vgg16", 64, 224)),
    Work(Case("resnet50, bf16, channels_last", "resnet50", 128, 224, channels_last=True), autocast=True),
)
QUICK = (Work(Case("vgg_small", "vgg_small", 4, 32)),)


@dataclass(frozen=True)
class Row:
    """One way on one network.

    Attributes:
        way: its name.
        peak_nbytes: of a step, above what was held before.
        seconds: of a step; None where the gradients are wrong.
        times_plain: the same over plain's in the same round.
        is_exact: whether the gradients must have plain's bits.
        differing: how many of them have not, in any of the steps.
        ratio: of the bytes saved to the bytes held for them; None for what is no Session.
        predicted_nbytes: the peak that a plan predicts; None for what is no plan.
        note: what else is to be said.
    """

    way: str
    peak_nbytes: int
    seconds: Summary | None = None
    times_plain: Summary | None = None
    is_exact: bool = True
    differing: int = 0
    ratio: float | None = None
    predicted_nbytes: int | None = None
    note: str = ""


@dataclass(frozen=True)
class Measured:
    """All ways on one network.

    Attributes:
        name: of the network.
        what: the network and its batch in words.
        saved: number of tensors that autograd saves.
        unstable: how many gradients plain PyTorch computes differently a second time.
        rows: the results, plain's first.
        failed: ways that raised an error, and the error.
    """

    name: str
    what: str
    saved: int = 0
    unstable: int = 0
    rows: tuple[Row, ...] = ()
    failed: tuple[str, ...] = ()


@dataclass(eq=False)
class Way:
    """A way of running a forward pass.

    Attributes:
        context: what the forward pass runs in.
        is_exact: whether gradients have plain's bits.
        checkpointed: whether parts are recomputed by torch's checkpoint.
        predicted_nbytes: the peak that a plan predicts.
        note: what is to be said of it.
    """

    context: AbstractContextManager[object]
    is_exact: bool = True
    checkpointed: bool = False
    predicted_nbytes: int | None = None
    note: str = ""


class Training:
    """Steps of one network."""

    def __init__(self, work: Work, device: str) -> None:
        self.workload = cases.build(work.case, device)
        self.autocast = work.autocast
        self.device = device

    def forward(self, checkpointed: bool = False) -> Tensor:
        """The loss."""
        loss = self.workload.checkpointed_loss if checkpointed else self.workload.loss
        with torch.autocast(self.device, torch.bfloat16, enabled=self.autocast):
            return loss()

    def step(self, way: Way, seed: int = SEED) -> Tensor:
        """Runs a forward and a backward pass, from gradients of zero."""
        for parameter in self.workload.model.parameters():
            if parameter.grad is not None:
                parameter.grad.zero_()
        torch.manual_seed(seed)
        with way.context:
            loss = self.forward(way.checkpointed)
        torch.autograd.backward([loss])
        return loss.detach()

    def gradients(self) -> list[Tensor]:
        """Copies of all gradients, in the host's memory."""
        return [x.grad.cpu() for x in self.workload.model.parameters() if x.grad is not None]

    def peak(self, way: Way, seed: int) -> int:
        """The peak of a step."""
        gc.collect()
        return bs.measure(lambda: self.step(way, seed), repeats=1, warmup=0, device=self.device).peak_nbytes

    def seconds(self, way: Way) -> float:
        """Seconds of a step, of a few between two waits for the device."""
        self.step(way)
        self._wait()
        started = time.perf_counter()
        for _ in range(TIMED_STEPS):
            self.step(way)
        self._wait()
        return (time.perf_counter() - started) / TIMED_STEPS

    def _wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


def ways(training: Training) -> dict[str, Way]:
    """All ways by name but plans; plain is the first, and ``plain again`` shows the noise."""
    found = {
        "plain": Way(nullcontext()),
        "plain again": Way(nullcontext()),
        "checkpoint": Way(nullcontext(), checkpointed=True, note=training.workload.segments),
        "save_on_cpu": Way(torch.autograd.graph.save_on_cpu(pin_memory=training.device == "cuda")),
    }
    exact = ("keep", "lossless", "lossless_stored", "cdma", "offload")
    found |= {policy: Way(bs.Session(policy)) for policy in exact}
    return {**found, "quantized, 4 bits": Way(bs.Session(bs.policies.quantized(bits=4)), is_exact=False)}


def plans(training: Training, plain_nbytes: int) -> dict[str, Way]:
    """Plans for shares of plain's peak; of the smallest budget, where one cannot be met."""
    started = time.perf_counter()
    plain = Way(nullcontext())
    profile = bs.profile(lambda: training.step(plain), training.workload.model, device=training.device)
    planner = Planner(profile, ("lossless", "recompute"))
    profiled = time.perf_counter() - started
    found: dict[str, Way] = {}
    for share in SHARES:
        started, name = time.perf_counter(), f"plan, {share:.0%}"
        try:
            plan = planner.plan(int(share * plain_nbytes))
        except BudgetError as error:
            plan, name = cast(bs.Plan, error.plan), "plan, smallest"
        seconds = time.perf_counter() - started
        found[name] = Way(
            bs.Session(plan),
            predicted_nbytes=plan.peak_nbytes,
            note=f"profile {profiled:.1f} s, plan {seconds:.1f} s",
        )
    return found


def measure(work: Work, device: str, rounds: int, deadline: Deadline, with_plans: bool = True) -> Measured:
    """Measures all ways on one network."""
    training = Training(work, device)
    what = f"{work.case}{', autocast to bfloat16' if work.autocast else ''}"
    saved = count_saved(training.forward)
    gated: dict[str, tuple[Way, Row]] = {}
    failed: list[str] = []
    reference: list[list[Tensor]] = []
    unstable: set[int] = set()

    def judge(name: str, way: Way) -> None:
        differing: set[int] = set()
        for number in range(COMPARED_STEPS):
            training.step(way, SEED + number)
            gradients = training.gradients()
            if len(reference) <= number:
                reference.append(gradients)
            are_same = map(same_bits, gradients, reference[number])
            differing |= {at for at, is_same in enumerate(are_same) if not is_same}
        if name == "plain again":
            unstable.update(differing)
        peak = training.peak(way, SEED)
        report = way.context.report() if isinstance(way.context, bs.Session) else None
        ratio = None if report is None else report.ratio
        wrong = len(differing - unstable) if way.is_exact and name != "plain again" else 0
        row = Row(name, peak, is_exact=way.is_exact, differing=wrong, ratio=ratio)
        gated[name] = way, replace(row, predicted_nbytes=way.predicted_nbytes, note=way.note)

    def judge_all(group: dict[str, Way]) -> None:
        for name, way in group.items():
            try:
                judge(name, way)
            except Exception as error:
                failed.append(f"{name}: {type(error).__name__}: {error}")

    judge_all(ways(training))
    if work.has_plans and with_plans:
        try:
            judge_all(plans(training, gated["plain"][1].peak_nbytes))
        except Exception as error:
            failed.append(f"plans: {type(error).__name__}: {error}")
    right = {name: way for name, (way, row) in gated.items() if not row.differing}
    gc.collect()
    with uncollected():
        tasks = {name: partial(training.seconds, way) for name, way in right.items()}
        times = interleave(tasks, Effort(rounds, deadline))
    rows = []
    for name, (_, row) in gated.items():
        if name in times:
            over = [own / plain for own, plain in zip(times[name], times["plain"], strict=True)]
            row = replace(row, seconds=summarise(times[name]), times_plain=summarise(over))
        rows.append(row)
    return Measured(work.case.name, what, saved, len(unstable), tuple(rows), tuple(failed))


def show(found: Measured) -> str:
    """A line for each way."""
    lines = [
        (
            row.way,
            mib(row.peak_nbytes),
            f"{row.peak_nbytes / found.rows[0].peak_nbytes:.2f}",
            spread(row.seconds, 1e3, 1),
            spread(row.times_plain, digits=3),
            "" if row.ratio is None else f"{row.ratio:.2f}",
            "" if row.predicted_nbytes is None else mib(row.predicted_nbytes),
            f"{row.differing} DIFFER" if row.differing else "equal" if row.is_exact else "",
            row.note,
        )
        for row in found.rows
    ]
    head = (
        f"{found.name}: {found.what}; {found.saved} saved tensors; plain differs from itself in {found.unstable}",
        table(("way", "peak MiB", "x plain", "step ms", "x plain", "ratio", "predicted", "bits", "note"), lines),
        *(f"FAILED {text}" for text in found.failed),
    )
    return "\n".join(head)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures every network, prints its table, writes the JSON; returns 1 if bits differ or a way failed, else 0."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description="Training steps on a GPU.")
    parser.add_argument("--json", type=Path, help="the file to write (default: none)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu shows that everything runs")
    parser.add_argument("--seconds", type=float, default=900.0, help="no network is begun after it (default: 900)")
    parser.add_argument("--rounds", type=int, default=7, help="of each network, at most (default: 7)")
    parser.add_argument("--skip-plans", action="store_true", help="no plans, which take most of the time")
    parser.add_argument("--quick", action="store_true", help="a small network that shows that everything runs")
    names = [work.case.name for work in WORK]
    parser.add_argument("--only", action="append", choices=names, help="this network (may be given several times)")
    asked = parser.parse_args(arguments)
    if asked.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda was asked for; torch finds no CUDA device; use --device cpu")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS computes the same twice only with it
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # it takes time
    deadline = Deadline.after(asked.seconds)
    results = Results("gpu", asked.json, arguments, format=FORMAT, device=asked.device)
    chosen = QUICK if asked.quick else WORK
    measured: list[Measured] = []
    for work in chosen:
        if (asked.only and work.case.name not in asked.only) or work.case.absent() is not None:
            continue
        if time.monotonic() > deadline.ends_at:
            print(f"{work.case.name}: no time was left")
            continue
        measured.append(measure(work, asked.device, asked.rounds, deadline, not asked.skip_plans))
        print(f"\n{show(measured[-1])}", flush=True)
        results.write(networks=measured)
    print(f"\n{results.close()}")
    return int(any(found.failed or any(row.differing for row in found.rows) for found in measured))


if __name__ == "__main__":
    raise SystemExit(main())
