"""Charts of comparisons and of the bytes alive over a step. Needs matplotlib: ``pip install 'backstash[plot]'``."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator

from backstash.errors import MeasureError
from backstash.planning.model.trace import Role, Trace
from backstash.report.compare import Comparison

COLOURS = ("#8c8c8c", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
"""Grey for the baseline, then colours that colour-blind people can distinguish (Okabe and Ito)."""

_MEASURES = (
    ("counted peak", "peak_nbytes"),
    ("resident peak", "resident_nbytes"),
    ("stash", "stash_nbytes"),
    ("step time", "step_seconds"),
)

_ROLES: tuple[tuple[Role, str, str], ...] = (
    ("parameter", "parameters", "#c9c9c9"),
    ("gradient", "their gradients", "#9a9a9a"),
    ("stashed", "stashed, dense", "#d55e00"),
    ("encoded", "stashed, encoded", "#009e73"),
    ("decoded", "decoded", "#e69f00"),
    ("recomputed", "made again", "#f0e442"),
    ("immediate", "immediately consumed", "#56b4e9"),
    ("workspace", "workspace", "#cc79a7"),
)
"""Role, label and colour of the layers of a timeline from bottom to top, the most lasting first."""


def chart(comparison: Comparison) -> Figure:
    """Peaks, stash and step time relative to the baseline, and the losses of all policies in one diagram.

    The figure belongs to no window and to no global state. Save it with ``figure.savefig(...)``.
    """
    runs = len(comparison.labels)
    figure = Figure(figsize=(max(11, 4 + 1.4 * runs), max(4.6, 3.8 + 0.15 * runs)), layout="constrained")
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
    """Writes the chart. Equal comparisons give equal files."""
    figure = chart(comparison)
    figure.savefig(png, format="png", dpi=150)
    with matplotlib.rc_context({"svg.hashsalt": "backstash"}):
        figure.savefig(svg, format="svg", metadata={"Date": None})


def timeline_chart(traces: Mapping[str, Trace]) -> Figure:
    """Live bytes over a training step by role, with one panel for each trace.

    All operations are drawn equally wide, with their allocations inside. So traces of the same model have the same
    operation at the same position.

    Args:
        traces: the traces by title. The first is the baseline, whose peak is marked in the other panels.

    Raises:
        MeasureError: there is no trace, or a trace has no operations.
    """
    if not traces or not all(trace.ops for trace in traces.values()):
        raise MeasureError(
            f"a timeline was asked for of {len(traces)} traces, but it needs one or more, each with operations. "
            f"Make them with planning.record.record(step)."
        )
    figure = Figure(figsize=(10, 1.1 + 2.5 * len(traces)), layout="constrained")
    panels = figure.subplots(len(traces), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    peak = max(trace.peak_nbytes for trace in traces.values())
    baseline = next(iter(traces.values())).peak_nbytes
    for number, (axes, (title, trace)) in enumerate(zip(panels, traces.items(), strict=True)):
        _areas(axes, trace)
        _marks(axes, title, trace, baseline if number else None)
        axes.set_ylim(0, peak / 2**20 * 1.2)
    panels[-1].set_xlim(0, 2)
    panels[-1].set_xticks([0, 1, 2], ["step begins", "backward begins", "step ends"])
    for label, side in zip(panels[-1].get_xticklabels(), ("left", "center", "right"), strict=True):
        label.set_horizontalalignment(side)
    present = {buffer.role for trace in traces.values() for buffer in trace.buffers}
    handles = [Patch(color=colour, label=label) for role, label, colour in _ROLES if role in present]
    figure.legend(handles=handles, loc="outside upper center", ncols=len(handles), frameon=False, fontsize=9)
    return figure


def timeline(traces: Mapping[str, Trace], path: str | Path) -> None:
    """Writes :func:`timeline_chart` in the format of the path's ending (png, svg, pdf). Equal traces, equal files."""
    ending = Path(path).suffix.lower()
    dated = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
    with matplotlib.rc_context({"svg.hashsalt": "backstash"}):
        timeline_chart(traces).savefig(path, dpi=150, metadata=dated.get(ending))


