"""The machine that a measurement ran on, as one line of text and as data for JSON."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import torch

from backstash import accelerator
from backstash.version import __version__

_PACKAGE = Path(__file__).parents[1]
_CPUINFO = Path("/proc/cpuinfo")
_SETTINGS = ("BACKSTASH_", "MALLOC_", "LD_PRELOAD", "OMP_", "MKL_", "KMP_", "PYTORCH_")


@dataclass(frozen=True)
class Machine:
    """Hardware and versions.

    Attributes:
        cores: number of cores that this process may use.
        threads: number of threads with which torch computes on CPU.
        gpu: name of the accelerator; None without one.
        commit: git commit of backstash, with ``-dirty`` if files differ from it; None if it is not known.
        settings: environment variables of backstash, the allocator and the thread pools, which change results.
    """

    cpu: str
    cores: int
    threads: int
    gpu: str | None
    python: str
    torch: str
    backstash: str
    commit: str | None
    settings: dict[str, str]

    def __str__(self) -> str:
        return (
            f"{f'{self.gpu}; ' if self.gpu else ''}{self.cpu}, {self.cores} cores, {self.threads} threads; "
            f"Python {self.python}, torch {self.torch}, backstash {self.backstash}"
            f"{f' ({self.commit})' if self.commit else ''}{''.join(f'; {k}={v}' for k, v in self.settings.items())}"
        )


def describe_machine() -> Machine:
    """Describes the machine that this process runs on."""
    return Machine(
        cpu=_cpu(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        threads=torch.get_num_threads(),
        gpu=next(iter(accelerator.names()), None),
        python=platform.python_version(),
        torch=torch.__version__,
        backstash=__version__,
        commit=_commit(),
        settings={name: value for name, value in sorted(os.environ.items()) if name.startswith(_SETTINGS)},
    )


def _cpu() -> str:
    lines = _CPUINFO.read_text().splitlines() if _CPUINFO.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _commit() -> str | None:
    """The commit of a checkout. git must track this file, as an installed package may lie in another repository."""
    if not shutil.which("git") or _git("ls-files", "--error-unmatch", "__init__.py") is None:
        return None
    return _git("describe", "--always", "--dirty", "--abbrev=12", "--exclude=*")


def _git(*arguments: str) -> str | None:
    done = subprocess.run(["git", "-C", str(_PACKAGE), *arguments], capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None
