"""Integers of few bits in C++: int64, int32, int16, int8, uint8 and bool. Others go to the reference."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from backstash.codecs.narrow import reference as reference
from backstash.ops import bytes_for
from backstash.ops.cpu import library
from backstash.ops.cpu.planes import INTEGERS, check_plane, new_plane, threads_for

_lib: Any = library.functions(
    bs_narrow_encode="(pliilpi)",
    bs_narrow_decode="(pilplii)",
)


def narrow_encode(x: Tensor, bits: int, base: int) -> Tensor:
    """See :func:`backstash.codecs.narrow.reference.narrow_encode`."""
    code = INTEGERS.get(x.dtype)
    if code is None or not 1 <= bits <= 32:
        return reference.narrow_encode(x, bits, base)
    n = x.numel()
    packed = new_plane(bytes_for(n, bits), torch.uint8)
    _lib.bs_narrow_encode(x.data_ptr(), n, code, bits, base, packed.data_ptr(), threads_for(n * x.element_size()))
    return packed


def narrow_decode(packed: Tensor, bits: int, base: int, out: Tensor) -> None:
    """See :func:`backstash.codecs.narrow.reference.narrow_decode`."""
    code = INTEGERS.get(out.dtype)
    if code is None or not 1 <= bits <= 32:
        return reference.narrow_decode(packed, bits, base, out)
    n = out.numel()
    check_plane("narrow_decode", "packed", packed, bytes_for(n, bits))
    _lib.bs_narrow_decode(packed.data_ptr(), bits, base, out.data_ptr(), n, code, threads_for(n * out.element_size()))
