"""Sizes of sparse tensors, and where csr overtakes zvc: ``python -m studies.density [--json FILE]``.

Every ratio is that of a tensor that was encoded: normal numbers, a share of them zeroed at random. The last line is the
share of zeros from which on csr is the smaller one, found by halving; the formula of `Csr.crossing` says 88.9 %.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from backstash.codecs import Codec, Csr, Zvc
from bench.results import Results
from bench.rounds import table

FORMAT = 1
"""Version of the JSON's layout."""

ZEROS = (0.5, 0.6, 0.7, 0.8, 0.85, 0.88, 0.89, 0.9, 0.92, 0.95, 0.97, 0.98, 0.99)
DTYPES = (torch.float32, torch.bfloat16)

PAIRS: Mapping[str, tuple[Codec, Codec]] = {"": (Zvc(), Csr())}
"""What is compared: zvc and csr, by what is done to the values."""


@dataclass(frozen=True)
class Row:
    """One tensor under the codecs.

    Attributes:
        dtype: of the tensor.
        zeros: share of its elements that are zero.
        ratios: dense over encoded bytes, by codec.
    """

    dtype: str
    zeros: float
    ratios: Mapping[str, float]


def tensor(numel: int, dtype: torch.dtype, zeros: float) -> Tensor:
    """Normal numbers [numel], none zero, of which a share is zeroed; more zeros keep those that fewer zeros have."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(numel, generator=generator).to(dtype)
    x.masked_fill_(x == 0, 1)
    order = torch.rand(numel, generator=generator).argsort(stable=True)
    x[order[: round(zeros * numel)]] = 0
    return x


def measure(numel: int, dtype: torch.dtype, zeros: float) -> Row:
    """Encode one tensor with every codec."""
    x = tensor(numel, dtype, zeros)
    ratios = {codec.id + name: x.nbytes / codec.encode(x).nbytes for name, pair in PAIRS.items() for codec in pair}
    return Row(str(dtype).removeprefix("torch."), zeros, ratios)


def crossing(numel: int, dtype: torch.dtype, name: str) -> float:
    """The smallest share of zeros, to a thousandth, at which csr is smaller than zvc."""
    low, high = 500, 1000
    zvc, csr = PAIRS[name]
    while high - low > 1:
        middle = (low + high) // 2
        x = tensor(numel, dtype, middle / 1000)
        if csr.encode(x).nbytes < zvc.encode(x).nbytes:
            high = middle
        else:
            low = middle
    return high / 1000


def main(arguments: Sequence[str] | None = None) -> int:
    """Encodes, prints a table, writes the JSON."""
    parser = argparse.ArgumentParser(prog="python -m studies.density", description="Ratios by density.")
    parser.add_argument("--numel", type=int, default=1 << 20, help="elements of a tensor (default: 1048576)")
    parser.add_argument("--json", type=Path, help="file to write")
    asked = parser.parse_args(arguments)
    results = Results("studies.density", asked.json, arguments, format=FORMAT, numel=asked.numel)
    rows = [measure(asked.numel, dtype, zeros) for dtype in DTYPES for zeros in ZEROS]
    header = ("dtype", "zeros", *rows[0].ratios)
    print(table(header, [(row.dtype, f"{row.zeros:.0%}", *(f"{r:.2f}" for r in row.ratios.values())) for row in rows]))
    crossings = {
        f"{row}{name}": crossing(asked.numel, dtype, name)
        for dtype, row in ((dtype, str(dtype).removeprefix("torch.")) for dtype in DTYPES)
        for name in PAIRS
    }
    for which, zeros in crossings.items():
        print(f"{which}: csr is smaller than zvc from {zeros:.1%} zeros")
    results.write(rows=rows, csr_smaller_from_zeros=crossings)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
