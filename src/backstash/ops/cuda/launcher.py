"""A launcher of compiled CUDA kernels: cubins of our own and of Triton, by the driver's function for it.

A launch is one call of a C function (``native/launch``). It is told the kinds of the kernel's arguments once, when the
kernel is loaded, and takes tensors as they are. It runs in torch's primary context, on the stream that it is given.
"""

from __future__ import annotations

import importlib
import re
from functools import cache
from pathlib import Path
from typing import Any

import torch

DRIVER = "libcuda.so.1"
FATBIN = Path(__file__).with_name("kernels.fatbin")
"""Where ``setup.py`` puts the kernels."""

ARCHITECTURES = (80, 86, 89, 90, 100, 120)
"""The compute capabilities that the fatbin has code for; setup.py has the same ones."""

KINDS = {"i1": "i", "i8": "i", "i16": "i", "i32": "i", "u32": "i", "i64": "l", "u64": "l", "fp32": "f", "fp64": "d"}
"""What the launcher calls Triton's types of numbers; pointers are ``p``."""

_ENTRY = re.compile(r"\.entry\s+(\w+)\s*\((.*?)\)", re.DOTALL)
_PARAMETER = re.compile(r"\.param\s+\.(?:align\s+\d+\s+\.)?(\w+)")
_PTX_KINDS = {"u64": "pl", "b64": "pl", "u32": "i", "b32": "i", "f32": "f", "f64": "d", "s32": "i", "s64": "l"}


@cache
def compiled_launcher() -> Any | None:
    """Returns the module of C++ that launches; None where it was not built."""
    try:
        return importlib.import_module("backstash.ops._launch")
    except ImportError:
        return None


@cache
def open_launcher(driver: str = DRIVER) -> Any | None:
    """Returns the launcher with the driver open; None where one of them is not there."""
    found = compiled_launcher()
    if found is not None:
        try:
            found.open_driver(driver)
        except OSError:
            return None
    return found


def load(image: bytes, name: str, device: int, threads: int, shared: int, kinds: str, driver: str = DRIVER) -> int:
    """Loads a kernel on a device.

    Args:
        image: a cubin or fatbin.
        name: of the kernel.
        device: the number of the CUDA device.
        threads: of a block.
        shared: bytes of dynamic shared memory; more than 48 KiB are asked for.
        kinds: of the arguments, a letter each: ``p`` a tensor or None, ``i`` and ``l`` integers of 32 and 64 bits,
            ``f`` and ``d`` floats of as many, ``0`` a null pointer that nobody gives.
        driver: the path of libcuda.

    Returns:
        What the launcher's function ``launch`` takes as its first argument.

    Raises:
        RuntimeError: there is no launcher, or the driver refuses.
    """
    opened = open_launcher(driver)
    if opened is None:
        raise RuntimeError(
            f"asked for the kernel {name!r}, but there is no compiled launcher or no {driver}. Build it with 'python "
            f"setup.py build_native'; 'backstash doctor' tells what is there."
        )
    return int(opened.load_kernel(image, name, device, threads, shared, kinds))


def load_triton(compiled: Any, device: int, driver: str = DRIVER) -> int:
    """Loads what ``triton.compile`` has returned; its arguments are those of the kernel that are no constants.

    Triton's kernels take pointers to scratch memory after their own arguments, how many depends on its version: as many
    as the PTX has parameters more. They are null here.

    Raises:
        ValueError: the kernel needs scratch memory, clusters or a cooperative launch, or takes what is no number.
        RuntimeError: as :func:`load`.
    """
    metadata = compiled.metadata
    wants = ("global_scratch_size", "profile_scratch_size", "launch_cooperative_grid", "launch_pdl")
    asked = [name for name in wants if getattr(metadata, name, 0)]
    if asked or getattr(metadata, "num_ctas", 1) != 1:
        raise ValueError(
            f"asked to launch {metadata.name!r}, but it needs {', '.join(asked) or 'clusters'}, which the launcher "
            f"does not provide. Call it by Triton's own launcher."
        )
    kinds = triton_kinds(compiled.src.signature)
    given = len(ptx_kinds(compiled.asm["ptx"], metadata.name))
    image, threads = compiled.asm["cubin"], metadata.num_warps * 32
    kinds += "0" * (given - len(kinds))
    return load(image, metadata.name, device, threads, metadata.shared, kinds, driver)


def triton_kinds(signature: dict[str, str]) -> str:
    """Returns the kinds of the arguments of a signature that are no constants.

    Raises:
        ValueError: one is neither a pointer nor a number of 32 or 64 bits.
    """
    types = [each for each in signature.values() if each != "constexpr"]
    unknown = [each for each in types if not each.startswith("*") and each not in KINDS]
    if unknown:
        raise ValueError(
            f"asked to launch a kernel with arguments of the types {unknown}, but only {list(KINDS)} are known"
        )
    return "".join("p" if each.startswith("*") else KINDS[each] for each in types)


def ptx_kinds(ptx: str, name: str) -> list[str]:
    """Returns of each parameter of an entry which kinds it may be; a pointer and an integer look alike.

    Raises:
        LookupError: there is no such entry.
    """
    for entry, parameters in _ENTRY.findall(ptx):
        if entry == name:
            return [_PTX_KINDS.get(each, each) for each in _PARAMETER.findall(parameters)]
    raise LookupError(f"asked for the entry {name!r} of a kernel's PTX, which has none of that name")


def stream_of(device: int) -> int:
    """Returns the stream that torch launches on now, as the driver knows it."""
    return int(torch.cuda.current_stream(device).cuda_stream)
