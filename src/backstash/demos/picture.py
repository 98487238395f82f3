"""The picture of a demonstration: a bar for each way of training, as text and as a chart."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from backstash.demos.demonstrations import Demonstration
from backstash.demos.reaching import Largest
from backstash.stash.tables import amount

WIDTH = 40
"""Characters of the longest bar."""


def heading(demonstration: Demonstration, nbytes: int) -> str:
    """What is shown, in a line."""
    return f"{demonstration.title}: {demonstration.unit} in {amount(nbytes)}"


def price(row: Largest, base: Largest) -> str:
    """The time for as much work as in plain PyTorch, as a multiple of plain's; empty where nothing fits."""
    if not row.work or not base.work or row is base:
        return ""
    return f"about {row.seconds / row.work * base.work / base.seconds:.1f}x the time for each"


def text_picture(demonstration: Demonstration, nbytes: int, found: Sequence[Largest]) -> str:
    """The bars in a terminal, with the peak that was counted and the price in time.

    Args:
        demonstration: what was trained.
        nbytes: the memory that a step might take.
        found: how far each way came, plain PyTorch first.
    """
    most = max((row.size for row in found), default=0) or 1
    wide = max(len(row.label) for row in found)
    lines = [heading(demonstration, nbytes)]
    for row in found:
        bar = "█" * round(WIDTH * row.size / most)
        bits = "" if row.is_equal else "  DIFFERENT BITS"
        lines.append(f"  {row.label:<{wide}}  {bar:<{WIDTH}} {row.size:>7,}  {price(row, found[0])}{bits}".rstrip())
    lines.append(
        "Memory above weights, gradients and the optimizer's state; every byte of a step of that size was counted."
    )
    if not any(row.size for row in found):
        least = amount(min((row.peak_nbytes for row in found), default=0))
        smallest = f"{demonstration.start:,} {demonstration.unit}, the smallest size,"
        lines.append(f"Nothing fits: {smallest} take {least} or more. Ask for more --memory.")
    elif all(row.is_equal for row in found):
        lines.append("All gradients have the same bits as in plain PyTorch.")
    return "\n".join(lines)


def save_picture(
    demonstration: Demonstration, nbytes: int, found: Sequence[Largest], path: Path, is_timed: bool = True
) -> None:
    """Writes the chart as a PNG; equal results give equal files. Needs matplotlib.

    Args:
        demonstration, nbytes, found: as for :func:`text_picture`.
        path: the file.
        is_timed: whether the prices in time are shown, of which each is that of one step.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 0.9 + 0.5 * len(found)), layout="constrained")
    axes = figure.subplots()
    rows = list(reversed(found))
    colours = ["#8c8c8c" if "plain" in row.label or "checkpoint" in row.label else "#0072b2" for row in rows]
    axes.barh([row.label for row in rows], [row.size for row in rows], color=colours)
    most = max((row.size for row in found), default=0) or 1
    axes.set_xlim(0, 1.35 * most)
    for place, row in enumerate(rows):
        text = f"{row.size:,}  {price(row, found[0]) if is_timed else ''}".rstrip()
        axes.text(row.size + 0.01 * most, place, f" {text}", va="center", fontsize=9)
    axes.set_title(heading(demonstration, nbytes), loc="left", fontsize=11, fontweight="bold")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, format="png", dpi=120, metadata={"Software": None})
