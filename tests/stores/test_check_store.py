"""The stores keep their contract, and check_store catches stores that do not: each class below breaks one promise."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from backstash.codecs import Encoded, Zvc
from backstash.stores import DeviceStore, DiskStore, HostStore, Store, Ticket, Usage
from backstash.testing import check_store


@pytest.mark.parametrize("make", [DeviceStore, HostStore, DiskStore], ids=["device", "host", "disk"])
def test_stores_keep_the_contract(make: Callable[..., Store], tmp_path: Path) -> None:
    check_store(make(tmp_path) if make is DiskStore else make())


def test_a_store_in_use_is_left_as_it_was() -> None:
    store = DeviceStore()
    ticket = store.put(Zvc().encode(torch.ones(100)))
    before = store.usage()
    check_store(store)
    assert (store.usage().nbytes, store.usage().count) == (before.nbytes, before.count)
    assert store.get(ticket).nbytes == ticket.nbytes


def test_device_store_copies_nothing() -> None:
    store = DeviceStore()
    encoded = Zvc().encode(torch.ones(100))
    assert store.get(store.put(encoded)) is encoded


def test_usage_of_a_device_store() -> None:
    store = DeviceStore()
    first, second = Zvc().encode(torch.ones(100)), Zvc().encode(torch.zeros(100))
    tickets = [store.put(first), store.put(second)]
    total = first.nbytes + second.nbytes
    assert store.usage() == Usage(total, total, 2)
    store.drop(tickets[0])
    assert store.usage() == Usage(second.nbytes, total, 1)
    store.drop(tickets[1])
    assert store.usage() == Usage(0, total, 0)


class Rounds(DeviceStore):
    def get(self, ticket: Ticket) -> Encoded:
        encoded = super().get(ticket)
        planes = {name: plane + 0.0 if plane.is_floating_point() else plane for name, plane in encoded.planes.items()}
        return replace(encoded, planes=planes)


class Mixes(DeviceStore):
    def get(self, ticket: Ticket) -> Encoded:
        return self._values[min(self._values)]


class LosesPlanes(DeviceStore):
    def get(self, ticket: Ticket) -> Encoded:
        encoded = super().get(ticket)
        return replace(encoded, planes={name: plane for name, plane in encoded.planes.items() if plane.numel()})


class GivesOnce(DeviceStore):
    def get(self, ticket: Ticket) -> Encoded:
        return self._values.pop(ticket.number)


class CountsDropsTwice(DeviceStore):
    def drop(self, ticket: Ticket) -> None:
        super().drop(ticket)
        self._holdings.nbytes -= ticket.nbytes


class CountsNothing(DeviceStore):
    def usage(self) -> Usage:
        return Usage(0, 0, 0)


class ForgetsItsPeak(DeviceStore):
    def usage(self) -> Usage:
        return replace(super().usage(), peak_nbytes=0)


class UnderstatesTickets(DeviceStore):
    def put(self, encoded: Encoded) -> Ticket:
        ticket = super().put(encoded)
        self._holdings.nbytes -= ticket.nbytes
        return Ticket(ticket.number, 0)


class KeepsDropped(DeviceStore):
    def drop(self, ticket: Ticket) -> None:
        with self._lock:
            if (value := self._values.pop(ticket.number, None)) is not None:
                self._holdings.remove(ticket.nbytes)
                self.__dict__.setdefault("dropped", []).append(value)


class ServesDropped(KeepsDropped):
    def put(self, encoded: Encoded) -> Ticket:
        ticket = super().put(encoded)
        self.__dict__.setdefault("every", {})[ticket.number] = encoded
        return ticket

    def get(self, ticket: Ticket) -> Encoded:
        return self.every[ticket.number]  # type: ignore[attr-defined,no-any-return]


class OverwritesOnDrop(DeviceStore):
    def drop(self, ticket: Ticket) -> None:
        for plane in self._values[ticket.number].planes.values() if ticket.number in self._values else ():
            plane.zero_()
        super().drop(ticket)


@pytest.mark.parametrize(
    ("store", "message"),
    [
        (Rounds(), "Bring back every plane where it was, bit for bit"),
        (Mixes(), "Return what was put under this ticket"),
        (LosesPlanes(), "Return what was put under this ticket"),
        (CountsDropsTwice(), "Count a drop once"),
        (CountsNothing(), "Count in put"),
        (ForgetsItsPeak(), "for its peak"),
        (UnderstatesTickets(), "Give the ticket the bytes that are held"),
        (KeepsDropped(), "its planes still in memory. Drop every reference"),
        (ServesDropped(), "a stale one is a wrong gradient"),
        (OverwritesOnDrop(), "Bring back every plane"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, DeviceStore) else "",
)
def test_a_broken_promise_is_caught(store: Store, message: str) -> None:
    with pytest.raises(AssertionError, match=message) as caught:
        check_store(store)
    assert ", got " in str(caught.value)


def test_a_lost_value_is_an_error_of_the_store() -> None:
    with pytest.raises(KeyError):
        check_store(GivesOnce())


DEADLOCK = """
import os, threading
from backstash import stores, testing
testing._PATIENCE_SECONDS = 1.0
store = stores.DeviceStore()
store._lock = threading.Lock()
try:
    testing.check_store(store)
except AssertionError as error:
    print(error, flush=True)
os._exit(0)
"""


@pytest.mark.slow
def test_a_drop_inside_a_put_that_deadlocks_is_caught() -> None:
    done = subprocess.run([sys.executable, "-c", DEADLOCK], capture_output=True, text=True, check=False)
    assert "got a deadlock. The garbage collector may run finalizers inside put: guard it with an RLock." in done.stdout
