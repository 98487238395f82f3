"""Amounts and tables as text, for the reports."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Sequence

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("bytes", 1))


def mib(nbytes: int) -> str:
    """Bytes for people: ``"1.50 MiB"``."""
    return f"{nbytes / 2**20:.2f} MiB"


def amount(nbytes: int) -> str:
    """Bytes in three digits or so, in the unit that fits them.

    Example:
        >>> amount(8_808_038), amount(190 << 20), amount(40 << 30), amount(0)
        ('8.4 MiB', '190 MiB', '40.0 GiB', '0 MiB')
    """
    return f"{_digits(nbytes, _unit(nbytes)[1])} {_unit(nbytes)[0]}"


def change(before: int, after: int) -> str:
    """Two amounts in the unit of the larger one, or each in its own if the other would be shown as zero.

    Example:
        >>> change(21_810_380, 8_808_038), change(21_810_380, 4096)
        ('20.8 -> 8.4 MiB', '20.8 MiB -> 4.0 KiB')
    """
    name, size = _unit(max(before, after))
    if 0 < min(before, after) < size / 20:
        return f"{amount(before)} -> {amount(after)}"
    return f"{_digits(before, size)} -> {_digits(after, size)} {name}"


def _unit(nbytes: int) -> tuple[str, int]:
    if not nbytes:
        return _UNITS[1]
    return next((unit for unit in _UNITS if nbytes >= unit[1]), _UNITS[-1])


def _digits(nbytes: int, size: int) -> str:
    scaled = nbytes / size
    return f"{scaled:.0f}" if size == 1 or scaled >= 99.95 or not nbytes else f"{scaled:.1f}"


def ms(seconds: float) -> str:
    """Seconds as milliseconds: ``"1.5 ms"``."""
    return f"{seconds * 1e3:.1f} ms"


def ratio(saved: int, stash: int) -> str:
    """How many times smaller the stash is; ``"all"`` if it has no bytes."""
    return f"{saved / stash:.2f}" if stash else "all"


def paragraph(text: str, width: int) -> list[str]:
    """A text in lines of at most ``width`` characters, of which all but the first are indented.

    Example:
        >>> paragraph("note: this is longer than the line", 20)
        ['note: this is longer', '  than the line']
    """
    return textwrap.wrap(text, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def shortened(text: str, width: int) -> str:
    """A text of at most ``width`` characters, without its middle if it is longer: names differ at both ends.

    Example:
        >>> shortened("transformer.layers.*.mlp.act", 20)
        'transf..rs.*.mlp.act'
    """
    if len(text) <= width:
        return text
    left = max((width - 2) // 3, 1)
    return f"{text[:left]}..{text[left - width + 2 :]}"


def folded(path: str) -> str:
    """A module's path with ``*`` for its numbers, so that repeated blocks have one name.

    Example:
        >>> folded("layers.3.conv1")
        'layers.*.conv1'
    """
    return _NUMBER.sub("*", path)


def table(header: Sequence[str], rows: Iterable[Sequence[str]], right: Sequence[int] = ()) -> list[str]:
    """Lines of a table with a line below its header.

    Args:
        header: the columns' names.
        rows: the cells.
        right: numbers of the columns that are aligned to the right.
    """
    cells = [header, *rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    lines = [
        "  ".join(
            cell.rjust(width) if number in right else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    ]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return lines
