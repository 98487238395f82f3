"""torch.compile with and without treated graphs: ``python -m studies.compile [--case NAME] [--json FILE]``.

For each case, in this order:

1. Every candidate compiles and takes two steps from the same weights, data and dropout. The gradients of the exact
   candidates must have the bits of compiled plain's; otherwise the run says so and fails, and its table shows it.
2. Saved bytes: between forward and backward, every distinct memory that autograd holds, parameters excluded.
3. The counted peak of a step (report.meter.CountedPeak): every byte that torch allocates, above those before the step.
4. The rounds: each candidate's step once per round, each round in another order; median and quartiles. "compiled,
   again" is compiled plain once more: its times over compiled plain's say how far times of equal work lie apart.

Torch's own candidates are compiled plain, compiled with ``activation_memory_budget`` at three settings, and with its
own fp8 for what is saved. With ``--frontier`` there are many more budgets, of torch and of ours: see
:mod:`studies.compile_frontier`.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._functorch import config as functorch

import backstash
from backstash import Session, policies
from backstash.report.meter import CountedPeak
from bench import cases
from bench.cases import SEED, Case, Workload
from bench.machine import load
from bench.results import Results
from bench.rounds import Deadline, Effort, Summary, interleave, spread, summarise, table

FORMAT = 1
"""Version of the JSON's layout."""

CASES = (
    Case("resnet_cifar20", "resnet_cifar20", 32, 32),
    Case("resnet18", "resnet18", 8, 112),
    Case("gpt2", "gpt2", 2, 256, needs="transformers"),
    Case("mobilenet_v2", "mobilenet_v2", 8, 224),
    Case("resnet50", "resnet50", 8, 224),
    Case("vit_b16", "vit_b16", 4, 224, needs="transformers"),
    Case("gpt2-50257_words", "gpt2_words", 2, 512, needs="transformers"),
)
DEFAULT = ("resnet_cifar20", "resnet18", "gpt2")

AGAIN = "compiled, again"
LEAST_ROUNDS = 5
"""Of fewer rounds a table says that they are few."""

BUDGETS = (0.5, 0.3, 0.1)
"""Settings of torch's activation_memory_budget."""

OURS = (0.7, 0.5)
"""Budgets of ours, as shares of compiled plain's counted peak."""


@dataclass(eq=False)
class Candidate:
    """A way to run the model.

    Attributes:
        name: its name.
        is_exact: whether its gradients must have the bits of compiled plain's.
        options: for torch.compile; None to run eager.
        settings: of AOTAutograd while compiling.
        context: around the forward pass.
    """

    name: str
    is_exact: bool = True
    options: dict[str, Any] | None = None
    settings: dict[str, Any] | None = None
    context: Callable[[], AbstractContextManager[object]] = nullcontext


@dataclass(frozen=True)
class Row:
    """One candidate on one case.

    Attributes:
        candidate: its name.
        saved_nbytes: bytes held between forward and backward, parameters excluded.
        peak_nbytes: the counted peak of a step.
        seconds: of a step.
        times_plain: the same over compiled plain's in the same round.
        error: relative difference of all gradients together from compiled plain's (L2).
        compile_seconds: of the first step.
        note: what the treatment's report says of its graphs.
    """

    candidate: str
    saved_nbytes: int
    peak_nbytes: int
    seconds: Summary
    times_plain: Summary
    error: float
    compile_seconds: float
    note: str


