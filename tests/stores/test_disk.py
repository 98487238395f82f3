"""The disk store: every value comes back, within its limits and its memory, from many threads and for Sessions."""

from __future__ import annotations

import gc
import mmap
import os
import shutil
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from fresh import run_fresh
from store_values import Everywhere, comes_back, value
from torch import nn

from backstash import Encoded, Session
from backstash.errors import StoreError, StoreFullError
from backstash.report import meter
from backstash.saved import TensorSpec
from backstash.stores import DiskStore, Ticket, Usage
from backstash.stores.blocks import BLOCK
from backstash.testing import equal_bits

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")

SIZES = (0, 1, 63, 64, 65, 4095, 4096, 4097, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 7)


@pytest.mark.parametrize("ahead", [False, True])
def test_every_size_comes_back(store: DiskStore, ahead: bool) -> None:
    values = [value(n, seed=n) for n in SIZES]
    tickets = [store.put(one) for one in values]
    for ticket, one in reversed(list(zip(tickets, values, strict=True))):
        if ahead:
            store.prefetch(ticket)
        assert comes_back(store, ticket, one)


def test_planes_that_meet_in_a_block_come_back(store: DiskStore) -> None:
    planes = {f"p{n}": value(n, seed=n).planes["codes"] for n in (5, BLOCK - 70, 1, 0, BLOCK + 3, 100)}
    planes["scalar"] = torch.tensor(-0.0)
    planes["strided"] = torch.arange(20.0).view(4, 5).t()
    one = Encoded("check", TensorSpec.of(torch.empty(3)), planes, {"bits": 3})
    ticket = store.put(one)
    assert comes_back(store, ticket, one)
    assert store.get(ticket).meta == {"bits": 3}
    assert ticket.nbytes % 4096 == 0


def test_every_step_uses_the_same_part_of_the_file(store: DiskStore) -> None:
    for _ in range(5):
        tickets = [store.put(value(3 << 20, seed=seed)) for seed in range(10)]
        for seed in reversed(range(10)):
            assert comes_back(store, tickets[seed], value(3 << 20, seed=seed))
            store.drop(tickets[seed])
        store.flush()
        assert store._space.take(1) == 0
        store._space.give(0, 1)
    assert store.usage().count == store.usage().nbytes == 0


def test_the_byte_limit_holds(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, capacity=3 << 20)
    tickets = [store.put(value(1 << 20, seed=seed)) for seed in range(3)]
    with pytest.raises(StoreFullError, match=r"DiskStore was asked to hold 4096 bytes \(check of uint8 \[1\]\) beside"):
        store.put(value(1))
    assert store.usage().nbytes == 3 << 20
    for ticket in (tickets[0], tickets[2]):
        store.drop(ticket)
    store.flush()
    with pytest.raises(StoreFullError, match="what is free of its capacity is in smaller pieces"):
        store.put(value(2 << 20))
    assert comes_back(store, tickets[1], value(1 << 20, seed=1))
    assert store._file.nbytes <= 3 << 20


def test_deleting_the_directory_loses_nothing(tmp_path: Path) -> None:
    with DiskStore(tmp_path / "there") as store:
        before = store.put(value(BLOCK + 1))
        assert list((tmp_path / "there").iterdir()) == []
        shutil.rmtree(tmp_path / "there")
        after = store.put(value(100, seed=1))
        assert comes_back(store, before, value(BLOCK + 1))
        assert comes_back(store, after, value(100, seed=1))


@LINUX
def test_the_file_goes_with_the_store(tmp_path: Path) -> None:
    def files() -> int:
        links = [os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()]
        return sum(str(tmp_path) in link for link in links)

    store = DiskStore(tmp_path)
    seen = weakref.ref(store)
    tickets = [store.put(value(BLOCK)) for _ in range(9)]
    store.get(tickets[0])
    assert files() == 1
    store.flush()
    del store
    for _ in range(6000):  # a writer may still be about to end
        if seen() is None:
            break
        time.sleep(0.01)
    assert seen() is None
    assert files() == 0


def test_a_closed_store_says_so(tmp_path: Path) -> None:
    store = DiskStore(tmp_path)
    ticket = store.put(value(100))
    store.close()
    store.close()
    store.prefetch(ticket)
    for call in (lambda: store.get(ticket), lambda: store.put(value(100))):
        with pytest.raises(StoreError, match=r"check of uint8 \[100\], ticket \d, but it is closed"):
            call()
    store.drop(ticket)
    assert store.usage().count == 0


