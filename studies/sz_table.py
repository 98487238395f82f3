"""Sizes and errors of activations under sz: ``python -m studies.sz_table [--json FILE] [--network]``.

Of numbers as relus leave them, the ratio, what the entropy of its own integers would allow, and how fast it encodes and
decodes, beside zlib and, where installed (``pip install 'backstash[peers]'``), zfp and SZ3. With ``--network`` also
bits per element of what convolutions read in two networks after a short training, in codecs by which a relu can decide
as it did: ``Szp``; ``Signed(Sz)``, which encodes what is not zero; and ``Sz`` of everything, with a bit beside it.
"""

from __future__ import annotations

import argparse
import math
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from backstash.codecs import BlockQuant, Codec, Signed, Sz, Szp
from bench import datasets
from bench.results import Results
from bench.rounds import table
from studies import comet
from studies.gist_accuracy import Schedule

BOUNDS = (1e-3, 1e-2, 1e-1)
"""Shares of the range."""

SHARES = (0.05, 0.2, 0.5)
"""Bounds of a network's values, of the root mean square of what is not zero."""

TRAININGS = {
    "small_vgg": Schedule(steps=200, batch=64, train_images=6400, test_images=1, size=16),
    "resnet18": Schedule(steps=25, batch=16, train_images=400, test_images=1, size=64, learning_rate=0.02),
}
ROUNDS = 5


@dataclass(frozen=True)
class Row:
    """One codec on one tensor.

    Attributes:
        values: what the tensor is.
        bound: the largest error, as a share of the range.
        codec: its name.
        ratio: dense over stored bytes.
        entropy_ratio: what coding the multiples of twice the bound one by one would allow; None but for our codec.
        encode, decode: GB/s of the dense tensor.
    """

    values: str
    bound: float
    codec: str
    ratio: float
    entropy_ratio: float | None
    encode: float
    decode: float


@dataclass(frozen=True)
class Bits:
    """One convolution's input: bits per element.

    Attributes:
        network, layer: which.
        nonzero: share of elements.
        share: the bound, of the root mean square of the non-zeros.
        szp, signed: of these codecs.
        beside: of Sz, and a bit per element beside it.
        signed_blockquant: of ``Signed(BlockQuant(2))``, which has no bound but a range's share.
    """

    network: str
    layer: str
    nonzero: float
    share: float
    szp: float
    signed: float
    beside: float
    signed_blockquant: float


def activations(zeros: float, dtype: torch.dtype, batch: int = 16) -> Tensor:
    """[batch, 64, 112, 112] of what a relu leaves of normal numbers of which a share is below zero."""
    noise = torch.randn(batch, 64, 112, 112, generator=torch.Generator().manual_seed(0))
    return (noise - math.sqrt(2) * torch.erfinv(torch.tensor(2 * zeros - 1.0))).relu().to(dtype)


def entropy(x: Tensor, bound: float) -> float:
    """Bits per element of the multiples of twice the bound, each coded on its own."""
    counts = torch.round(x.double() / (2 * bound)).long().unique(return_counts=True)[1].double()
    shares = counts / x.numel()
    return float(-(shares * shares.log2()).sum())


