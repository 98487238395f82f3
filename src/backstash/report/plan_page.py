"""A plan as a page: one HTML file that fetches nothing, for reading in a browser and for sending to somebody.

Figures are in their elements twice: as text for people, and exactly in ``value`` or ``data-v`` for programs.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING

from backstash.planning.model.budget import with_choices
from backstash.planning.model.decision import Decision, blocks_alike
from backstash.planning.model.problem import KIND_WORDS, StepProfile
from backstash.report.plan_charts import Curve, Hover, frontier_chart, legend, memory_chart, peak_bars
from backstash.report.plan_layers import chosen, parts
from backstash.report.plan_style import SCRIPT, STYLE
from backstash.stash.html import document, exactly, named, tiles, tools
from backstash.stash.tables import amount, ms

if TYPE_CHECKING:
    from backstash.planning.model.plan import Plan

POINTS = 200
"""Most points of the frontier that are drawn and listed."""

LARGEST = 8
"""Number of values that are listed under the peak."""

REASONS = 3
"""Most reasons that are shown in a row of several values."""


def plan_page(profile: StepProfile, plan: Plan, title: str = "A plan for a training step") -> str:
    """Returns the page of a plan: charts of memory and of the frontier, and tables that can be sorted and searched.

    It can be read without a script, in light and dark, on a telephone and on a wide screen.

    Args:
        profile: the profile of which the plan was made.
        title: the heading, such as the name of the script that was planned.

    Raises:
        PlanError: the plan was made of another profile.
    """
    profile = with_choices(profile, plan.allow)  # a plan with more families of choices is made of a profile with these
    course = Curve.of(profile, plan)
    memory, under_memory = memory_chart(course, plan)
    frontier, under_frontier = _frontier(plan)
    under: dict[str, Hover] = {"memory": under_memory, "frontier": under_frontier}
    data = json.dumps(under, separators=(",", ":")).replace("<", "\\u003c")  # so that no name ends the element
    name = escape(title)
    body = (
        f"<h1>{name}</h1>\n"
        f"{_facts(profile, plan)}\n{_tiles(plan)}\n"
        f"<h2>Memory over the step</h2>\n{_caption(course, plan)}\n{legend(course)}{memory}\n"
        f"<h2>What is alive at the peak</h2>\n{peak_bars(course)}{_largest(profile, plan, course)}\n"
        f"<h2>What a smaller peak costs</h2>\n{frontier}\n"
        f"<h2>Modules</h2>\n{_modules(plan.decisions)}\n"
        f'<details class="wide"><summary>All {len(plan.decisions)} values</summary>\n{_values(plan)}</details>\n'
    )
    script = f'<script type="application/json" id="points">{data}</script><script>{SCRIPT}</script>'
    return document(name, body, script, STYLE)


def _facts(profile: StepProfile, plan: Plan) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in profile.versions.items())
    facts = [f"device {profile.device}", profile.machine, versions, f"plan {plan.fingerprint}"]
    return (
        f'<p class="soft">All bytes are above the {amount(profile.held_nbytes)} that are held before the step. '
        f"Allowed: {escape(', '.join(plan.allow) or 'nothing')}.</p>"
        f'<p class="small">{escape("; ".join(fact for fact in facts if fact))}</p>'
    )


def _tiles(plan: Plan) -> str:
    counts = Counter(decision.kind for decision in plan.decisions)
    ways = ", ".join(f"{counts[kind]} {word}" for kind, word in KIND_WORDS.items() if counts[kind]) or "none"
    less = f"{1 - plan.peak_nbytes / plan.plain_peak_nbytes:.0%} less" if plan.plain_peak_nbytes else ""
    more = plan.seconds - plan.plain_seconds
    share = f"plain {ms(plan.plain_seconds)}, {more / plan.plain_seconds:+.1%}" if plan.plain_seconds else ""
    facts = [
        ("peak, plain", exactly(plan.plain_peak_nbytes), "measured"),
        ("peak, planned", exactly(plan.peak_nbytes), "as in the plain step" if plan.is_empty else less),
        ("budget", exactly(plan.budget), ""),
        ("step, planned", f'<data value="{plan.seconds!r}">{ms(plan.seconds)}</data>', share),
        ("values", f'<data value="{len(plan.decisions)}">{len(plan.decisions)}</data>', ways),
    ]
    if plan.error:
        facts.append(
            ("error of gradients", f'<data value="{plan.error!r}">{plan.error:.1e}</data>', "at most, relative")
        )
    return tiles(facts)


def _caption(course: Curve, plan: Plan) -> str:
    text = "The functions of the forward pass and the nodes of the backward pass in their order, equally wide."
    if plan.is_empty:
        text += " The plain step fits into the budget, so nothing is done."
    modelled = amount(max(course.plain)), amount(max(course.planned))
    if modelled != (amount(plan.plain_peak_nbytes), amount(plan.peak_nbytes)):  # the plan's own are of steps that ran
        text += f" The lines are the peak model's: at most {modelled[0]} plain, {modelled[1]} planned."
    return f'<p class="small">{text}</p>'


def _largest(profile: StepProfile, plan: Plan, course: Curve) -> str:
    """Returns a table of the values that hold the most at the planned peak."""
    at = course.planned.index(max(course.planned))
    held: Counter[int] = Counter()
    for part in parts(profile, chosen(profile, plan)):
        if part.start <= at <= part.last:
            held[part.value] += part.nbytes
    decisions = {decision.key: decision for decision in plan.decisions}
    rows = []
    for number, nbytes in held.most_common(LARGEST):
        value = profile.values[number]
        decision = decisions[value.key]
        rows.append(
            [
                named(escape(value.key)),
                f'<td data-l="tensor">{escape(value.spec)}</td>',
                f'<td data-l="what">{_chip(decision.kind, decision.choice)}</td>',
                _number("there", nbytes, amount(nbytes)),
            ]
        )
    if not rows:
        return '<p class="small">No value that could be held otherwise is alive at the planned peak.</p>'
    head = ("value", "tensor", "what is done", "bytes there")
    return '<p class="at"><b>The largest values at the planned peak</b></p>' + _table("largest", head, rows, {3})


def _frontier(plan: Plan) -> tuple[str, Hover]:
    """Returns the chart of the frontier and its points as a table, or a sentence where there is nothing to choose."""
    if len(plan.frontier) < 2:
        return '<p class="small">There is one plan only: the plain step fits, or nothing else can be done.</p>', []
    points = _thinned(plan)
    chart, under = frontier_chart(plan, points)
    rows = [
        [
            _number("peak", nbytes, amount(nbytes)),
            f'<td class="n" data-l="step" data-v="{seconds!r}">{ms(seconds)}</td>',
            f'<td data-l="plan">{"this plan" if seconds == plan.seconds else ""}</td>',
        ]
        for nbytes, seconds in points
    ]
    # Among these points the plan is found by its time: a peak that was reached in a trial is not the model's.
    text = (
        "Each point is the fastest plan that was found for its peak; the last one keeps everything. The dashed line is "
        "the budget. The axes do not begin at zero."
    )
    table = _table("points-of-frontier", ("peak", "step", ""), rows, {0, 1})
    return (
        f'<p class="small">{text}</p>{chart}<details><summary>The {len(points)} points as a table</summary>{table}'
        f"</details>",
        under,
    )


def _thinned(plan: Plan) -> list[tuple[int, float]]:
    """Returns at most so many points of the frontier, and the plan's own; the first and the last among them."""
    points = plan.frontier
    if len(points) <= POINTS:
        return list(points)
    numbers = {round(number * (len(points) - 1) / (POINTS - 1)) for number in range(POINTS)}
    numbers |= {number for number, (_, seconds) in enumerate(points) if seconds == plan.seconds}
    return [points[number] for number in sorted(numbers)]


