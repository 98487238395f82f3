"""The C library's allocator on CPU: how much time it costs to give memory back after every layer, and how to keep it.

glibc maps each block above a threshold (at most 32 MiB) afresh, and unmaps it when it is freed. So the system clears
every large tensor of every step and pages it in again. A process that keeps freed memory does not pay for that.
"""

from __future__ import annotations

import ctypes
import os
import sys
from dataclasses import dataclass

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of mallopt, malloc.h

WORTH_SAYING = 0.1
"""Share of the processor's time in the system above which :meth:`Usage.advice` gives advice."""


def keep_memory() -> bool:
    """Lets this process keep freed memory for its next allocations, instead of giving it back to the system.

    This holds for blocks of up to 1 GiB, and for up to 2 GiB of free memory. It is the same as to start the process
    with ``MALLOC_MMAP_THRESHOLD_=1073741824 MALLOC_TRIM_THRESHOLD_=2147483647``. It cannot be undone within the
    process, whose resident memory never shrinks again.

    Returns:
        Whether the C library can do it. glibc can.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    return mallopt is not None and bool(mallopt(_MMAP_THRESHOLD, 1 << 30)) and bool(mallopt(_TRIM_THRESHOLD, 2**31 - 1))


@dataclass(frozen=True)
class Usage:
    """The processor time that this process has used.

    Attributes:
        program_seconds: time in the program.
        system_seconds: time in the system on behalf of the program, mostly for page faults.
        page_faults: number of page faults, without those that read from a disk.
    """

    program_seconds: float
    system_seconds: float
    page_faults: int

    @classmethod
    def now(cls) -> Usage:
        """The usage from the start of the process until now."""
        import resource

        used = resource.getrusage(resource.RUSAGE_SELF)
        return cls(used.ru_utime, used.ru_stime, used.ru_minflt)

    def since(self, before: Usage) -> Usage:
        """The usage between ``before`` and this one."""
        return Usage(
            self.program_seconds - before.program_seconds,
            self.system_seconds - before.system_seconds,
            self.page_faults - before.page_faults,
        )

    def advice(self) -> str | None:
        """Returns how to save the time in the system, or None if it is a small share."""
        total = self.program_seconds + self.system_seconds
        if os.name != "posix" or total <= 0 or self.system_seconds / total < WORTH_SAYING:
            return None
        return (
            f"{self.system_seconds / total:.0%} of the processor time went to the system, with {self.page_faults:,} "
            f"page faults: freed memory is given back and paged in again. backstash run --keep-memory keeps it; so "
            f"does, without backstash, MALLOC_MMAP_THRESHOLD_=1073741824 MALLOC_TRIM_THRESHOLD_=2147483647 in the "
            f"environment."
        )
