"""The table of compiled models under budgets: peak and time of ours beside torch's ``activation_memory_budget``."""

from __future__ import annotations

import re

from benchmarks.published.results import MIB, case_title, kinds, load, machine_line, newest, summary, table

_KIND = "compile-frontier"


def frontiers() -> str:
    """Every network's candidates by peak; a notice until they have been measured."""
    found = [kind for kind in kinds() if kind.startswith(_KIND)]
    if not found:
        return "Not measured yet. The command is `python -m benchmarks.compile --frontier`."
    rows, about = [], []
    for kind in found:
        results, path = load(kind), newest(kind)
        about.append(f"[{path.name}](results:{path.name}): {machine_line(kind)}")
        for case in results["cases"]:
            measured = results["frontier"][case["name"]]
            plain = next(row["peak_nbytes"] for row in measured if row["candidate"] == "compiled")
            for row in sorted(measured, key=lambda row: -int(row["peak_nbytes"])):
                rows.append(
                    (
                        case_title(case),
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


TABLES = {"compiled-frontier": frontiers}
