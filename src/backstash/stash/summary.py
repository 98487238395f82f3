"""A report as text: in a few lines, what was gained, what to do now, which values take the most; or all values.

Functions of plain data. The report itself is in ledger.py.
"""

from __future__ import annotations

import re
import shutil
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

from backstash.stash.helping import NOTHING_REMADE as NOTHING_REMADE
from backstash.stash.helping import holdings, row_label, what_now
from backstash.stash.tables import amount, change, mib, ms, paragraph, ratio, shortened, table

if TYPE_CHECKING:
    from backstash.stash.ledger import Entry, Report

LARGEST = 10
"""How many of the values that are still held a summary shows."""

PEAK_ROWS = 12
"""Groups of buffers that a printed report shows of the peak."""

_CODE = re.compile(r"`[^`]*`")
_UNBROKEN = "\N{NO-BREAK SPACE}"

NARROWEST, WIDEST = 60, 120
"""Characters of a line of a summary, whatever the terminal's width is."""


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
    for line in what_now(report):
        whole = _CODE.sub(lambda code: code[0].replace(" ", _UNBROKEN), line)  # what is to be typed stays on one line
        lines += (part.replace(_UNBROKEN, " ") for part in paragraph(whole, width))
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


def _stores(report: Report) -> set[str]:
    return {row.store for row in report.rows if row.store != "device" and row.stash_nbytes}


def _and(words: Sequence[str]) -> str:
    return " and ".join(words)


def every_value(report: Report) -> str:
    """All values in a table, below the totals by codec and what was alive at the peak."""
    stalled = report.stall_seconds >= 0.5e-4  # else it would be shown as 0.0 ms
    lines = [
        f"policy {report.policy}: saved {mib(report.saved_nbytes)}, stashed as {mib(report.stash_nbytes)}, "
        f"ratio {report.ratio:.2f} (step {report.steps}; {mib(report.parameter_nbytes)} of parameters by reference)",
        *(f"note: {note}" for note in report.notes),
        *([f"{mib(report.moved_nbytes)} of it in other stores"] if report.moved_nbytes else []),
        *(
            [f"recipes: {report.proofs} proven for the first time in this step, {report.repeated_proofs} once more"]
            if report.proofs or report.repeated_proofs
            else []
        ),
        *(
            [f"recognised from earlier steps: {report.recognised} of {report.named} saved tensors"]
            if report.named
            else []
        ),
        *([f"waited {ms(report.stall_seconds)} for other stores"] if stalled else []),
        *([f"gradient error: {'; '.join(map(str, report.gradient_error))}"] if report.gradient_error else []),
        "",
        *table(
            ("codec", "values", "saved", "stash", "ratio", "encode", "decode", "GB/s enc", "GB/s dec"),
            (
                (
                    total.codec,
                    str(total.count),
                    mib(total.saved_nbytes),
                    mib(total.stash_nbytes),
                    ratio(total.saved_nbytes, total.stash_nbytes),
                    ms(total.encode_seconds),
                    ms(total.decode_seconds),
                    "" if total.encode_gb_per_second is None else f"{total.encode_gb_per_second:.1f}",
                    "" if total.decode_gb_per_second is None else f"{total.decode_gb_per_second:.1f}",
                )
                for total in report.by_codec()
            ),
        ),
        "",
        *table(
            ("saved tensor", "need", "tensor", "saved", "stash", "codec", *(["stall"] if stalled else []), "note"),
            (
                (
                    row.key,
                    row.need,
                    row.spec,
                    mib(row.saved_nbytes),
                    mib(row.stash_nbytes),
                    row.codec if row.store == "device" else f"{row.codec} in {row.store}",
                    *([ms(row.stall_seconds)] if stalled else []),
                    row.reason or (f"also {', '.join(row.shared_by)}" if row.shared_by else ""),
                )
                for row in report.rows
            ),
        ),
    ]
    if report.peak:
        lines[2:2] = _peak_lines(report)
    return "\n".join(lines)


def _peak_lines(report: Report) -> list[str]:
    """What was alive at the peak: totals by role, then the largest groups of buffers."""
    roles: dict[str, int] = defaultdict(int)
    for row in report.peak:
        roles[row.role] += row.nbytes
    shown = sorted(roles.items(), key=lambda pair: -pair[1])
    return [
        f"alive at the peak: {mib(sum(roles.values()))}, of which "
        + ", ".join(f"{role} {mib(nbytes)}" for role, nbytes in shown),
        "",
        *table(
            ("role", "allocated in or after", "buffers", "bytes"),
            ((row.role, row.name, str(row.count), mib(row.nbytes)) for row in report.peak[:PEAK_ROWS]),
        ),
        "",
    ]
