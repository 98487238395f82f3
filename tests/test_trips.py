"""The trips that the page of the architecture tells, beside what a run enters."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from fresh import run_fresh

from backstash import interpreter

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "understand" / "architecture.md"
STATION = re.compile(r"^\d+\. `([\w/]+\.py)`, `(\w+)`: ", re.MULTILINE)


TRIP = f"""
import json, sys
sys.path.insert(0, {str(ROOT)!r})
from tests import trips
print(json.dumps(trips.TRIPS[sys.argv[1]]()))
"""


@cache
def traced(name: str, kernels: str) -> dict[str, Any]:
    """What a trip has entered. Of compiled functions the interpreter of Python keeps no record."""
    run = run_fresh(TRIP, name, BACKSTASH_KERNELS=kernels)
    assert run.returncode == 0, run.stderr[-2000:]
    found: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return found


def told(name: str) -> str:
    (text,) = re.findall(rf"<!-- trip: {name}\..*?-->\n(.*?)<!-- End of the trip. -->", PAGE.read_text(), re.DOTALL)
    return str(text)


def in_order(stations: list[tuple[str, str]], entered: list[list[str]]) -> None:
    rest = iter(entered)
    for file, function in stations:
        assert any(each == [file, function] for each in rest), f"{file}, {function}: not entered after those before it"


@pytest.mark.parametrize(
    ("name", "stretch"), [("relu", "first"), pytest.param("budget", "run", marks=pytest.mark.slow)]
)
def test_a_trip_goes_as_it_is_told(name: str, stretch: str) -> None:
    stations = STATION.findall(told(name))
    assert len(stations) == len(re.findall(r"^\d+\. ", told(name), re.MULTILINE)) > 10
    in_order(stations, traced(name, "reference" if name == "relu" else "auto")[stretch]["functions"])


def test_a_repeated_step_asks_neither_the_needs_nor_the_policy() -> None:
    stations, repeated = STATION.findall(told("relu")), traced("relu", "reference")["repeated"]["functions"]
    skipped = [at for at, station in enumerate(stations, 1) if list(station) not in repeated]
    assert [f"without {' and '.join(map(str, skipped))}"] == re.findall(r"without [\d and]+\d", told("relu"))
    in_order([station for at, station in enumerate(stations, 1) if at not in skipped], repeated)


def test_no_step_enters_more_files_than_is_told() -> None:
    """How many a run within a budget enters depends on its plan, and so on what was measured."""
    (most,) = re.findall(r"enters at most (\d+) files", told("relu"))
    assert max(stretch["files"] for stretch in traced("relu", "reference").values()) <= int(most)


@pytest.mark.skipif(interpreter.module is None, reason="the interpreter of scripts is not built")
def test_a_settled_step_enters_no_more_than_is_told() -> None:
    ((files, functions),) = re.findall(r"at most (\d+) files and (\d+) functions", told("relu"))
    settled = traced("relu", "auto")["repeated"]
    assert settled["files"] <= int(files) and len(settled["functions"]) <= int(functions)
