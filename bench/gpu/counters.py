"""The processor's counters of this process: instructions and cycles, by Linux's ``perf_event_open``."""

from __future__ import annotations

import ctypes
import fcntl
import os
import platform
import struct
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

_CALL = {"x86_64": 298, "aarch64": 241}.get(platform.machine())
_CYCLES, _INSTRUCTIONS = 0, 1
_DISABLED, _NO_KERNEL, _NO_HYPERVISOR = 1 << 0, 1 << 5, 1 << 6
_SIZE = 112
_ENABLE, _DISABLE = 0x2400, 0x2401


@dataclass(frozen=True)
class Counted:
    """What the host's processor did.

    Attributes:
        instructions: outside of the kernel, of all threads that were there.
        cycles: likewise.
    """

    instructions: int
    cycles: int


def count(work: Callable[[], object]) -> Counted | None:
    """Returns what a call takes of the processor; None where the system does not let a process count."""
    if not sys.platform.startswith("linux") or _CALL is None:
        return None
    threads = [int(path.name) for path in Path("/proc/self/task").iterdir()]
    counters = [(kind, _open(kind, thread)) for thread in threads for kind in (_INSTRUCTIONS, _CYCLES)]
    opened = [(kind, number) for kind, number in counters if number >= 0]
    try:
        if len(opened) < len(counters):
            return None
        for _, number in opened:
            fcntl.ioctl(number, _ENABLE, 0)
        work()
        for _, number in opened:
            fcntl.ioctl(number, _DISABLE, 0)
        found = {_INSTRUCTIONS: 0, _CYCLES: 0}
        for kind, number in opened:
            found[kind] += struct.unpack("Q", os.read(number, 8))[0]
    finally:
        for _, number in opened:
            os.close(number)
    return Counted(found[_INSTRUCTIONS], found[_CYCLES])


def _open(kind: int, thread: int) -> int:
    """Opens a counter of a thread. Returns its file, or -1."""
    flags = _DISABLED | _NO_KERNEL | _NO_HYPERVISOR
    attributes = struct.pack("IIQQQQQ", 0, _SIZE, kind, 0, 0, 0, flags).ljust(_SIZE, b"\0")
    return int(ctypes.CDLL(None).syscall(_CALL, attributes, thread, -1, -1, 0))
