"""The allocator of a process on CPU: how much time it costs to give memory back, and which one keeps it best.

glibc maps each block above a threshold (at most 32 MiB) afresh, and unmaps it when it is freed. So the system clears
every large tensor of every step and pages it in again, and what lies in its heap leaves holes that stay resident.
tcmalloc does neither, and jemalloc does not if it is told to keep what is freed. They are preloaded into a process when
it starts. mimalloc is only used if it is asked for: it pages every large block in again, more often than glibc.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from backstash.errors import AllocatorError

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of mallopt, malloc.h

WORTH_SAYING = 0.1
"""Share of the processor's time in the system above which :meth:`ProcessorTime.advice` gives advice."""

SYSTEM = "system"
"""The name of the C library's own allocator."""

_FOLDERS = ("/usr/lib", "/usr/lib64", "/lib", "/lib64", "/usr/local/lib", "/usr/local/lib64", "/opt/homebrew/lib")


@dataclass(frozen=True)
class Family:
    """An allocator that may be installed.

    Attributes:
        files: names of its shared library, the best first.
        package: the package of Debian and Ubuntu that has it.
        is_automatic: whether it is used without being asked for.
        settings: environment variables with which it serves training best.
    """

    name: str
    files: tuple[str, ...]
    package: str
    is_automatic: bool = True
    settings: Mapping[str, str] = field(default_factory=dict)


FAMILIES = (
    # Without the threshold it prints a line for each tensor above 1 GiB.
    Family(
        "tcmalloc",
        ("libtcmalloc_minimal.so.4", "libtcmalloc.so.4", "libtcmalloc_minimal.so", "libtcmalloc.so"),
        "libtcmalloc-minimal4",
        settings={"TCMALLOC_LARGE_ALLOC_REPORT_THRESHOLD": str(1 << 62)},
    ),
    # With its defaults it gives freed pages back within the step, and each step pages them in again.
    Family(
        "jemalloc",
        ("libjemalloc.so.2", "libjemalloc.so.1", "libjemalloc.so"),
        "libjemalloc2",
        settings={"MALLOC_CONF": "dirty_decay_ms:-1,muzzy_decay_ms:-1"},
    ),
    Family("mimalloc", ("libmimalloc.so.3", "libmimalloc.so.2", "libmimalloc.so"), "libmimalloc2.0", False),
)
"""The known allocators, the best first."""


@dataclass(frozen=True)
class Allocator:
    """An allocator that can be preloaded.

    Attributes:
        name: the family's name, or the library's file name.
        path: its shared library.
        settings: environment variables that it is started with, unless they are set already.
    """

    name: str
    path: str
    settings: Mapping[str, str] = field(default_factory=dict)

    def environment(self, base: Mapping[str, str]) -> dict[str, str]:
        """The environment of a process that is started with this allocator."""
        preloaded = [name for name in base.get("LD_PRELOAD", "").replace(":", " ").split() if name != self.path]
        return {**self.settings, **base, "LD_PRELOAD": " ".join([self.path, *preloaded])}

    @property
    def is_loaded(self) -> bool:
        """Whether this process was started with it."""
        return self.path in os.environ.get("LD_PRELOAD", "").replace(":", " ").split()


def installed() -> dict[str, Allocator]:
    """The known allocators that this system has, by name, the best first."""
    if sys.platform != "linux":
        return {}
    listed = _listed()
    found = {}
    for family in FAMILIES:
        path = next((path for file in family.files if (path := listed.get(file) or _in_folders(file))), None)
        if path is not None:
            found[family.name] = Allocator(family.name, path, family.settings)
    return found


