"""Allocators and their settings, for plain PyTorch and for Sessions: ``python -m studies.allocator``.

The candidates are plain PyTorch, the policy ``lossless``, and plans for a share of plain's counted peak and for the
smallest budget that there is. The C library's settings hold for a process, and so does the high-water mark of resident
memory. So each candidate has a process of its own under each setting; they take turns. Plans are made once, in another
process, and read from a file.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from backstash.errors import BudgetError
from backstash.integrations import allocator
from backstash.planning.measure.profiling import profile
from backstash.planning.model.plan import Plan
from backstash.planning.search.planner import Planner
from backstash.report import meter
from bench import cases
from bench.cases import Case
from bench.peers import Plain, Stashing
from bench.results import Results
from bench.rounds import mib, summarise, table
from bench.step_table import timed_step, uncollected
from studies import frontier

ROOT = Path(__file__).resolve().parents[1]
KEEP = {"MALLOC_MMAP_THRESHOLD_": "1073741824", "MALLOC_TRIM_THRESHOLD_": "2147483647"}
SETTINGS = {
    "default": {},
    "keep": KEEP,
    "huge pages": {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"},
    "keep, huge pages": {**KEEP, "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"},
    "give back": {"MALLOC_MMAP_THRESHOLD_": "1048576", "THP_MEM_ALLOC_ENABLE": "1"},
}
"""Environments of the C library's allocator: its own, freed memory kept, huge pages asked for, and freed memory given
back at once: each tensor of 1 MiB or more in a mapping of its own, of huge pages, which torch asks for."""


def environments(asked: str | None) -> dict[str, dict[str, str]]:
    """The settings of the C library, and the other allocators: those that are installed, or those that were asked for.

    Args:
        asked: names or paths with commas; None for all that are installed.

    Raises:
        AllocatorError: one of them is not installed.
    """
    found = allocator.installed()
    if asked is not None:
        chosen = (allocator.choose_allocator(name) for name in asked.split(",") if name)
        found = {one.name: one for one in chosen if one is not None}
    return {**SETTINGS, **{name: one.environment({}) for name, one in found.items()}}


COUNTED = 3
"""Steps before the counted one: a Session has learned what a step is by then."""


def find(name: str, batch: int) -> Case:
    """A case of the frontier or of the step table, with that batch; its own one for 0."""
    known = {case.name: case for case in (*cases.CPU, cases.WORDS, *cases.QUICK, *frontier.CASES)}
    if name not in known:
        raise ValueError(f"the case {name!r} was asked for; there is no such case; use one of {', '.join(known)}")
    return replace(known[name], batch=batch or known[name].batch)


def make_plans(case: Case, shares: Sequence[float], folder: Path) -> None:
    """Writes a plan for each share of plain's counted peak that has one, and for the smallest budget."""
    workload = frontier.build(case)
    planner = Planner(profile(lambda: workload.loss().backward(), workload.model))
    for share in shares:
        try:
            plan = planner.plan(f"{100 * share:g}%")
        except BudgetError:
            continue
        (folder / f"plan, {share:.0%}.json").write_text(plan.to_json())
    try:
        planner.plan(1)
    except BudgetError as error:
        plan = planner.plan(error.smallest_nbytes)
        (folder / "plan, smallest budget.json").write_text(plan.to_json())


def child(case: Case, candidate: str, plan: Path | None, rounds: int) -> None:
    """Measures one candidate in this process, and prints seconds of steps and its peaks."""
    workload = frontier.build(case)
    before = meter.resident_nbytes()
    policy = candidate if plan is None else Plan.from_json(plan.read_text())
    forward = (Plain() if candidate == "plain" else Stashing(policy)).start(workload)
    with uncollected():
        seconds = [timed_step(workload, forward).seconds for _ in range(rounds)]
    resident = meter.resident_peak_nbytes()  # before the profiler takes memory of its own
    for _ in range(max(0, COUNTED - 2 * rounds)):
        forward.loss().backward()
    with meter.CountedPeak() as counter:
        forward.loss().backward()
    measured = {"resident_nbytes": resident, "resident_before_nbytes": before, "peak_nbytes": counter.peak_nbytes}
    print(json.dumps({"seconds": seconds, **measured}))


