from __future__ import annotations

import errno
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from store_values import Everywhere, value

from backstash import Encoded, Session
from backstash.errors import StoreError, StoreFullError
from backstash.stores import DeviceStore, DiskStore, HostStore, Store, Ticket, TierStore, Usage
from backstash.testing import check_store, equal_bits


def tiers(directory: Path) -> TierStore:
    return TierStore([DeviceStore(capacity=1000), HostStore(capacity=2000), DiskStore(directory)])


def counts(store: TierStore) -> list[int]:
    return [tier.usage().count for tier in store.stores]


def test_what_is_full_spills_onward_and_is_found(tmp_path: Path) -> None:
    store = tiers(tmp_path)
    tickets = [store.put(value(500, seed=seed)) for seed in range(8)]
    assert counts(store) == [2, 4, 2]
    assert store.usage() == Usage(6 * 500 + 2 * 4096, 6 * 500 + 2 * 4096, 8, store.usage().stall_seconds)
    for seed, ticket in reversed(list(enumerate(tickets))):
        store.prefetch(ticket)
        assert equal_bits(store.get(ticket).planes["codes"], value(500, seed=seed).planes["codes"])
    store.drop(tickets[0])
    store.put(value(500))
    assert counts(store) == [2, 4, 2]
    assert tickets[7].nbytes == 4096


def test_it_keeps_the_contract(tmp_path: Path) -> None:
    check_store(tiers(tmp_path))
    check_store(TierStore([DeviceStore(), HostStore()]))
    check_store(TierStore([DeviceStore(capacity=0), TierStore([HostStore(capacity=3000), DiskStore(tmp_path)])]))


def test_the_last_store_refuses_for_all() -> None:
    store = TierStore([DeviceStore(capacity=10), HostStore(capacity=20)])
    with pytest.raises(StoreFullError, match="HostStore was asked to hold 21 bytes"):
        store.put(value(21))
    assert store.usage().count == 0


def test_no_stores_are_refused() -> None:
    with pytest.raises(ValueError, match="TierStore was asked for no stores"):
        TierStore([])


def test_a_disk_that_fails_is_passed_over_with_one_notice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = DiskStore(tmp_path)
    store = TierStore([DeviceStore(capacity=0), disk, HostStore()])
    first = store.put(value(5000))
    disk.flush()

    def fails(descriptor: int, data: Any, at: int) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "pwrite", fails)
    lost = store.put(value(5000))
    disk.flush()
    with pytest.warns(
        UserWarning, match=r"DiskStore\(.*\) failed and is passed over .* HostStore\(.*Input/output error"
    ):
        second = store.put(value(5000, seed=1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        store.put(value(5000, seed=2))
    assert counts(store) == [0, 2, 2]
    assert equal_bits(store.get(first).planes["codes"], value(5000).planes["codes"])
    assert equal_bits(store.get(second).planes["codes"], value(5000, seed=1).planes["codes"])
    with pytest.raises(StoreError, match="could not be written"):
        store.get(lost)


class Fails(DeviceStore):
    def put(self, encoded: Encoded) -> Ticket:
        raise StoreError("no")


def test_an_error_of_the_last_store_is_raised() -> None:
    store: Store = TierStore([DeviceStore(capacity=0), Fails()])
    with pytest.raises(StoreError, match="no"):
        store.put(value(1))


def test_a_session_spills(tmp_path: Path) -> None:
    store = TierStore([DeviceStore(capacity=10_000), HostStore(capacity=10_000), DiskStore(tmp_path)])
    x = torch.randn(30, 40, requires_grad=True)

    def step() -> torch.Tensor:
        y = x
        for _ in range(8):
            y = y.tanh().exp()
        return y.sum()

    (expected,) = torch.autograd.grad(step(), x)
    with Session(Everywhere("tiers"), stores={"tiers": store}, min_nbytes=0):
        y = step()
        assert all(counts(store))
        (got,) = torch.autograd.grad(y, x)
    del y
    assert equal_bits(got, expected)
    assert counts(store) == [0, 0, 0]
