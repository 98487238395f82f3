"""Checksums of tensors: 64 bits that depend on every bit of every element and on its position.

Note: [the sum]
    The elements' bytes in row-major order are words of 64 bits. Word i of a piece adds ``w[i] * word + v[i] * (word >>
    32)`` modulo 2^64, where w and v are odd random numbers. A changed bit always changes the sum, because it is
    multiplied by an odd number. A permutation changes it, because positions have weights of their own. The second term
    is for the highest bit of a word, the sign of a number: multiplied by any odd number it stays the highest bit, so
    two changed signs would cancel each other in the first term. A NaN is a number like any other.

    On CPU the sums are NumPy's dot products of blocks that fit into a cache; on an accelerator they are torch's, and
    stay on the device. Both give the same number.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from functools import cache

import numpy as np
import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from backstash.saved import is_tensor
from backstash.torch_internals import is_traceable_wrapper_subclass, unseen_by_modes, without_gradients

Checksum = int | Tensor
"""A checksum: a signed integer of 64 bits, or on an accelerator the same as a tensor of one element, without a wait."""

PIECE = 16 << 20
"""Bytes of a tensor that are summed at once: a tensor that is not contiguous is copied in pieces of that size."""

_BLOCK = 1 << 16
"""Words of a block on CPU: 512 KiB."""

_MIX = 6364136223846793005
_TAIL = 0x9E3779B97F4A7C15
_ALL = (1 << 64) - 1


def why_unchecked(x: Tensor) -> str | None:
    """Returns why a tensor has no checksum, or None if it has one."""
    if is_lazy(x):
        return "a parameter without a shape yet"
    for inner in _inner(x):
        if inner is None:
            return f"a {type(x).__name__} does not say what it wraps"
        if inner.layout is not torch.strided or inner.is_nested:
            return f"a tensor of layout {inner.layout}"
        if inner.is_meta:
            return "a tensor on the meta device"
        if inner.is_quantized:
            return "a quantized tensor"
    return None


def checksum(x: Tensor) -> Checksum:
    """Returns the checksum of a tensor for which :func:`why_unchecked` returns None. Launches nothing that waits.

    Of a wrapper such as a DTensor the tensors inside are summed. No mode of the program sees how.
    """
    return without_gradients(lambda: unseen_by_modes(lambda: _checksum(x)))


def _checksum(x: Tensor) -> Checksum:
    total: Checksum = 0
    for inner in _inner(x):
        assert inner is not None
        for piece in _pieces(inner.detach().resolve_conj().resolve_neg()):
            part = _sum_on_cpu(piece) if piece.device.type == "cpu" else _sum_on_device(piece)
            if isinstance(total, int) and isinstance(part, int):
                total = (total * _MIX + part) & _ALL
            else:
                total = total * _signed(_MIX) + part
    return _signed(total) if isinstance(total, int) else total


def numbers_of(sums: Sequence[Checksum]) -> list[int]:
    """Returns checksums as integers, with one wait for each device that has some of them."""
    found: list[int] = [each if isinstance(each, int) else 0 for each in sums]
    devices: dict[torch.device, list[int]] = {}
    for place, each in enumerate(sums):
        if isinstance(each, Tensor):
            devices.setdefault(each.device, []).append(place)
    for places in devices.values():
        tensors = [each for place in places if isinstance(each := sums[place], Tensor)]
        for place, number in zip(places, torch.stack(tensors).tolist(), strict=True):
            found[place] = number
    return found


def _inner(x: Tensor) -> Iterator[Tensor | None]:
    """The tensors that hold the bits of ``x``: itself, those that it wraps, or None where that is not known."""
    if type(x).__torch_dispatch__ is Tensor.__torch_dispatch__:
        yield x if type(x) is Tensor else x.detach().as_subclass(Tensor)
    elif is_traceable_wrapper_subclass(x):
        for name in x.__tensor_flatten__()[0]:  # type: ignore[attr-defined]
            inner = getattr(x, name)
            if is_tensor(inner):
                yield from _inner(inner.trigger_wait() if hasattr(inner, "trigger_wait") else inner)
    else:
        yield None


def _pieces(x: Tensor) -> Iterator[Tensor]:
    """The bytes of ``x`` in row-major order, cut in a way that depends on its shape and dtype alone."""
    nbytes = x.numel() * x.element_size()
    if nbytes <= PIECE or x.dim() == 0:
        if nbytes:
            yield x.contiguous().view(-1).view(torch.uint8)
        return
    row = nbytes // x.shape[0]
    if row > PIECE:
        for index in range(x.shape[0]):
            yield from _pieces(x[index])
        return
    rows = max(1, PIECE // max(1, row))
    for begin in range(0, x.shape[0], rows):
        yield x[begin : begin + rows].contiguous().view(-1).view(torch.uint8)


def _sum_on_cpu(piece: Tensor) -> int:
    # Not piece.numpy(), after which torch would refuse to resize the storage, as FSDP does with weights.
    memory = (ctypes.c_uint8 * piece.numel()).from_address(piece.data_ptr())
    data = np.frombuffer(memoryview(memory), np.uint8)
    tail = len(data) % 8
    words = data[: len(data) - tail].view(np.int64)
    low, high = _weights()
    total = 0
    shifted = np.empty(min(len(words), _BLOCK), np.int64)
    for begin in range(0, len(words), _BLOCK):
        block = words[begin : begin + _BLOCK]
        above = np.right_shift(block, 32, out=shifted[: len(block)])
        part = int(np.dot(block, low[: len(block)])) + int(np.dot(above, high[: len(block)]))
        total = (total * _MIX + part) & _ALL
    if tail:
        total = (total * _MIX + int.from_bytes(data[-tail:].tobytes(), "little") * _TAIL) & _ALL
    return total


def _sum_on_device(piece: Tensor) -> Tensor:
    """As :func:`_sum_on_cpu`, by torch's functions alone."""
    tail = piece.numel() % 8
    whole = piece[: piece.numel() - tail]
    words = (whole if whole.storage_offset() % 8 == 0 else whole.clone()).view(torch.int64)
    low, high = _weights_on(piece.device)
    total = torch.zeros((), dtype=torch.int64, device=piece.device)
    full = words.numel() // _BLOCK
    if full:
        blocks = words[: full * _BLOCK].view(full, _BLOCK)
        parts = (blocks * low).sum(1) + ((blocks >> 32) * high).sum(1)
        total = (parts * _powers_on(piece.device, full)).sum()
    rest = words[full * _BLOCK :]
    if rest.numel():
        part = (rest * low[: rest.numel()]).sum() + ((rest >> 32) * high[: rest.numel()]).sum()
        total = total * _signed(_MIX) + part
    if tail:
        places = torch.arange(tail, device=piece.device) * 8
        last = (piece[-tail:].to(torch.int64) << places).sum()
        total = total * _signed(_MIX) + last * _signed(_TAIL)
    return total


@cache
def _weights() -> tuple[np.ndarray, np.ndarray]:  # type: ignore[type-arg]
    generator = np.random.default_rng(20)  # of its own: no global generator is touched
    low, high = (generator.integers(-(2**63), 2**63 - 1, _BLOCK, dtype=np.int64) | 1 for _ in range(2))
    return low, high


@cache
def _weights_on(device: torch.device) -> tuple[Tensor, Tensor]:
    low, high = _weights()
    return torch.from_numpy(low).to(device), torch.from_numpy(high).to(device)


@cache
def _powers_on(device: torch.device, count: int) -> Tensor:
    """Powers of ``_MIX``, the highest first, so that the first block is multiplied as often as on CPU."""
    return torch.tensor([_signed(pow(_MIX, count - 1 - place, 1 << 64)) for place in range(count)], device=device)


def _signed(number: int) -> int:
    number &= _ALL
    return number - (1 << 64) if number >> 63 else number
