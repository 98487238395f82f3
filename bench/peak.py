"""The peak of a step, and what is alive at it: ``python -m bench.peak [--json FILE] [--seconds N]``.

Of each network the counted and the resident peak and the time of a step, of plain PyTorch, torch.utils.checkpoint, a
Session, and checkpoints inside a Session; of a language model also with its loss in chunks. Gradients of parameters are
there before a step begins, so they are in no peak; a new gradient on its way to be added to one is. Then what is alive
at the peak by its role, of plain PyTorch and of a Session, with a timeline per network beside the JSON.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from backstash.planning.measure.record import record
from backstash.planning.model.trace import ROLES, Role, Trace
from backstash.stash.ledger import PeakRow
from bench import step_table
from bench.cases import QUICK, SEED, WORDS, Case, build, find
from bench.peers import peak_peers
from bench.results import Results
from bench.rounds import Deadline, Effort, mib, table

FORMAT = 1
"""Version of the JSON's layout."""

NAMES = (
    "alexnet",
    "alexnet-channels_last",
    WORDS.name,
    "resnet50",
    "resnet50-channels_last",
    "vgg16",
    "vgg16-channels_last",
)
"""Cases of the step table, and GPT-2 with all its words."""

STEP: tuple[Role, ...] = tuple(role for role in ROLES if role not in ("parameter", "gradient"))
"""What a step adds to what outlasts it."""


@dataclass(frozen=True)
class Live:
    """What is alive at a step's peak.

    Attributes:
        policy: ``"plain"`` or the policy's name.
        peak_nbytes: the most bytes alive at once, without parameters and their gradients.
        rows: what they are, the largest first.
    """

    policy: str
    peak_nbytes: int
    rows: tuple[PeakRow, ...]


@dataclass(frozen=True)
class PeakResult:
    """One network.

    Attributes:
        case: peaks and times.
        live: what is alive at the peak, plain first.
    """

    case: step_table.CaseResult
    live: tuple[Live, ...]


def measure(case: Case, effort: Effort, resident: bool, quick: bool) -> tuple[PeakResult, dict[str, Trace]]:
    """Measures one network; also returns the traces by title."""
    deadline = None if effort.deadline is None else effort.deadline.part(0.8)  # the traces come after
    plan = step_table.Plan(Effort(effort.rounds, deadline), resident, quick)
    result = step_table.measure(case, "cpu", plan, peak_peers(case.network))
    if result.status != "measured":
        return PeakResult(result, ()), {}
    workload = build(case, "cpu")

    def step() -> None:
        for parameter in workload.model.parameters():
            if parameter.grad is not None:
                parameter.grad.zero_()
        torch.manual_seed(SEED)
        torch.autograd.backward([workload.loss()])

    traces = {
        title: record(step, policy, model=workload.model) for title, policy in (("plain", None), ("lossless",) * 2)
    }
    live = tuple(
        Live(title, sum(row.nbytes for row in rows), rows)
        for title, rows in ((title, trace.at_peak(STEP)) for title, trace in traces.items())
    )
    return PeakResult(result, live), traces


def show_live(result: PeakResult) -> str:
    """The tables of what is alive at the peak."""
    lines = []
    for live in result.live:
        roles: dict[str, int] = defaultdict(int)
        for row in live.rows:
            roles[row.role] += row.nbytes
        parts = ", ".join(f"{role} {mib(nbytes)}" for role, nbytes in sorted(roles.items(), key=lambda one: -one[1]))
        lines.append(f"alive at the peak, {live.policy}: {mib(live.peak_nbytes)} MiB: {parts}")
        rows = ((row.role, row.name, str(row.count), mib(row.nbytes)) for row in live.rows[:6])
        lines += [table(("role", "allocated in or after", "buffers", "MiB"), rows), ""]
    return "\n".join(lines)


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.peak", description="What a step's peak is made of.")
    parser.add_argument("--json", type=Path, help="the file to write; figures are put beside it (default: none)")
    parser.add_argument("--seconds", type=float, default=900.0, help="for everything (default: 900)")
    parser.add_argument("--rounds", type=int, default=7, help="of timed steps, at most (default: 7)")
    parser.add_argument("--cases", help=f"which, comma-separated (default: {','.join(NAMES)})")
    parser.add_argument("--skip-resident", action="store_true", help="no resident peaks, which need processes")
    parser.add_argument("--quick", action="store_true", help="small networks: shows that everything runs")
    return parser.parse_args(arguments)


def _cases(asked: argparse.Namespace) -> Iterator[Case]:
    if asked.cases is None and asked.quick:
        yield from QUICK
        return
    for name in asked.cases.split(",") if asked.cases else NAMES:
        try:
            yield find(name, "cpu", asked.quick)
        except ValueError as error:
            raise SystemExit(f"bench.peak: {error}") from None


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures everything, prints tables, writes the JSON and the figures; returns 1 where a gate failed, else 0."""
    asked = _arguments(arguments)
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # the profiler that counts bytes else prints two lines per step
    cases = list(_cases(asked))
    deadline = Deadline.after(asked.seconds)
    results = Results("bench.peak", asked.json, arguments, format=FORMAT, quick=asked.quick)
    measured = []
    for index, case in enumerate(cases):
        left = sum(one.share for one in cases[index:])
        effort = Effort(2 if asked.quick else asked.rounds, deadline.part(case.share / left))
        one, traces = measure(case, effort, not asked.skip_resident, asked.quick)
        measured.append(one)
        results.write(cases=measured)
        print(f"\n{step_table.show(one.case)}\n\n{show_live(one)}", flush=True)
        if asked.json is not None:
            print(_draw(case, traces, asked.json), flush=True)
    return int(any(one.case.status == "failed" for one in measured))


def _draw(case: Case, traces: dict[str, Trace], beside: Path) -> str:
    if not traces:
        return "no figure: nothing was measured"
    if importlib.util.find_spec("matplotlib") is None:
        return "no figure: matplotlib is not installed; run: pip install 'backstash[plot]'"
    from backstash.report import plot

    path = beside.with_name(f"{beside.stem}-{case.name}.png")
    plot.timeline(traces, path)
    return f"the figure is in {path}"


if __name__ == "__main__":
    raise SystemExit(main())
