"""Plain torch, dull on purpose: the definition of every plane's layout. Runs on any device."""

from __future__ import annotations

import torch
from torch import Tensor

from backstash.errors import DamagedPlanesError
from backstash.ops.schema import ZVC_CHUNK, bytes_for, window_bits, zvc_chunks
from backstash.saved import Test

_BITS_DTYPE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits_of(x: Tensor) -> Tensor:
    """``x`` seen as integers of the same width, so that -0.0 and NaN payloads compare as they are stored."""
    return x.view(_BITS_DTYPE[x.element_size()])


def pack(fields: Tensor, bits: int) -> Tensor:
    """Pack integers into a little-endian bit stream: field ``i`` occupies bits ``[i * bits, (i + 1) * bits)``.

    Args:
        fields: int64 [n], each in ``[0, 2**bits)``.
        bits: width of a field, 1 to 32.

    Returns:
        uint8 [ceil(n * bits / 8)]; bits past the last field are zero.
    """
    shifts = torch.arange(bits, device=fields.device)
    stream = ((fields[:, None] >> shifts) & 1).reshape(-1)
    padded = stream.new_zeros(bytes_for(fields.numel(), bits) * 8)
    padded[: stream.numel()] = stream
    weights = 1 << torch.arange(8, device=fields.device)
    return (padded.view(-1, 8) * weights).sum(1).to(torch.uint8)


def unpack(packed: Tensor, bits: int, numel: int) -> Tensor:
    """The inverse of :func:`pack`: uint8 [ceil(numel * bits / 8)] to int64 [numel]."""
    shifts = torch.arange(8, device=packed.device)
    stream = ((packed.long()[:, None] >> shifts) & 1).reshape(-1)[: numel * bits]
    weights = 1 << torch.arange(bits, device=packed.device)
    return (stream.view(-1, bits) * weights).sum(1)


def look(x: Tensor, runs: int, run: int, step: int) -> tuple[int, int]:
    """How many elements of a sample are not zero, and how many bit patterns it has: 1, 2, or 3 for more.

    Args:
        x: [n].
        runs, run, step: the sample: so many runs of so many neighbours, each beginning ``step`` after the last one.
    """
    bits = bits_of(x.as_strided((runs, run), (step, 1)).reshape(-1))
    return int(torch.count_nonzero(bits)), min(3, bits.unique().numel())


def passes(x: Tensor, test: int, lo: float, hi: float) -> Tensor:
    """Outcome of a :class:`~backstash.saved.Test` for every element, bool [n]; bounds rounded to ``x.dtype``."""
    kind = list(Test)[test]
    if kind is Test.NONZERO:
        return bits_of(x) != 0
    low = torch.tensor(lo, dtype=x.dtype, device=x.device)
    high = torch.tensor(hi, dtype=x.dtype, device=x.device)
    if kind is Test.NOT_LE:
        return ~(x <= low)
    if kind is Test.GT:
        return x > low
    if kind is Test.INSIDE:
        return (low < x) & (x < high)
    if kind is Test.NOT_OUTSIDE:
        return ~((x <= low) | (x >= high))
    return (low <= x) & (x <= high)


def bitmask_encode(x: Tensor, test: int, lo: float, hi: float) -> Tensor:
    """One bit per element: [n] floating to uint8 [ceil(n / 8)], element ``i`` in bit ``i % 8`` of byte ``i // 8``."""
    return pack(passes(x, test, lo, hi).long(), 1)


def bitmask_decode(mask: Tensor, out: Tensor, if_set: float, if_clear: float) -> None:
    """Fill ``out`` [n] (any floating dtype, bool or uint8) with one of two values per bit."""
    flags = unpack(mask, 1, out.numel()).bool()
    out.copy_(torch.where(flags, torch.tensor(if_set, dtype=out.dtype), torch.tensor(if_clear, dtype=out.dtype)))


def binary_encode(x: Tensor, pair: Tensor) -> tuple[Tensor, Tensor]:
    """One bit per element of a tensor whose elements are all ``pair[0]`` (bit 0) or ``pair[1]`` (bit 1), bitwise.

    Args:
        x: [n], 2, 4 or 8 bytes per element.
        pair: [2] of the same dtype.

    Returns:
        The mask, uint8 [ceil(n / 8)], and int64 [1]: how many elements are neither. Not zero: the mask is useless.
    """
    bits, two = bits_of(x), bits_of(pair)
    other = bits != two[0]
    return pack(other.long(), 1), (other & (bits != two[1])).sum().view(1)


