"""``check_store``: the contract that a Session needs of a store."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from threading import Thread

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from backstash.bits import equal_bits
from backstash.codecs.base import Encoded
from backstash.errors import BackstashError
from backstash.saved import TensorSpec
from backstash.stores import Store, Ticket
from backstash.testing.failures import fail
from backstash.testing.layouts import describe_layout
from backstash.testing.tensors import special_floats

_PATIENCE_SECONDS = 10.0
"""How long a ``put`` may take before it counts as a deadlock."""


def check_store(store: Store) -> None:
    """Checks that a store returns values bit for bit, frees them when they are dropped, and serves any thread.

    Args:
        store: an open store. It may hold values, and holds the same values afterwards.

    Raises:
        AssertionError: the store breaks the contract.
    """
    at_start = store.usage()
    _check_values(store)
    _check_threads(store)
    _check_drop_inside_put(store)
    at_end = store.usage()
    if (at_end.nbytes, at_end.count) != (at_start.nbytes, at_start.count):
        fail(
            f"check_store asked {store!r} to drop all that was put",
            f"{at_end} after {at_start}",
            "Count every drop once, under a lock",
        )


def _value(seed: int) -> Encoded:
    """A value with planes of several dtypes, an empty plane, and metadata, as codecs return it."""
    generator = torch.Generator().manual_seed(seed)
    n = 64 + seed % 7
    planes = {
        "mask": torch.randint(0, 256, (n,), dtype=torch.uint8, generator=generator),
        "offsets": torch.randint(-(2**62), 2**62, (3,), generator=generator),
        "values": torch.cat([special_floats(torch.float32), torch.randn(n, generator=generator)]),
        "half": torch.randn(n, generator=generator).bfloat16(),
        "flags": torch.randint(0, 2, (5,), generator=generator).bool(),
        "none": torch.empty(0, dtype=torch.float64),
    }
    return Encoded("check", TensorSpec.of(torch.empty(n)), planes, {"bits": seed, "scale": 0.5, "sizes": (1, 2)})


def _same(store: Store, expected: Encoded, got: Encoded) -> None:
    if (got.codec, got.spec, dict(got.meta)) != (expected.codec, expected.spec, dict(expected.meta)):
        fail(f"check_store asked {store!r} for {expected.codec} {expected.meta}", f"{got.codec} {got.meta}", _NO_MIX)
    if list(got.planes) != list(expected.planes):
        fail(f"check_store asked {store!r} for planes {list(expected.planes)}", f"{list(got.planes)}", _NO_MIX)
    for name, plane in expected.planes.items():
        if got.planes[name].device != plane.device or not equal_bits(got.planes[name], plane):
            fail(
                f"check_store asked {store!r} for plane {name!r} as it was put: {describe_layout(plane)}",
                f"{describe_layout(got.planes[name])} with other bits, shape, dtype or device",
                "Bring back every plane where it was, bit for bit",
            )


_NO_MIX = "Return what was put under this ticket"


def _check_values(store: Store) -> None:
    base = store.usage()
    values = {store.put(_value(seed)): seed for seed in range(5)}
    bare = store.put(Encoded("check", TensorSpec.of(torch.empty(3)), {}))
    usage = store.usage()
    nbytes = sum(ticket.nbytes for ticket in values) + bare.nbytes
    if (usage.count - base.count, usage.nbytes - base.nbytes) != (len(values) + 1, nbytes):
        fail(f"check_store asked {store!r} to hold {nbytes} bytes more than {base}", f"{usage}", "Count in put")
    if usage.peak_nbytes < usage.nbytes:
        fail(f"check_store asked {store!r} for its peak", f"{usage}", "Take the maximum in put")
    for ticket, seed in values.items():
        if ticket.nbytes < _value(seed).nbytes:
            fail(
                f"check_store asked {store!r} for the bytes of a value of {_value(seed).nbytes}",
                f"{ticket}",
                "Give the ticket the bytes that are held; a store does not encode",
            )
    order = [*values, *reversed(values), *values]
    for ticket, following in pairwise(order):
        store.prefetch(following)
        _same(store, _value(values[ticket]), store.get(ticket))
    if store.get(bare).planes:
        fail(f"check_store asked {store!r} for a value without planes", "planes", _NO_MIX)
    _check_drops(store, list(values.items()), bare)


def _check_drops(store: Store, values: list[tuple[Ticket, int]], bare: Ticket) -> None:
    (first, seed), *rest = values
    held = store.get(first)
    store.prefetch(first)
    for _ in range(2):  # the second drop must do nothing: a finalizer may come late
        before = store.usage()
        store.drop(first)
    if store.usage() != before:
        fail(f"check_store asked {store!r} to drop twice", f"{store.usage()} after {before}", "Count a drop once")
    later = store.put(_value(99))
    _same(store, _value(seed), held)
    for ticket, other in rest:
        _same(store, _value(other), store.get(ticket))
    try:
        store.get(first)
    except (LookupError, BackstashError):
        pass
    else:
        fail(f"check_store asked {store!r} for a dropped value", "a value", "Raise: a stale one is a wrong gradient")
    store.drop(bare)
    for ticket, _ in rest:
        store.drop(ticket)
    store.drop(later)
    value = _value(7)
    memory = StorageWeakRef(value.planes["values"].untyped_storage())
    ticket = store.put(value)
    del value
    store.drop(ticket)
    if not memory.expired():
        gc.collect()
    if not memory.expired():
        fail(f"check_store asked {store!r} to forget a value", "its planes still in memory", "Drop every reference")


def _check_threads(store: Store) -> None:
    def work(worker: int) -> None:
        tickets = [(store.put(_value(seed)), seed) for seed in range(worker * 16, worker * 16 + 16)]
        for ticket, seed in reversed(tickets):
            store.prefetch(ticket)
            _same(store, _value(seed), store.get(ticket))
            store.drop(ticket)

    shared = store.put(_value(5))
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(8)))
        for got in threads.map(store.get, [shared] * 8):
            _same(store, _value(5), got)
        list(threads.map(store.drop, [shared] * 8))


class _Claim:
    """Drops its ticket when the garbage collector frees it, as an abandoned graph does."""

    def __init__(self, store: Store, ticket: Ticket) -> None:
        self.store, self.ticket, self.cycle = store, ticket, self

    def __del__(self) -> None:
        self.store.drop(self.ticket)


def _check_drop_inside_put(store: Store) -> None:
    """Lets the garbage collector drop a value at every allocation of a ``put``, on the same thread."""
    value = _value(1)

    def work() -> None:
        for allocations in range(1, 120):
            ticket = store.put(value)
            gc.disable()
            gc.collect(0)
            _Claim(store, ticket)
            gc.set_threshold(allocations, 10**6, 10**6)
            gc.enable()
            store.drop(store.put(value))

    enabled, thresholds = gc.isenabled(), gc.get_threshold()
    worker = Thread(target=work, daemon=True)
    try:
        worker.start()
        worker.join(_PATIENCE_SECONDS)
    finally:
        gc.set_threshold(*thresholds)
        (gc.enable if enabled else gc.disable)()
    if worker.is_alive():
        fail(
            f"check_store asked {store!r} to drop a value while the same thread puts another",
            "a deadlock",
            "The garbage collector may run finalizers inside put: guard it with an RLock",
        )
    gc.collect()
