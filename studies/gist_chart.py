"""The figure of ``studies.gist``: ratios per network and stage, and the paper's average. Needs matplotlib."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from matplotlib.axes import Axes
from matplotlib.figure import Figure

if TYPE_CHECKING:
    from studies.gist import Mean, NetworkResult

COLOURS = ("#0072b2", "#56b4e9", "#009e73", "#e69f00", "#d55e00", "#cc79a7")
"""Of the stages, in order: exact ones blue and green, lossy ones orange to purple (Okabe and Ito)."""


def chart(results: Sequence[NetworkResult], found: Sequence[Mean], paper: float, made_on: str) -> Figure:
    """Stash ratios above, memory footprint ratios below, the geometric means on the right.

    Args:
        results: the networks; those whose gate failed are left out.
        found: the means over them.
        paper: average MFR of the paper, drawn as a line.
        made_on: what the numbers were measured on.
    """
    measured = [one for one in results if one.rows]
    figure = Figure(figsize=(11, 7.6), layout="constrained")
    stash, static, dynamic = figure.subplots(3, 1, sharex=True)
    titles = ("stash: dense bytes saved over bytes held", "MFR, static allocator", "MFR, dynamic allocation")
    for axes, field, title in zip(
        (stash, static, dynamic), ("ratio", "mfr_static", "mfr_dynamic"), titles, strict=True
    ):
        _bars(axes, measured, found, field)
        axes.set_title(title, loc="left", fontsize=10, fontweight="bold")
        axes.set_ylabel("ratio")
        axes.axhline(1.0, color="#444444", linewidth=0.8, linestyle=":", zorder=0)
        axes.spines[["top", "right"]].set_visible(False)
    static.axhline(paper, color="#222222", linewidth=1.1, linestyle=(0, (5, 3)), label=f"paper, all encodings: {paper}")
    names = [f"{one.network}\n(batch {one.batch})" for one in measured]
    dynamic.set_xticks(range(len(measured) + 1), [*names, "geometric\nmean"])
    handles, labels = static.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(labels), frameon=False, fontsize=9)
    figure.supxlabel(textwrap.fill(made_on, 170), fontsize=6.5, color="#666666")
    return figure


def _bars(axes: Axes, results: Sequence[NetworkResult], found: Sequence[Mean], field: str) -> None:
    width = 0.84 / max(len(found), 1)
    tallest = 1.0
    for number, mean in enumerate(found):
        values = [getattr(row, field) for one in results for row in one.rows if row.stage == mean.stage]
        heights = [*values, getattr(mean, field)]
        places = [group + (number - (len(found) - 1) / 2) * width for group in range(len(heights))]
        colour = COLOURS[number % len(COLOURS)]
        axes.bar(places, heights, width * 0.92, color=colour, label=mean.stage)
        for place, height in zip(places, heights, strict=True):
            axes.annotate(
                f"{height:.1f}" if height >= 10 else f"{height:.2f}",
                (place, height),
                xytext=(0, 2),
                textcoords="offset points",
                ha="center",
                fontsize=6.5,
            )
        tallest = max(tallest, *heights)
    axes.axvline(len(results) - 0.5, color="#bbbbbb", linewidth=0.8)
    axes.set_ylim(0, tallest * 1.18)
