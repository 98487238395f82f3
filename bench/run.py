"""The benchmark: ``python -m bench.run [--device cpu|cuda] [--quick] [--only ratios,codecs,steps]``.

Everything that was measured, every round of it, goes into one JSON file; tables go to the screen. The time that was
asked for is divided over what is to be measured: rounds end early to meet it, and the JSON says how many were done.

``--case NAME`` runs one case of the step table, with ``--rounds N`` of exactly that many rounds and no time limit;
it writes a file only where ``--out`` says so.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from bench import codec_table, ratio_table, step_table
from bench.cases import cases, find
from bench.machine import ROOT
from bench.peers import StepPeer, step_peers
from bench.results import Results
from bench.rounds import Deadline, Effort
from bench.training import Schedule

FORMAT = 1
"""Version of the JSON's layout."""

SECTIONS = {"ratios": 0.12, "codecs": 0.08, "steps": 0.80}
"""The sections, in order, and the share of the time that each gets."""

TRAINING = Schedule(steps=12, batch=8, size=112)
QUICK_TRAINING = Schedule(steps=2, batch=4, size=28)


@dataclass(frozen=True)
class Asked:
    """The command line, checked.

    Attributes:
        device: ``"cpu"`` or ``"cuda"``.
        quick: small networks and images, which only show that everything runs.
        sections: keys of `SECTIONS`.
        case: the one case to run, None for all.
        candidates: names of the step candidates, None for all.
        rounds: rounds of the step table, None to go by the time.
        resident: whether to measure the resident peak.
        seconds: for everything.
        out: folder of the JSON file, None for none.
    """

    device: str
    quick: bool
    sections: tuple[str, ...]
    case: str | None
    candidates: tuple[str, ...] | None
    rounds: int | None
    resident: bool
    seconds: float
    out: Path | None


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns 1 where a gate failed, else 0."""
    asked = parse(arguments)
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # the profiler that counts bytes else prints two lines per step
    if asked.device == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS computes the same twice only with it
    deadline = Deadline.after(asked.seconds)
    facts: dict[str, Any] = {"quick": asked.quick, "complete": False, "seconds_asked": asked.seconds}
    results = Results("bench.run", _path(asked), arguments, format=FORMAT, device=asked.device, **facts)
    for section, share in _shares(asked.sections):
        print(f"\n== {section} ==\n", flush=True)
        for so_far in _RUN[section](asked, deadline.part(share)):
            results.write(**{section: so_far})
    results.write(complete=True)
    print(f"\n{results.close()}")
    return int(any(case["status"] == "failed" for case in results.found.get("steps", [])))


def parse(arguments: Sequence[str] | None) -> Asked:
    """The command line as `Asked`; ends the program with a message where it is wrong."""
    parser = argparse.ArgumentParser(prog="python -m bench.run", description="Measures backstash beside its peers.")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--quick", action="store_true", help="small networks: shows that everything runs")
    parser.add_argument("--only", help=f"sections to run, of {','.join(SECTIONS)}")
    parser.add_argument("--case", help="one case of the step table, alone; 'list' names them")
    parser.add_argument("--candidates", help="of the step table, e.g. plain,lossless; plain is always among them")
    parser.add_argument("--rounds", type=int, help="rounds of the step table, however long they take")
    parser.add_argument("--skip-resident", action="store_true", help="no resident peaks, which take fresh processes")
    parser.add_argument("--seconds", type=float, default=480.0, help="for everything (default: 480)")
    parser.add_argument("--out", type=Path, help="folder of the JSON file (default: docs/results; with --case: none)")
    asked = parser.parse_args(arguments)
    if asked.case == "list":
        print("\n".join(f"{case.name}: {case}" for case in cases(asked.device, asked.quick)))
        raise SystemExit(0)
    if asked.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda was asked for; torch finds no CUDA device; use --device cpu")
    try:
        case = find(asked.case, asked.device, asked.quick).name if asked.case else None
        sections = ("steps",) if case else _choose("section", asked.only, tuple(SECTIONS))
        names = tuple(peer.name for peer in step_peers(asked.device))
        candidates = _choose("candidate", asked.candidates, names) if asked.candidates else None
    except ValueError as error:
        parser.error(str(error))
    if asked.rounds is not None and asked.rounds < 1:
        parser.error(f"--rounds {asked.rounds} was asked for; it has to be at least 1")
    out = asked.out or (None if case else ROOT / "docs" / "results")
    return Asked(
        asked.device, asked.quick, sections, case, candidates, asked.rounds, not asked.skip_resident, asked.seconds, out
    )


# -- sections: each yields what it has so far, again and again ---------------------------------------------------------


def _ratios(asked: Asked, deadline: Deadline) -> Iterator[list[ratio_table.RatioRow]]:
    names = ratio_table.QUICK_NETWORKS if asked.quick else ratio_table.NETWORKS
    schedule = QUICK_TRAINING if asked.quick else TRAINING
    rows = ratio_table.measure(names, asked.device, deadline, schedule)
    print(ratio_table.show(rows), flush=True)
    yield rows


def _codecs(asked: Asked, deadline: Deadline) -> Iterator[codec_table.CodecTable]:
    full = codec_table.FULL_CUDA if asked.device == "cuda" else codec_table.FULL
    work = codec_table.QUICK if asked.quick else full
    result = codec_table.measure(work, asked.device, deadline, rounds=2 if asked.quick else 11)
    print(codec_table.show(result), flush=True)
    yield result


def _steps(asked: Asked, deadline: Deadline) -> Iterator[list[step_table.CaseResult]]:
    chosen = cases(asked.device, asked.quick)
    if asked.case is not None:
        chosen = (find(asked.case, asked.device, asked.quick),)
    print(step_table.LEGEND, end="\n\n", flush=True)
    results: list[step_table.CaseResult] = []
    for index, case in enumerate(chosen):
        share = case.share / sum(other.share for other in chosen[index:] if other.absent() is None or other is case)
        result = step_table.measure(case, asked.device, _plan(asked, deadline.part(share)), _candidates(asked))
        print(step_table.show(result), end="\n\n", flush=True)
        results.append(result)
        yield results


_RUN: dict[str, Callable[[Asked, Deadline], Iterator[Any]]] = {"ratios": _ratios, "codecs": _codecs, "steps": _steps}


def _plan(asked: Asked, deadline: Deadline) -> step_table.Plan:
    if asked.rounds is not None:
        return step_table.Plan(Effort(asked.rounds), asked.resident, asked.quick)
    return step_table.Plan(Effort(2 if asked.quick else 11, deadline), asked.resident, asked.quick)


def _candidates(asked: Asked) -> tuple[StepPeer, ...]:
    peers = step_peers(asked.device)
    names = asked.candidates
    return tuple(peer for index, peer in enumerate(peers) if names is None or index == 0 or peer.name in names)


def _shares(sections: Sequence[str]) -> list[tuple[str, float]]:
    """Each section and its share of the time that is left when it begins."""
    weights = [SECTIONS[section] for section in sections]
    return [(section, weights[index] / sum(weights[index:])) for index, section in enumerate(sections)]


def _choose(what: str, asked: str | None, known: tuple[str, ...]) -> tuple[str, ...]:
    if asked is None:
        return known
    names = tuple(asked.split(","))
    for name in names:
        if name not in known:
            raise ValueError(
                f"the {what} {name!r} was asked for; there is no such {what}; use some of {', '.join(known)}"
            )
    return tuple(name for name in known if name in names)


# -- the file ----------------------------------------------------------------------------------------------------------


def _path(asked: Asked) -> Path | None:
    """The file: that of the day, by kind and device."""
    if asked.out is None:
        return None
    kind = "bench" if asked.case is None else f"step-{asked.case}"
    return asked.out / f"{kind}-{asked.device}-{datetime.now(UTC):%Y-%m-%d}{'-quick' if asked.quick else ''}.json"


if __name__ == "__main__":
    raise SystemExit(main())