def binary_decode(mask: Tensor, pair: Tensor, out: Tensor) -> None:
    """Fill ``out`` [n] with ``pair[bit]``, bit for bit."""
    bits_of(out).copy_(bits_of(pair)[unpack(mask, 1, out.numel())])


def zvc_encode(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Zero-value compression: a bit per element and the elements that have any bit set, in order.

    Args:
        x: [n], 2, 4 or 8 bytes per element.

    Returns:
        mask uint8 [ceil(n / 8)]; offsets int64 [ceil(n / ZVC_CHUNK)], where each chunk's first value stands in the
        values plane; values [number of set bits] of ``x``'s dtype.
    """
    flags = bits_of(x) != 0
    counts = torch.zeros(zvc_chunks(x.numel()) * ZVC_CHUNK, dtype=torch.int64, device=x.device)
    counts[: x.numel()] = flags
    counts = counts.view(-1, ZVC_CHUNK).sum(1)
    return pack(flags.long(), 1), counts.cumsum(0) - counts, x[flags]


def zvc_decode(mask: Tensor, offsets: Tensor, values: Tensor, out: Tensor) -> None:
    """Fill ``out`` [n] from the planes of :func:`zvc_encode`.

    Raises:
        DamagedPlanesError: the mask's bits, the offsets and the number of values do not agree.
    """
    flags = unpack(mask, 1, out.numel()).bool()
    counts = torch.zeros(zvc_chunks(out.numel()) * ZVC_CHUNK, dtype=torch.int64, device=out.device)
    counts[: out.numel()] = flags
    counts = counts.view(-1, ZVC_CHUNK).sum(1)
    if int(counts.sum()) != values.numel() or not torch.equal(counts.cumsum(0) - counts, offsets):
        raise DamagedPlanesError(zvc_damage(values.numel()))
    bits_of(out).zero_()
    bits_of(out)[flags] = bits_of(values)


def zvc_damage(stored: int) -> str:
    """The message of a ZVC stash whose planes disagree."""
    return (
        f"zvc_decode asked for the values that the mask and the offsets announce, got planes that disagree "
        f"({stored} values stored). The stash was overwritten or cut short; compute the step again."
    )


def narrow_encode(x: Tensor, bits: int, base: int) -> Tensor:
    """Integers (or bool) [n] as ``x - base`` in ``bits`` bits each: see :func:`pack`. ``x - base`` must fit."""
    return pack(x.long() - base, bits)


def narrow_decode(packed: Tensor, bits: int, base: int, out: Tensor) -> None:
    """Fill ``out`` [n] of an integer dtype or bool with ``field + base``."""
    out.copy_(unpack(packed, bits, out.numel()) + base)


def _origins(
    numel: int, inner: int, output_size: list[int], stride: list[int], padding: list[int], device: torch.device
) -> list[Tensor]:
    """Per spatial dimension, where the window of every output element starts in the (padded) input, int64 [n]."""
    position = torch.arange(numel, device=device) // inner
    origins = []
    for size, step, pad in reversed(list(zip(output_size, stride, padding, strict=True))):
        origins.append((position % size) * step - pad)
        position = position // size
    return origins[::-1]


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
    """Max-pool indices as positions inside their windows.

    Args:
        indices: int64 [n] in memory order, each an index into the flattened spatial input, as max_pool returns them.
        inner: elements between spatial neighbours in memory: 1 for contiguous, the channels for channels_last.
        input_size, output_size, kernel, stride, padding, dilation: of the pooling, one entry per spatial dimension.

    Returns:
        uint8 [ceil(n * window_bits(kernel) / 8)], fields as in :func:`pack`, each the row-major position in the
        window; and int64 [1]: how many indices are in no position of their window. Not zero: the plane is useless.
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
    return pack(torch.where(bad, 0, code), window_bits(kernel)), bad.sum().view(1)


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
    """Fill ``out`` int64 [n] with the indices that :func:`window_encode` was given."""
    origins = _origins(out.numel(), inner, output_size, stride, padding, out.device)
    code = unpack(packed, window_bits(kernel), out.numel())
    offsets: list[Tensor] = []
    for size in reversed(kernel):
        offsets.append(code % size)
        code = code // size
    index = torch.zeros_like(out)
    for offset, origin, size, step in zip(offsets[::-1], origins, input_size, dilation, strict=True):
        index = index * size + origin + offset * step
    out.copy_(index)
