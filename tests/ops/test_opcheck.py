"""torch's own checks of the registered ops: the schema tells the truth, fakes agree, tracing works."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.library import opcheck

import backstash  # noqa: F401  registers the ops
from backstash.ops.schema import SCHEMAS, ZVC_CHUNK

OPS = torch.ops.backstash
UTILITIES = ("test_schema", "test_faketensor", "test_autograd_registration", "test_aot_dispatch_dynamic")
WINDOW = (1, [4, 4], [2, 2], [2, 2], [2, 2], [0, 0], [1, 1])


def arguments(op: str, n: int, dtype: torch.dtype) -> tuple[Any, ...]:
    """Arguments of ``op`` for ``n`` elements."""
    x = (torch.arange(n) % 3).to(dtype)
    integers = torch.arange(n) % 30 + 5
    two = (torch.arange(n) % 2).to(dtype)
    pair = torch.tensor([0, 1], dtype=dtype)
    indices = torch.tensor([0, 2, 13, 10]).repeat(n // 4)
    if op == "bitmask_encode":
        return x, 0, 0.0, 1.0
    if op == "bitmask_decode":
        return OPS.bitmask_encode(x, 0, 0.0, 1.0), torch.empty_like(x), 1.0, 0.0
    if op == "binary_encode":
        return two, pair
    if op == "binary_decode":
        return OPS.binary_encode(two, pair)[0], pair, torch.empty_like(two)
    if op == "zvc_encode":
        return (x,)
    if op == "zvc_decode":
        return *OPS.zvc_encode(x), torch.empty_like(x)
    if op == "rle_encode":
        return (x,)
    if op == "rle_decode":
        return *OPS.rle_encode(x), torch.empty_like(x)
    if op == "csr_encode":
        return (x,)
    if op == "csr_decode":
        return *OPS.csr_encode(x), torch.empty_like(x)
    if op == "fewbit_encode":
        return x, [0.5, 1.5, 3.0], 2
    if op == "fewbit_decode":
        return OPS.fewbit_encode(x, [0.5, 1.5, 3.0], 2)[0], [1.0, 2.0, 3.0, 4.0], 2, torch.empty_like(x)
    if op == "minifloat_encode":
        return x, "fp10", True
    if op == "minifloat_decode":
        return OPS.minifloat_encode(x, "fp10", False), "fp10", torch.empty_like(x)
    if op == "minifloat_scaled_encode":
        return x, "float8_e4m3fn", 16
    if op == "minifloat_scaled_decode":
        return *OPS.minifloat_scaled_encode(x, "float8_e4m3fn", 16), "float8_e4m3fn", 16, torch.empty_like(x)
    if op == "zvc_minifloat_encode":
        return x, "fp10"
    if op == "zvc_minifloat_decode":
        return *OPS.zvc_minifloat_encode(x, "fp10"), "fp10", torch.empty_like(x)
    if op == "blockquant_encode":
        return x, 2, 16, True, 0
    if op == "blockquant_decode":
        return *OPS.blockquant_encode(x, 2, 16, True, 0)[:2], 2, 16, torch.empty_like(x)
    if op == "dct_encode":
        return x, 1, 4, n // 4, 1, [3] * 64
    if op == "dct_decode":
        return *OPS.dct_encode(x, 1, 4, n // 4, 1, [3] * 64)[:4], 1, 4, n // 4, 1, [3] * 64, torch.empty_like(x)
    if op.startswith("szp"):
        x, grid = x.to(torch.float32 if dtype.itemsize == 8 else dtype), torch.tensor([5.0, 0.2, 0.1])
        if op == "szp_decode":
            return *OPS.szp_encode(x, grid), grid[1:2].clone(), torch.empty_like(x)
        return (x, grid) if op == "szp_encode" else (x,)
    if op == "narrow_encode":
        return integers, 5, 5
    if op == "narrow_decode":
        return OPS.narrow_encode(integers, 5, 5), 5, 5, torch.empty_like(integers)
    if op == "sz_range":
        return (x,)
    if op == "sz_survey":
        return x, 0.5, 0.25, 0, [4, 16, 16, 65536]
    model = torch.tensor([2000, 96, 1000, 1000], dtype=torch.int16), 0.5
    if op == "sz_encode":
        return x, *model, 0.25, 2, 0, 1, [4, 16, 16, 65536]
    if op == "sz_decode":
        stream, *planes = OPS.sz_encode(x, *model, 0.25, 2, 0, 1, [4, 16, 16, 65536])
        return model[0], stream, *planes, 0.5, 2, 0, 1, [4, 16, 16, 65536], torch.empty_like(x)
    if op == "window_encode":
        return indices, *WINDOW
    assert op == "window_decode", f"{op} has no arguments here yet"
    return OPS.window_encode(indices, *WINDOW)[0], *WINDOW, torch.empty_like(indices)


@pytest.mark.parametrize("n", [16, 0])
@pytest.mark.parametrize("op", SCHEMAS)
def test_opcheck(op: str, n: int) -> None:
    opcheck(getattr(OPS, op).default, arguments(op, n, torch.float32), test_utils=UTILITIES)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("op", [op for op in SCHEMAS if not op.startswith(("narrow", "window"))])
def test_opcheck_of_other_dtypes(op: str, dtype: torch.dtype) -> None:
    opcheck(getattr(OPS, op).default, arguments(op, ZVC_CHUNK + 4, dtype), test_utils=UTILITIES[:2])


@pytest.mark.parametrize("op", SCHEMAS)
def test_what_is_not_flat_is_refused(op: str) -> None:
    given = arguments(op, 16, torch.float32)
    first = given[0]
    for wrong in (first.view(1, -1), first.repeat_interleave(2)[::2]):
        with pytest.raises(ValueError, match=f"backstash::{op} asked for a flat contiguous tensor, got shape"):
            getattr(OPS, op)(wrong, *given[1:])
