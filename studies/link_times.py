"""Compression beside the link, simulated: ``python -m studies.link_times [--json FILE] [--resume]``.

The feature maps that the policy ``vdnn`` moves cross a link of 3, 12.8 or 50 GB/s each way: as they are, or compressed
on their way. What each codec takes for each map is measured, in seconds of one thread's time, which other programs on
the machine hardly change, and divided by the cores that compress. The rest is arithmetic. On the way out a map is
encoded while the one before it crosses the link; on the way back it is decoded while the next one crosses. The time of
a direction is when the last map has arrived. Nothing else is taken to compute meanwhile: what is left of these times
behind a network's own computation is another question, which ``python -m studies.layrub`` measures.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from backstash import Encoded, Session, policies
from backstash.codecs import Codec, Deflate, Rle, Sz, Szp, Zvc
from backstash.errors import StoreError
from backstash.stores import Ticket, Usage
from bench.cases import SEED, image_batch
from bench.results import Results
from bench.rounds import table
from tests import networks

NETWORKS = ("alexnet", "overfeat", "nin", "vgg16", "squeezenet1_0", "googlenet")
"""The six of cDMA's paper."""

SPEEDS = (3e9, 12.8e9, 50e9)
"""Bytes per second of a direction: a slow link, 16 lanes of PCIe 3, and nearly those of PCIe 5."""

SHARE = 0.02
"""The bound of the codecs that have one, as a share of the root mean square of what is not zero."""

CODECS: dict[str, Callable[[Tensor], Codec]] = {
    "zvc": lambda x: Zvc(),
    "rle": lambda x: Rle(),
    "deflate": lambda x: Deflate(),
    "szp": lambda x: Szp(_bound(x)),
    "sz": lambda x: Sz(_bound(x)),
}
"""Those of cDMA's paper, which are exact, and two with a bound."""


def _bound(x: Tensor) -> float:
    nonzero = x[x != 0]
    return SHARE * float(nonzero.square().mean().sqrt()) if nonzero.numel() else 1.0


@dataclass(frozen=True)
class Moved:
    """A feature map on its way.

    Attributes:
        nbytes: as they cross the link.
        encode_seconds, decode_seconds: of one thread; 0 if the map is sent as it is.
    """

    nbytes: int
    encode_seconds: float = 0.0
    decode_seconds: float = 0.0


@dataclass(frozen=True)
class Way:
    """One way to send the feature maps of a step.

    Attributes:
        nbytes: bytes that cross the link each way.
        out_seconds, back_seconds: of the two directions.
        seconds: both together.
        encode_seconds, decode_seconds: of one thread.
    """

    nbytes: int
    out_seconds: float
    back_seconds: float
    seconds: float
    encode_seconds: float
    decode_seconds: float


@dataclass
class Scale:
    """A store that measures each codec on the feature maps that it is given, and holds nothing.

    Attributes:
        rounds: how often each map is encoded and decoded.
        maps: by codec, the maps in forward's order.
    """

    rounds: int
    maps: dict[str, list[Moved]] = field(default_factory=lambda: {name: [] for name in ("raw", *CODECS)})
    _numbers: count[int] = field(default_factory=count, repr=False)

    def put(self, encoded: Encoded) -> Ticket:
        """Measures a value."""
        values = encoded.planes["values"]
        if values.is_floating_point():
            self.maps["raw"].append(Moved(values.nbytes))
            for name, make in CODECS.items():
                self.maps[name].append(self._measured(make(values), values))
        return Ticket(next(self._numbers), encoded.nbytes)

    def _measured(self, codec: Codec, values: Tensor) -> Moved:
        if codec.declines(values) is not None:
            return Moved(values.nbytes)
        out, encoding, decoding = torch.empty_like(values), [], []
        for _ in range(self.rounds):
            started = time.thread_time()
            encoded = codec.encode(values)
            between = time.thread_time()
            codec.decode(encoded, out)
            encoding.append(between - started)
            decoding.append(time.thread_time() - between)
        return Moved(encoded.nbytes, statistics.median(encoding), statistics.median(decoding))

    def prefetch(self, ticket: Ticket) -> None:
        """Nothing is here."""

    def get(self, ticket: Ticket) -> Encoded:
        """Nothing is here."""
        raise StoreError("Scale was asked for a value, but it holds none. Run no backward.")

    def drop(self, ticket: Ticket) -> None:
        """Nothing is here."""

    def usage(self) -> Usage:
        """Nothing is held."""
        return Usage(0, 0, 0)


