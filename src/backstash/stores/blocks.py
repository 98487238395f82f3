"""A value in a file: where each plane lies among its bytes, and the blocks in which the bytes are transferred."""

from __future__ import annotations

from concurrent.futures import Future

import torch
from torch import Tensor

from backstash.codecs.base import Encoded
from backstash.stores.aligned import PAGE, round_up
from backstash.stores.base import Ticket

BLOCK = 4 << 20
"""Bytes of one transfer."""

_LINE = 64
"""Planes begin at multiples of this many bytes, as planes that torch allocates do."""


class ReadTransfers:
    """The transfers of a value that is being read, and the memory that they fill."""

    __slots__ = ("blocks", "memory")

    def __init__(self, memory: Tensor, blocks: list[Future[None]]) -> None:
        self.memory, self.blocks = memory, blocks


class PlaneExtent:
    """A plane's name, dtype, shape and device, and where its bytes lie among the bytes of its value."""

    __slots__ = ("begin", "device", "dtype", "end", "name", "shape")

    def __init__(self, name: str, plane: Tensor, begin: int) -> None:
        self.name, self.dtype, self.shape, self.device = name, plane.dtype, plane.shape, plane.device
        self.begin, self.end = begin, begin + plane.numel() * plane.element_size()


class BlockedValue:
    """All facts about a value but its bytes.

    ``users`` counts the calls that need the value's part of the file: ``put``, and every transfer that has not ended.
    """

    __slots__ = (
        "blocks",
        "checksums",
        "codec",
        "dropped",
        "failure",
        "meta",
        "nbytes",
        "places",
        "reading",
        "spec",
        "start",
        "ticket",
        "users",
        "writes",
    )

    def __init__(self, encoded: Encoded, number: int) -> None:
        self.codec, self.spec, self.meta = encoded.codec, encoded.spec, encoded.meta
        self.places: list[PlaneExtent] = []
        end = 0
        for name, plane in encoded.planes.items():
            self.places.append(PlaneExtent(name, plane, end))
            end = round_up(self.places[-1].end, _LINE)
        self.nbytes = round_up(end, PAGE)
        self.blocks = -(-self.nbytes // BLOCK)
        self.ticket = Ticket(number, self.nbytes)
        self.start = 0
        self.checksums = [0] * self.blocks
        self.writes: list[Future[None]] = []
        self.reading: ReadTransfers | None = None
        self.failure: OSError | None = None
        self.users = 1
        self.dropped = False

    def __str__(self) -> str:
        return f"{self.codec} of {self.spec}, ticket {self.ticket.number}"

    def length(self, block: int) -> int:
        """Bytes of the block with this number."""
        return min(BLOCK, self.nbytes - block * BLOCK)

    def encoded(self, memory: Tensor) -> Encoded:
        """The value. Its planes are parts of ``memory``, or copies on the device that they came from."""
        planes = {
            place.name: memory[place.begin : place.end].view(place.dtype).view(place.shape).to(place.device)
            for place in self.places
        }
        return Encoded(self.codec, self.spec, planes, self.meta)


def plane_bytes(plane: Tensor) -> Tensor:
    """The elements of a plane in row-major order, as uint8 [nbytes]."""
    return plane.contiguous().reshape(-1).view(torch.uint8)


def gather_planes(places: list[PlaneExtent], views: list[Tensor], first: int, block: Tensor) -> None:
    """Copies into ``block`` those bytes of a value that begin at byte ``first``.

    NumPy copies planes on CPU. torch would copy with all its threads, and would wait for the threads that the writers
    have displaced.

    Args:
        places: where the value's planes lie among its bytes.
        views: the bytes of these planes, as :func:`plane_bytes` returns them.
        first: the byte of the value with which the block begins.
        block: the memory to fill, uint8 [n].
    """
    last = first + block.numel()
    for place, view in zip(places, views, strict=True):
        begin, end = max(place.begin, first), min(place.end, last)
        if begin < end:
            to, part = block[begin - first : end - first], view[begin - place.begin : end - place.begin]
            if part.device.type == "cpu":
                to.numpy()[:] = part.numpy()
            else:
                to.copy_(part)
