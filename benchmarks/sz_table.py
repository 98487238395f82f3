"""What sz makes of activations, against the entropy of its own codes, zlib and, where installed, zfp and SZ3.

python -m benchmarks.sz_table
"""

from __future__ import annotations

import math
import time
import zlib
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from backstash.codecs import Sz

BOUNDS = (1e-3, 1e-2, 1e-1)
ROUNDS = 5


def activations(zeros: float, dtype: torch.dtype) -> Tensor:
    """[16, 64, 112, 112] of what a relu leaves of normal numbers of which a share is below zero."""
    noise = torch.randn(16, 64, 112, 112, generator=torch.Generator().manual_seed(0))
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


def main() -> None:
    """Print the table."""
    print(f"{torch.get_num_threads()} threads; GB/s of what the tensor has dense; entropy as bits per element")
    print(f"{'':28}{'ratio':>8}{'limit':>8}{'share':>8}{'encode':>8}{'decode':>8}")
    for dtype in (torch.float32, torch.bfloat16):
        for zeros in (0.5, 0.8):
            x = activations(zeros, dtype)
            for bound in BOUNDS:
                codec = Sz(bound, "rel")
                encoded, out = codec.encode(x), torch.empty_like(x)
                absolute = bound * float(x.max())
                limit = 8 * x.element_size() / entropy(x, absolute)
                ratio = x.nbytes / encoded.nbytes
                rates = [
                    x.nbytes / 1e9 / seconds(call)
                    for call in (lambda: codec.encode(x), lambda: codec.decode(encoded, out))  # noqa: B023
                ]
                name = f"{str(dtype)[6:]} {zeros:.0%} zeros {bound:g}"
                print(f"{name:28}{ratio:8.2f}{limit:8.2f}{ratio / limit:8.1%}{rates[0]:8.2f}{rates[1]:8.2f}")
                if dtype is not torch.float32:
                    continue
                for peer, encode, decode in peers(x, absolute):
                    packed = encode()
                    ratio = x.nbytes / len(memoryview(packed).cast("B"))
                    rates = [
                        x.nbytes / 1e9 / seconds(call, 1)
                        for call in (encode, lambda: decode(packed))  # noqa: B023
                    ]
                    print(f"  {peer:26}{ratio:8.2f}{'':16}{rates[0]:8.2f}{rates[1]:8.2f}")


if __name__ == "__main__":
    main()
