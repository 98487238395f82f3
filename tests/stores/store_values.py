"""Shared by the tests of stores: values to put, and a policy that puts everything that it can."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from backstash import Encoded, Stash
from backstash.codecs import Bitmask, Shape, Zvc
from backstash.policies.base import Action, Keep, Outcome
from backstash.saved import Need, SavedTensor, TensorSpec
from backstash.stores import DiskStore, Ticket
from backstash.testing import equal_bits


def value(nbytes: int, device: str = "cpu", seed: int = 0) -> Encoded:
    """Returns a value with one plane of random bytes."""
    plane = torch.randint(256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)).to(device)
    return Encoded("check", TensorSpec.of(plane), {"codes": plane})


def comes_back(store: DiskStore, ticket: Ticket, expected: Encoded) -> bool:
    got = store.get(ticket)
    assert got.planes.keys() == expected.planes.keys()
    return all(equal_bits(got.planes[name], plane) for name, plane in expected.planes.items())


@dataclass(frozen=True)
class Everywhere:
    """A policy that encodes everything that it can exactly, and puts it into one store."""

    store: str

    def decide(self, saved: SavedTensor) -> Action:
        if saved.need is Need.SHAPE:
            return Stash(Shape())
        if saved.need is Need.SIGN and saved.mask is not None:
            return Stash(Bitmask(replace(saved.mask)), store=self.store)
        if saved.spec.dtype.is_floating_point:
            return Stash((Always(),), store=self.store)
        return Keep()

    def observe(self, outcome: Outcome) -> None:
        pass


class Always(Zvc):
    """A Zvc that encodes any data, also where that saves no memory."""

    def declines(self, x: torch.Tensor) -> str | None:
        return None
