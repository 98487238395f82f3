"""The table of steps on a GPU."""

from __future__ import annotations

from typing import Any

from benchmarks.published.results import ENOUGH, load, machine_line, mib, summary, table

_KIND = "gpu-cuda"


def steps() -> str:
    """Peaks, times and bits of every way on every network."""
    parts = [machine_line(_KIND)]
    for network in load(_KIND)["networks"]:
        plain = network["rows"][0]
        rows = [_row(row, plain) for row in network["rows"]]
        title = f"{network['what']}, {network['saved']} saved tensors"
        parts.append(f"**{title}**\n\n{table(('', 'peak, MiB', 'x plain', 'step, x plain', 'bits'), rows)}")
    return "\n\n".join(parts)


def _row(row: dict[str, Any], plain: dict[str, Any]) -> tuple[str, ...]:
    times = row["times_plain"]
    bits = f"{row['differing']} gradients differ" if row["differing"] else "equal" if row["is_exact"] else "bounded"
    return (
        row["way"] if row["way"].startswith("plain") else f"`{row['way']}`",
        mib(row["peak_nbytes"]),
        f"{row['peak_nbytes'] / plain['peak_nbytes']:.2f}",
        "" if times is None or times["count"] < ENOUGH else summary(times),
        bits,
    )


TABLES = {"gpu": steps}
