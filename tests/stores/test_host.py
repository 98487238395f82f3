from __future__ import annotations

import gc
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from store_values import Everywhere, value

from backstash import Session
from backstash.codecs import Zvc
from backstash.errors import StoreFullError
from backstash.stores import DeviceStore, HostStore, Usage
from backstash.stores.space import Space
from backstash.testing import check_store, equal_bits

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def test_planes_on_cpu_are_not_copied() -> None:
    store = HostStore()
    encoded = Zvc().encode(torch.ones(100))
    assert store.get(store.put(encoded)) is encoded


@pytest.mark.parametrize("kind", [DeviceStore, HostStore])
def test_a_full_store_refuses_and_takes_again_after_a_drop(kind: type[DeviceStore | HostStore]) -> None:
    store = kind(capacity=1000)
    tickets = [store.put(value(500)), store.put(value(500))]
    with pytest.raises(StoreFullError, match=rf"{kind.__name__} was asked to hold 1 bytes \(check of uint8 \[1\]\)"):
        store.put(value(1))
    assert store.usage() == Usage(1000, 1000, 2)
    store.drop(tickets[0])
    store.drop(store.put(value(500)))
    assert store.usage() == Usage(500, 1000, 1)


@pytest.mark.parametrize("kind", [DeviceStore, HostStore])
def test_a_capacity_is_a_number_of_bytes(kind: type[DeviceStore | HostStore]) -> None:
    with pytest.raises(ValueError, match="capacity=-1, but there are no fewer than 0 bytes"):
        kind(capacity=-1)


def test_a_store_is_freed_with_its_last_reference() -> None:
    store = HostStore()
    seen = weakref.ref(store)
    gc.disable()
    try:
        del store
        assert seen() is None
    finally:
        gc.enable()


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 30)), max_size=60))
def test_space_hands_out_what_is_free(steps: list[tuple[bool, int]]) -> None:
    size = 100
    space, taken = Space(size), {}
    for take, n in steps:
        if take:
            used = {byte for start, length in taken.items() for byte in range(start, start + length)}
            fits = [s for s in range(size - n + 1) if used.isdisjoint(range(s, s + n))]
            start = space.take(n)
            assert start == (fits[0] if fits else None)
            if start is not None:
                taken[start] = n
        elif taken:
            start = sorted(taken)[n % len(taken)]
            space.give(start, taken.pop(start))
    for start, length in taken.items():
        space.give(start, length)
    assert space.take(size) == 0


@gpu
@pytest.mark.gpu
def test_planes_on_cuda_come_back() -> None:
    store = HostStore(in_flight=1 << 20)
    check_store(store)
    for round in range(3):  # the second round uses pinned memory again
        tickets = [store.put(value(n, "cuda", seed=n + round)) for n in (1, 0, 100_000, 3 << 20, 65 << 20)]
        for ticket, n in reversed(list(zip(tickets, (1, 0, 100_000, 3 << 20, 65 << 20), strict=True))):
            store.prefetch(ticket)
            for _ in range(2):
                got = store.get(ticket).planes["codes"]
                assert got.is_cuda and equal_bits(got.cpu(), value(n, seed=n + round).planes["codes"])
            store.drop(ticket)
    assert store.usage().nbytes == 0


@gpu
@pytest.mark.gpu
def test_what_is_freed_while_its_copy_runs_is_not_overwritten() -> None:
    store = HostStore()
    for seed in range(50):
        ticket = store.put(value(8 << 20, "cuda", seed))
        torch.full((8 << 20,), 255, dtype=torch.uint8, device="cuda")  # would get the memory of the plane
        assert equal_bits(store.get(ticket).planes["codes"].cpu(), value(8 << 20, seed=seed).planes["codes"])
        store.drop(ticket)


def test_a_session_may_use_it() -> None:
    x = torch.randn(64, 64, requires_grad=True)
    store = HostStore()
    with Session(Everywhere("host"), stores={"host": store}, min_nbytes=0):
        y = x.relu().exp().relu().sum()
    assert store.usage().nbytes > 0
    y.backward()
    del y
    assert store.usage().count == 0