def candidates() -> list[Candidate]:
    """Those that do not depend on a measurement; compiled plain is the first."""
    session = Session("lossless")
    setting = "activation_memory_budget"
    torch_budgets = [
        Candidate(f"compiled, {setting} {share}", is_exact=False, options={}, settings={setting: share})
        for share in BUDGETS
    ]
    # Torch's own rounding of what a graph saves: undocumented, one scale for each value, off unless it is asked for.
    rounding = {
        "quant_type": "torch.float8_e4m3fn",
        "size_in_mb": 0,
        "allowed_dtypes": "torch.float32",
        "use_scaling": True,
        "exclude_primals": True,
    }
    torch_fp8 = {"post_grad_fusion_options": {"activation_quantization_aten_pass": rounding}}
    fp8 = policies.gist("float8_e4m3fn")
    return [
        Candidate("compiled", options={}),
        Candidate(AGAIN, options={}),
        Candidate("eager", is_exact=False),
        Candidate("eager, lossless", is_exact=False, context=lambda: session),
        *torch_budgets,
        Candidate("compiled, fp8 of torch", is_exact=False, options=torch_fp8),
        Candidate("ours, lossless", options=backstash.compile_options("lossless")),
        Candidate("ours, fp8", is_exact=False, options=backstash.compile_options(fp8)),
        Candidate("ours, 4 bits", is_exact=False, options=backstash.compile_options(policies.quantized(4))),
        Candidate("ours, 2 bits", is_exact=False, options=backstash.compile_options(policies.quantized(2))),
    ]


def within(nbytes: int, share: float) -> Candidate:
    """Ours under a budget that is a share of compiled plain's peak."""
    options = backstash.compile_options("lossless", budget=int(share * nbytes))
    return Candidate(f"ours, lossless, budget {share} of the peak", options=options)


class Runner:
    """A candidate on a workload of its own graph, ready to step."""

    def __init__(self, candidate: Candidate, workload: Workload) -> None:
        self.candidate = candidate
        self.workload = workload
        self._loss: Callable[[], Tensor] = workload.loss
        # Dynamo finds compiled code by the code object: one for each candidate, or all would run the first one's.
        self._loss.__code__ = self._loss.__code__.replace()
        if candidate.options is not None:
            self._loss = torch.compile(workload.loss, options=candidate.options)
        started = time.perf_counter()
        with functorch.patch(candidate.settings or {}):
            self.step()
        self.compile_seconds = time.perf_counter() - started

    def forward(self) -> Tensor:
        """The loss, with gradients set to zero and dropout seeded before."""
        for parameter in self.workload.model.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.zero_()
        torch.manual_seed(SEED)
        with self.candidate.context():
            return self._loss()

    def step(self) -> float:
        """Seconds of a step."""
        gc.collect()
        started = time.perf_counter()
        self.forward().backward()  # type: ignore[no-untyped-call]
        return time.perf_counter() - started

    def gradients(self) -> list[Tensor]:
        """The gradients of a step."""
        self.step()
        return [parameter.grad.clone() for parameter in self.workload.model.parameters() if parameter.grad is not None]

    def saved_nbytes(self) -> int:
        """Bytes that are alive after a forward pass and were not before it, but for the loss."""
        gc.collect()
        if self.candidate.context is not nullcontext:  # a Session's own accounts
            self.forward().backward()  # type: ignore[no-untyped-call]
            report = self.candidate.context().report()  # type: ignore[attr-defined]
            return int(report.stash_nbytes)
        with CountedPeak() as counter:
            loss = self.forward()
        saved = counter.timeline[-1][1] if counter.timeline else 0
        loss.backward()  # type: ignore[no-untyped-call]
        return saved - loss.nbytes

    def peak_nbytes(self) -> int:
        """The counted peak of a step."""
        gc.collect()
        with CountedPeak() as counter:
            self.forward().backward()  # type: ignore[no-untyped-call]
        return counter.peak_nbytes

    def note(self) -> str:
        """What the report of the treated graphs says."""
        report = getattr(self.candidate.options, "report", None)
        return "" if report is None else "; ".join(report().notes)


