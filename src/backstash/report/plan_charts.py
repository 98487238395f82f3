"""The charts of a plan's page: live bytes over the step, what is where at the peak, and the frontier.

Lines and areas are SVG that is stretched to the width of the window. All text is HTML beside or above it, so it has the
same size at any width. Nothing needs a script but what appears under the pointer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from typing import TYPE_CHECKING

from backstash.planning.model.problem import StepProfile
from backstash.report.plan_layers import LAYERS, ChartLayer, chosen, kept, layers, total
from backstash.stash.tables import amount, ms

if TYPE_CHECKING:
    from backstash.planning.model.plan import Plan

COLUMNS = 800
"""A chart has at most this many positions; of those that share one, it shows the one with the most bytes."""

HEIGHT = 1000.0
"""Height of a chart in the units of its SVG, which is stretched anyway."""

HEADROOM = 1.06
"""The axis reaches so many times the largest number."""

Hover = list[tuple[float, str]]
"""For each point of a chart, where it is in the width (0 to 1) and what is shown under the pointer."""


@dataclass(frozen=True)
class Curve:
    """The bytes over a step, plain and planned.

    Attributes:
        plain: bytes at each position of the plain step.
        planned: bytes at each position under the plan.
        by_layer: the planned bytes by layer.
    """

    profile: StepProfile
    plain: list[int]
    planned: list[int]
    by_layer: dict[ChartLayer, list[int]]

    @classmethod
    def of(cls, profile: StepProfile, plan: Plan) -> Curve:
        """Returns the course of a plan.

        Raises:
            PlanError: the plan was made of another profile.
        """
        count = len(profile.positions)
        found = layers(profile, chosen(profile, plan))
        return cls(profile, total(layers(profile, kept(profile)), count), total(found, count), found)

    @property
    def first_backward(self) -> int:
        """The first position of the backward pass."""
        positions = enumerate(self.profile.positions)
        return next((number for number, position in positions if position.is_backward), len(self.plain))


def memory_chart(course: Curve, plan: Plan) -> tuple[str, Hover]:
    """Returns the chart of the bytes alive over the step, and what is shown under the pointer."""
    count, first = len(course.plain), course.first_backward
    most = max(*course.plain, *course.planned, 1)
    is_budget_near = plan.budget <= 1.3 * most
    top = HEADROOM * max(most, plan.budget if is_budget_near else 0)
    columns = _columns(first, count)
    planned_at = [max(range(*column), key=course.planned.__getitem__) for column in columns]
    drawn = []
    bottom = [0] * len(columns)
    for name, _ in LAYERS:
        if name in course.by_layer:
            upper = [low + course.by_layer[name][at] for low, at in zip(bottom, planned_at, strict=True)]
            drawn.append(f'<path class="area {name}" d="{_area(columns, bottom, upper, top)}"/>')
            bottom = upper
    drawn.append(f'<path class="line planned" d="{_stairs(columns, bottom, top)}"/>')
    plain = [max(course.plain[begin:end]) for begin, end in columns]
    drawn.append(f'<path class="line plain" d="{_stairs(columns, plain, top)}"/>')
    labels = [f'<i class="edge" style="left:{_percent(first / count)}"></i>'] if 0 < first < count else []
    if is_budget_near:
        height = _percent(plan.budget / top)
        labels.append(f'<i class="budget" style="bottom:{height}"></i>')
        labels.append(f'<b class="budget" style="bottom:{height}">budget {amount(plan.budget)}</b>')
    for kind, line in (("plain", course.plain), ("planned", course.planned)):
        where = line.index(max(line))
        place = f"left:{_percent((where + 0.5) / count)};bottom:{_percent(line[where] / top)}"
        labels.append(f'<i class="dot {kind}" style="{place}"></i>')
    below = []
    if first:
        below.append(f'<span style="left:{_percent(first / count / 2)}">forward</span>')
    if first < count:
        below.append(f'<span style="left:{_percent((1 + first / count) / 2)}">backward</span>')
    size = f"0 0 {count} {HEIGHT:.0f}"
    texts = [
        ((begin + end) / 2 / count, _under_pointer(course, begin, end, at))
        for (begin, end), at in zip(columns, planned_at, strict=True)
    ]
    label = (
        f"bytes alive over the step: plain at most {amount(max(course.plain))}, "
        f"planned at most {amount(max(course.planned))}"
    )
    ticks = [(value / top, _round(amount(value))) for value in byte_ticks(0, int(top))]
    return _frame("memory", label, size, "".join(drawn), "".join(labels), ticks, "".join(below)), texts


def peak_bars(course: Curve) -> str:
    """Returns what is alive at the peaks of the plain and the planned step, as two bars of the same scale."""
    most = max(*course.plain, *course.planned, 1)
    rows = []
    plain = layers(course.profile, kept(course.profile))
    for title, line, found in (("plain", course.plain, plain), ("planned", course.planned, course.by_layer)):
        at = line.index(max(line))
        position = course.profile.positions[at]
        pieces = [(name, words, found[name][at]) for name, words in LAYERS if found.get(name, [0] * (at + 1))[at]]
        bar = "".join(
            f'<span class="{name}" style="width:{_percent(nbytes / most)}" title="{words}: {amount(nbytes)}"></span>'
            for name, words, nbytes in pieces
        )
        words = ", ".join(
            f'{label} <data value="{nbytes}">{amount(nbytes)}</data>' for _, label, nbytes in reversed(pieces)
        )
        where = f"in {position.module}" if position.module else ""
        passing = "backward" if position.is_backward else "forward"
        rows.append(
            f'<p class="at"><b>{title}: <data value="{line[at]}">{amount(line[at])}</data></b> at '
            f"<code>{escape(position.name)}</code> {escape(where)} of the {passing} pass</p>"
            f'<div class="stack">{bar}</div><p class="small">{words or "nothing"}</p>'
        )
    return "".join(rows)


def legend(course: Curve) -> str:
    """Returns the key to the colours of the memory chart."""
    found = [f'<span><i class="key {name}"></i>{words}</span>' for name, words in LAYERS if name in course.by_layer]
    return f'<p class="legend"><span><i class="key plain"></i>the plain step</span>{"".join(found)}</p>'


def frontier_chart(plan: Plan, points: Sequence[tuple[int, float]]) -> tuple[str, Hover]:
    """Returns the chart of the best plans at all budgets, and what is shown under the pointer.

    Args:
        plan: the plan that is marked.
        points: peak in bytes and seconds of the plans that are drawn, two or more, in the order of their peaks.
    """
    marked = plan.peak_nbytes, plan.seconds
    least, most = min(p for p, _ in (*points, marked)), max(p for p, _ in (*points, marked))
    fastest, slowest = min(s for _, s in (*points, marked)), max(s for _, s in (*points, marked))
    width, height = 1.08 * (most - least) or 1.0, 1.25 * (slowest - fastest) or 1.0
    left, low = least - 0.04 * (most - least), fastest - 0.08 * (slowest - fastest)

    def place(point: tuple[float, float]) -> tuple[float, float]:
        return (point[0] - left) / width, (point[1] - low) / height

    def corner(point: tuple[float, float]) -> str:
        x, y = place(point)
        return f"{1000 * x:.1f} {HEIGHT * (1 - y):.1f}"

    steps = [f"M{corner(points[0])}"]
    for before, after in pairwise(points):  # the better plan is not available any earlier
        steps += [f"L{corner((after[0], before[1]))}", f"L{corner(after)}"]
    dots = "".join(f"M{corner(point)}h0" for point in points)
    drawn = (
        f'<path class="line frontier" d="{"".join(steps)}"/><path class="dots" d="{dots}"/>'
        f'<path class="dots marked" d="M{corner(marked)}h0"/>'
    )
    x, y = place(marked)
    labels = [_callout("marked", x, y, f"this plan: {amount(plan.peak_nbytes)}, {ms(plan.seconds)}")]
    if left <= plan.budget <= left + width:
        at = _percent((plan.budget - left) / width)
        labels.append(f'<i class="budget upright" style="left:{at}"></i>')
    below = "".join(
        f'<span style="left:{_percent((value - left) / width)}">{_round(amount(value))}</span>'
        for value in byte_ticks(int(left), int(left + width))
        if value >= left
    )
    ticks = [((value - low) / height, _round(ms(value))) for value in _ticks(low, low + height) if value >= low]
    texts = [(place(point)[0], f"peak {amount(point[0])}, step {ms(point[1])}") for point in points]
    label = f"peak against step time of {len(points)} plans, from {amount(least)} to {amount(most)}"
    return _frame("frontier", label, f"0 0 1000 {HEIGHT:.0f}", drawn, "".join(labels), ticks, below), texts


def byte_ticks(least: int, most: int) -> list[int]:
    """Returns up to six round numbers of bytes between two.

    Example:
        >>> [amount(value) for value in byte_ticks(0, 140 << 20)]
        ['0 MiB', '50.0 MiB', '100 MiB']
    """
    unit = next((unit for unit in (1 << 30, 1 << 20, 1 << 10) if most >= 2 * unit), 1)
    return [round(value * unit) for value in _ticks(least / unit, most / unit)]


def _ticks(least: float, most: float) -> list[float]:
    raw = (most - least) / 5
    if raw <= 0:
        return [least]
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw * 0.999)
    first = math.ceil(least / step - 1e-9)
    return [number * step for number in range(first, math.floor(most / step + 1e-9) + 1)]


def _round(text: str) -> str:
    return text.replace(".0 ", " ")


def _columns(first: int, count: int) -> list[tuple[int, int]]:
    """Returns ranges of positions, each of one pass, that share a column of the chart."""
    wide = -(-count // COLUMNS)
    edges = [*range(0, first, wide), *range(first, count, wide), count]
    return list(pairwise(edges))


def _stairs(columns: Sequence[tuple[int, int]], heights: Sequence[int], top: float) -> str:
    """Returns the path of a line that is level over each column, from left to right."""
    path = [f"M{columns[0][0]} {_y(heights[0], top)}"]
    for (begin, end), nbytes, before in zip(columns, heights, (heights[0], *heights), strict=False):
        if nbytes != before:
            path.append(f"H{begin}V{_y(nbytes, top)}")
        if end == columns[-1][1]:
            path.append(f"H{end}")
    return "".join(path)


def _area(columns: Sequence[tuple[int, int]], lower: Sequence[int], upper: Sequence[int], top: float) -> str:
    """Returns the path of the area between two such lines."""
    path = [_stairs(columns, upper, top)]
    for (begin, _), nbytes in zip(reversed(columns), reversed(lower), strict=True):
        path.append(f"V{_y(nbytes, top)}H{begin}")
    return "".join(path) + "Z"


def _y(nbytes: float, top: float) -> str:
    return f"{HEIGHT * (1 - nbytes / top):.1f}"


def _under_pointer(course: Curve, begin: int, end: int, at: int) -> str:
    position = course.profile.positions[at]
    place = f" in {position.module}" if position.module else ""
    passing = "backward" if position.is_backward else "forward"
    return (
        f"{passing} {at}: {position.name}{place}\n"
        f"plain {amount(max(course.plain[begin:end]))}, planned {amount(course.planned[at])}"
    )


def _callout(name: str, x: float, y: float, text: str) -> str:
    """Returns a label at a point, to its left if it is in the right half."""
    side = f"right:{_percent(1 - x)}" if x > 0.5 else f"left:{_percent(x)}"
    return f'<b class="{name}" style="{side};bottom:{_percent(y)}">{escape(text)}</b>'


def _frame(
    name: str, label: str, size: str, drawn: str, labels: str, ticks: Sequence[tuple[float, str]], below: str
) -> str:
    marks = "".join(f'<span style="bottom:{_percent(at)}">{text}</span>' for at, text in ticks if 0 <= at <= 1)
    grid = "".join(f'<i class="grid" style="bottom:{_percent(at)}"></i>' for at, _ in ticks if 0 <= at <= 1)
    return (
        f'<div class="chart" id="{name}"><div class="y" aria-hidden="true">{marks}</div>'
        f'<div class="plot" tabindex="0" role="group" '
        f'aria-label="{escape(label)}; arrow keys read the points">{grid}'
        f'<svg viewBox="{size}" preserveAspectRatio="none" role="img" aria-label="{escape(label)}">{drawn}</svg>'
        f'{labels}<i class="cursor"></i><div class="tip" role="status"></div></div>'
        f'<div class="x" aria-hidden="true">{below}</div></div>'
    )


def _percent(share: float) -> str:
    return f"{100 * share:.2f}%"
