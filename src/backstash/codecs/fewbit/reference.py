"""A few bits per element: how many thresholds it exceeds; and products with what such codes stand for."""

from __future__ import annotations

import torch
from torch import Tensor

from backstash.ops import bytes_for, check_plane, kernel, pack_fields, unpack_fields


def _codes_and_count(x: Tensor, thresholds: list[float], bits: int) -> tuple[Tensor, Tensor]:
    return x.new_empty(bytes_for(x.numel(), bits), dtype=torch.uint8), x.new_empty(1, dtype=torch.int64)


@kernel("(Tensor x, float[] thresholds, int bits) -> (Tensor, Tensor)", _codes_and_count)
def fewbit_encode(x: Tensor, thresholds: list[float], bits: int) -> tuple[Tensor, Tensor]:
    """Counts the thresholds that each element exceeds, in ``bits`` bits (see :func:`pack_fields`).

    -0.0 counts as 0.0. Infinities and NaN exceed no threshold.

    Args:
        x: float32, bfloat16 or float16 [n], compared as float32.
        thresholds: fewer than 2**bits numbers of float32, rising.
        bits: width of a field, 1 to 4.

    Returns:
        uint8 [ceil(n * bits / 8)]; and int64 [1], the number of elements that are not finite.
    """
    edges = torch.tensor(thresholds, dtype=torch.float32, device=x.device)
    nonfinite = ~x.isfinite()
    codes = torch.bucketize(x.float(), edges).masked_fill(nonfinite, 0)
    return pack_fields(codes, bits), nonfinite.sum().view(1)


@kernel("(Tensor packed, float[] values, int bits, Tensor(a!) out) -> ()")
def fewbit_decode(packed: Tensor, values: list[float], bits: int, out: Tensor) -> None:
    """Fills ``out`` [n] with ``values[field]``, rounded to its dtype. There are 2**bits values."""
    table = torch.tensor(values, dtype=out.dtype, device=out.device)
    out.copy_(table[unpack_fields(packed, bits, out.numel())])


@kernel("(Tensor x, Tensor packed, Tensor table, Tensor(a!) out) -> ()")
def scale_by_codes(x: Tensor, packed: Tensor, table: Tensor, out: Tensor) -> None:
    """Fills ``out`` [n] with ``x`` times ``table[field]``.

    Which of two NaN stays is up to the compiler.

    Args:
        x: [n] floating.
        packed: uint8 [ceil(n * bits / 8)], fields of 1, 2, 3 or 4 bits, see :func:`backstash.ops.bits.pack_fields`.
        table: [2**bits] of the dtype of ``x``, without NaN.
        out: [n] of the dtype of ``x``; it may be ``x``.

    Raises:
        DamagedPlanesError: the plane is not of the size that ``x`` needs, or the table has not 2, 4, 8 or 16 values.
    """
    bits = table.numel().bit_length() - 1
    check_plane("scale_by_codes", "table", table, 2 ** min(max(bits, 1), 4))
    check_plane("scale_by_codes", "packed", packed, bytes_for(x.numel(), bits))
    torch.mul(x, table[unpack_fields(packed, bits, x.numel())], out=out)
