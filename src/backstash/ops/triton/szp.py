"""Error-bounded values at a width per block, on CUDA: the launchers. ``szp_kernels`` has the device code."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from backstash.errors import DamagedPlanesError
from backstash.ops import triton
from backstash.ops.schema import SZP_BLOCK, ZVC_CHUNK, bytes_for, zvc_chunks

SLOT = ZVC_CHUNK + ZVC_CHUNK // SZP_BLOCK // 4
"""Words that a chunk takes at most."""


def szp_range(x: Tensor) -> Tensor:
    """The smallest and the largest finite element. See ``reference.szp_range``."""
    keys = torch.stack([x.new_full((), 0x7F800000, dtype=torch.int32), x.new_full((), -0x7F800001, dtype=torch.int32)])
    _launch("szp_range_kernel", triton._blocks(x.numel(), ZVC_CHUNK), x, keys, x.numel(), BLOCK=ZVC_CHUNK)
    found = torch.where(keys < 0, keys ^ 0x7FFFFFFF, keys).view(torch.float32)
    return torch.where(keys[0] <= keys[1], found, 0.0) + 0.0


def szp_encode_staged(x: Tensor, grid: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """:func:`szp_encode` that never waits for the device: every chunk's words stay in a slot as large as any may be.

    Returns:
        mask, and offsets as :func:`szp_encode` has them; staging int32 [chunks, SLOT]; sizes int64 [chunks], of which
        the sum is how many words :func:`szp_compact` makes.
    """
    chunks = zvc_chunks(x.numel())
    mask = x.new_empty(bytes_for(x.numel(), 1), dtype=torch.uint8)
    sizes = x.new_empty(chunks, dtype=torch.int64)
    staging = x.new_empty((chunks, SLOT), dtype=torch.int32)
    _launch("szp_encode_kernel", chunks, x, grid, mask, sizes, staging, x.numel(), **_constants(x))
    return mask, sizes.cumsum(0) - sizes, staging, sizes


def szp_compact(staging: Tensor, offsets: Tensor, sizes: Tensor, words: Tensor) -> None:
    """Fill ``words``, which has room for them, with what :func:`szp_encode_staged` left in the slots."""
    kernel = triton._kernels().szp_compact_kernel
    triton._launch(kernel, sizes.numel(), staging, offsets, sizes, words, SLOT=SLOT, BLOCK=triton.BLOCK)


def szp_encode(x: Tensor, grid: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Where elements are not zero, and these as multiples of a step. See ``reference.szp_encode``.

    One pass over ``x``. **Waits for the device**, once, after it: the size of the words plane depends on the data.
    Until then a buffer of SLOT words per chunk is allocated as well.
    """
    mask, offsets, staging, sizes = szp_encode_staged(x, grid)
    words = x.new_empty(int(sizes.sum().item()), dtype=torch.int32)
    szp_compact(staging, offsets, sizes, words)
    return mask, offsets, words


def szp_decode(mask: Tensor, offsets: Tensor, words: Tensor, step: Tensor, out: Tensor) -> None:
    """Fill ``out`` [n] from the planes of :func:`szp_encode` and the step, float32 [1].

    Raises:
        DamagedPlanesError: a plane has the wrong size, or there are more words than fit the chunks. That the mask's
            bits, the offsets, the widths and the words agree is not checked, which would wait for the device: no access
            leaves its plane.
    """
    chunks = zvc_chunks(out.numel())
    triton._check_plane("szp_decode", "mask", mask, bytes_for(out.numel(), 1), out)
    triton._check_plane("szp_decode", "offsets", offsets, chunks, out)
    triton._check_plane("szp_decode", "step", step, 1, out)
    if words.numel() > chunks * SLOT:
        raise DamagedPlanesError(
            f"szp_decode asked for at most {chunks * SLOT} words, got {words.numel()}. The stash was overwritten or "
            f"belongs to another tensor; compute the step again."
        )
    kernel = triton._kernels().szp_decode_kernel
    arguments = mask, offsets, words, step, triton._bits_of(out), out.numel(), words.numel()
    triton._launch(kernel, chunks, *arguments, HALF=out.dtype == torch.float16, **_constants(out))


def _constants(x: Tensor) -> dict[str, Any]:
    return {"BITS": 8 * x.element_size(), "CHUNK": ZVC_CHUNK, "BLOCK": SZP_BLOCK, "num_warps": triton.ZVC_WARPS}


def _launch(kernel: str, programs: int, x: Tensor, *args: Any, **constants: Any) -> None:
    half = x.dtype == torch.float16
    triton._launch(getattr(triton._kernels(), kernel), programs, triton._bits_of(x), *args, HALF=half, **constants)