@LINUX
def test_the_memory_of_what_was_put_is_free(tmp_path: Path) -> None:
    with DiskStore(tmp_path, in_flight=2 * BLOCK) as store:
        store.get(store.put(value(3 * BLOCK)))  # the staging memory is there from now on
        before = meter.resident_nbytes()
        for seed in range(16):
            # In a mapping of its own: malloc may keep what is freed.
            plane = torch.frombuffer(mmap.mmap(-1, 16 << 20), dtype=torch.uint8).fill_(seed)
            store.put(Encoded("check", TensorSpec.of(plane), {"codes": plane}))
            del plane
        assert meter.resident_nbytes() - before < 32 << 20
        assert store.usage().nbytes >= 256 << 20


def test_prefetch_is_bounded(store: DiskStore) -> None:
    tickets = [store.put(value(BLOCK, seed=seed)) for seed in range(5)]
    for ticket in tickets * 2:
        store.prefetch(ticket)
    assert store._prefetched == 2 * BLOCK
    for seed, ticket in enumerate(tickets):
        assert comes_back(store, ticket, value(BLOCK, seed=seed))
    assert store._prefetched == 0
    store.prefetch(tickets[0])
    store.drop(tickets[0])
    assert store._prefetched == 0


def test_memory_is_used_again_when_nobody_holds_it(store: DiskStore) -> None:
    tickets = [store.put(value(BLOCK, seed=seed)) for seed in range(4)]
    held = [store.get(ticket) for ticket in tickets]
    assert all(
        equal_bits(one.planes["codes"], value(BLOCK, seed=seed).planes["codes"]) for seed, one in enumerate(held)
    )
    last = held.pop().planes["codes"][5:]
    address = last.data_ptr() - 5
    assert store.get(tickets[0]).planes["codes"].data_ptr() != address
    del last
    addresses = {store.get(ticket).planes["codes"].data_ptr() for ticket in tickets}
    assert address in addresses or len(addresses) == 1


def test_put_waits_where_too_much_is_in_flight(store: DiskStore, monkeypatch: pytest.MonkeyPatch) -> None:
    pwrite, go, writing = os.pwrite, threading.Event(), threading.Event()

    def slow(descriptor: int, data: Any, at: int) -> int:
        writing.set()
        go.wait()
        return pwrite(descriptor, data, at)

    monkeypatch.setattr(os, "pwrite", slow)
    with ThreadPoolExecutor(1) as thread:
        putting = thread.submit(store.put, value(5 * BLOCK))
        assert writing.wait(60)
        time.sleep(0.1)
        assert not putting.done()
        go.set()
        assert comes_back(store, putting.result(), value(5 * BLOCK))
    assert store.usage().stall_seconds > 0


def test_what_is_dropped_before_it_is_written_is_not(store: DiskStore, monkeypatch: pytest.MonkeyPatch) -> None:
    pwrite, go, written = os.pwrite, threading.Event(), []

    def slow(descriptor: int, data: Any, at: int) -> int:
        go.wait()
        written.append(at)
        return pwrite(descriptor, data, at)

    monkeypatch.setattr(os, "pwrite", slow)
    with ThreadPoolExecutor(1) as thread:
        dropped = store.put(value(BLOCK))
        store.prefetch(dropped)
        store.drop(dropped)
        other = thread.submit(store.put, value(4 * BLOCK, seed=1))  # must not get the place that is being written
        go.set()
        assert comes_back(store, other.result(), value(4 * BLOCK, seed=1))
    assert store.usage().count == 1


def test_many_threads_put_get_and_drop(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, capacity=64 << 20, in_flight=2 * BLOCK)

    def work(worker: int) -> None:
        generator = torch.Generator().manual_seed(worker)
        held: list[tuple[Ticket, int, int]] = []
        for step in range(40):
            n, seed = int(torch.randint(1, 400_000, (1,), generator=generator)), worker * 100 + step
            held.append((store.put(value(n, seed=seed)), n, seed))
            if step % 3 == 2:
                ticket, n, seed = held.pop(int(torch.randint(len(held), (1,), generator=generator)))
                store.prefetch(ticket)
                if step % 2:
                    assert comes_back(store, ticket, value(n, seed=seed))
                store.drop(ticket)
        for ticket, n, seed in reversed(held):
            assert comes_back(store, ticket, value(n, seed=seed))
            store.drop(ticket)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(4)))
    store.flush()
    assert (store.usage().nbytes, store.usage().count) == (0, 0)
    assert store._space.take(store._holdings.capacity) == 0
    store.close()


