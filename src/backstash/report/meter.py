"""Measures the real peak of a training step, in counted bytes and in resident bytes. Nothing is estimated."""

from __future__ import annotations

import gc
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from backstash import accelerator
from backstash.arguments import check_count, check_step
from backstash.errors import MeasureError
from backstash.stash import buffers
from backstash.torch_internals import profiler_event, record_operation, starting_profiler

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
_MARK = "backstash: mark"


@dataclass(frozen=True)
class Measurement:
    """Memory and time of one step, as medians over the repeats.

    Attributes:
        peak_nbytes: the most bytes of tensors alive at once, above those alive at the start. On CPU every allocation of
            torch is counted with its profiler, which is exact; on an accelerator it is ``max_memory_allocated``.
        resident_nbytes: on CPU, growth of the process's resident high-water mark above the start. It includes memory
            that libraries allocate without torch. None if the system does not report it (see ``notes``).
        seconds: seconds of a step, measured without the profiler.
        repeats: number of steps that were measured.
        device: ``"cpu"`` or the accelerator's type.
        notes: what could not be measured, and why.
    """

    peak_nbytes: int
    resident_nbytes: int | None
    seconds: float
    repeats: int
    device: str
    notes: tuple[str, ...] = ()


def measure(step: Callable[[], object], *, repeats: int = 3, warmup: int = 1, device: str | None = None) -> Measurement:
    """Runs ``step`` and returns its real peak and time.

    The step runs ``warmup + 2 * repeats`` times on CPU, where counting and timing need a run each, and
    ``warmup + repeats`` times on an accelerator.

    Args:
        step: one training step. It should leave as much memory in use as it found: preallocate gradients with
            ``zero_grad(set_to_none=False)``, or call ``measure`` after a first step.
        repeats: number of steps over which the medians are taken.
        warmup: number of steps that run first.
        device: ``"cpu"`` or the accelerator's type, such as ``"cuda"``. Default: the accelerator, if in use.

    Raises:
        MeasureError: ``repeats`` or ``warmup`` is too small, or there is no such device.
        TypeError: ``step`` cannot be called without arguments, or a number is no int.
    """
    check_step(step, "measure")
    if isinstance(repeats, int) and isinstance(warmup, int) and (repeats < 1 or warmup < 0):
        raise MeasureError(
            f"measure was asked for repeats={repeats} and warmup={warmup}, but it needs repeats >= 1 and warmup >= 0."
        )
    check_count(repeats, "repeats", "steps", "measure")
    check_count(warmup, "warmup", "steps", "measure")
    if device is None:
        device = accelerator.kind_in_use() or "cpu"
    if not accelerator.is_here(device):
        raise MeasureError(
            f"measure was asked for device={device!r}, but it measures 'cpu', and an accelerator where one is "
            f"({accelerator.kind() or 'none'} here)."
        )
    buffers.release_buffers()
    for _ in range(warmup):
        step()
    seconds, resident, counted = [], [], []
    notes: list[str] = []
    for _ in range(repeats):
        if device != "cpu":
            torch.accelerator.synchronize()
            torch.accelerator.reset_peak_memory_stats()
            at_start = torch.accelerator.memory_allocated()
        else:
            reset = reset_resident_peak()
            before = resident_nbytes()
        started = time.perf_counter()
        step()
        if device != "cpu":
            torch.accelerator.synchronize()
            counted.append(torch.accelerator.max_memory_allocated() - at_start)
        seconds.append(time.perf_counter() - started)
        if device == "cpu":
            after = resident_peak_nbytes()
            if reset and before is not None and after is not None:
                resident.append(after - before)
            with CountedPeak() as counter:
                step()
            counted.append(counter.peak_nbytes)
    if not resident:
        notes.append(
            "resident peak: measured on CPU only"
            if device != "cpu"
            else f"resident peak: this system ({sys.platform}) does not let a process reset its high-water mark"
        )
    return Measurement(
        peak_nbytes=int(statistics.median(counted)),
        resident_nbytes=int(statistics.median(resident)) if resident else None,
        seconds=statistics.median(seconds),
        repeats=repeats,
        device=device,
        notes=tuple(notes),
    )


