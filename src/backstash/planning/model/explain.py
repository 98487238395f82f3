"""A profile and a plan in words: what modules save, what is done with each value and why, how two plans differ."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from html import escape

from backstash.planning.model.decision import Decision, PlanData, blocks_alike
from backstash.planning.model.problem import KIND_WORDS, PlannedValue, StepProfile
from backstash.stash.tables import amount, folded, ms, table

WIDTH = 60
"""Longer reasons are cut."""


def size(nbytes: int) -> str:
    """Returns a number of bytes in the unit that suits it."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.2f} {name}"
    return f"{nbytes} B"


def milliseconds(seconds: float) -> str:
    """Returns a time in milliseconds."""
    return f"{1000 * seconds:.2f} ms"


def share(error: float) -> str:
    """Returns an error of gradients as a share of their length, or a dash for none."""
    return f"{error:.1g}" if error else "-"


def plan_summary(plan: PlanData) -> str:
    """Returns the plan in a sentence or two."""
    added = plan.seconds - plan.plain_seconds
    share = f", {added / plan.plain_seconds:.1%} more than plain" if plan.plain_seconds else ""
    counts = Counter(decision.kind for decision in plan.decisions)
    ways = ", ".join(f"{counts[kind]} {word}" for kind, word in KIND_WORDS.items() if counts[kind]) or "no values"
    text = (
        f"budget {size(plan.budget)}: predicted peak {size(plan.peak_nbytes)} (plain {size(plan.plain_peak_nbytes)}), "
        f"step {milliseconds(plan.seconds)}{share}; {ways}"
    )
    if set(counts) == {"keep"} and not plan.is_empty:
        text += "; what backward reads the shape of alone is let go"
    if plan.error:
        text += f"; gradients off by {plan.error:.2%} of their length (limit {plan.error_limit:.2%})"
    if plan.reordered:
        return f"{text}; the loss of {plan.reordered!r} in chunks, with sums in another order."
    return f"{text}. The plain step fits, so nothing is done." if plan.is_empty else f"{text}."


def explain(plan: PlanData) -> str:
    """Returns a table of all values, and the totals of their modules, with repeated blocks in one row."""
    head = ("value", "tensor", "what", "saved", "held", "adds", "error", "why")
    rows = [_row(decision) for decision in plan.decisions]
    totals = ("modules", "values", "what", "saved", "held", "adds")
    return "\n".join((plan_summary(plan), "", *table(head, rows), "", *table(totals, _modules(plan.decisions))))


def diff(plan: PlanData, other: PlanData) -> str:
    """Returns what another plan does otherwise; empty if it does the same."""
    mine = {decision.key: decision for decision in plan.decisions}
    theirs = {decision.key: decision for decision in other.decisions}
    rows = []
    for key in dict.fromkeys((*mine, *theirs)):
        a, b = mine.get(key), theirs.get(key)
        if a is None or b is None or (a.choice, a.spec) != (b.choice, b.spec):
            held = [size(found.held_nbytes) if found else "-" for found in (a, b)]
            what = [found.choice if found else "not there" for found in (a, b)]
            rows.append((key, f"{what[0]} -> {what[1]}", f"{held[0]} -> {held[1]}"))
    if not rows:
        return ""
    head = (
        f"peak {size(plan.peak_nbytes)} -> {size(other.peak_nbytes)}, step {milliseconds(plan.seconds)} -> "
        f"{milliseconds(other.seconds)}"
    )
    return "\n".join((head, "", *table(("value", "what", "held"), rows)))


def html(plan: PlanData) -> str:
    """Returns the summary and the totals of the modules as HTML, for a notebook."""
    head = "".join(f"<th>{name}</th>" for name in ("modules", "values", "what", "saved", "held", "adds"))
    rows = (("".join(f"<td>{escape(cell)}</td>" for cell in row)) for row in _modules(plan.decisions))
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    return f"<p>{escape(plan_summary(plan))}</p><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _row(decision: Decision) -> tuple[str, ...]:
    reason = decision.reason if len(decision.reason) <= WIDTH else decision.reason[: WIDTH - 3] + "..."
    sizes = size(decision.nbytes), size(decision.held_nbytes)
    return (
        decision.key,
        decision.spec,
        decision.choice,
        *sizes,
        milliseconds(decision.seconds),
        share(decision.error),
        reason,
    )


def _modules(decisions: Iterable[Decision]) -> list[tuple[str, ...]]:
    """One row for all blocks that differ in their numbers only and hold as many values in the same ways."""
    rows: list[tuple[str, ...]] = []
    for pattern, choices, blocks in blocks_alike(decisions, lambda decision: decision.choice):
        found = [decision for block in blocks.values() for decision in block]
        name = f"{pattern} ({len(blocks)})" if len(blocks) > 1 else next(iter(blocks)) or "(outside)"
        what = ", ".join(f"{choice} {count}" if count > 1 else choice for choice, count in Counter(choices).items())
        sizes = size(sum(each.nbytes for each in found)), size(sum(each.held_nbytes for each in found))
        rows.append((name, str(len(found)), what, *sizes, milliseconds(sum(each.seconds for each in found))))
    return rows


_COLUMNS = ("saved", "encoded", "not remade", "remade in")


def outline(profile: StepProfile, every_value: bool = False) -> str:
    """Returns a table of what modules save, the largest first, with repeated blocks in one row."""
    total = sum(value.nbytes for value in profile.values)
    head = (
        f"plain step: peak {amount(profile.plain_peak_nbytes)}, {ms(profile.seconds)}; "
        f"{len(profile.values)} values, {amount(total)}, are held for the backward pass alone"
    )
    if every_value:
        rows = [(value.key, value.spec, *_facts([value])) for value in sorted(profile.values, key=lambda v: -v.nbytes)]
        return "\n".join((head, "", *table(("value", "tensor", *_COLUMNS), rows, (2, 3, 4, 5))))
    groups: dict[str, list[PlannedValue]] = defaultdict(list)
    for value in profile.values:
        groups[folded(value.module)].append(value)
    largest = sorted(groups.items(), key=lambda item: -sum(value.nbytes for value in item[1]))
    rows = [(module or "(outside modules)", str(len(values)), *_facts(values)) for module, values in largest]
    return "\n".join((head, "", *table(("module", "values", *_COLUMNS), rows, (1, 2, 3, 4, 5))))


def _facts(values: Iterable[PlannedValue]) -> tuple[str, str, str, str]:
    """Bytes that are saved, that exact codecs leave, and that are left if all is remade that can be; and its time."""
    saved = encoded = left = 0
    seconds = 0.0
    for value in values:
        saved += value.nbytes
        encoded += min(choice.held_nbytes for choice in value.choices if choice.kind in ("keep", "encode"))
        remade = [choice for choice in value.choices if choice.kind == "recompute"]
        left += 0 if remade else value.nbytes
        seconds += remade[0].seconds if remade else 0.0
    return amount(saved), amount(encoded), amount(left), ms(seconds) if left < saved else "-"
