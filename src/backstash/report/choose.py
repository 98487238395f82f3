"""Recommends a policy for a script, from what was measured of all of them: ``backstash choose``."""

from __future__ import annotations

from collections.abc import Callable

from backstash.report.compare import Comparison, Row
from backstash.report.watch import PLAIN
from backstash.stash.tables import amount

WORTHWHILE = 0.95
"""A policy gains something if its peak is at most this share of plain's. Peaks of equal runs are equal."""

CHEAP = 1.15
"""A policy is cheap if its step takes at most this many times plain's. A few steps tell times to 5 % or so."""

BEARABLE = 0.3
"""The largest gradient error that is recommended. The gradient's direction has a cosine of 0.96 to the exact one."""


def recommend(comparison: Comparison) -> list[str]:
    """Lines of advice: what to use, and what for less memory than that, if anything.

    The first line recommends the exact policy with the lowest peak among those that cost little time, or plain PyTorch
    if none gains anything. If no run of plain came to its end, as when memory does not suffice, the exact policy with
    the lowest peak is recommended. On CPU, a policy that moves what is saved to the host's memory is not recommended,
    because it is there already. An exact policy whose losses are not plain's is not recommended, unless those of plain
    differ from run to run as well.
    """
    on_cpu = comparison.runs[0].device == "cpu"
    rows = [
        row for row in comparison.rows() if row.policy != PLAIN and row.peak_nbytes and not (on_cpu and _moves(row))
    ]
    base = next((row for row in comparison.rows() if row.label == comparison.baseline and row.policy == PLAIN), None)
    differing = [row for row in rows if row.is_exact and row.losses_equal is False]
    repeats = comparison.repeats_itself
    is_told = base is not None and repeats is not False  # whether bits tell anything
    exact = [row for row in rows if row.is_exact and not (is_told and row in differing)]
    if base is None:
        if not exact:
            return ["recommended: nothing, because neither plain PyTorch nor an exact policy could be measured"]
        best = min(exact, key=_peak)
        return [f"recommended: {best.label}, {_figures(comparison, best)}; plain PyTorch could not be measured"]
    enough = WORTHWHILE * (base.peak_nbytes or 0)
    gaining = [row for row in exact if _peak(row) <= enough]
    cheap = [row for row in gaining if _slowdown(row, base) <= CHEAP]
    lines = []
    if cheap:
        best = min(cheap, key=_order(base))
        lines.append(f"recommended: {best.label}; {_figures(comparison, best)}")
    elif gaining:
        best = min(gaining, key=lambda row: _slowdown(row, base))
        lines.append(f"recommended: {best.label}, which takes time; {_figures(comparison, best)}")
    elif is_told and any(_peak(row) <= enough for row in differing):
        best = base
        names = ", ".join(row.label for row in differing)
        lines.append(
            f"recommended: plain PyTorch, because losses under {names} differ from those of plain, "
            f"{'which ran only once' if repeats is None else 'whose runs all have the same'}; `backstash verify` "
            f"compares the step itself"
        )
    else:
        best = base
        lines.append(
            f"recommended: plain PyTorch, because no exact policy lowers the peak by {1 - WORTHWHILE:.0%}: what saved "
            f"tensors take is not what the peak is made of, or has no smaller form"
        )
    below = WORTHWHILE * _peak(best)
    less = [row for row in gaining if _peak(row) <= below]
    if less:
        smallest = min(less, key=_peak)
        lines.append(f"for less memory: {smallest.label}; {_figures(comparison, smallest)}")
        below = WORTHWHILE * _peak(smallest)
    lossy = [row for row in rows if not row.is_exact and _peak(row) <= below and _error(row) <= BEARABLE]
    if lossy:
        smallest = min(lossy, key=_peak)
        error = "unknown" if smallest.gradient_error is None else f"{smallest.gradient_error:.2g}"
        lines.append(
            f"if gradients may change: {smallest.label}, gradient error {error}; {_figures(comparison, smallest)}"
        )
    if differing and not is_told:
        lines.append(
            "note: bits could not be compared, because the losses of plain PyTorch differ between runs that should be "
            "equal. Seed the script to compare bits; `backstash verify` compares the step itself"
        )
    return lines


def _order(base: Row) -> Callable[[Row], tuple[float, float]]:
    """Lowest peak first; of peaks that are nearly equal, the faster policy."""

    def key(row: Row) -> tuple[float, float]:
        return round(_peak(row) / max(base.peak_nbytes or 1, 1), 2), _slowdown(row, base)

    return key


def _peak(row: Row) -> int:
    return row.peak_nbytes or 0


def _moves(row: Row) -> bool:
    return row.stash_nbytes != row.device_nbytes


def _slowdown(row: Row, base: Row) -> float:
    return row.step_seconds / base.step_seconds if row.step_seconds and base.step_seconds else 1.0


def _error(row: Row) -> float:
    return row.gradient_error or 0.0


def _figures(comparison: Comparison, row: Row) -> str:
    return comparison.headline(row) or f"peak {amount(_peak(row))}"
