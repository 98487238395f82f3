"""Error-bounded values at a width per block, in C++.

Other dtypes than float32, float16 and bfloat16 go to the reference.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from backstash.codecs.szp import reference as reference
from backstash.codecs.szp.reference import szp_damage
from backstash.errors import DamagedPlanesError
from backstash.ops import bytes_for, zvc_chunks
from backstash.ops.cpu import library
from backstash.ops.cpu.planes import SMALL_FLOATS, check_plane, new_plane, threads_for

_lib: Any = library.functions(
    bs_szp_range="(plippi)",
    bs_szp_measure="l(plipppi)",
    bs_szp_write="(plippppli)",
    bs_szp_decode="i(ppplfplii)",
)


def szp_range(x: Tensor) -> Tensor:
    """See :func:`backstash.codecs.szp.reference.szp_range`."""
    if x.dtype not in SMALL_FLOATS:
        return reference.szp_range(x)
    n, found = x.numel(), torch.empty(2, dtype=torch.float32, device="cpu")
    scratch = torch.empty(2 * ((n >> 16) + 1), dtype=torch.float32, device="cpu")
    outputs = scratch.data_ptr(), found.data_ptr()
    _lib.bs_szp_range(x.data_ptr(), n, SMALL_FLOATS[x.dtype], *outputs, threads_for(x.nbytes))
    return found


def szp_encode(x: Tensor, grid: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """See :func:`backstash.codecs.szp.reference.szp_encode`."""
    if x.dtype not in SMALL_FLOATS:
        return reference.szp_encode(x, grid)
    n, threads = x.numel(), threads_for(x.nbytes)
    mask = new_plane(bytes_for(n, 1), torch.uint8)
    offsets = torch.empty(zvc_chunks(n), dtype=torch.int64, device="cpu")
    arguments = x.data_ptr(), n, SMALL_FLOATS[x.dtype], grid.data_ptr(), mask.data_ptr(), offsets.data_ptr()
    stored = _lib.bs_szp_measure(*arguments, threads)
    words = new_plane(stored, torch.int32)
    _lib.bs_szp_write(*arguments, words.data_ptr(), stored, threads)
    return mask, offsets, words


def szp_decode(mask: Tensor, offsets: Tensor, words: Tensor, step: Tensor, out: Tensor) -> None:
    """See :func:`backstash.codecs.szp.reference.szp_decode`. All planes are checked before ``out`` is touched."""
    if out.dtype not in SMALL_FLOATS:
        return reference.szp_decode(mask, offsets, words, step, out)
    n = out.numel()
    check_plane("szp_decode", "mask", mask, bytes_for(n, 1))
    check_plane("szp_decode", "offsets", offsets, zvc_chunks(n))
    planes = mask.data_ptr(), offsets.data_ptr(), words.data_ptr(), words.numel(), float(step)
    if _lib.bs_szp_decode(*planes, out.data_ptr(), n, SMALL_FLOATS[out.dtype], threads_for(out.nbytes)) != 0:
        raise DamagedPlanesError(szp_damage(words.numel()))
