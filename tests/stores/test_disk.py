"""The disk store under faults: what cannot be kept or brought back is an error that names it, never another value."""

from __future__ import annotations

import errno
import fcntl
import gc
import mmap
import os
import shutil
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from store_values import Everywhere, value
from torch import nn

from backstash import Encoded, Session
from backstash.errors import DamagedPlanesError, StoreError, StoreFullError
from backstash.report import meter
from backstash.saved import TensorSpec
from backstash.stores import DiskStore, Ticket, Usage
from backstash.stores.blocks import BLOCK
from backstash.testing import check_store, equal_bits

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[DiskStore]:
    with DiskStore(tmp_path, in_flight=2 * BLOCK) as store:
        yield store


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 16 MiB."""
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", tmp_path], capture_output=True)
    if mounted.returncode:
        pytest.skip("only root may mount a small disk")
    yield tmp_path
    subprocess.run(["umount", tmp_path], check=True)


def comes_back(store: DiskStore, ticket: Ticket, expected: Encoded) -> bool:
    got = store.get(ticket)
    assert got.planes.keys() == expected.planes.keys()
    return all(equal_bits(got.planes[name], plane) for name, plane in expected.planes.items())


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


def test_a_full_disk_is_found_out_by_put(small_disk: Path) -> None:
    store = DiskStore(small_disk)
    values = [value(5 << 20, seed=seed) for seed in range(3)]
    tickets = [store.put(one) for one in values]
    with pytest.raises(StoreFullError, match=r"its file has \d+ and cannot grow: .*No space left on device"):
        store.put(value(5 << 20))
    assert all(comes_back(store, ticket, one) for ticket, one in zip(tickets, values, strict=True))
    store.drop(tickets[1])
    store.flush()
    assert comes_back(store, store.put(values[2]), values[2])
    check_store(store)
    store.close()
    assert shutil.disk_usage(small_disk).used == 0


def test_a_write_error_is_told_by_get_and_by_the_next_put(store: DiskStore, monkeypatch: pytest.MonkeyPatch) -> None:
    kept, lost = value(10_000, seed=1), value(3 * BLOCK, seed=2)
    first = store.put(kept)
    store.flush()

    def fails(descriptor: int, data: Any, at: int) -> int:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", fails)
        second = store.put(lost)
        store.flush()
    message = rf"asked for check of uint8 \[{3 * BLOCK}\], ticket 1, but it could not be written: .*Input/output"
    for _ in range(2):
        store.prefetch(second)
        with pytest.raises(StoreError, match=message):
            store.get(second)
    with pytest.raises(StoreError, match=r"a write failed before: .*Input/output error. See what ails the disk"):
        store.put(kept)
    assert comes_back(store, first, kept)
    store.drop(second)
    assert store.usage().count == 1


def test_short_writes_and_reads_go_on(store: DiskStore, monkeypatch: pytest.MonkeyPatch) -> None:
    pwrite, preadv = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda descriptor, data, at: pwrite(descriptor, data[:8192], at))
    monkeypatch.setattr(os, "preadv", lambda descriptor, data, at: preadv(descriptor, [data[0][:4096]], at))
    assert comes_back(store, store.put(value(100_000)), value(100_000))


def test_a_file_that_ends_too_early_is_an_error(store: DiskStore) -> None:
    ticket = store.put(value(BLOCK + 5))
    store.flush()
    os.ftruncate(store._file._descriptor, BLOCK)
    with pytest.raises(StoreError, match=rf"check of uint8 \[{BLOCK + 5}\], ticket 0, .*ends at byte {BLOCK}, 4096"):
        store.get(ticket)


def test_a_read_error_names_the_tensor(store: DiskStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(descriptor: int, data: Any, at: int) -> int:
        raise OSError(errno.EIO, "Input/output error")

    ticket = store.put(value(5))
    monkeypatch.setattr(os, "preadv", fails)
    with pytest.raises(StoreError, match=r"check of uint8 \[5\], ticket 0, but it could not be read: .*Input/output"):
        store.get(ticket)


@pytest.mark.parametrize("where", [0, 4999, BLOCK - 1, BLOCK, 2 * BLOCK + 4])
def test_a_flipped_byte_is_an_error_and_never_a_value(store: DiskStore, where: int) -> None:
    other = store.put(value(5000))
    ticket = store.put(value(2 * BLOCK + 5, seed=3))
    store.flush()
    with open(f"/proc/self/fd/{store._file._descriptor}", "r+b") as file:
        file.seek(8192 + where)
        byte = file.read(1)[0]
        file.seek(8192 + where)
        file.write(bytes([byte ^ 1]))
    for ahead in (False, True):
        if ahead:
            store.prefetch(ticket)
        message = (
            rf"check of uint8 \[{2 * BLOCK + 5}\], ticket 1, got other bytes than were put: .* block {where // BLOCK}"
        )
        with pytest.raises(DamagedPlanesError, match=message):
            store.get(ticket)
    assert comes_back(store, other, value(5000))


def test_deleting_the_directory_loses_nothing(tmp_path: Path) -> None:
    with DiskStore(tmp_path / "there") as store:
        before = store.put(value(BLOCK + 1))
        assert list((tmp_path / "there").iterdir()) == []
        shutil.rmtree(tmp_path / "there")
        after = store.put(value(100, seed=1))
        assert comes_back(store, before, value(BLOCK + 1))
        assert comes_back(store, after, value(100, seed=1))


def test_a_directory_that_cannot_be_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=r"DiskStore was asked to keep a file in .*file, but that failed"):
        DiskStore(tmp_path / "file")


def test_memory_for_two_blocks_is_the_least(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"in_flight=1, but it takes {2 * BLOCK} bytes or more"):
        DiskStore(tmp_path, in_flight=1)


@pytest.mark.parametrize("missing", [("O_TMPFILE",), ("O_DIRECT",), ("O_TMPFILE", "O_DIRECT", "posix_fallocate")])
def test_systems_that_have_less(missing: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in missing:
        monkeypatch.delattr(os, name, raising=False)
    with DiskStore(tmp_path) as store:
        assert store._file.direct == (hasattr(os, "O_DIRECT"))
        assert list(tmp_path.iterdir()) == []
        assert comes_back(store, store.put(value(BLOCK + 9)), value(BLOCK + 9))
        check_store(store)


def test_a_file_system_that_refuses_direct_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pwrite = os.pwrite

    def refuses(descriptor: int, data: Any, at: int) -> int:
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return pwrite(descriptor, data, at)

    monkeypatch.setattr(os, "pwrite", refuses)
    with DiskStore(tmp_path) as store:
        assert not store._file.direct
        assert comes_back(store, store.put(value(BLOCK + 9)), value(BLOCK + 9))


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


KILLED = """
import sys, time, torch
from backstash.codecs import Encoded
from backstash.saved import TensorSpec
from backstash.stores import DiskStore
store = DiskStore(sys.argv[1])
plane = torch.ones(10 << 20, dtype=torch.uint8)
store.put(Encoded("check", TensorSpec.of(plane), {"codes": plane}))
store.flush()
print("written", flush=True)
time.sleep(60)
"""


def test_a_killed_process_leaves_nothing(small_disk: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", KILLED, small_disk], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "written\n"
        assert shutil.disk_usage(small_disk).used >= 10 << 20
        process.kill()
    assert list(small_disk.iterdir()) == []
    assert shutil.disk_usage(small_disk).used == 0
    with DiskStore(small_disk) as store:
        assert comes_back(store, store.put(value(12 << 20)), value(12 << 20))


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
    assert store._space.take(store._account.capacity) == 0
    store.close()


# -- with a Session ----------------------------------------------------------------------------------------------------


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
    assert store._space.take(1 << 62) == 0


def test_a_lost_value_ends_the_backward_pass_with_its_name(store: DiskStore) -> None:
    x = torch.randn(50, 50, requires_grad=True)
    with Session(Everywhere("disk"), stores={"disk": store}, min_nbytes=0):
        y = x.exp().tanh().sum()
    store.flush()
    os.ftruncate(store._file._descriptor, 0)
    with pytest.raises(StoreError, match=r"zvc of float32 \[50, 50\], ticket \d, but it could not be read"):
        y.backward()
