"""Run lengths of zeros in C++: the kernels of ZVC, and kernels between its mask and the tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from backstash.codecs.rle import reference as reference
from backstash.codecs.rle.reference import rle_damage
from backstash.codecs.zvc.cpu import zvc_decode, zvc_encode
from backstash.errors import DamagedPlanesError
from backstash.ops import bytes_for, zvc_chunks
from backstash.ops.cpu import library
from backstash.ops.cpu.planes import check_plane, new_plane, threads_for

_lib: Any = library.functions(
    bs_rle_count="l(plpi)",
    bs_rle_write="(plppi)",
    bs_rle_mask="i(plplpi)",
)


def rle_encode(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """See :func:`backstash.codecs.rle.reference.rle_encode`."""
    width = x.element_size()
    if width not in (2, 4, 8):
        return reference.rle_encode(x)
    n, chunks, threads = x.numel(), zvc_chunks(x.numel()), threads_for(x.numel() * width)
    mask, offsets, values = zvc_encode(x)
    starts = torch.empty(2 * chunks, dtype=torch.int64, device="cpu")
    starts[chunks:] = offsets
    tokens = new_plane(_lib.bs_rle_count(mask.data_ptr(), n, starts.data_ptr(), threads), torch.uint8)
    _lib.bs_rle_write(mask.data_ptr(), n, starts.data_ptr(), tokens.data_ptr(), threads)
    return tokens, starts, values


def rle_decode(tokens: Tensor, starts: Tensor, values: Tensor, out: Tensor) -> None:
    """See :func:`backstash.codecs.rle.reference.rle_decode`. All planes are checked before ``out`` is touched."""
    width = out.element_size()
    if width not in (2, 4, 8) or values.element_size() != width:
        return reference.rle_decode(tokens, starts, values, out)
    n, stored, chunks = out.numel(), values.numel(), zvc_chunks(out.numel())
    check_plane("rle_decode", "starts", starts, 2 * chunks)
    threads = threads_for(n * width)
    mask = new_plane(bytes_for(n, 1), torch.uint8)
    planes = tokens.data_ptr(), tokens.numel(), starts.data_ptr()
    if _lib.bs_rle_mask(*planes, n, mask.data_ptr(), threads) != 0:
        raise DamagedPlanesError(rle_damage(stored))
    try:
        zvc_decode(mask, starts[chunks:], values, out)
    except DamagedPlanesError:
        raise DamagedPlanesError(rle_damage(stored)) from None
