"""A budget in bytes: among ways to split a graph and to hold what it saves, the cheapest whose peak stays below it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from backstash.integrations.compile.choose import Choice
from backstash.integrations.compile.liveness import Plan, held_nbytes, peak_nbytes, seconds
from backstash.integrations.compile.values import SavedValue, Split

UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30}

RECOMPUTING: tuple[dict[str, Any], ...] = (
    {},
    {
        "ban_recompute_used_far_apart": False,
        "ban_recompute_long_fusible_chains": False,
        "ban_recompute_materialized_backward": False,
    },
    {"aggressive_recomputation": True},
    *({"aggressive_recomputation": True, "activation_memory_budget": share} for share in (0.5, 0.3, 0.15, 0.05)),
)
"""Settings of torch's partitioner, from the one that recomputes least to the one that recomputes most."""

Planner = Callable[[Split], list[tuple[SavedValue, Choice]]]


@dataclass(frozen=True)
class Chosen:
    """One way to hold what a graph saves.

    Attributes:
        split: the graphs.
        plan: the form of each value.
        peak: estimated bytes at the peak.
        seconds: estimated time for recomputing and encoding.
    """

    split: Split
    plan: list[tuple[SavedValue, Choice]]
    peak: int
    seconds: float


def parse_nbytes(text: int | str) -> int:
    """A number of bytes, given as a number or as text such as ``"1.5 GiB"``.

    Raises:
        ValueError: the text is no number of bytes, or the number is not above zero.
    """
    if isinstance(text, str):
        match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([a-zA-Z]*)\s*", text)
        if match and match[2].lower() in UNITS:
            text = int(float(match[1]) * UNITS[match[2].lower()])
    if not isinstance(text, int) or isinstance(text, bool) or text <= 0:
        raise ValueError(
            f"compile_options was asked for budget={text!r}, but it takes a number of bytes above zero, such as 600 << "
            f"20, or text such as '600MiB' or '1.5 GiB'."
        )
    return text


def cheapest(
    partition: Callable[[dict[str, Any]], tuple[fx.GraphModule, fx.GraphModule, int]],
    planned: Planner,
    budget: int,
    fuses: bool,
) -> tuple[Chosen, str]:
    """The cheapest way to stay below a budget, or the one with the lowest peak if none does; and a note on it.

    Args:
        partition: splits the joint graph under settings of AOTAutograd; returns the graphs and the number of results
            that are not for the backward graph.
        planned: chooses a form for each value that a split saves.
        budget: bytes at the peak, inputs excluded.
        fuses: whether the compiler fuses elementwise operators.
    """
    found: list[Chosen] = []
    sizes: set[tuple[str, ...]] = set()
    for settings in RECOMPUTING:
        split = Split(*partition(settings))
        values = tuple(sorted(value.base.name for value in split.values()))
        if values in sizes:
            continue  # the same values are saved as under an earlier setting
        sizes.add(values)
        found.append(_least(split, planned(split), budget, fuses))
        if found[-1].peak <= budget and len(found) > 1:
            break  # further settings recompute more
    within = [chosen for chosen in found if chosen.peak <= budget]
    best = min(within, key=lambda chosen: chosen.seconds) if within else min(found, key=lambda chosen: chosen.peak)
    mib = f"a peak of {best.peak / 2**20:.0f} MiB is estimated, inputs excluded; asked for {budget / 2**20:.0f} MiB"
    again = sum(node.op == "call_function" for node in best.split.twins)
    note = f"budget: {mib}, with {again} operators computed again"
    return best, note if within else f"{note}. No way was found to stay below the budget"


def _least(split: Split, plan: list[tuple[SavedValue, Choice]], budget: int, fuses: bool) -> Chosen:
    """Rounds as few values as the budget allows; exact forms cost next to nothing and are always taken."""
    exact = [(value, choice if _is_exact(choice) else _kept(choice)) for value, choice in plan]
    rounded = [index for index, (_, choice) in enumerate(plan) if not _is_exact(choice)]
    rounded.sort(key=lambda index: held_nbytes(*plan[index]) - plan[index][0].spec().nbytes)

    def peak(count: int) -> int:
        return peak_nbytes(split, _by_base(_mixed(exact, plan, rounded[:count])), fuses)

    low, high = 0, len(rounded)
    while low < high:  # the peak falls with each value that is rounded
        middle = (low + high) // 2
        if peak(middle) <= budget:
            high = middle
        else:
            low = middle + 1
    chosen = _mixed(exact, plan, rounded[:low])
    by_base = _by_base(chosen)
    return Chosen(split, chosen, peak_nbytes(split, by_base, fuses), seconds(split, by_base))


def _is_exact(choice: Choice) -> bool:
    return choice.codec is None or choice.codec.is_exact


def _kept(choice: Choice) -> Choice:
    return replace(choice, codec=None, tests=(), reason="it fits into the budget as it is")


def _mixed(
    exact: list[tuple[SavedValue, Choice]], plan: list[tuple[SavedValue, Choice]], rounded: list[int]
) -> list[tuple[SavedValue, Choice]]:
    chosen = set(rounded)
    return [plan[index] if index in chosen else item for index, item in enumerate(exact)]


def _by_base(plan: list[tuple[SavedValue, Choice]]) -> Plan:
    return {value.base: (value, choice) for value, choice in plan}