def _modules(decisions: Iterable[Decision]) -> str:
    """Returns the table of modules; paths that differ in numbers only share a row if the same ops save in them."""
    rows = []
    for pattern, _, members in blocks_alike(decisions, lambda decision: decision.op):
        found = [decision for block in members.values() for decision in block]
        saved, held = sum(each.nbytes for each in found), sum(each.held_nbytes for each in found)
        name = escape(next(iter(members))) or "outside modules"
        if len(members) > 1:
            each = "".join(f"<li>{escape(module)}: {_change(block)}</li>" for module, block in members.items())
            name = f"<details><summary>{escape(pattern)} ({len(members)})</summary><ul>{each}</ul></details>"
        rows.append(
            [
                named(name),
                _number("values", len(found), str(len(found))),
                _number("saved", saved, amount(saved)),
                _number("held", held, amount(held)),
                f'<td data-l="what">{_ways(found)}</td>',
                _time(sum(each.seconds for each in found)),
                f'<td class="long" data-l="why">{escape(_reasons(found))}</td>',
            ]
        )
    head = ("modules", "values", "saved", "held", "what is done", "adds", "why")
    return (
        '<p class="small">Repeated blocks share a row, which opens. <i>held</i>: bytes between forward and backward; '
        "<i>adds</i>: time added to a step.</p>"
        + tools("modules", "search: attn recompute")
        + _table("modules", head, rows, {1, 2, 3, 5}, is_sortable=True)
    )


