"""A report in a few lines: what was gained, how it is stored, and which values still take the most.

Functions of plain data. The report itself is in ledger.py.
"""

from __future__ import annotations

import shutil
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from backstash.stash.tables import amount, change, folded, ms, paragraph, ratio, shortened, table

if TYPE_CHECKING:
    from backstash.stash.ledger import Entry, Report

LARGEST = 10
"""How many of the values that are still held a summary shows."""

NARROWEST, WIDEST = 60, 120
"""Characters of a line of a summary, whatever the terminal's width is."""

NOTHING_REMADE = "nothing is made again"
"""Part of the note of a Session that remakes nothing, because a step saves little."""

_BITS = {"float64": 64, "float32": 32, "float16": 16, "bfloat16": 16}
_QUANTIZED_BITS = 8 + 64 / 256
"""Bits per value of the policy ``quantized(8)``: two float32 extremes for each group of 256 values."""


@dataclass(frozen=True)
class HeldValues:
    """Values of one kind that are still held on the device.

    Attributes:
        name: their module and role, where the numbers of repeated blocks are ``*``.
        count: how many they are.
        nbytes: bytes that the device holds for them.
        why: why they are held, in a few words.
        advice: what would make them smaller; empty if nothing is known.
    """

    name: str
    count: int
    nbytes: int
    why: str
    advice: str


def headline(report: Report) -> str:
    """What was gained, in one line. Only what is known is told: peaks and times have to be measured."""
    if not report.rows:
        return "nothing was saved"
    parts = [f"activations {change(report.saved_nbytes, report.device_nbytes)} on the device"]
    if report.moved_nbytes:
        parts.append(f"{amount(report.moved_nbytes)} moved to {_and(sorted(_stores(report)))}")
    if report.measured is not None:
        found = report.measured
        if found.plain_peak_nbytes and found.peak_nbytes:
            parts.append(f"peak {change(found.plain_peak_nbytes, found.peak_nbytes)}")
        elif found.peak_nbytes:
            parts.append(f"peak {amount(found.peak_nbytes)}")
        if found.plain_seconds and found.seconds:
            share = found.seconds / found.plain_seconds - 1
            parts.append(f"step {share * 100:+.0f} %")
    return "; ".join(parts)


def summary(report: Report, width: int | None = None) -> str:
    """The report in a few lines.

    Args:
        report: the report.
        width: characters of a line. By default the terminal's, between 60 and 120.
    """
    width = width or min(max(shutil.get_terminal_size().columns, NARROWEST), WIDEST)
    lines = paragraph(headline(report), width)
    if report.rows:
        about = f"in step {report.steps} under {report.policy}"
        if report.parameter_nbytes:
            about += f"; weights that backward reads are not counted ({amount(report.parameter_nbytes)})"
        lines += paragraph(about, width)
    for note in report.notes:
        lines += paragraph(f"note: {note}", width)
    if not report.rows:
        return "\n".join(lines)
    if report.stall_seconds >= 0.5e-4:  # else it would be shown as 0.0 ms
        lines += paragraph(f"waited {ms(report.stall_seconds)} for other stores", width)
    if report.gradient_error:
        lines += paragraph(f"gradient error: {'; '.join(map(str, report.gradient_error))}", width)
    if report.peak:
        lines += paragraph(_at_peak(report), width)
    lines += ["", *_stored_as(report), *_largest(report, width)]
    return "\n".join(lines)


def _at_peak(report: Report) -> str:
    """What was alive when the step took most, by role."""
    roles: dict[str, int] = defaultdict(int)
    for row in report.peak:
        roles[row.role] += row.nbytes
    shown = sorted(roles.items(), key=lambda pair: -pair[1])
    return f"alive at the peak: {amount(sum(roles.values()))}, of which " + ", ".join(
        f"{role} {amount(nbytes)}" for role, nbytes in shown
    )


def _stored_as(report: Report) -> list[str]:
    """A table of the forms in which values are stored."""
    groups: dict[str, list[Entry]] = defaultdict(list)
    for row in report.rows:
        groups[row_label(row)].append(row)
    stalled = report.stall_seconds >= 0.5e-4
    lines = []
    for name, rows in sorted(groups.items(), key=lambda pair: sum(r.stash_nbytes - r.saved_nbytes for r in pair[1])):
        saved, stash = sum(row.saved_nbytes for row in rows), sum(row.stash_nbytes for row in rows)
        times = [sum(row.encode_seconds for row in rows), sum(row.decode_seconds for row in rows)]
        if stalled:
            times.append(sum(row.stall_seconds for row in rows))
        cells = [name, str(len(rows)), amount(saved), amount(stash), ratio(saved, stash)]
        lines.append([*cells, *(ms(seconds) if seconds else "" for seconds in times)])
    header = ["stored as", "values", "dense", "stored", "ratio", "encode", "decode", *(["stall"] if stalled else [])]
    return table(header, lines, right=range(1, len(header)))


