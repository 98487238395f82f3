"""The chart of one network of ``studies.frontier``: peak against the time of a step. Needs matplotlib."""

from __future__ import annotations

import textwrap
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from studies.published.results import MIB, case_title

STYLES = {
    "plain": ("#222222", "o", "plain"),
    "checkpoint": ("#d55e00", "s", "torch.utils.checkpoint"),
    "selective": ("#cc79a7", "D", "selective checkpoint"),
    "host": ("#999999", "P", "save_on_cpu"),
    "compiled": ("#e69f00", "X", "torch.compile, memory budgets"),
    "lossless": ("#56b4e9", "v", "ours, lossless without a plan"),
    "ours": ("#0072b2", "o", "ours, exact plans"),
    "bounded": ("#009e73", "^", "ours, plans with bounded errors"),
    "offload": ("#6a51a3", "<", "ours, plans with offload"),
}
"""Colour (Okabe and Ito), marker and name of each family of candidates."""

LINES = ("ours", "bounded", "offload", "compiled")
"""Families whose members are settings of one thing: they are joined by a line."""


def chart(network: Any, made_on: str) -> Figure:
    """Draws a network's results, down and to the left is better.

    Args:
        network: its results, as the JSON has them.
        made_on: what the numbers were measured on.
    """
    figure = Figure(figsize=(9, 5.4), layout="constrained")
    axes: Axes = figure.subplots()
    families: dict[str, list[Any]] = {}
    for row in network["rows"]:
        if row["candidate"] != "plain again":
            families.setdefault(row["family"], []).append(row)
    for family in STYLES:
        rows = sorted(families.get(family, []), key=lambda row: row["peak_nbytes"])
        if rows:
            _draw(axes, family, rows)
    axes.set_title(f"{case_title(network['case'])}: memory and time of a training step", loc="left", fontweight="bold")
    axes.set_xlabel("counted peak above parameters and gradients, MiB")
    axes.set_ylabel("time of a step, plain = 1")
    axes.set_xlim(left=0)
    axes.axhline(1.0, color="#444444", linewidth=0.8, linestyle=":", zorder=0)
    axes.grid(color="#e6e6e6", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=10, loc="upper right")
    figure.supxlabel(textwrap.fill(made_on, 150), fontsize=7, color="#666666")
    return figure


def _draw(axes: Axes, family: str, rows: list[Any]) -> None:
    colour, marker, name = STYLES[family]
    peaks = [row["peak_nbytes"] / MIB for row in rows]
    times = [row["times_plain"]["median"] for row in rows]
    below = [time - row["times_plain"]["q1"] for time, row in zip(times, rows, strict=True)]
    above = [row["times_plain"]["q3"] - time for time, row in zip(times, rows, strict=True)]
    line = "-" if family in LINES else ""
    axes.errorbar(
        peaks,
        times,
        yerr=[below, above],
        color=colour,
        marker=marker,
        markersize=7,
        linestyle=line,
        linewidth=1.6,
        elinewidth=1,
        capsize=2,
        label=name,
        zorder=4 if family == "ours" else 3,
    )
    if family == "checkpoint":
        for row, peak, time in zip(rows, peaks, times, strict=True):
            text = row["candidate"].removeprefix("checkpoint, ").replace("checkpoint", "each block")
            axes.annotate(text, (peak, time), xytext=(7, 5), textcoords="offset points", fontsize=8.5, color=colour)