def _values(plan: Plan) -> str:
    rows = [
        [
            named(escape(each.key)),
            f'<td data-l="tensor">{escape(each.spec)}</td>',
            _number("saved", each.nbytes, amount(each.nbytes)),
            _number("held", each.held_nbytes, amount(each.held_nbytes)),
            f'<td data-l="what">{_chip(each.kind, each.choice)}</td>',
            _time(each.seconds),
            f'<td class="long" data-l="why">{escape(each.reason)}</td>',
        ]
        for each in plan.decisions
    ]
    head = ("value", "tensor", "saved", "held", "what is done", "adds", "why")
    return tools("values", "search: h.0 softmax") + _table("values", head, rows, {2, 3, 5}, is_sortable=True)


def _change(found: Sequence[Decision]) -> str:
    saved, held = sum(each.nbytes for each in found), sum(each.held_nbytes for each in found)
    counts = Counter(each.choice for each in found)
    ways = ", ".join(f"{choice} {count}" if count > 1 else choice for choice, count in counts.items())
    return f"{amount(saved)} to {amount(held)} ({escape(ways)})"


def _ways(found: Sequence[Decision]) -> str:
    counts = Counter((each.kind, each.choice) for each in found)
    return "".join(
        _chip(kind, f"{choice} {count}" if len(found) > 1 else choice) for (kind, choice), count in counts.items()
    )


def _reasons(found: Sequence[Decision]) -> str:
    """Returns the reasons of the values that take the most bytes."""
    bytes_of: Counter[str] = Counter()
    for decision in found:
        if decision.reason:
            bytes_of[f"{decision.choice}: {decision.reason}" if len(found) > 1 else decision.reason] += decision.nbytes
    reasons = [reason for reason, _ in bytes_of.most_common(REASONS)]
    more = len(bytes_of) - len(reasons)
    return "; ".join([*reasons, f"and {more} more"] if more else reasons)


def _chip(kind: str, text: str) -> str:
    return f'<span class="chip"><i class="{escape(kind)}"></i>{escape(text)}</span>'


def _number(label: str, figure: int, text: str) -> str:
    return f'<td class="n" data-l="{label}" data-v="{figure}">{text}</td>'


def _time(seconds: float) -> str:
    return f'<td class="n" data-l="adds" data-v="{seconds!r}">{ms(seconds) if seconds else "0"}</td>'


def _table(
    name: str, head: Sequence[str], rows: Iterable[Sequence[str]], numeric: set[int], is_sortable: bool = False
) -> str:
    """Returns a table of cells that are HTML already; a narrow window shows each row as a card."""
    kind = "cards sortable" if is_sortable else "cards"
    heads = "".join(
        f'<th scope="col"{" class=n" if number in numeric else ""}>{text}</th>' for number, text in enumerate(head)
    )
    body = "\n".join(f"<tr>{''.join(row)}</tr>" for row in rows)
    return f'<table class="{kind}" id="{name}"><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table>'
