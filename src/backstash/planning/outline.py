"""A profile in words: what each module saves, and what it could be."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from backstash.planning.problem import PlannedValue, StepProfile
from backstash.stash.tables import amount, folded, ms, table

_COLUMNS = ("saved", "encoded", "not remade", "remade in")


def outline(profile: StepProfile, every_value: bool = False) -> str:
    """Returns a table of what modules save, the largest first, with repeated blocks in one row.

    Args:
        profile: the step.
        every_value: whether each value has a row of its own.
    """
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
