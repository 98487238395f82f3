"""Bits of tensors, packed and counted: what the reference kernels share. Runs on any device."""

from __future__ import annotations

import torch
from torch import Tensor

from backstash.errors import DamagedPlanesError
from backstash.ops.layout import ZVC_CHUNK, bytes_for, zvc_chunks

_BITS_DTYPE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits_of(x: Tensor) -> Tensor:
    """Returns a view of ``x`` as integers, so that -0.0 and NaN payloads compare as they are stored."""
    return x.view(_BITS_DTYPE[x.element_size()])


def pack(fields: Tensor, bits: int) -> Tensor:
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


def unpack(packed: Tensor, bits: int, numel: int) -> Tensor:
    """Unpacks what :func:`pack` has packed: uint8 [ceil(numel * bits / 8)] to int64 [numel]."""
    shifts = torch.arange(8, device=packed.device)
    stream = ((packed.long()[:, None] >> shifts) & 1).reshape(-1)[: numel * bits]
    weights = 1 << torch.arange(bits, device=packed.device)
    return (stream.view(-1, bits) * weights).sum(1)


def per_chunk(flags: Tensor) -> Tensor:
    """Counts the flags, bool [n], that are set in each chunk of ZVC_CHUNK: int64 [ceil(n / ZVC_CHUNK)]."""
    counts = torch.zeros(zvc_chunks(flags.numel()) * ZVC_CHUNK, dtype=torch.int64, device=flags.device)
    counts[: flags.numel()] = flags
    return counts.view(-1, ZVC_CHUNK).sum(1)


def check_plane(op: str, name: str, plane: Tensor, expected: int) -> None:
    """Checks that a plane has as many elements as the output needs.

    Raises:
        DamagedPlanesError: it has not.
    """
    if plane.numel() != expected:
        raise DamagedPlanesError(
            f"{op} asked for {expected} elements in the plane {name!r}, got {plane.numel()}. "
            f"The stash was overwritten or cut short; compute the step again."
        )
