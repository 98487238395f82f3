"""What allocators and their settings give, to plain PyTorch and to a Session: ``python -m benchmarks.allocator``.

The C library's settings hold for a process, so each setting has processes of its own, taking turns; within one, plain
and Session steps take turns as well.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from backstash.integrations import allocator
from backstash.report import meter
from benchmarks.cases import build, find
from benchmarks.peers import Plain, Stashing
from benchmarks.results import Results
from benchmarks.rounds import Deadline, Effort, interleave, mib, summarise, table
from benchmarks.step_table import measure_resident, timed_step, uncollected

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
        chosen = (allocator.choose(name) for name in asked.split(",") if name)
        found = {one.name: one for one in chosen if one is not None}
    return {**SETTINGS, **{name: one.environment({}) for name, one in found.items()}}


PEERS = (Plain(), Stashing("lossless"))


def child(case: str, rounds: int) -> None:
    """Measures in this process, and prints seconds of steps and resident peaks."""
    workload = build(find(case, "cpu"), "cpu")
    forwards = {peer.name: peer.start(workload) for peer in PEERS}
    with uncollected():
        times = interleave(
            {name: partial(timed_step, workload, forward) for name, forward in forwards.items()}, Effort(rounds, None)
        )
    found = {}
    for name, forward in forwards.items():
        resident = measure_resident(workload, forward, Deadline.after(30.0))
        found[name] = {
            "seconds": [one.seconds for one in times[name]],
            "resident_nbytes": None if resident is None else resident.growth_nbytes,
            "resident_before_nbytes": meter.resident_nbytes(),
        }
    print(json.dumps(found))


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs every setting, in turn, and prints medians beside the default's plain step."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.allocator", description=main.__doc__)
    parser.add_argument("--cases", default="vgg16,resnet50", help="comma-separated (default: vgg16,resnet50)")
    parser.add_argument("--turns", type=int, default=2, help="processes of each setting (default: 2)")
    parser.add_argument("--rounds", type=int, default=3, help="timed steps in each (default: 3)")
    parser.add_argument("--allocators", help="names or paths, comma-separated (default: all that are installed)")
    parser.add_argument("--json", type=Path, help="the file to write (default: none)")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    asked = parser.parse_args(arguments)
    if asked.child:
        child(asked.child, asked.rounds)
        return 0
    settings = environments(asked.allocators)
    results = Results("allocator", asked.json, arguments, settings=settings)
    cases: dict[str, list[dict[str, Any]]] = {}
    for case in asked.cases.split(","):
        seconds: dict[tuple[str, str], list[float]] = {}
        resident: dict[tuple[str, str], list[int]] = {}
        for _ in range(asked.turns):
            for setting, environment in settings.items():
                command = [sys.executable, "-m", "benchmarks.allocator", "--child", case, "--rounds", str(asked.rounds)]
                run = subprocess.run(
                    command, cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True, check=True
                )
                for name, one in json.loads(run.stdout.splitlines()[-1]).items():
                    seconds.setdefault((setting, name), []).extend(one["seconds"])
                    resident.setdefault((setting, name), []).append(one["resident_nbytes"] or 0)
        base = summarise(seconds["default", "plain"]).median
        rows = [
            (
                setting,
                name,
                f"{summarise(values).median:.3f}",
                f"{summarise(values).median / base:.2f}",
                mib(int(summarise(resident[setting, name]).median)),
            )
            for (setting, name), values in seconds.items()
        ]
        print(
            f"\n{case}\n{table(('allocator', 'candidate', 's per step', 'of plain', 'resident MiB'), rows)}", flush=True
        )
        cases[case] = [
            {"setting": setting, "candidate": name, "seconds": values, "resident_nbytes": resident[setting, name]}
            for (setting, name), values in seconds.items()
        ]
        results.write(cases=cases)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