class CountedPeak:
    """Counts every byte that torch allocates and frees on CPU inside the ``with``.

    Attributes:
        peak_nbytes: after the ``with``, the most bytes alive at once, above those alive at its start. Bytes that the
            decode buffers of backstash held at the start count as well. Memory from before the start that is freed
            inside is not subtracted: torch's profiler reports a release only where it, or an earlier profiler, has seen
            the memory made (Note: [freed from before]).
        timeline: after the ``with``, (nanoseconds, bytes alive) after each allocation or release.

    Note: [profiler's scopes]
        The hooks of an optimizer run inside a scope of torch's profiler. A profiler that is started or stopped inside a
        scope makes torch 2.13 print an internal error when the scope is left, or end with a segmentation fault. So what
        is counted between two optimizer steps is counted from before the first, and the steps are marked.
    """

    def __enter__(self) -> CountedPeak:
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # or the profiler prints two lines each time
        self.peak_nbytes = 0
        self.timeline: list[tuple[int, int]] = []
        self._marks: list[int] = []  # bytes that the decode buffers held at each mark
        self._marked: list[int] = []  # when that was, in nanoseconds
        # So garbage of an earlier count must not be freed in the middle of this one.
        gc.collect()
        self._held_nbytes = buffers.held_nbytes()
        self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=False)
        with starting_profiler():
            self._profile.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._profile.__exit__(kind, error, trace)
        if error is None:
            events = list(_all_of(self._profile.profiler.kineto_results.experimental_event_tree()))  # type: ignore[union-attr]
            self._marked = sorted(event.start_time_ns for event in events if event.name == _MARK)
            timeline = _timeline(events)
            self.timeline = [(when, nbytes + self._held_nbytes) for when, nbytes in timeline]
            self.peak_nbytes = max((nbytes for _, nbytes in self.timeline), default=0)

    def mark(self) -> int:
        """Notes that this is a moment of interest. Returns its number for :meth:`peak_between`."""
        with record_operation(_MARK):
            self._marks.append(buffers.held_nbytes())
        return len(self._marks) - 1

    def peak_between(self, begin: int | None, end: int | None) -> int:
        """After the ``with``: the most bytes alive between two marks, above those alive at the first of them.

        Args:
            begin, end: the marks' numbers; None for the start and for the end.
        """
        first = 0 if begin is None else self._marked[begin]
        last = self._marked[end] if end is not None else math.inf
        before = [nbytes for when, nbytes in self.timeline if when <= first]
        alive = before[-1] if before else self._held_nbytes
        base = alive - (self._held_nbytes if begin is None else self._marks[begin])
        return max((nbytes for when, nbytes in self.timeline if first < when <= last), default=alive) - base


def _all_of(roots: Iterable[Any]) -> Iterator[Any]:
    waiting = list(roots)
    while waiting:
        event = waiting.pop()
        yield event
        waiting += event.children


def _timeline(events: Iterable[Any]) -> list[tuple[int, int]]:
    alive, timeline = 0, []
    sizes: dict[int, int] = {}  # by the addresses of what was allocated inside and is alive
    changes = [event for event in events if event.tag == profiler_event.Allocation]
    for event in sorted(changes, key=lambda change: change.start_time_ns):
        memory = event.extra_fields
        # The release of what was made before the start may be reported, where an earlier profiler has seen it made.
        is_counted = memory.alloc_size > 0 or memory.ptr in sizes
        if memory.device.type == "cpu" and is_counted:
            alive -= sizes.pop(memory.ptr, 0)
            if memory.alloc_size > 0:
                sizes[memory.ptr] = memory.alloc_size
                alive += memory.alloc_size
            timeline.append((event.start_time_ns, alive))
    return timeline


def resident_nbytes() -> int | None:
    """Resident bytes of this process now, without the decode buffers; None if /proc does not report them."""
    resident = _status("VmRSS")
    return None if resident is None else resident - buffers.held_nbytes()


def resident_peak_nbytes() -> int | None:
    """High-water mark of the resident bytes since the start or last reset; None if /proc does not report it."""
    return _status("VmHWM")


def reset_resident_peak() -> bool:
    """Sets the high-water mark to the bytes that are resident now. Returns whether the system allows that."""
    try:
        _CLEAR.write_text("5")
    except OSError:
        return False
    return True


class ResidentPeaks:
    """The resident peaks of this process before and after a moment. On CPU alone; it takes no time of a step.

    Attributes:
        before, after: these peaks in bytes; None for what is not known.
    """

    def __init__(self) -> None:
        self.before: int | None = None
        self.after: int | None = None

    def separate(self) -> None:
        """This is the moment, if there was none yet."""
        if self.before is None and not _uses_gpu():
            peak = resident_peak_nbytes()
            self.before = peak if peak is not None and reset_resident_peak() else None

    def end(self) -> None:
        """Takes the peak since then, or that of all time if there was no such moment."""
        self.after = None if _uses_gpu() else resident_peak_nbytes()


def _status(field: str) -> int | None:
    try:
        lines = _STATUS.read_text(errors="replace").splitlines()  # a process may have any bytes for a name
    except OSError:
        return None
    for line in lines:
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    return None


def peak_so_far_nbytes() -> int | None:
    """The most memory that this process has used: of the GPU if it has used one, else resident."""
    return torch.accelerator.max_memory_allocated() if _uses_gpu() else resident_peak_nbytes()


def _uses_gpu() -> bool:
    return accelerator.kind_in_use() is not None