def _run(arguments: Sequence[str], environment: dict[str, str]) -> str:
    """Runs this module in another process, and returns the last line that it prints."""
    command = [sys.executable, "-m", "studies.allocator", *arguments]
    run = subprocess.run(command, cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True)
    if run.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{run.stderr}")
    return next(iter(run.stdout.splitlines()[-1:]), "")


def measure(case: str, asked: argparse.Namespace, settings: dict[str, dict[str, str]]) -> list[dict[str, Any]]:
    """Measures every candidate of a case under every setting, in turns."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    common = ["--cases", case, "--batch", str(asked.batch), "--rounds", str(asked.rounds)]
    common += ["--threads", str(asked.threads)]
    with TemporaryDirectory() as folder:
        _run([*common, "--plans", folder, "--shares", asked.shares], {})
        plans = {path.stem: path for path in sorted(Path(folder).iterdir())}
        for _ in range(asked.turns):
            for setting, environment in settings.items():
                for candidate in ("plain", "lossless", *plans):
                    plan = ["--plan", str(plans[candidate])] if candidate in plans else []
                    measured = json.loads(_run([*common, "--child", candidate, *plan], environment))
                    row = found.setdefault((setting, candidate), {"setting": setting, "candidate": candidate})
                    for name, value in measured.items():
                        row.setdefault(name, []).extend(value if isinstance(value, list) else [value])
    return list(found.values())


def show(rows: Sequence[dict[str, Any]]) -> str:
    """Medians: time beside the default's plain step, counted and resident peaks."""
    base = next((summarise(row["seconds"]).median for row in rows if row["candidate"] == "plain"), 1.0)
    lines = [
        (
            row["setting"],
            row["candidate"],
            mib(int(summarise(row["peak_nbytes"]).median)),
            mib(int(summarise(row["resident_nbytes"]).median)),
            f"{summarise(row['seconds']).median:.3f}",
            f"{summarise(row['seconds']).median / base:.2f}",
        )
        for row in rows
    ]
    return table(("allocator", "candidate", "counted MiB", "resident MiB", "s per step", "of plain"), lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs every candidate under every setting, in turn, and prints medians beside the default's plain step."""
    parser = argparse.ArgumentParser(prog="python -m studies.allocator", description=main.__doc__)
    parser.add_argument("--cases", default="vgg16,resnet50", help="comma-separated (default: vgg16,resnet50)")
    parser.add_argument("--batch", type=int, default=0, help="images or texts per step (default: the case's)")
    parser.add_argument("--shares", default="0.5", help="budgets as shares of plain's peak (default: 0.5)")
    parser.add_argument("--turns", type=int, default=2, help="processes of each candidate and setting (default: 2)")
    parser.add_argument("--rounds", type=int, default=3, help="timed steps in each (default: 3)")
    parser.add_argument("--threads", type=int, default=1, help="of each process (default: 1)")
    parser.add_argument("--settings", help="names, comma-separated, of the settings (default: all)")
    parser.add_argument("--allocators", help="names or paths, comma-separated (default: all that are installed)")
    parser.add_argument("--json", type=Path, help="the file to write (default: none)")
    for hidden in ("--child", "--plan", "--plans"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    asked = parser.parse_args(arguments)
    torch.set_num_threads(asked.threads)
    if asked.plans:
        shares = [float(share) for share in asked.shares.split(",")]
        make_plans(find(asked.cases, asked.batch), shares, Path(asked.plans))
        return 0
    if asked.child:
        child(find(asked.cases, asked.batch), asked.child, asked.plan and Path(asked.plan), asked.rounds)
        return 0
    settings = environments(asked.allocators)
    if asked.settings is not None:
        settings = {name: settings[name] for name in asked.settings.split(",")}
    results = Results("studies.allocator", asked.json, arguments, settings=settings)
    measured: dict[str, Any] = {}
    for case in asked.cases.split(","):
        measured[case] = measure(case, asked, settings)
        print(f"\n{find(case, asked.batch)}\n{show(measured[case])}", flush=True)
        results.write(cases=measured, batch=asked.batch)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
