"""The disk store under faults: a value that cannot be kept or read back is an error, and never another value."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from store_values import comes_back, value

from backstash.errors import DamagedPlanesError, StoreError, StoreFullError
from backstash.stores import DiskStore
from backstash.stores.blocks import BLOCK
from backstash.testing import check_store


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


def test_the_file_takes_ahead_no_more_than_it_has(store: DiskStore) -> None:
    values = [value(1 << 20, seed=seed) for seed in range(12)]
    tickets = []
    for number, one in enumerate(values, 1):
        tickets.append(store.put(one))
        taken = 512 * os.fstat(store._file._descriptor).st_blocks
        assert taken <= (2 * number + 4) << 20, f"{taken} bytes for {number} MiB"
    assert all(comes_back(store, ticket, one) for ticket, one in zip(tickets, values, strict=True))


def test_a_reservation_that_fails_gives_back_what_it_has_taken(
    store: DiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = value(10_000, seed=1)
    first = store.put(kept)
    store.flush()
    file = store._file
    free, reserve = 24 << 20, os.posix_fallocate

    def taking_all(descriptor: int, at: int, nbytes: int) -> None:
        """As ext4 does, which has taken all that there was when it says that it is too little."""
        reserve(descriptor, at, min(at + nbytes, free) - at)
        if at + nbytes > free:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", taking_all)
    before = os.fstat(file._descriptor).st_blocks
    with pytest.raises(StoreFullError, match="cannot grow"):
        store.put(value(32 << 20, seed=2))
    assert os.fstat(file._descriptor).st_blocks == before
    large = value(18 << 20, seed=3)  # which fits, and what the file would take ahead does not
    second = store.put(large)
    store.flush()
    assert comes_back(store, first, kept) and comes_back(store, second, large)


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


def test_a_directory_that_cannot_be_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=r"DiskStore was asked to keep a file in .*file, but that failed"):
        DiskStore(tmp_path / "file")
    with pytest.raises(StoreError, match=r"No such file.* Name a directory .* is made, in a directory that is there"):
        DiskStore(tmp_path / "scrach" / "values")
    assert not (tmp_path / "scrach").exists()


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


@pytest.mark.slow
def test_a_killed_process_leaves_nothing(small_disk: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", KILLED, small_disk], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "written\n"
        assert shutil.disk_usage(small_disk).used >= 10 << 20
        process.kill()
    assert list(small_disk.iterdir()) == []
    assert shutil.disk_usage(small_disk).used == 0
    with DiskStore(small_disk) as store:
        assert comes_back(store, store.put(value(12 << 20)), value(12 << 20))
