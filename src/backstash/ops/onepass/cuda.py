"""Norms, curves and dropout in one pass on CUDA (``native/onepass/kernels.cu``), launched by a launcher of our own.

The signatures are the references'. Of a curve's tables only ``whole`` is read: a GPU computes every element alike.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from backstash.ops.cuda import launcher
from backstash.ops.layout import Rounding, images

PACK, THREADS = 8, 256
"""Elements of a thread, and threads of a block."""

NAMES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}

ROW_NORMS = (
    "f32_f32_f32", "f32_f32_bf16", "f32_f32_f16", "f32_bf16_bf16", "f32_f16_f16", "bf16_f32_bf16", "bf16_bf16_bf16",
    "f16_f32_f16", "f16_f16_f16",
)  # fmt: skip
GROUPED_NORMS = ("f32_f32", "bf16_f32", "bf16_bf16", "f16_f32", "f16_f16")

KERNELS = {
    **{f"bs_row_norm_{types}": "pppppppllii" for types in ROW_NORMS},
    **{f"bs_grouped_norm_{types}": "pppppppplllllii" for types in GROUPED_NORMS},
    **{f"bs_affine_{type_}": "ppppppppppppppppllllllffiii" for type_ in NAMES.values()},
    **{f"bs_gated_{type_}": "pppppli" for type_ in NAMES.values()},
    **{f"bs_curve_{type_}": "ppplii" for type_ in NAMES.values()},
    **{f"bs_dropout_{type_}": "ppplfi" for type_ in NAMES.values()},
}
"""The kernels of the fatbin, and the kinds of their arguments."""


@cache
def _loaded(name: str, device: int) -> int:
    return launcher.load(launcher.FATBIN.read_bytes(), name, device, THREADS, 0, KERNELS[name])


def launch(name: str, x: Tensor, *args: Any) -> None:
    """Launches a kernel of the fatbin, with a thread for each pack of ``x``, and these arguments."""
    device = x.device.index
    blocks = -(-x.numel() // (PACK * THREADS))
    opened: Any = launcher.open_launcher()
    opened.launch(_loaded(name, device), blocks, launcher.stream_of(device), *args)


def row_norm(
    x: Tensor,
    residual: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    order: int,
    nan: int,
    out: Tensor,
) -> None:
    """See :func:`backstash.ops.onepass.reference.row_norm`."""
    vector = bias if weight is None else weight
    of_vector = x.dtype if vector is None else vector.dtype
    types = NAMES[x.dtype], NAMES[of_vector], NAMES[out.dtype]
    width = x.numel() // max(1, rstd.numel())
    given = x, residual, mean, rstd, weight, bias, out, x.numel(), width, int(order), nan
    launch(f"bs_row_norm_{'_'.join(types)}", x, *given)


def grouped_norm(
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    groups: int,
    curve: int,
    whole: Tensor | None,
    tail: Tensor | None,
    chunk: int,
    step: int,
    nan: int,
    out: Tensor,
    normed: Tensor | None,
) -> None:
    """See :func:`backstash.ops.onepass.reference.grouped_norm`."""
    vector, sizes = bias if weight is None else weight, images(x)
    assert sizes is not None
    types = NAMES[x.dtype], NAMES[torch.float32 if vector is None else vector.dtype]
    channels = x.shape[1]
    pixels = x.numel() // max(1, x.shape[0] * channels)
    given = x, mean, rstd, weight, bias, whole, out, normed, x.numel(), channels, sizes[1], pixels, groups
    launch(f"bs_grouped_norm_{'_'.join(types)}", x, *given, int(curve), nan)


def channel_norm(
    x: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    activation: int,
    lo: float,
    hi: float,
    outer: int,
    inner: int,
    nan: int,
    out: Tensor,
    rounding: int = Rounding.SCALED,
) -> None:
    """See :func:`backstash.ops.onepass.reference.channel_norm`."""
    given = x, mean, invstd, weight, bias, residual, None, None, None, None, None, out, None, None, None, None
    sizes = x.numel(), x.shape[1], inner, 0, 1, 0
    numbers = float(lo), float(hi), int(activation), int(rounding), nan
    launch(f"bs_affine_{NAMES[x.dtype]}", x, *given, *sizes, *numbers)


def gated(
    gate: Tensor,
    up: Tensor,
    whole: Tensor | None,
    tail: Tensor | None,
    chunk: int,
    step: int,
    nan: int,
    tail_nan: int,
    out: Tensor,
    inner: Tensor | None,
) -> None:
    """See :func:`backstash.ops.onepass.reference.gated`."""
    launch(f"bs_gated_{NAMES[gate.dtype]}", gate, gate, up, whole, out, inner, gate.numel(), nan)


def curve(
    x: Tensor, curve: int, whole: Tensor | None, tail: Tensor | None, chunk: int, step: int, nan: int, out: Tensor
) -> None:
    """See :func:`backstash.ops.onepass.reference.curve`."""
    launch(f"bs_curve_{NAMES[x.dtype]}", x, x, whole, out, x.numel(), int(curve), nan)


def dropout_bits(x: Tensor, mask: Tensor, scale: float, nan: int, out: Tensor) -> None:
    """See :func:`backstash.ops.onepass.reference.dropout_bits`."""
    launch(f"bs_dropout_{NAMES[x.dtype]}", x, x, mask, out, x.numel(), scale, nan)


@cache
def available() -> bool:
    """Whether these kernels may serve: they are there for this GPU, and a first launch has given the right bits."""
    if not torch.cuda.is_available() or not launcher.FATBIN.exists() or launcher.open_launcher() is None:
        return False
    major, minor = torch.cuda.get_device_capability()
    if not any(major == known // 10 and minor >= known % 10 for known in launcher.ARCHITECTURES):
        return False
    numbers = torch.arange(1 << 16, dtype=torch.int32, device="cuda").to(torch.int16)
    out = torch.empty_like(numbers)
    try:
        curve(numbers.view(torch.bfloat16), 0, numbers.flip(0).contiguous(), None, 0, 0, 0, out.view(torch.bfloat16))
    except RuntimeError:
        return False
    return torch.equal(out, numbers.flip(0))
