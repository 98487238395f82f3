"""Max-pool indices as positions inside their windows; and the pooling's gradient from these."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from backstash.ops import bytes_for, check_plane, kernel, pack_fields, unpack_fields

WINDOW = "int inner, int[] input_size, int[] output_size, int[] kernel, int[] stride, int[] padding, int[] dilation"
"""The arguments that describe a pooling, in a schema."""


def window_bits(kernel: Sequence[int]) -> int:
    """Returns the bits that tell the positions of a pooling window apart: 2 for 2x2, 4 for 3x3."""
    return max(1, (math.prod(kernel) - 1).bit_length())


def in_three_dimensions(*sizes: list[int]) -> list[int]:
    """Returns the 18 numbers of a pooling as ``native/window.cpp`` takes them; in a missing dimension nothing happens.

    Args:
        sizes: input_size, output_size, kernel, stride, padding and dilation, one entry per spatial dimension.
    """
    neutral = (1, 1, 1, 1, 0, 1)
    return [n for size, unit in zip(sizes, neutral, strict=True) for n in (*[unit] * (3 - len(size)), *size)]


def _packed_and_count(
    indices: Tensor, inner: int, input_size: list[int], output_size: list[int], kernel: list[int], *_: object
) -> tuple[Tensor, Tensor]:
    packed = indices.new_empty(bytes_for(indices.numel(), window_bits(kernel)), dtype=torch.uint8)
    return packed, indices.new_empty(1, dtype=torch.int64)


def _origins(
    numel: int, inner: int, output_size: list[int], stride: list[int], padding: list[int], device: torch.device
) -> list[Tensor]:
    """Returns, per spatial dimension, where each output element's window starts in the padded input: int64 [n]."""
    position = torch.arange(numel, device=device) // inner
    origins = []
    for size, step, pad in reversed(list(zip(output_size, stride, padding, strict=True))):
        origins.append((position % size) * step - pad)
        position = position // size
    return origins[::-1]


@kernel(f"(Tensor indices, {WINDOW}) -> (Tensor, Tensor)", _packed_and_count)
def window_encode(
    indices: Tensor,
    inner: int,
    input_size: list[int],
    output_size: list[int],
    kernel: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
) -> tuple[Tensor, Tensor]:
    """Stores max-pool indices as positions inside their windows.

    Args:
        indices: int64 [n] in memory order, each an index into the flattened spatial input, as max_pool returns them.
        inner: elements between spatial neighbours in memory: 1 for contiguous, the channels for channels_last.
        input_size, output_size, kernel, stride, padding, dilation: of the pooling, one entry per spatial dimension.

    Returns:
        uint8 [ceil(n * window_bits(kernel) / 8)], fields as in :func:`pack_fields`, each the row-major position in the
        window; and int64 [1], the number of indices in no position of their window. If that is not zero, the plane is
        useless.
    """
    origins = _origins(indices.numel(), inner, output_size, stride, padding, indices.device)
    rest = indices.long()
    coordinates: list[Tensor] = []
    for size in reversed(input_size):
        coordinates.append(rest % size)
        rest = rest // size
    code = torch.zeros_like(indices)
    bad = rest != 0
    for where, origin, size, step in zip(coordinates[::-1], origins, kernel, dilation, strict=True):
        distance = where - origin
        offset = distance // step
        bad |= (distance % step != 0) | (offset < 0) | (offset >= size)
        code = code * size + offset
    return pack_fields(torch.where(bad, 0, code), window_bits(kernel)), bad.sum().view(1)


@kernel(f"(Tensor packed, {WINDOW}, Tensor(a!) out) -> ()")
def window_decode(
    packed: Tensor,
    inner: int,
    input_size: list[int],
    output_size: list[int],
    kernel: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    out: Tensor,
) -> None:
    """Fills ``out`` int64 [n] with the indices that :func:`window_encode` was given."""
    origins = _origins(out.numel(), inner, output_size, stride, padding, out.device)
    code = unpack_fields(packed, window_bits(kernel), out.numel())
    offsets: list[Tensor] = []
    for size in reversed(kernel):
        offsets.append(code % size)
        code = code // size
    index = torch.zeros_like(out)
    for offset, origin, size, step in zip(offsets[::-1], origins, input_size, dilation, strict=True):
        index = index * size + origin + offset * step
    out.copy_(index)


@kernel(f"(Tensor packed, {WINDOW}, Tensor grad, Tensor(a!) out) -> ()")
def window_scatter(
    packed: Tensor,
    inner: int,
    input_size: list[int],
    output_size: list[int],
    kernel: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    grad: Tensor,
    out: Tensor,
) -> None:
    """Fills ``out`` with the gradient of a max pooling's input, from the codes of :func:`window_encode`.

    Gradients are added window after window in memory order. That is ATen's order, so in float32 and float64 the bits
    are ATen's. In float16 and bfloat16 ATen adds in float32 for some layouts, and the bits may differ.

    Args:
        packed: the plane that :func:`window_encode` returned; the arguments up to ``dilation`` are those it was given.
        grad: [n], the output's gradient.
        out: [n / prod(output_size) * prod(input_size)] of the dtype of ``grad``.

    Raises:
        DamagedPlanesError: the plane is not of the size that ``grad`` needs.
    """
    n = grad.numel()
    check_plane("window_scatter", "packed", packed, bytes_for(n, window_bits(kernel)))
    index = torch.empty(n, dtype=torch.int64, device=grad.device)
    window_decode(packed, inner, input_size, output_size, kernel, stride, padding, dilation, index)
    pixels, outputs = math.prod(input_size), math.prod(output_size)
    position = torch.arange(n, device=grad.device)
    image, channel = position // (outputs * inner), position % inner
    inside = (index >= 0) & (index < pixels)  # always true unless the codes are damaged
    flat = ((image * pixels + index) * inner + channel)[inside]
    out.zero_().index_add_(0, flat, grad[inside])