def seconds(call: Callable[[], object], rounds: int = ROUNDS) -> float:
    """The median of some rounds, after one that does not count."""
    call()
    taken = []
    for _ in range(rounds):
        begin = time.perf_counter()
        call()
        taken.append(time.perf_counter() - begin)
    return sorted(taken)[rounds // 2]


def peers(x: Tensor, bound: float) -> Iterator[tuple[str, Callable[[], Any], Callable[[Any], Any]]]:
    """Name, encoder to something with a length in bytes, decoder."""
    array = x.numpy()
    yield "zlib 1", lambda: zlib.compress(array.data, 1), zlib.decompress
    if find_spec("zfpy"):
        import zfpy

        yield "zfp", lambda: zfpy.compress_numpy(array, tolerance=bound), zfpy.decompress_numpy
    if find_spec("pysz"):
        from pysz import sz, szConfig, szErrorBoundMode

        config = szConfig()
        config.errorBoundMode = szErrorBoundMode.ABS
        config.absErrorBound = bound
        config.openmp = True
        yield (
            "SZ3",
            lambda: sz.compress(array, config)[0],
            lambda packed: sz.decompress(packed, array.dtype, array.shape),
        )


def rows(batch: int) -> Iterator[Row]:
    """The first table's; the peers are given single precision only."""
    for dtype in (torch.float32, torch.bfloat16):
        for zeros in (0.5, 0.8):
            x = activations(zeros, dtype, batch)
            name = f"{str(dtype)[6:]}, {zeros:.0%} zeros"
            for bound in BOUNDS:
                codec, out = Sz(bound, "rel"), torch.empty_like(x)
                encoded = codec.encode(x)
                absolute = bound * float(x.max())
                allowed = 8 * x.element_size() / entropy(x, absolute)
                rates = _rates(x, lambda: codec.encode(x), lambda: codec.decode(encoded, out))  # noqa: B023
                yield Row(name, bound, "sz", x.nbytes / encoded.nbytes, allowed, *rates)
                for peer, encode, decode in peers(x, absolute) if dtype is torch.float32 else ():
                    packed = encode()
                    rates = _rates(x, encode, lambda: decode(packed), rounds=1)  # noqa: B023
                    yield Row(name, bound, peer, x.nbytes / memoryview(packed).nbytes, None, *rates)


def _rates(x: Tensor, *calls: Callable[[], object], rounds: int = ROUNDS) -> list[float]:
    return [x.nbytes / 1e9 / seconds(call, rounds) for call in calls]


def network_bits(network: str) -> Iterator[Bits]:
    """The second table's, of one network."""
    schedule = TRAININGS[network]
    data = datasets.load(None, schedule.size, None, schedule.train_images)
    (run,) = comet.train(network, ["plain"], data, schedule, seed=1)
    inputs: dict[str, Tensor] = {}
    layers = {name: module for name, module in run.model.named_modules() if isinstance(module, nn.Conv2d)}
    for name, module in list(layers.items())[1:]:
        module.register_forward_pre_hook(
            lambda module, given, name=name: inputs.__setitem__(name, given[0].detach().clone())
        )
    run.model(data.train_images[: schedule.batch])
    for layer, x in inputs.items():
        size = float(x[x != 0].square().mean().sqrt())
        for share in SHARES:

            def bits(codec: Codec, x: Tensor = x) -> float:
                return 8 * codec.encode(x).nbytes / x.numel()

            bound = share * size
            found = (
                bits(Szp(bound)),
                bits(Signed(Sz(bound, nonzero=True))),
                1 + bits(Sz(bound)),
                bits(Signed(BlockQuant(2))),
            )
            yield Bits(network, layer, float(x.count_nonzero()) / x.numel(), share, *found)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures everything, prints the tables, writes the JSON; returns 0."""
    parser = argparse.ArgumentParser(prog="python -m studies.sz_table", description="What sz makes of activations.")
    parser.add_argument("--json", type=Path, help="the file to write (default: none)")
    parser.add_argument("--network", action="store_true", help="also what convolutions read in two trained networks")
    parser.add_argument("--quick", action="store_true", help="small tensors: shows that everything runs")
    asked = parser.parse_args(arguments)
    results = Results("studies.sz_table", asked.json, arguments, quick=asked.quick)
    found = []
    for row in rows(1 if asked.quick else 16):
        found.append(row)
        results.write(codecs=found)
    header = ("values", "bound", "codec", "ratio", "entropy's", "encode GB/s", "decode GB/s")
    lines = []
    for row in found:
        numbers = [row.ratio, row.entropy_ratio, row.encode, row.decode]
        cells = ["" if number is None else f"{number:.2f}" for number in numbers]
        lines.append((row.values, f"{row.bound:g}", row.codec, *cells))
    print(table(header, lines))
    if asked.network:
        trained = [bits for network in TRAININGS for bits in network_bits(network)]
        results.write(networks=trained)
        names = ("network", "layer", "non-zero", "bound", "szp", "signed sz", "sz and a bit", "signed blockquant2")
        figures = [(one.nonzero, one.share, one.szp, one.signed, one.beside, one.signed_blockquant) for one in trained]
        shown = [
            (one.network, one.layer, *(f"{number:.2f}" for number in numbers))
            for one, numbers in zip(trained, figures, strict=True)
        ]
        print(f"\nbits per element\n{table(names, shown)}")
    print(f"\n{results.close()}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