def choose_allocator(asked: str) -> Allocator | None:
    """Returns the allocator that a process should be started with, or None for the C library's own.

    Args:
        asked: ``"auto"`` for the best that is installed, unless this process has another one already or a GPU will
            compute; ``"system"``; a name of :data:`FAMILIES`; or the path of a shared library.

    Raises:
        AllocatorError: it is not installed, or that is no shared library.
    """
    if asked == SYSTEM:
        return None
    if asked == "auto":
        if preloaded() or _has_gpu():
            return None
        automatic = [family.name for family in FAMILIES if family.is_automatic]
        return next((found for name, found in installed().items() if name in automatic), None)
    family = next((family for family in FAMILIES if family.name == asked), None)
    if family is not None:
        found = installed().get(asked)
        if found is None:
            raise AllocatorError(
                f"the allocator {asked!r} was asked for, but this system has no {family.files[0]}. Install it (Debian, "
                f"Ubuntu: apt install {family.package}), or give the path of the library."
            )
        return found
    path = Path(asked)
    if not _is_library(path):
        names = ", ".join(["auto", SYSTEM, *(family.name for family in FAMILIES)])
        wrong = "is no shared library" if path.is_file() else "does not exist"
        raise AllocatorError(
            f"the allocator {asked!r} was asked for, but that file {wrong}. Give one of {names}, or the path of a "
            f"shared library that defines malloc."
        )
    settings = next((family.settings for family in FAMILIES if family.name in path.name), {})
    return Allocator(path.name.partition(".so")[0].removeprefix("lib"), str(path.resolve()), settings)


def preloaded() -> str | None:
    """The name of an allocator that this process was started with by its environment; None for the system's."""
    for path in os.environ.get("LD_PRELOAD", "").replace(":", " ").split():
        for family in FAMILIES:
            if family.name in Path(path).name:
                return family.name
    return None


def allocator_advice() -> str | None:
    """Returns what to install for an allocator that keeps memory; None if there is one, or if it would not help."""
    if sys.platform != "linux" or choose_allocator("auto") is not None or preloaded() or _has_gpu():
        return None
    return (
        f"no tcmalloc or jemalloc is installed: the resident memory of training on CPU shrinks less than its tensors "
        f"(Debian, Ubuntu: apt install {FAMILIES[0].package})"
    )


def _listed() -> dict[str, str]:
    """Libraries by file name, from the cache of the dynamic linker."""
    command = shutil.which("ldconfig") or shutil.which("ldconfig", path="/sbin:/usr/sbin")
    if command is None:
        return {}
    done = subprocess.run([command, "-p"], capture_output=True, text=True, check=False)
    lines = (line.strip().partition(" => ") for line in done.stdout.splitlines())
    known = {file for family in FAMILIES for file in family.files}
    found: dict[str, str] = {}
    for line, _, path in lines:
        name = line.partition(" ")[0]
        if name in known - set(found) and _is_library(Path(path)):
            found[name] = path
    return found


def _in_folders(file: str) -> str | None:
    """A library in one of the usual folders, or in the environment's (conda has its own)."""
    machine = os.uname().machine
    folders = [*_FOLDERS, f"/usr/lib/{machine}-linux-gnu", str(Path(sys.prefix, "lib"))]
    return next((str(path) for folder in folders if _is_library(path := Path(folder, file))), None)


def _is_library(path: Path) -> bool:
    """Whether a file is a shared library of this process's word size."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(5) == (b"\x7fELF\x02" if sys.maxsize > 2**32 else b"\x7fELF\x01")


def _has_gpu() -> bool:
    """Whether a GPU will do the computing, so that the host's memory matters little."""
    from backstash import accelerator  # imports torch

    return accelerator.kind() is not None


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
class ProcessorTime:
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
    def now(cls) -> ProcessorTime:
        """The usage from the start of the process until now."""
        import resource

        used = resource.getrusage(resource.RUSAGE_SELF)
        return cls(used.ru_utime, used.ru_stime, used.ru_minflt)

    def since(self, before: ProcessorTime) -> ProcessorTime:
        """The usage between ``before`` and this one."""
        return ProcessorTime(
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
            f"page faults: freed memory is given back and paged in again. tcmalloc keeps it (Debian, Ubuntu: apt "
            f"install {FAMILIES[0].package}), and so does backstash run --keep-memory."
        )