def _largest(report: Report, width: int) -> list[str]:
    """A table of the values that still take the most."""
    held = holdings(report)
    if not held:
        return []
    shown = held[:LARGEST]
    fixed = [(amount(one.nbytes), str(one.count), one.why) for one in shown]
    taken = sum(max(len(cells[i]) for cells in fixed) + 2 for i in range(3)) + 1
    advice = max(max(len(one.advice) for one in shown), len("what would help"))
    room = max(width - taken - advice - 1, width // 4)
    lines = table(
        ("still held", "bytes", "n", "why", "what would help"),
        [(shortened(one.name, room), *cells, one.advice) for one, cells in zip(shown, fixed, strict=True)],
        right=(1, 2),
    )
    if len(held) > LARGEST:
        rest = sum(one.nbytes for one in held[LARGEST:])
        lines.append(f"and {amount(rest)} in {len(held) - LARGEST} more kinds of values")
    return ["", *(line[:width].rstrip() for line in lines)]


def holdings(report: Report) -> list[HeldValues]:
    """The values that the device holds, largest first. Values of repeated blocks are one row."""
    was_remaking = not any(NOTHING_REMADE in note for note in report.notes)
    groups: dict[tuple[str, str, str, str], list[Entry]] = defaultdict(list)
    for row in report.rows:
        if row.device_nbytes:
            groups[_folded(row.key), row.spec, row_label(row), why(row, was_remaking)].append(row)
    found = []
    for (name, _, _, reason), alike in groups.items():
        shown = name if len(alike) > 1 else alike[0].key.replace("#0:", ":")
        nbytes = sum(row.device_nbytes for row in alike)
        found.append(HeldValues(shown.lstrip("/") or "?", len(alike), nbytes, reason, advice(alike, reason)))
    return sorted(found, key=lambda one: -one.nbytes)


def row_label(row: Entry) -> str:
    """The form in which a value is stored, and where, if that is not the device."""
    return row.codec if row.store == "device" else f"{row.codec} in {row.store}"


def why(row: Entry, was_remaking: bool = True) -> str:
    """Why a value is still held, in a few words.

    Args:
        row: the value.
        was_remaking: whether values were remade where that is possible, so that a reason against it says something.
    """
    if row.codec != "kept":
        return row.codec
    reason, _, origin = row.reason.partition("; not recomputed: ")
    if reason.startswith("held by the program"):
        return "in use"
    if reason == "small":
        return "too small"
    if reason.endswith("of a sample is not zero"):
        return "unknown origin" if was_remaking and origin == "what made it is not known" else "dense"
    if reason == "the policy says so":
        return "by the policy"
    return shortened(reason, 24) if reason else "kept"


def advice(rows: Sequence[Entry], reason: str) -> str:
    """What would make values of one kind smaller, which are held for that reason, as far as it is known untried.

    The bits of a gradient stay as they are if a value is made again, so that comes first. A budget has it done.
    """
    row = rows[0]
    if reason == "too small":
        return "a smaller min_nbytes"
    if reason == "by the policy":
        return "the policy lossless"
    if reason == "in use" or row.need in ("", "SIGN", "SHAPE", "INDEX"):
        return ""
    if row.codec == "kept" and all(one.remake_seconds for one in rows):
        return f"recompute: {ms(sum(one.remake_seconds for one in rows))}"
    bits = _BITS.get(row.spec.partition(" ")[0])
    if row.codec == "kept" and row.effect and bits:
        held = sum(one.device_nbytes for one in rows)
        return f"8 bits: -{amount(round(held * (1 - _QUANTIZED_BITS / bits)))}"
    return "offload"


def _folded(key: str) -> str:
    """A key with ``*`` for the numbers of modules, and without the number of the first node of its kind."""
    path, slash, node = key.rpartition("/")
    return folded(path) + slash + node.replace("#0:", ":")


def _stores(report: Report) -> set[str]:
    return {row.store for row in report.rows if row.store != "device" and row.stash_nbytes}


def _and(words: Sequence[str]) -> str:
    return " and ".join(words)