def simulate(maps: Sequence[Moved], bytes_per_second: float, cores: int) -> Way:
    """Sends maps out in their order and back in the opposite one, and returns the times.

    Args:
        maps: in forward's order.
        bytes_per_second: of each direction of the link.
        cores: how many compress a map together.
    """
    encoded = sent = 0.0
    for moved in maps:
        encoded += moved.encode_seconds / cores
        sent = max(sent, encoded) + moved.nbytes / bytes_per_second
    arrived = decoded = 0.0
    for moved in reversed(maps):
        arrived += moved.nbytes / bytes_per_second
        decoded = max(decoded, arrived) + moved.decode_seconds / cores
    return Way(
        sum(moved.nbytes for moved in maps),
        sent,
        decoded,
        sent + decoded,
        sum(moved.encode_seconds for moved in maps),
        sum(moved.decode_seconds for moved in maps),
    )


@dataclass(frozen=True)
class Row:
    """A network over a link.

    Attributes:
        network: a key of `networks.NETWORKS`.
        batch, size: images, their height and width.
        bytes_per_second: of each direction of the link.
        cores: how many compress.
        ways: by codec; ``"raw"`` is as it is.
    """

    network: str
    batch: int
    size: int
    bytes_per_second: float
    cores: int
    ways: dict[str, Way]


def measure(name: str, batch: int, size: int | None, cores: int, rounds: int) -> list[Row]:
    """One forward pass of a network at initialisation, and its maps over every link."""
    torch.manual_seed(SEED)
    model = networks.build(name)
    pixels = size or networks.NETWORKS[name].image_size
    _, images, labels = image_batch(batch, pixels)
    scale = Scale(rounds)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # so that the thread's time is all of a codec's
    try:
        with Session(policies.vdnn(), model=model, stores={"host": scale}):
            functional.cross_entropy(model(images), labels)
    finally:
        torch.set_num_threads(threads)
    return [
        Row(name, batch, pixels, speed, cores, {way: simulate(maps, speed, cores) for way, maps in scale.maps.items()})
        for speed in SPEEDS
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, simulates, prints a table and writes the JSON; returns 0."""
    parser = argparse.ArgumentParser(prog="python -m studies.link_times", description="Compression beside a link.")
    parser.add_argument("--networks", nargs="+", choices=sorted(networks.NETWORKS), default=NETWORKS)
    parser.add_argument("--batch", type=int, default=2, help="images of the forward pass (default: 2)")
    parser.add_argument("--size", type=int, help="their height and width (default: the network's own)")
    parser.add_argument("--cores", type=int, default=2, help="cores that compress (default: 2)")
    parser.add_argument("--rounds", type=int, default=5, help="of each map and codec (default: 5)")
    parser.add_argument("--json", type=Path, help="file to write, after every network")
    parser.add_argument("--resume", action="store_true", help="leave out the networks that the file has")
    asked = parser.parse_args(arguments)
    if min(asked.batch, asked.cores, asked.rounds) < 1:
        raise SystemExit(
            f"studies.link_times was asked for a batch of {asked.batch}, {asked.cores} cores and {asked.rounds} "
            f"rounds, but it takes one of each at least."
        )
    results = Results("studies.link_times", asked.json, arguments, resume=asked.resume)
    rows: list[dict[str, object]] = list(results.found.get("rows", []))
    known = {row["network"] for row in rows}
    for name in asked.networks:
        if name not in known:
            found = measure(name, asked.batch, asked.size, asked.cores, asked.rounds)
            results.write(rows=[*rows, *found])
            rows = list(results.found["rows"])
    header = ("network", "GB/s", *("raw", *CODECS))
    print(table(header, [_line(row) for row in results.found["rows"]]))
    print(f"\n{results.close()}")
    return 0


def _line(row: dict[str, object]) -> tuple[str, ...]:
    ways: dict[str, dict[str, float]] = row["ways"]  # type: ignore[assignment]
    cells = [f"{1000 * way['seconds']:.1f} ms" for way in ways.values()]
    return (str(row["network"]), f"{float(row['bytes_per_second']) / 1e9:g}", *cells)  # type: ignore[arg-type]


if __name__ == "__main__":
    raise SystemExit(main())
