"""The tables of compiled models: plain and treated, and under budgets beside torch's ``activation_memory_budget``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from studies.published.results import MIB, case_title, kinds, load, machine_line, newest, summary, table

_KIND = "compile-frontier"


def frontiers() -> str:
    """Every network's candidates by peak; a notice until they have been measured.

    Of a candidate that was measured twice the times with more rounds are shown.
    """
    found = [kind for kind in kinds() if kind.startswith(_KIND)]
    if not found:
        return "Not measured yet. The command is `python -m studies.compile --frontier`."
    rows, about = [], []
    networks: dict[str, dict[str, Any]] = {}
    for kind in found:
        results, path = load(kind), newest(kind)
        about.append(f"[{path.name}](results:{path.name}): {machine_line(kind)}")
        for case in results["cases"]:
            best = networks.setdefault(case_title(case), {})
            for row in results["frontier"][case["name"]]:
                known = best.get(row["candidate"])
                if known is None or row["times_plain"]["count"] >= known["times_plain"]["count"]:
                    best[row["candidate"]] = row
    for title, measured in networks.items():
        plain = measured["compiled"]["peak_nbytes"]
        for row in sorted(measured.values(), key=lambda row: -int(row["peak_nbytes"])):
            rows.append(
                (
                    title,
                    row["candidate"],
                    _asked(row["candidate"], plain),
                    f"{row['peak_nbytes'] / MIB:.0f}",
                    summary(row["times_plain"]) if row["candidate"] != "compiled" else "1",
                    f"off by {row['error']:.2g}" if row["error"] else "equal bits",
                )
            )
    header = ("network", "", "MiB asked for", "MiB at the peak", "step, times compiled plain's", "gradient")
    return "\n\n".join((*about, table(header, rows)))


def _asked(candidate: str, plain: int) -> str:
    """The budget of a candidate of ours, whose name says its share of compiled plain's peak."""
    share = re.search(r", budget ([\d.]+)$", candidate)
    return f"{float(share[1]) * plain / MIB:.0f}" if share else ""


def compiled() -> str:
    """Bytes saved, peaks and times of compiled graphs; a notice until they have been measured.

    A file with a remark has no times worth showing: the remark says why.
    """
    found = [kind for kind in kinds() if kind.startswith("compile-") and not kind.startswith(_KIND)]
    return "\n\n".join(map(_compiled, found)) or "Not measured yet. The command is `python -m studies.compile`."


def _compiled(kind: str) -> str:
    found, path = load(kind), newest(kind)
    timed = not found["remark"]
    rows = [
        (
            case_title(measured["case"]),
            row["candidate"],
            f"{row['saved_nbytes'] / 2**20:.1f}",
            f"{row['peak_nbytes'] / 2**20:.1f}",
            *([summary(row["times_plain"])] if timed else []),
            _against_compiled(row),
        )
        for measured in found["measured"]
        for row in measured["rows"]
    ]
    times = ["step, times compiled plain's"] if timed else []
    header = ("network", "", "MiB after forward", "MiB at the peak", *times, "gradient, from compiled plain")
    remark = f" {found['remark']}" if found["remark"] else ""
    return f"[{path.name}](results:{path.name}). {machine_line(kind)}{remark}\n\n{table(header, rows)}"


def _against_compiled(row: Mapping[str, Any]) -> str:
    if row["candidate"].startswith("eager"):
        return "other random numbers in dropout"
    return f"off by {row['error']:.2g}" if row["error"] else "equal bits"


TABLES = {"compiled": compiled, "compiled-frontier": frontiers}
