"""Exponents as codes into windows, in C++: of elements of 2 and of 4 bytes. Others go to the reference."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from backstash.codecs.exponents import reference as reference
from backstash.codecs.exponents.reference import check_exponents, exponents_blocks, exponents_damage
from backstash.errors import DamagedPlanesError
from backstash.ops import bytes_for, zvc_chunks
from backstash.ops.cpu import library
from backstash.ops.cpu.planes import new_plane, threads_for

_lib: Any = library.functions(
    bs_exponents_code="l(pliippppplpi)",
    bs_exponents_gather="(pliipppplpli)",
    bs_exponents_decode="i(ppppplpliii)",
)

ASIDE = 8
"""Escapes are put aside until their number is known, up to one in so many elements; the others are looked for again."""


def exponents_encode(x: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """See :func:`backstash.codecs.exponents.reference.exponents_encode`."""
    if x.element_size() not in (2, 4):
        return reference.exponents_encode(x, bits)
    return _encoded(x, bits, None)[0]


def exponents_encode_within(x: Tensor, bits: int, room: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """See :func:`backstash.codecs.exponents.reference.exponents_encode_within`."""
    if x.element_size() not in (2, 4):
        return reference.exponents_encode_within(x, bits, room)
    planes, stored = _encoded(x, bits, room)
    return *planes, torch.full((1,), stored, dtype=torch.int64, device="cpu")


def _encoded(x: Tensor, bits: int, room: int | None) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor, Tensor], int]:
    """Returns the planes, with room for so many escapes, None for as many as there are; and the number of these."""
    n, width, chunks = x.numel(), x.element_size(), zvc_chunks(x.numel())
    fractions = new_plane((width - 1) * n, torch.uint8)
    codes = new_plane(bytes_for(n, bits), torch.uint8)
    bases = torch.empty(exponents_blocks(n), dtype=torch.uint8, device="cpu")
    offsets = torch.empty(chunks, dtype=torch.int64, device="cpu")
    aside = torch.empty(n // ASIDE, dtype=torch.uint8, device="cpu")
    places = torch.empty(chunks, dtype=torch.int64, device="cpu")
    what, threads = (x.data_ptr(), n, width, bits), threads_for(n * width)
    planes = fractions.data_ptr(), codes.data_ptr(), bases.data_ptr(), offsets.data_ptr()
    stored = _lib.bs_exponents_code(*what, *planes, aside.data_ptr(), aside.numel(), places.data_ptr(), threads)
    room = stored if room is None else room
    escapes = new_plane(room, torch.uint8)
    found = codes.data_ptr(), offsets.data_ptr(), aside.data_ptr(), places.data_ptr(), stored
    _lib.bs_exponents_gather(*what, *found, escapes.data_ptr(), room, threads)
    return (fractions, codes, bases, offsets, escapes), stored


def exponents_decode(
    fractions: Tensor, codes: Tensor, bases: Tensor, offsets: Tensor, escapes: Tensor, bits: int, out: Tensor
) -> None:
    """See :func:`backstash.codecs.exponents.reference.exponents_decode`. Checks all planes first."""
    width = out.element_size()
    if width not in (2, 4):
        return reference.exponents_decode(fractions, codes, bases, offsets, escapes, bits, out)
    check_exponents(fractions, codes, bases, offsets, bits, out)
    n, stored = out.numel(), escapes.numel()
    planes = [plane.data_ptr() for plane in (fractions, codes, bases, offsets, escapes)]
    if _lib.bs_exponents_decode(*planes, stored, out.data_ptr(), n, width, bits, threads_for(n * width)) != 0:
        raise DamagedPlanesError(exponents_damage(stored))
