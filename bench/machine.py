"""A description of the machine: one line for people, all of it for the JSON."""

from __future__ import annotations

import os
import platform
import subprocess
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import torch

from backstash.ops import backends
from backstash.report import machine

ROOT = Path(__file__).resolve().parents[1]
"""The repository."""

PACKAGES = (
    "backstash",
    "torch",
    "numpy",
    "triton",
    "transformers",
    "scikit-learn",
    "blosc2",
    "numcodecs",
    "pysz",
    "zfpy",
)


@dataclass(frozen=True)
class Machine(machine.Machine):
    """Hardware, software and commit; ``gpu`` is None where the benchmark ran on CPU.

    Attributes:
        memory_nbytes: memory of the machine.
        gpu_driver: version of the GPU's driver.
        gpu_memory_nbytes: its memory.
        system: operating system and version.
        huge_pages: the kernel's setting of transparent huge pages.
        packages: versions of the packages that matter; an absent one is missing here.
        cuda: CUDA version that torch was built for.
        kernels: which kernels served the device: native, triton or reference.
        load: load averages over 1, 5 and 15 minutes at the start: over a quiet machine's 0 somebody else computed too.
    """

    memory_nbytes: int | None
    gpu_driver: str | None
    gpu_memory_nbytes: int | None
    system: str
    huge_pages: str | None
    packages: dict[str, str]
    cuda: str | None
    kernels: str
    load: tuple[float, ...]

    def __str__(self) -> str:
        memory = "" if self.memory_nbytes is None else f"; {self.memory_nbytes / 2**30:.0f} GiB"
        driver = "" if self.gpu is None else f"; driver {self.gpu_driver}"
        return (
            f"{super().__str__()}{driver}{memory}; {self.system}; {self.kernels} kernels; "
            f"load {' '.join(f'{one:.2f}' for one in self.load)}"
        )


def describe(device: str) -> Machine:
    """The machine that this process runs on.

    Args:
        device: ``"cpu"``, or the accelerator's type.
    """
    cuda = device == "cuda"
    here = vars(machine.describe_machine())
    return Machine(
        **here | {"gpu": None if device == "cpu" else here["gpu"]},
        memory_nbytes=_memory(),
        gpu_driver=_output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") if cuda else None,
        gpu_memory_nbytes=torch.cuda.get_device_properties(0).total_memory if cuda else None,
        system=f"{platform.system()} {platform.release()}",
        huge_pages=_huge_pages(),
        packages=_versions(),
        cuda=torch.version.cuda,
        kernels=backends.name(device),
        load=load(),
    )


def load() -> tuple[float, ...]:
    """Load averages over 1, 5 and 15 minutes; empty where the system has none."""
    return tuple(round(one, 2) for one in os.getloadavg()) if hasattr(os, "getloadavg") else ()


def _versions() -> dict[str, str]:
    versions: dict[str, str] = {"torch": str(torch.__version__)}
    for package in PACKAGES:
        try:
            versions.setdefault(package, metadata.version(package))
        except metadata.PackageNotFoundError:
            continue
    return versions


def _memory() -> int | None:
    file = Path("/proc/meminfo")
    lines = file.read_text().splitlines() if file.exists() else []
    sizes = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemTotal:")]
    return sizes[0] if sizes else None


def _huge_pages() -> str | None:
    file = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not file.exists():
        return None
    return file.read_text().partition("[")[2].partition("]")[0]


def _output(*command: str) -> str | None:
    """What a command prints; None where it fails or is not there."""
    try:
        result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=30)
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() if result.returncode == 0 else None
