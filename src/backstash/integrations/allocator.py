"""The C library's allocator on CPU: what it costs to give memory back after every layer, and how to stop it.

glibc maps each block above a threshold (at most 32 MiB) afresh and unmaps it when it is freed, so every large tensor of
every step is paged in and cleared once more by the system. A process that keeps what it has freed does not pay that.
"""

from __future__ import annotations

import ctypes
import os
import sys
from dataclasses import dataclass

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of mallopt, malloc.h

WORTH_SAYING = 0.1
"""Share of the processor's time in the system from which it is worth to be told."""


def keep_memory() -> bool:
    """Have this process keep memory that it frees, for its next allocations, instead of giving it back to the system.

    For blocks up to 1 GiB and as much as 2 GiB of free memory; the same as starting the process with
    ``MALLOC_MMAP_THRESHOLD_=1073741824 MALLOC_TRIM_THRESHOLD_=2147483647``. It cannot be undone within the process, and
    its resident memory stays as large as it was at the largest.

    Returns:
        Whether the C library knows how: glibc does.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    return mallopt is not None and bool(mallopt(_MMAP_THRESHOLD, 1 << 30)) and bool(mallopt(_TRIM_THRESHOLD, 2**31 - 1))


@dataclass(frozen=True)
class Usage:
    """Time that this process has taken of the processors.

    Attributes:
        program_seconds: in the program.
        system_seconds: in the system on its behalf: page faults, above all.
        page_faults: how many, without those that read from disk.
    """

    program_seconds: float
    system_seconds: float
    page_faults: int

    @classmethod
    def now(cls) -> Usage:
        """From the start of the process until now."""
        import resource

        used = resource.getrusage(resource.RUSAGE_SELF)
        return cls(used.ru_utime, used.ru_stime, used.ru_minflt)

    def since(self, before: Usage) -> Usage:
        """What was used in between."""
        return Usage(
            self.program_seconds - before.program_seconds,
            self.system_seconds - before.system_seconds,
            self.page_faults - before.page_faults,
        )

    def advice(self) -> str | None:
        """What keeping memory could give, None where it is not worth a line."""
        total = self.program_seconds + self.system_seconds
        if os.name != "posix" or total <= 0 or self.system_seconds / total < WORTH_SAYING:
            return None
        return (
            f"{self.system_seconds / total:.0%} of the processor time went to the system, with {self.page_faults:,} "
            f"page faults: freed memory is given back and paged in again. backstash run --keep-memory keeps it; so "
            f"does, without backstash, MALLOC_MMAP_THRESHOLD_=1073741824 MALLOC_TRIM_THRESHOLD_=2147483647 in the "
            f"environment."
        )
