"""Processor time of a Session by the rooms of the package: cProfile's times, added up.

cProfile counts a function of C apart from the function of Python that called it. Here its time goes to its caller's
room: an allocation in the decoder is the decoder's. What is called by nobody of the package - the program, torch's own
Python, the engine - is the row ``everything else``; so are the torch functions themselves, which the observer calls.

A profiler makes each call longer, so that rooms of many short calls look dearer than they are. The times are good for
finding out what to look at, and no measure of what a step takes: see `bench.hostcost` for that.
"""

from __future__ import annotations

import cProfile
import pstats
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import backstash

PACKAGE = Path(backstash.__file__).parent

ROOMS: dict[str, tuple[str, ...]] = {
    "observe": ("capture/observer", "capture/side_effects", "capture/modules", "capture/hooks", "capture/learned"),
    "replay": ("replay/",),
    "note how values are made": ("remake/tape", "remake/calls", "remake/contents", "remake/patterns", "repeatable"),
    "pack": ("capture/forward", "stash/held", "stash/parameters", "stash/wrapped"),
    "name": ("capture/names", "capture/naming", "formulas"),
    "wait and decide": ("stash/pending", "stash/place", "policies/", "papers/"),
    "encode": ("stash/encode", "stash/value", "stash/live", "stash/accounts", "codecs/"),
    "find and prove recipes": (
        "remake/remaking",
        "remake/recipes",
        "remake/leaves",
        "remake/leaning",
        "remake/proving",
        "stash/sample",
        "proofs",
    ),
    "decode": ("stash/unpack", "stash/decode", "stash/buffers", "stash/prefetch"),
    "remake": ("remake/making", "remake/fused", "remake/repeating"),
    "claims": ("redeem/",),
    "kernels": ("ops/",),
}
"""By room the files of the package that belong to it, or the folders, as the beginnings of their paths."""

KERNELS = {"reference", "cpu", "triton"}
"""The names of files and folders with kernels, whichever codec these stand beside."""

ELSE = "everything else"


@dataclass(frozen=True)
class Stage:
    """One room's part of a step.

    Attributes:
        name: of the room.
        calls: of its functions in a step.
        seconds: of thread time in a step, under the profiler.
    """

    name: str
    calls: float
    seconds: float


def room_of(file: str) -> str | None:
    """The room of a source file; None where it is not the package's. What no room claims is the Session's own."""
    path = Path(file)
    if not path.is_relative_to(PACKAGE):
        return None
    inside = path.relative_to(PACKAGE).as_posix()
    if KERNELS & {*path.relative_to(PACKAGE).with_suffix("").parts}:
        return "kernels"
    return next((name for name, begins in ROOMS.items() if inside.startswith(begins)), "session and the rest")


def profile(step: Callable[[], Any], steps: int) -> list[Stage]:
    """Runs a step some times under cProfile; returns the rooms, the dearest first.

    Args:
        step: runs a step.
        steps: how many.
    """
    profiler = cProfile.Profile(time.thread_time)
    profiler.enable()
    try:
        for _ in range(steps):
            step()
    finally:
        profiler.disable()
    seconds: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    functions: dict[Any, Any] = pstats.Stats(profiler).stats  # type: ignore[attr-defined]  # not in its annotations
    for (file, _, name), (_, number, own, _, callers) in functions.items():
        room = room_of(file)
        if room is not None:
            seconds[room] += own
            calls[room] += number
            continue
        for (caller, _, outer), (_, _, part, _) in callers.items():
            is_function_of_torch = outer == "__torch_function__" and "torch" in name
            seconds[ELSE if is_function_of_torch else room_of(caller) or ELSE] += part
    return [Stage(name, calls[name] / steps, total / steps) for name, total in seconds.most_common()]