# -- with a Session ----------------------------------------------------------------------------------------------------


def all_space_is_given_back(store: DiskStore) -> bool:
    """Waits until the file is free: ``flush`` does not wait for the write of a value that was dropped meanwhile."""
    for _ in range(6000):
        if store._space.take(1 << 62) == 0:
            return True
        time.sleep(0.01)
    return False


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.BatchNorm2d(8), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3), nn.Tanh()
    )


def gradients(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    model(x).square().sum().backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


def steps(store: DiskStore, seed: int) -> None:
    x = torch.randn(4, 3, 20, 20, generator=torch.Generator().manual_seed(seed))
    model = network(seed)
    expected = gradients(model, x)
    with Session(Everywhere("disk"), stores={"disk": store}, min_nbytes=0):
        for _ in range(5):
            for got, plain in zip(gradients(model, x), expected, strict=True):
                assert equal_bits(got, plain)


def test_gradients_are_the_same(store: DiskStore) -> None:
    steps(store, 0)
    assert store.usage().peak_nbytes > 0
    assert store.usage().count == 0


def test_sessions_in_two_threads_share_a_store(store: DiskStore) -> None:
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda seed: steps(store, seed), (1, 2)))
    assert store.usage().count == 0


def test_abandoned_graphs_leave_no_bytes(store: DiskStore) -> None:
    x = torch.randn(20, 20, requires_grad=True)
    with Session(Everywhere("disk"), stores={"disk": store}, min_nbytes=0):
        for i in range(1000):
            y = x.exp().tanh().sum()
            if i % 10 == 0:  # only the garbage collector finds it
                cycle: list[Any] = [y]
                cycle.append(cycle)
                del cycle
            del y
    gc.collect()
    store.flush()
    usage = store.usage()
    assert usage.peak_nbytes > 0
    assert usage == Usage(0, usage.peak_nbytes, 0, usage.stall_seconds)
    assert all_space_is_given_back(store)


def test_a_lost_value_ends_the_backward_pass_with_its_name(store: DiskStore) -> None:
    x = torch.randn(50, 50, requires_grad=True)
    with Session(Everywhere("disk"), stores={"disk": store}, min_nbytes=0):
        y = x.exp().tanh().sum()
    store.flush()
    os.ftruncate(store._file._descriptor, 0)
    with pytest.raises(StoreError, match=r"zvc of float32 \[50, 50\], ticket \d, but it could not be read"):
        y.backward()


FORKED = """
import os, sys, traceback, warnings
import torch
from torch import nn
import backstash as bs
from backstash.errors import StoreError
from backstash.stores import DiskStore

warnings.simplefilter("ignore")
torch.set_num_threads(1)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.Sigmoid(), nn.Linear(256, 4))
session = bs.Session(
    bs.policies.offload(store="file"), stores={"file": DiskStore(sys.argv[1])}, model=model, min_nbytes=0
)


def loss_of(seed):
    torch.manual_seed(seed)
    return model(torch.randn(64, 64)).square().sum()


def gradients(loss):
    loss.backward()
    found = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    return found


def has_plain_bits(seed):
    with session:
        loss = loss_of(seed)
    found = gradients(loss)
    return all(map(torch.equal, found, gradients(loss_of(seed))))


def child(number):
    for step in range(30):
        assert has_plain_bits(100 * number + step)
    if held is not None:
        try:
            held.backward()
        except StoreError as error:
            assert "put before this process was forked" in str(error)
        else:
            raise AssertionError("the values of the other process were read")


held = None
if sys.argv[2] == "used":
    assert has_plain_bits(0)
if sys.argv[2] == "in use":
    with session:
        held = loss_of(0)
children = []
for number in (1, 2):
    pid = os.fork()
    if pid == 0:
        try:
            child(number)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    children.append(pid)
if held is not None:
    assert all(map(torch.equal, gradients(held), gradients(loss_of(0))))
for step in range(30):
    assert has_plain_bits(step)
assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children] == [0, 0]
print("done")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
@pytest.mark.parametrize("state", ["unused", "used", "in use"])
def test_forked_processes_have_files_of_their_own(state: str, tmp_path: Path) -> None:
    run = run_fresh(FORKED, str(tmp_path), state)
    assert run.stdout == "done\n", run.stderr[-3000:]
    assert not list(tmp_path.iterdir())