def _areas(axes: Axes, trace: Trace) -> None:
    places = [0.0, *_places(trace)]
    layers = []
    for role, _, colour in _ROLES:
        live = trace.live((role,))
        if any(live):
            resident = sum(b.nbytes for b in trace.buffers if b.role == role and (b.start, b.end) == (0, trace.end))
            layers.append((colour, [nbytes / 2**20 for nbytes in (resident, *live, live[-1])]))
    axes.stackplot(
        places,
        [live for _, live in layers],
        colors=[colour for colour, _ in layers],
        step="post",
        linewidth=0,
        rasterized=len(places) > 5000,  # a vector file would have a corner for each allocation
    )


def _marks(axes: Axes, title: str, trace: Trace, baseline: int | None) -> None:
    """Marks the passes, the peak, and its ratio to the baseline's peak."""
    live = trace.live()
    peak, places = trace.peak_nbytes, _places(trace)
    where = places[live.index(peak)]
    axes.axvline(1.0, color="#222222", linewidth=0.9)
    text = f"peak {peak / 2**20:,.0f} MiB"
    if baseline:
        axes.axhline(baseline / 2**20, color="#444444", linewidth=0.9, linestyle=(0, (4, 3)))
        text += f" ({peak / baseline:.2f}x)"
    axes.plot([where], [peak / 2**20], marker="o", markersize=4.5, color="#222222", clip_on=False, zorder=5)
    axes.annotate(
        text,
        (where, peak / 2**20),
        xytext=(-7 if where > 1.6 else 7, 4),
        textcoords="offset points",
        ha="right" if where > 1.6 else "left",
        fontsize=9,
        fontweight="bold",
    )
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold")
    for middle, name in ((0.5, "forward"), (1.5, "backward")):
        axes.text(middle, 0.985, name, transform=axes.get_xaxis_transform(), ha="center", va="top", color="#555555")
    axes.set_ylabel("live MiB")
    axes.yaxis.set_major_locator(MaxNLocator(4))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0)


def _places(trace: Trace) -> list[float]:
    """Positions on the axis at which the ticks begin, and the last tick ends: forward is 0 to 1, backward 1 to 2."""
    begun = Counter(op.start for op in trace.ops)
    skipped = max(begun[0] - 1, 0)  # operations before the first allocation, such as setting gradients to zero
    forward = sum(op.start < trace.backward for op in trace.ops) - skipped
    backward = len(trace.ops) - skipped - forward
    edges = sorted({0, *begun, trace.backward, trace.end})
    places: list[float] = []
    ops = -skipped  # operations that have begun
    for begin, until in pairwise(edges):
        ops += begun[begin]
        for tick in range(begin, until):  # all ticks are in the last operation that begins here
            done = max(ops - 1, 0) + (tick - begin) / (until - begin)
            places.append(done / max(forward, 1) if tick < trace.backward else 1 + (done - forward) / max(backward, 1))
    return [*places, 2.0]


def _bars(axes: Axes, comparison: Comparison) -> None:
    rows = {row.label: row for row in comparison.rows()}
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
            axes.bar(x, height, width * 0.94, color=_colour(number), label=row.label if group == 0 else None)
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
    axes.set_ylabel(f"relative to {base.label} (lower is better)")
    axes.legend(frameon=False, ncols=min(len(ordered), 5), loc="upper left", fontsize=9)


def _bar_text(field: str, value: float, height: float) -> str:
    amount = f"{value * 1e3:.0f} ms" if field == "step_seconds" else f"{value / 2**20:.0f} MiB"
    return amount if height == 1.0 else f"{height:.2f}x\n{amount}"


def _losses(axes: Axes, comparison: Comparison) -> None:
    """Draws the baseline wide and pale, and the others narrow on top of it, so that equal curves are all visible."""
    rows = {row.label: row for row in comparison.rows()}
    others = [label for label in comparison.labels if label != comparison.baseline]
    for number, run in enumerate([comparison.baseline, *others]):
        losses = [float.fromhex(loss) for loss in comparison.of(run)[0].losses]
        steps = range(1, len(losses) + 1)
        label = run
        if number and rows[run].losses_equal is not None:
            label += ": every bit equal" if rows[run].losses_equal else ": differs"
        turn = 4 * number, (4, 4 * len(others) - 2)  # dashes in turn
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