def error(found: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    """Relative difference of all gradients together."""
    difference = sum(float((one - other).double().square().sum()) for one, other in zip(found, exact, strict=True))
    return float((difference / sum(float(one.double().square().sum()) for one in exact)) ** 0.5)


def measure(case: Case, effort: Effort, only: Sequence[str] = ()) -> list[Row]:
    """The candidates on one case.

    Args:
        case: the case.
        effort: how many rounds.
        only: names of candidates to measure beside compiled plain and itself again; all if empty.
    """
    state = {name: value.clone() for name, value in cases.build(case, "cpu").model.state_dict().items()}
    runners: list[Runner] = []
    facts: dict[str, tuple[int, int, float]] = {}
    exact: list[Tensor] = []
    waiting = candidates()
    while waiting:
        candidate = waiting.pop(0)
        if runners and only and candidate.name not in (AGAIN, *only):
            continue
        runner = Runner(candidate, cases.build(case, "cpu"))
        runner.workload.model.load_state_dict(state)
        gradients = runner.gradients()
        exact = exact or gradients
        off = error(gradients, exact)
        facts[candidate.name] = runner.saved_nbytes(), runner.peak_nbytes(), off
        print(f"  {candidate.name}: {facts[candidate.name]}, {runner.compile_seconds:.0f} s to compile", flush=True)
        if not runners:
            waiting += [within(facts[candidate.name][1], share) for share in OURS]
        runners.append(runner)
    times = interleave({runner.candidate.name: runner.step for runner in runners}, effort)
    plain = times[runners[0].candidate.name]
    rows = []
    for runner in runners:
        name = runner.candidate.name
        over = summarise([mine / its for mine, its in zip(times[name], plain, strict=True)])
        rows.append(
            Row(
                name,
                *facts[name][:2],
                summarise(times[name]),
                over,
                facts[name][2],
                runner.compile_seconds,
                runner.note(),
            )
        )
    return rows


def lines(rows: Sequence[Row]) -> str:
    """The table of one case."""
    header = ("candidate", "saved MiB", "peak MiB", "ms", "times compiled", "gradient error")
    return table(
        header,
        [
            (
                row.candidate,
                f"{row.saved_nbytes / 2**20:.1f}",
                f"{row.peak_nbytes / 2**20:.1f}",
                spread(row.seconds, 1e3, 0),
                spread(row.times_plain),
                f"{row.error:.2g}",
            )
            for row in rows
        ],
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the cases, prints their tables and writes the file."""
    parser = argparse.ArgumentParser(prog="python -m studies.compile", description=__doc__)
    parser.add_argument("--case", action="append", choices=[case.name for case in CASES], help="may be repeated")
    parser.add_argument("--only", action="append", default=[], help="a candidate's name; may be repeated")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--seconds",
        type=float,
        default=None,
        help="the whole run, shared by the cases: rounds stop when a case's time is over; a frontier's candidates do",
    )
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--frontier", action="store_true", help="budgets of ours beside those of torch")
    parser.add_argument("--resume", action="store_true", help="with --frontier: leave out what the file has")
    parser.add_argument("--remark", default="", help="what a reader should know of the machine")
    asked = parser.parse_args(arguments)
    deadline = None if asked.seconds is None else Deadline.after(asked.seconds)
    chosen = [case for case in CASES if case.name in (asked.case or DEFAULT)]
    results = Results(
        "compile", asked.json, arguments, format=FORMAT, resume=asked.resume, cases=chosen, remark=asked.remark
    )
    if asked.frontier:
        from studies import compile_frontier  # it imports this module

        return compile_frontier.run(chosen, Effort(asked.rounds, deadline), asked.only, results)
    measured: list[dict[str, Any]] = []
    for number, case in enumerate(chosen):
        absent = case.absent()
        print(f"\n{case}" if absent is None else f"\n{case}: skipped, {absent}", flush=True)
        if absent is None:
            before = load()
            part = None if deadline is None else deadline.part(1 / (len(chosen) - number))
            rows = measure(case, Effort(asked.rounds, part), asked.only)
            measured.append({"case": case, "rows": rows, "load_before": before, "load_after": load()})
            print(lines(rows), flush=True)
            if rows[0].seconds.count < min(LEAST_ROUNDS, asked.rounds):
                print(f"only {rows[0].seconds.count} rounds fitted into the time: times are rough", flush=True)
        results.write(measured=measured)
    exact = {candidate.name for candidate in candidates() if candidate.is_exact}
    off = [row.candidate for found in measured for row in found["rows"] if row.candidate in exact and row.error]
    print(results.close())
    if off:
        print(f"not the bits of compiled plain, but should be: {', '.join(off)}")
    return int(bool(off))


if __name__ == "__main__":
    raise SystemExit(main())
