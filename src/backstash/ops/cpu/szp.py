"""Error-bounded values at a width per block, in C++. float32, float16 and bfloat16; others go to the reference."""

from __future__ import annotations

import torch
from torch import Tensor

from backstash.errors import DamagedPlanesError
from backstash.ops import cpu, reference
from backstash.ops.cpu import library
from backstash.ops.reference import szp as layout
from backstash.ops.schema import bytes_for, zvc_chunks

_TYPES = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 3}  # the codes of native/elements.h
_lib = library.load()


def szp_range(x: Tensor) -> Tensor:
    """See :func:`backstash.ops.reference.szp.szp_range`."""
    if _lib is None or x.dtype not in _TYPES:
        return reference.szp_range(x)
    n, found = x.numel(), torch.empty(2, dtype=torch.float32, device="cpu")
    scratch = torch.empty(2 * ((n >> 16) + 1), dtype=torch.float32, device="cpu")
    outputs = scratch.data_ptr(), found.data_ptr()
    _lib.bs_szp_range(x.data_ptr(), n, _TYPES[x.dtype], *outputs, cpu._threads(x.nbytes))
    return found


def szp_encode(x: Tensor, grid: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """See :func:`backstash.ops.reference.szp.szp_encode`."""
    if _lib is None or x.dtype not in _TYPES:
        return reference.szp_encode(x, grid)
    n, threads = x.numel(), cpu._threads(x.nbytes)
    mask = cpu._new(bytes_for(n, 1), torch.uint8)
    offsets = torch.empty(zvc_chunks(n), dtype=torch.int64, device="cpu")
    arguments = x.data_ptr(), n, _TYPES[x.dtype], grid.data_ptr(), mask.data_ptr(), offsets.data_ptr()
    stored = _lib.bs_szp_measure(*arguments, threads)
    words = cpu._new(stored, torch.int32)
    _lib.bs_szp_write(*arguments, words.data_ptr(), stored, threads)
    return mask, offsets, words


def szp_decode(mask: Tensor, offsets: Tensor, words: Tensor, step: Tensor, out: Tensor) -> None:
    """See :func:`backstash.ops.reference.szp.szp_decode`. All planes are checked before ``out`` is touched.

    Raises:
        DamagedPlanesError: a plane is not of the size that ``out`` needs, or the mask's bits, the offsets, the widths
            and the number of words do not agree.
    """
    if _lib is None or out.dtype not in _TYPES:
        return reference.szp_decode(mask, offsets, words, step, out)
    n = out.numel()
    cpu._check_plane("szp_decode", "mask", mask, bytes_for(n, 1))
    cpu._check_plane("szp_decode", "offsets", offsets, zvc_chunks(n))
    planes = mask.data_ptr(), offsets.data_ptr(), words.data_ptr(), words.numel(), float(step)
    if _lib.bs_szp_decode(*planes, out.data_ptr(), n, _TYPES[out.dtype], cpu._threads(out.nbytes)) != 0:
        raise DamagedPlanesError(layout.szp_damage(words.numel()))
