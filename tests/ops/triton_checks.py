"""What the tests of the Triton kernels share: numbers, and outputs between canaries.

Expected planes always come from the reference on the CPU. Whatever a kernel fills stands between canaries, at an
address that is aligned to its elements only.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from backstash.ops import reference

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"

FLOATS = [torch.float32, torch.float16, torch.bfloat16, torch.float64]

CANARY = 0xA5
MARGIN = 17  # odd: what lies behind it is aligned to its elements, not to 16 bytes


def specials(dtype: torch.dtype) -> Tensor:
    """The values that kernels get wrong: signed zeros, subnormals, infinities, NaNs with payloads, bounds."""
    info = torch.finfo(dtype)
    numbers = [0.0, -0.0, 1.0, -1.0, 0.1, -0.1, 6.0, math.inf, -math.inf, math.nan, info.tiny, -info.tiny, info.max]
    values = torch.tensor(numbers, dtype=dtype)
    bits = reference.bits_of(values)
    payloads = bits[9] ^ torch.tensor([1, 5], dtype=bits.dtype)  # still NaN, not the NaN that arithmetic makes
    subnormals = torch.tensor([1, 3], dtype=bits.dtype)
    neighbours = torch.cat([bits[2:7] + 1, bits[2:7] - 1])
    extra = torch.cat([payloads, subnormals, -payloads, subnormals | bits[1], neighbours])
    return torch.cat([values, extra.view(dtype)])


def contents(dtype: torch.dtype, n: int) -> Tensor:
    """Half zeros (some of them negative), the rest specials and normal numbers; on the CPU."""
    special = specials(dtype)
    x = torch.randn(n).to(dtype)
    x = torch.where(torch.rand(n) < 0.4, special[torch.randint(len(special), (n,))], x)
    return torch.where(torch.rand(n) < 0.5, torch.zeros(n, dtype=dtype), x)


def bits(x: Tensor) -> Tensor:
    """The bits of ``x`` on the CPU, to be compared."""
    return reference.bits_of(x.cpu())


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
