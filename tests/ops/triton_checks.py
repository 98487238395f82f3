"""Numbers, and outputs between canaries, for the tests of the Triton kernels.

Expected planes always come from the reference on the CPU. Whatever a kernel fills stands between canaries, at an
address that is aligned to its elements only.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor

from backstash.ops.backends import kernels
from backstash.ops.bits import bits_of
from backstash.ops.layout import ZVC_CHUNK
from backstash.ops.triton.launching import BLOCK_BYTES

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"

launchers: Any = kernels("triton") if find_spec("triton") is not None else None
reference = kernels("reference")

FLOATS = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
TRITON_INTEGERS = [torch.int64, torch.int32, torch.int16, torch.uint8]
SHORT_TAILS = list(range(10))  # bytes hold 8 fields of a bit, and 8 fields of any width fill whole bytes
BLOCK_EDGES = [8 * BLOCK_BYTES + d for d in (-1, 0, 1)]
CHUNK_EDGES = [ZVC_CHUNK + d for d in (-1, 0, 1)] + [2 * ZVC_CHUNK + 13]
LENGTHS = SHORT_TAILS + BLOCK_EDGES + CHUNK_EDGES

CANARY = 0xA5
MARGIN = 17  # odd: what lies behind it is aligned to its elements, not to 16 bytes


def specials(dtype: torch.dtype) -> Tensor:
    """The values that kernels get wrong: signed zeros, subnormals, infinities, NaNs with payloads, bounds."""
    info = torch.finfo(dtype)
    numbers = [0.0, -0.0, 1.0, -1.0, 0.1, -0.1, 6.0, math.inf, -math.inf, math.nan, info.tiny, -info.tiny, info.max]
    values = torch.tensor(numbers, dtype=dtype)
    bits = bits_of(values)
    payloads = bits[9] ^ torch.tensor([1, 5], dtype=bits.dtype)  # still NaN, not the NaN that arithmetic makes
    subnormals = torch.tensor([1, 3], dtype=bits.dtype)
    neighbours = torch.cat([bits[2:7] + 1, bits[2:7] - 1])
    extra = torch.cat([payloads, subnormals, -payloads, subnormals | bits[1], neighbours])
    return torch.cat([values, extra.view(dtype)])


def half_zeros(dtype: torch.dtype, n: int) -> Tensor:
    """Returns [n] on the CPU: half zeros (some of them negative), half special and normal numbers."""
    special = specials(dtype)
    x = torch.randn(n).to(dtype)
    x = torch.where(torch.rand(n) < 0.4, special[torch.randint(len(special), (n,))], x)
    return torch.where(torch.rand(n) < 0.5, torch.zeros(n, dtype=dtype), x)


def bits(x: Tensor) -> Tensor:
    """The bits of ``x`` on the CPU, to be compared."""
    return bits_of(x.cpu())


def on_device(x: Tensor) -> Tensor:
    """A copy of ``x`` on the device of the kernels, aligned to its elements only."""
    return torch.cat([x[:1], x]).to(DEVICE)[1:] if x.numel() else x.to(DEVICE)


def filled(n: int, dtype: torch.dtype, decode: Callable[..., None], *planes: Any, **values: float) -> Tensor:
    """What a launcher makes of a poisoned output [n] of ``dtype``, on the CPU; nothing beside it may change."""
    size = torch.empty((), dtype=dtype).element_size()
    buffer = torch.full(((n + 2 * MARGIN) * size,), CANARY, dtype=torch.uint8, device=DEVICE)
    moved = [on_device(plane) if isinstance(plane, Tensor) else plane for plane in planes]
    decode(*moved, buffer.view(dtype)[MARGIN : MARGIN + n], **values)
    whole = buffer.cpu()
    beside = torch.cat([whole[: MARGIN * size], whole[(MARGIN + n) * size :]])
    assert (beside == CANARY).all(), "the kernel wrote outside its output"
    return whole.view(dtype)[MARGIN : MARGIN + n]


def expected(n: int, dtype: torch.dtype, decode: Callable[..., None], *planes: Any, **values: float) -> Tensor:
    """What the reference makes of an output [n] of ``dtype``."""
    out = torch.empty(n, dtype=dtype)
    decode(*planes, out, **values)
    return out


def triton_test(test: Callable[..., None]) -> Callable[..., None]:
    """Decorates a test of the Triton kernels: conftest.py hands it to the interpreter, and runs it on a GPU."""
    skip = pytest.mark.skipif(launchers is None, reason="Triton is not installed: pip install triton")
    decorated: Callable[..., None] = skip(pytest.mark.usefixtures("backend")(test))
    return decorated


MASK_LENGTHS = SHORT_TAILS + BLOCK_EDGES + [2 * 8 * BLOCK_BYTES + 13]
"""Lengths for kernels that know blocks of mask bytes and no chunks."""


def each_at_some_length(values: list[Any]) -> Iterator[tuple[int, Any]]:
    """Yields each of MASK_LENGTHS with one of the values in turn, and one short length with all of them."""
    for i, n in enumerate(MASK_LENGTHS):
        yield n, values[i % len(values)]
    for value in values:
        yield SHORT_TAILS[-1], value


def zvc_cases(dtype: torch.dtype) -> Iterator[Tensor]:
    """Yields contents of all lengths; and chunks that are full, empty, and empty between full ones."""
    for n in LENGTHS:
        yield half_zeros(dtype, n)
    yield torch.zeros(ZVC_CHUNK + 5, dtype=dtype)
    yield torch.full((2 * ZVC_CHUNK,), -0.0).to(dtype)
    gap = torch.ones(3 * ZVC_CHUNK + 1, dtype=dtype)
    gap[ZVC_CHUNK : 2 * ZVC_CHUNK] = 0
    yield gap


def numbers_of(dtype: torch.dtype, n: int) -> Tensor:
    """:func:`half_zeros` of all sizes, with what rounds to even, up to the smallest normal number, and over the top."""
    x = half_zeros(dtype, n) * torch.tensor(2.0).pow(torch.randint(-24, 18, (n,))).to(dtype)
    edges = torch.tensor([1 + k / 64 for k in range(64)]) * 2.0 ** torch.randint(-18, 17, (64,))
    return torch.where(torch.rand(n) < 0.2, edges.to(dtype)[torch.randint(64, (n,))], x)
