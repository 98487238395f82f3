"""Rates of DiskStore beside dd: ``python -m studies.disk DIRECTORY [--json FILE]``, Linux only.

A round runs everything once, each round beginning with another one. dd writes and reads as many bytes past the page
cache (``oflag=direct``, ``iflag=direct``) in blocks as large as the store's: to a fresh file, and over one that is
there. It writes what it reads from a file in memory, as the store has to; ``zeros`` are written from one buffer that
never leaves the caches, which is more than any data can be. The store is timed from the first ``put`` until all is
written (``fresh``: its file grows; ``again``: the file is there, as it is from the second training step on), and from
the first ``prefetch`` until the last ``get`` has returned.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from backstash.codecs import Encoded
from backstash.saved import TensorSpec
from backstash.stores import DiskStore, Ticket
from backstash.stores.blocks import BLOCK
from bench.results import Results
from bench.rounds import Effort, interleave, spread, summarise, table


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, prints a table, writes the JSON."""
    parser = argparse.ArgumentParser(prog="python -m studies.disk", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("directory", type=Path, help="a directory on the disk to measure")
    parser.add_argument("--mib", type=int, default=1024, help="bytes per round (default: 1024)")
    parser.add_argument("--value-mib", type=int, default=32, help="size of a value (default: 32)")
    parser.add_argument("--rounds", type=int, default=9, help="rounds (default: 9)")
    parser.add_argument("--json", type=Path, help="file to write")
    asked = parser.parse_args(arguments)
    sizes = {"nbytes": asked.mib << 20, "value_nbytes": asked.value_mib << 20, "block_nbytes": BLOCK}
    results = Results("studies.disk", asked.json, arguments, **sizes)
    asked.directory.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(dir=asked.directory) as disk,
        tempfile.TemporaryDirectory(dir="/dev/shm") as memory,
    ):
        tasks = Disk(Path(disk), Path(memory), asked.mib << 20, asked.value_mib << 20).tasks()
        seconds = interleave(tasks, Effort(asked.rounds))
    speeds = {name: [(asked.mib << 20) / one / 1e9 for one in times] for name, times in seconds.items()}
    rows = {name: summarise(each) for name, each in speeds.items()}
    shares = {
        name: summarise([a / b for a, b in zip(each, speeds[f"dd {name}"], strict=True)])
        for name, each in speeds.items()
        if f"dd {name}" in speeds
    }
    print(
        table(
            ("what", "GB/s", "of dd"),
            [
                (name, spread(row, 1, 2), spread(shares[name], 1, 2) if name in shares else "")
                for name, row in rows.items()
            ],
        )
    )
    results.write(gb_per_second=rows, share_of_dd=shares)
    return 0


class Disk:
    """The tasks, and the files that they share.

    Args:
        directory: where they are; empty.
        memory: an empty directory in memory.
        nbytes: bytes that a task moves.
        value_nbytes: bytes of a value that the store is given.
    """

    def __init__(self, directory: Path, memory: Path, nbytes: int, value_nbytes: int) -> None:
        self.directory, self.nbytes = directory, nbytes
        plane = torch.randint(256, (value_nbytes,), dtype=torch.uint8)
        self.value = Encoded("none", TensorSpec.of(plane), {"bytes": plane})
        self.file = directory / "dd"
        self.data = Path(memory, "dd")
        self.data.write_bytes(plane.numpy().tobytes() * (nbytes // value_nbytes))
        self._dd("write, fresh")
        self.store = DiskStore(directory)
        self.tickets: list[Ticket] = []
        self._write_again()

    def tasks(self) -> dict[str, Callable[[], float]]:
        """What to time by name; each returns seconds."""
        return {
            "write, fresh": self._write_fresh,
            "dd write, fresh": lambda: self._dd("write, fresh"),
            "write, again": self._write_again,
            "dd write, again": lambda: self._dd("write, again"),
            "dd write, again, zeros": lambda: self._dd("write, again, zeros"),
            "read": self._read,
            "dd read": lambda: self._dd("read"),
        }

    def _write_fresh(self) -> float:
        with DiskStore(self.directory) as store:
            return self._put(store)[0]

    def _write_again(self) -> float:
        for ticket in self.tickets:
            self.store.drop(ticket)
        seconds, self.tickets = self._put(self.store)
        return seconds

    def _put(self, store: DiskStore) -> tuple[float, list[Ticket]]:
        started = time.perf_counter()
        tickets = [store.put(self.value) for _ in range(self.nbytes // self.value.nbytes)]
        store.flush()
        return time.perf_counter() - started, tickets

    def _read(self) -> float:
        started = time.perf_counter()
        for i, ticket in enumerate(self.tickets):
            for ahead in self.tickets[i : i + 2]:
                self.store.prefetch(ahead)
            self.store.get(ticket)
        return time.perf_counter() - started

    def _dd(self, what: str) -> float:
        count = f"count={self.nbytes // BLOCK}"
        command = ["dd", f"if={self.file}", "of=/dev/null", f"bs={BLOCK}", count, "iflag=direct"]
        if what != "read":
            source = "/dev/zero" if "zeros" in what else self.data
            command = ["dd", f"if={source}", f"of={self.file}", f"bs={BLOCK}", count, "oflag=direct", "conv=notrunc"]
        if what == "write, fresh":
            self.file.unlink(missing_ok=True)
        said = subprocess.run(command, capture_output=True, text=True, check=True, env={"LC_ALL": "C"}).stderr
        found = re.search(r"copied, ([\d.e-]+) s", said)
        assert found is not None, said
        return float(found.group(1))


if __name__ == "__main__":
    raise SystemExit(main())
