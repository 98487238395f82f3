"""Bits of tensors, packed and counted: what the reference kernels share. Runs on any device."""

from __future__ import annotations

import torch
from torch import Tensor

from backstash.ops.layout import ZVC_CHUNK, bytes_for, zvc_chunks

_BITS_DTYPE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits_of(x: Tensor) -> Tensor:
    """Returns a view of ``x`` as integers, so that -0.0 and NaN payloads compare as they are stored."""
    return x.view(_BITS_DTYPE[x.element_size()])


def pack_fields(fields: Tensor, bits: int) -> Tensor:
    """Packs integers into a little-endian bit stream: field ``i`` occupies bits ``[i * bits, (i + 1) * bits)``.

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


def unpack_fields(packed: Tensor, bits: int, numel: int) -> Tensor:
    """Unpacks what :func:`pack_fields` has packed: uint8 [ceil(numel * bits / 8)] to int64 [numel]."""
    shifts = torch.arange(8, device=packed.device)
    stream = ((packed.long()[:, None] >> shifts) & 1).reshape(-1)[: numel * bits]
    weights = 1 << torch.arange(bits, device=packed.device)
    return (stream.view(-1, bits) * weights).sum(1)


def per_chunk(flags: Tensor) -> Tensor:
    """Counts the flags, bool [n], that are set in each chunk of ZVC_CHUNK: int64 [ceil(n / ZVC_CHUNK)]."""
    counts = torch.zeros(zvc_chunks(flags.numel()) * ZVC_CHUNK, dtype=torch.int64, device=flags.device)
    counts[: flags.numel()] = flags
    return counts.view(-1, ZVC_CHUNK).sum(1)


def gathered(flags: Tensor, room: int, *tensors: Tensor) -> list[Tensor]:
    """Returns the first ``room`` elements of each tensor that have a flag, and zeros where there are fewer.

    No size depends on the data, so the host does not wait for a device.
    """
    ranks = flags.cumsum(0) - 1
    places = torch.where(flags & (ranks < room), ranks, room)  # one more place takes all the others
    found = [x.new_zeros(room + 1) for x in tensors]
    for plane, x in zip(found, tensors, strict=True):
        bits_of(plane).scatter_(0, places, bits_of(x))
    return [plane[:room].clone() for plane in found]


def with_room(values: Tensor, room: int) -> Tensor:
    """Returns the first ``room`` values, and zeros where there are fewer."""
    found = values.new_zeros(room)
    found[: values.numel()] = values[:room]
    return found


def count_of(values: Tensor) -> Tensor:
    """Returns the number of values, int64 [1] where they are."""
    return torch.full((1,), values.numel(), dtype=torch.int64, device=values.device)
