"""Tables of frameworks: families of transformers, the examples, and how long a Session is open."""

from __future__ import annotations

from typing import Any

from benchmarks.published.results import load, machine_line, mib, table


def _bits(row: Any, *names: str) -> str:
    return "same bits" if all(row[name] for name in names) else "**differ**"


def families() -> str:
    """Each family of transformers under lossless."""
    found = load("families-cpu")
    rows = [
        (
            row["family"],
            mib(row["saved_nbytes"]),
            f"{row['ratio']:.2f}",
            mib(row["plain_peak_nbytes"]),
            mib(row["peak_nbytes"]),
            _bits(row, "losses_equal", "gradients_equal"),
        )
        for row in found["families"]
    ]
    size = found["size"]
    about = (
        f"{machine_line('families-cpu')} {size['layers']} layers of width {size['width']}, batch {size['batch']}, "
        f"{size['tokens']} tokens or images of {size['image']} x {size['image']}."
    )
    header = ("family", "saved, MiB", "ratio", "peak, plain, MiB", "peak, MiB", "losses and gradients")
    return f"{about}\n\n{table(header, rows)}"


def session_window() -> str:
    """What a Session gains by staying open after the model's call."""
    rows = [
        (
            row["around"],
            mib(row["saved_nbytes"]) if row["saved_nbytes"] else "-",
            mib(row["stash_nbytes"]) if row["saved_nbytes"] else "-",
            f"{row['peak_nbytes'] / 2**20:.2f}",
        )
        for row in load("families-cpu")["windows"]
    ]
    header = ("the Session is open around", "saved, MiB", "stash, MiB", "peak of the step, MiB")
    return f"{machine_line('families-cpu')}\n\n{table(header, rows)}"


def examples() -> str:
    """Each example with and without backstash."""
    rows = [
        (
            f"`{row['name']}.py`",
            row["framework"],
            f"`{row['line']}`",
            mib(row["saved_nbytes"]),
            f"{row['ratio']:.2f}",
            mib(row["plain_peak_nbytes"]),
            mib(row["peak_nbytes"]),
            _bits(row, "losses_equal", "weights_equal"),
        )
        for row in load("examples-cpu")["examples"]
    ]
    header = (
        *("script", "whose loop", "the line", "saved, MiB", "ratio"),
        *("peak, plain, MiB", "peak, MiB", "losses and weights"),
    )
    return f"{machine_line('examples-cpu')}\n\n{table(header, rows)}"


TABLES = {"families": families, "session-window": session_window, "examples": examples}
