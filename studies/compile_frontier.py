"""Peak against time of compiled models: our budgets beside torch's ``activation_memory_budget``.

``python -m studies.compile --frontier --case NAME --json FILE [--resume]``. Each candidate is compiled once and then
measured beside compiled plain, step by step in turns, so that a point's time is a ratio of neighbours; among them is
compiled plain itself. The file is written after every candidate; with ``--resume`` those that it has are left out, and
with ``--seconds`` no candidate is begun that would end too late.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

import backstash
from backstash import policies
from bench import cases
from bench.cases import Case
from bench.results import Results
from bench.rounds import Effort, interleave, summarise, table
from studies import compile as compiled
from studies.compile import Candidate, Row, Runner, error

TORCH = tuple(step / 10 for step in range(1, 11))
"""Settings of activation_memory_budget."""

EXACT = (0.9, 0.8, 0.7, 0.6, 0.55, 0.5, 0.45, 0.4, 0.35)
ROUNDED = (0.65, 0.5, 0.4, 0.35, 0.27)
"""Budgets of ours, as shares of compiled plain's counted peak: with exact forms alone, and with 4 bits."""


def points(peak_nbytes: int) -> Iterator[Candidate]:
    """The candidates but for the first, those of torch and ours in turns, so that a part of a run shows both."""
    yield Candidate(compiled.AGAIN, options={})
    setting = "activation_memory_budget"
    torchs = [Candidate(f"{setting} {share}", False, {}, {setting: share}) for share in TORCH]
    exact = [
        Candidate(
            f"lossless, budget {share}",
            options=backstash.compile_options("lossless", budget=int(share * peak_nbytes)),
        )
        for share in EXACT
    ]
    rounded = [
        Candidate(
            f"4 bits, budget {share}",
            False,
            backstash.compile_options(policies.quantized(4), budget=int(share * peak_nbytes)),
        )
        for share in ROUNDED
    ]
    for position in range(max(len(torchs), len(exact), len(rounded))):
        for group in (torchs, exact, rounded):
            yield from group[position : position + 1]


def measure(case: Case, effort: Effort, only: Sequence[str], known: Sequence[dict[str, Any]]) -> Iterator[Row]:
    """The points of one case that are not known yet.

    Args:
        case: the case.
        effort: how many rounds for each candidate. No candidate is begun after the deadline, or so shortly before it
            that it would take longer than the longest so far.
        only: names of candidates to measure beside compiled plain and itself again; all if empty.
        known: rows of an earlier run.
    """
    state = {name: value.clone() for name, value in cases.build(case, "cpu").model.state_dict().items()}
    plain = _runner(Candidate("compiled", options={}), case, state)
    exact, rounds, longest = plain.gradients(), Effort(effort.rounds), 0.0
    saved, peak = plain.saved_nbytes(), plain.peak_nbytes()
    found = {row["candidate"] for row in known}
    if "compiled" not in found:
        alone = summarise(interleave({"compiled": plain.step}, rounds)["compiled"])
        yield Row("compiled", saved, peak, alone, summarise([1.0]), 0.0, plain.compile_seconds, "")
    for candidate in points(peak):
        if candidate.name in found or (only and candidate.name not in (compiled.AGAIN, *only)):
            continue
        if effort.deadline is not None and effort.deadline.left() < longest:
            return
        started = time.monotonic()
        runner = _runner(candidate, case, state)
        off = error(runner.gradients(), exact)
        held, highest = runner.saved_nbytes(), runner.peak_nbytes()
        times = interleave({"plain": plain.step, "its": runner.step}, rounds)
        over = summarise([mine / its for mine, its in zip(times["its"], times["plain"], strict=True)])
        seconds = summarise(times["its"])
        yield Row(candidate.name, held, highest, seconds, over, off, runner.compile_seconds, runner.note())
        del runner
        gc.collect()
        longest = max(longest, time.monotonic() - started)


def _runner(candidate: Candidate, case: Case, state: dict[str, torch.Tensor]) -> Runner:
    workload = cases.build(case, "cpu")
    workload.model.load_state_dict(state)
    return Runner(candidate, workload)


def run(cases: Iterable[Case], effort: Effort, only: Sequence[str], results: Results) -> int:
    """Measures the cases, prints each row as it comes, and writes the file after each; returns the exit status."""
    measured: dict[str, list[dict[str, Any]]] = results.found.get("frontier", {})
    failed = []
    for case in cases:
        absent = case.absent()
        print(f"\n{case}" if absent is None else f"\n{case}: skipped, {absent}", flush=True)
        if absent is not None:
            continue
        rows = measured.setdefault(case.name, [])
        for row in measure(case, effort, only, rows):
            print(compiled.lines([row]).splitlines()[-1], flush=True)
            results.write(frontier={**measured, case.name: [*rows, row]})
            measured = results.found["frontier"]
            rows = measured[case.name]
        failed += [row["candidate"] for row in rows if row["candidate"].startswith("lossless") and row["error"]]
        print(summary(rows), flush=True)
    print(results.close())
    if failed:
        print(f"not the bits of compiled plain, but should be: {', '.join(failed)}")
    return int(bool(failed))


def summary(rows: Sequence[dict[str, Any]]) -> str:
    """For each peak that torch's budgets reach, the fastest exact candidate of ours that needs no more."""
    ours = [row for row in rows if row["candidate"].startswith("lossless")]
    lines = []
    for row in sorted((row for row in rows if row["candidate"].startswith("activation")), key=_peak):
        within = [mine for mine in ours if _peak(mine) <= _peak(row)]
        best = min(within, key=_times, default=None)
        beside = ("none", "", "") if best is None else (best["candidate"], _mib(best), f"{_times(best):.2f}")
        lines.append((row["candidate"], _mib(row), f"{_times(row):.2f}", *beside))
    header = ("torch", "peak MiB", "times compiled", "ours, no larger", "peak MiB", "times compiled")
    lowest = min(ours, key=_peak, default=None)
    text = table(header, lines)
    return text if lowest is None else f"{text}\nlowest exact peak: {_mib(lowest)} MiB at {_times(lowest):.2f}"


def _peak(row: dict[str, Any]) -> int:
    return int(row["peak_nbytes"])


def _times(row: dict[str, Any]) -> float:
    return float(row["times_plain"]["median"])


def _mib(row: dict[str, Any]) -> str:
    return f"{_peak(row) / 2**20:.0f}"
