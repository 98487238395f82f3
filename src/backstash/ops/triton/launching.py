"""The common part of all Triton launchers: the launch, sizes of blocks, checks of planes."""

from __future__ import annotations

import math
import struct
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from backstash.ops.bits import bits_of
from backstash.ops.cuda import launcher
from backstash.ops.layout import ZVC_CHUNK, zvc_chunks
from backstash.ops.layout import check_plane as check_plane
from backstash.ops.triton import relaunching

BLOCK_BYTES = 256
"""Bytes of a bit plane that one program writes or reads: 2048 mask bits, 16 elements for each of its 128 threads."""

BLOCK = 1024
"""Elements that one program decodes from fields wider than a bit."""

ZVC_WARPS = 8
"""Warps for a chunk of ZVC_CHUNK elements: 16 elements per thread, as in the other kernels (Triton's default is 4)."""


def launch(kernel: Any, programs: int, *args: Any, **constants: Any) -> None:
    """Runs ``programs`` programs on the device of the first argument; none if ``programs`` is 0, which CUDA refuses."""
    if programs:
        # No product and sum may be fused. Saying so also keeps Triton 3.9 from warning of another default.
        constants["enable_fp_fusion"] = False
        device = args[0].device
        if device.type != "cuda" or device.index == torch.cuda.current_device():
            _run(kernel, programs, args, constants)
        else:
            with torch.cuda.device(device):  # Triton launches on the current device, whatever its arguments say
                _run(kernel, programs, args, constants)


def launch_bytes(kernel: Any, plane: Tensor, *args: Any, **constants: Any) -> None:
    """Runs a program for each ``BLOCK_BYTES`` bytes of a packed plane."""
    launch(kernel, blocks_of(plane.numel(), BLOCK_BYTES), *args, BLOCK_BYTES=BLOCK_BYTES, **constants)


def launch_elements(kernel: Any, numel: int, *args: Any, **constants: Any) -> None:
    """Runs a program for each ``BLOCK`` elements."""
    launch(kernel, blocks_of(numel, BLOCK), *args, BLOCK=BLOCK, **constants)


def launch_chunks(kernel: Any, numel: int, *args: Any, **constants: Any) -> None:
    """Runs a program for each chunk of ``ZVC_CHUNK`` elements."""
    launch(kernel, zvc_chunks(numel), *args, CHUNK=ZVC_CHUNK, num_warps=ZVC_WARPS, **constants)


def _run(kernel: Any, programs: int, args: tuple[Any, ...], constants: dict[str, Any]) -> None:
    if relaunching.is_asked_for() and args[0].is_cuda:
        relaunching.run(kernel, programs, args, constants, launcher.DRIVER)
    else:
        kernel[(programs,)](*args, **constants)


def number_bits(value: float, dtype: torch.dtype, wide: torch.dtype | None = None) -> int:
    """Returns the bit pattern of ``value`` rounded to ``dtype``, and then widened to ``wide`` if that is given.

    Computed on the CPU, whatever the default device is: nothing is copied to or from a GPU.
    """
    return _number_bits(_DOUBLE.pack(value), dtype, wide or dtype)


_DOUBLE = struct.Struct("d")


@lru_cache(maxsize=4096)
def _number_bits(double: bytes, dtype: torch.dtype, wide: torch.dtype) -> int:
    """Takes the bytes of a double, because 0.0 and -0.0 are the same key of a cache."""
    return int(bits_of(torch.tensor(_DOUBLE.unpack(double), dtype=dtype, device="cpu").to(wide)).item())


def blocks_of(n: int, block: int) -> int:
    """Returns the number of blocks of ``block`` elements that cover ``n`` elements."""
    return (n + block - 1) // block


def fields_per_byte(bits: int) -> int:
    """Returns how many fields of ``bits`` bits may have bits in one byte: 2 for 4 bits, 4 for 3 bits."""
    return blocks_of(bits - math.gcd(bits, 8) + 8, bits)


def bytes_per_field(bits: int) -> int:
    """Returns how many bytes one field of ``bits`` bits may have bits in: 1 for 4 bits, 2 for 3 bits."""
    return blocks_of(8 - math.gcd(bits, 8) + bits, 8)
