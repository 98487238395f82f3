"""The chart of a comparison. Needs matplotlib: ``pip install 'backstash[plot]'``."""

from __future__ import annotations

import textwrap
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from backstash.report.compare import Comparison

COLOURS = ("#8c8c8c", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
"""Grey for the baseline, then colours that colour-blind people tell apart (Okabe and Ito)."""

_MEASURES = (
    ("counted peak", "peak_nbytes"),
    ("resident peak", "resident_nbytes"),
    ("stash", "stash_nbytes"),
    ("step time", "step_seconds"),
)


def chart(comparison: Comparison) -> Figure:
    """Peaks, stash and time relative to the baseline, and the losses over each other.

    The figure belongs to no window and to no global state: ``figure.savefig(...)`` is all it is for.
    """
    figure = Figure(figsize=(11, 4.6), layout="constrained")
    bars, losses = figure.subplots(1, 2, width_ratios=(3, 2))
    _bars(bars, comparison)
    _losses(losses, comparison)
    title = " ".join([Path(comparison.script).name, *comparison.args])
    figure.suptitle(textwrap.shorten(title, 110, placeholder=" ..."), fontsize=12, fontweight="bold")
    figure.supxlabel(comparison.made_on, fontsize=7, color="#666666")
    for axes in (bars, losses):
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def save(comparison: Comparison, png: Path, svg: Path) -> None:
    """Write the chart; equal comparisons give equal files."""
    figure = chart(comparison)
    figure.savefig(png, format="png", dpi=150)
    with matplotlib.rc_context({"svg.hashsalt": "backstash"}):
        figure.savefig(svg, format="svg", metadata={"Date": None})


def _bars(axes: Axes, comparison: Comparison) -> None:
    rows = {row.policy: row for row in comparison.rows()}
    base = rows.pop(comparison.baseline)
    ordered = [base, *rows.values()]
    measures = [(label, field) for label, field in _MEASURES if getattr(base, field)]
    width = 0.8 / len(ordered)
    tallest = 1.0
    for number, row in enumerate(ordered):
        for group, (_, field) in enumerate(measures):
            value = getattr(row, field)
            if value is None:
                continue
            height, x = value / getattr(base, field), group + (number - (len(ordered) - 1) / 2) * width
            axes.bar(x, height, width * 0.94, color=_colour(number), label=row.policy if group == 0 else None)
            axes.annotate(
                _bar_text(field, value, height),
                (x, height),
                xytext=(0, 3),
                textcoords="offset points",
                ha="center",
                fontsize=(9, 9, 9, 7)[len(ordered)] if len(ordered) < 4 else 5,
            )
            tallest = max(tallest, height)
    axes.axhline(1.0, color="#444444", linewidth=0.8, linestyle=":", zorder=0)
    axes.set_xticks(range(len(measures)), [label for label, _ in measures])
    axes.set_ylim(0, tallest * 1.25)
    axes.set_ylabel(f"relative to {base.policy} (lower is better)")
    axes.legend(frameon=False, ncols=len(ordered), loc="upper left", fontsize=9)


def _bar_text(field: str, value: float, height: float) -> str:
    amount = f"{value * 1e3:.0f} ms" if field == "step_seconds" else f"{value / 2**20:.0f} MiB"
    return amount if height == 1.0 else f"{height:.2f}x\n{amount}"


def _losses(axes: Axes, comparison: Comparison) -> None:
    """The baseline wide and pale, the others narrow on top of it: equal curves stay visible, both of them."""
    rows = {row.policy: row for row in comparison.rows()}
    others = [policy for policy in comparison.policies if policy != comparison.baseline]
    for number, policy in enumerate([comparison.baseline, *others]):
        losses = [float.fromhex(loss) for loss in comparison.of(policy)[0].losses]
        steps = range(1, len(losses) + 1)
        label = policy
        if number and rows[policy].losses_equal is not None:
            label += ": every bit equal" if rows[policy].losses_equal else ": differs"
        turn = 4 * number, (4, 4 * len(others) - 2)  # dashes that take turns
        style = {"linewidth": 5.0, "alpha": 0.45} if number == 0 else {"linewidth": 1.6, "linestyle": turn}
        axes.plot(steps, losses, color=_colour(number), label=label, **style)
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if any(run.losses for run in comparison.runs):
        axes.legend(frameon=False, fontsize=9)
    else:
        axes.set_title("the script called backward() of no loss", fontsize=9)


def _colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]
