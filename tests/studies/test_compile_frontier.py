"""The frontier of compiled models: which candidate of ours is set beside each of torch's."""

from __future__ import annotations

from typing import Any

from studies.compile_frontier import EXACT, ROUNDED, TORCH, points, summary


def row(candidate: str, mib: int, times: float) -> dict[str, Any]:
    return {"candidate": candidate, "peak_nbytes": mib << 20, "times_plain": {"median": times}}


def test_the_fastest_that_needs_no_more_is_beside_each_of_torch() -> None:
    rows = [
        row("compiled", 100, 1.0),
        row("activation_memory_budget 0.5", 60, 1.1),
        row("activation_memory_budget 0.9", 40, 1.3),
        row("lossless, budget 0.6", 58, 1.05),
        row("lossless, budget 0.5", 50, 1.02),
        row("4 bits, budget 0.3", 20, 1.0),
    ]
    lines = summary(rows).splitlines()
    assert lines[2].split() == ["activation_memory_budget", "0.9", "40", "1.30", "none"]
    assert lines[3].split() == [
        *("activation_memory_budget", "0.5", "60", "1.10"),
        *("lossless,", "budget", "0.5", "50", "1.02"),
    ]
    assert lines[4] == "lowest exact peak: 50 MiB at 1.02"


def test_points_have_names_of_their_own_and_budgets_below_the_peak() -> None:
    found = list(points(1 << 30))
    assert len({candidate.name for candidate in found}) == len(found) == 1 + len(TORCH) + len(EXACT) + len(ROUNDED)
    assert {candidate.is_exact for candidate in found if candidate.name.startswith("lossless")} == {True}
