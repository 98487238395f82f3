"""Tests of backstash with each torch that it names: ``python -m studies.torch_versions --json FILE [--torch 2.15.0]``.

A part of the quick tests runs with each version, in the environment that ``make test-torch TORCH=...`` makes, or in
this one for the torch that it has. The parts are small ones, in which versions differ most. A version whose environment
is not there is left out. ``--resume`` goes on with what the file has, also after another version was tried.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch

from backstash.torch_internals import TESTED
from bench.results import Results

ROOT = Path(__file__).resolve().parents[1]

PARTS = {
    "gradients": ("tests/gradients/test_consumers.py",),
    "checkpoints, hooks, threads": ("tests/gradients/test_surroundings.py",),
    "compiled graphs": ("tests/compile/test_packing.py", "tests/compile/test_graph_codecs.py"),
    "plans": ("tests/planning/test_plan.py", "tests/planning/test_plan_runs.py"),
}
"""Files of tests by what they are about."""

_FACTS = """
import inspect, json, torch
from torch.utils import checkpoint
from backstash.torch_internals import ASKS_FOR_HOOKS, asking_runners
print(json.dumps({
    "torch": torch.__version__,
    "asks_for_hooks": ASKS_FOR_HOOKS in inspect.signature(checkpoint.checkpoint).parameters,
    "answered": sorted(asking_runners()),
}))
"""


def python_of(version: str) -> str | None:
    """The Python that has this version of torch; None if there is none."""
    if torch.__version__.partition("+")[0] == version:
        return sys.executable
    found = ROOT / "build" / f"torch-{version}" / "bin" / "python"
    return str(found) if found.exists() else None


def counts(report: Path) -> dict[str, Any]:
    """How many tests passed, failed and were skipped, of pytest's report in XML, and the names of those that failed."""
    cases = list(ElementTree.parse(report).getroot().iter("testcase"))
    failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = sum(case.find("skipped") is not None for case in cases)
    names = [f"{case.get('classname')}.{case.get('name')}" for case in failed]
    return {"passed": len(cases) - len(failed) - skipped, "failed": names, "skipped": skipped}


def try_version(python: str) -> dict[str, Any]:
    """Runs the tests of all parts with one torch."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [python, *arguments]
        return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)

    asked = run("-c", _FACTS)
    if asked.returncode:
        return {"problem": asked.stderr.strip().splitlines()[-1], "parts": {}}
    parts = {}
    for name, files in PARTS.items():
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder) / "report.xml"
            began = time.monotonic()
            done = run("-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow", f"--junitxml={report}", *files)
            if not report.exists():
                raise SystemExit(f"pytest wrote no report with {python}:\n{done.stdout[-1000:]}{done.stderr[-1000:]}")
            parts[name] = {**counts(report), "files": files, "seconds": time.monotonic() - began}
    return {**json.loads(asked.stdout), "problem": None, "parts": parts}


def main(arguments: Sequence[str] | None = None) -> int:
    """Tries the versions; returns 1 if a test has failed with one of them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").strip())
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--torch", action="append", choices=TESTED, help="a version; may be repeated; all by default")
    parser.add_argument("--resume", action="store_true", help="keep the other versions that the file has")
    asked = parser.parse_args(arguments)
    earlier = json.loads(asked.json.read_text())["versions"] if asked.resume and asked.json.exists() else {}
    results = Results("studies.torch_versions", asked.json, ["--json", str(asked.json)])
    versions: dict[str, Any] = dict(earlier)
    for version in asked.torch or TESTED:
        python = python_of(version)
        if python is None:
            print(f"{version}: there is no build/torch-{version}; make test-torch TORCH={version} makes it", flush=True)
            continue
        versions[version] = found = try_version(python)
        shown = {
            name: f"{part['passed']} passed, {len(part['failed'])} failed" for name, part in found["parts"].items()
        }
        print(version, found["problem"] or shown, flush=True)
        results.write(versions={name: versions[name] for name in TESTED if name in versions})
    print(results.close())
    return int(
        any(found["problem"] or any(part["failed"] for part in found["parts"].values()) for found in versions.values())
    )


if __name__ == "__main__":
    sys.exit(main())
