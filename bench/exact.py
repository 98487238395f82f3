"""How small exact codecs make what networks save, and how fast they are beside a copy.

    python -m bench.exact --json docs/results/exact-DATE.json

A network runs forward once, and the tensors that it saves are caught by torch's own hooks; weights are left out. Each
codec encodes those that it takes and does not decline. Speeds are bytes read plus written by the codec over seconds,
all tensors of a network together; a share is that speed over the one of a copy in the same round.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from backstash.codecs import Codec, Exponents, Zvc
from backstash.ops import backends
from backstash.saved import TensorSpec
from bench.results import Results
from bench.rounds import Summary, summarise
from tests.networks import families
from tests.networks.resnet import resnet

FORMAT = 1
SMALLEST = 64 << 10
"""Bytes of the smallest tensor that counts: smaller ones are most of the tensors, and hardly any of the bytes."""

SIZE = families.Size(layers=2, width=512, tokens=512, image=64, batch=4)
CODECS: dict[str, Codec] = {"zvc": Zvc(), "exponents, 4": Exponents(4), "exponents, 3": Exponents(3)}


def _llama() -> list[Tensor]:
    model, inputs = families.llama(SIZE)
    return caught(model.bfloat16(), inputs, nullcontext())


def _gpt2() -> list[Tensor]:
    model, inputs = families.gpt2(SIZE)
    return caught(model, inputs, torch.autocast("cpu", torch.bfloat16))


def _resnet() -> list[Tensor]:
    model = resnet((2, 2, 2, 2), "basic")
    return caught(model, {"input": torch.randn(8, 3, 128, 128)}, nullcontext())


NETWORKS: dict[str, Callable[[], list[Tensor]]] = {
    "Llama, bfloat16": _llama,
    "GPT-2, autocast to bfloat16": _gpt2,
    "ResNet-18, float32": _resnet,
}


@dataclass(frozen=True)
class Speed:
    """How fast something was.

    Attributes:
        gb_per_second: 1e9 bytes, read plus written.
        share_of_copy: of the copy's speed in the same round.
    """

    gb_per_second: Summary
    share_of_copy: Summary


@dataclass(frozen=True)
class Row:
    """What one codec makes of the tensors that one network saves in one dtype.

    Attributes:
        network, dtype, codec: which.
        tensors, taken: number of tensors, and of those that the codec takes.
        nbytes, taken_nbytes, stored_nbytes: dense bytes of all, of those taken, and what these are stored in.
        ratio: dense bytes of all over what is held of all, where the codec's are stored and the others are dense.
        ratio_of_taken: the same of those taken alone; None where there are none.
        escapes: of Exponents, the share of the taken elements that are escapes.
        encode, decode: speeds; None where nothing is taken.
    """

    network: str
    dtype: str
    codec: str
    tensors: int
    taken: int
    nbytes: int
    taken_nbytes: int
    stored_nbytes: int
    ratio: float
    ratio_of_taken: float | None
    escapes: float | None
    encode: Speed | None
    decode: Speed | None


def caught(model: nn.Module, inputs: Any, context: AbstractContextManager[Any]) -> list[Tensor]:
    """Runs the model forward. Returns the large floating tensors that it saves, each storage once, and no weights."""
    weights = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    found: dict[int, Tensor] = {}

    def pack(x: Tensor) -> Tensor:
        place = x.untyped_storage().data_ptr()
        if x.is_floating_point() and x.nbytes >= SMALLEST and place not in weights:
            found.setdefault(place, x.detach())
        return x

    with context, torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        model(**inputs)
    return list(found.values())


def measure(network: str, name: str, tensors: list[Tensor], rounds: int) -> Row:
    """Encodes and decodes all tensors, of one dtype, in so many rounds, each with a copy."""
    codec = CODECS[name]
    taken = [x for x in tensors if codec.accepts(TensorSpec.of(x)) is None and codec.declines(x) is None]
    stored = [codec.encode(x) for x in taken]
    outs = [torch.empty_like(x) for x in taken]
    for out in outs:
        backends.advise_huge(out)
    for encoded, x, out in zip(stored, taken, outs, strict=True):
        bits = {2: torch.int16, 4: torch.int32}[x.element_size()]
        assert torch.equal(codec.decode(encoded, out).view(bits), x.view(bits)), (network, name)
    dense, small = sum(x.nbytes for x in taken), sum(encoded.nbytes for encoded in stored)
    seconds: dict[str, list[float]] = {way: [] for way in ("copy", "encode", "decode")}
    ways: dict[str, Callable[[], object]] = {
        "copy": lambda: [out.copy_(x) for out, x in zip(outs, taken, strict=True)],
        "encode": lambda: [codec.encode(x) for x in taken],
        "decode": lambda: [codec.decode(encoded, out) for encoded, out in zip(stored, outs, strict=True)],
    }
    for _ in range(rounds if taken else 0):
        for way, run in ways.items():
            seconds[way].append(_seconds(run))
    every = sum(x.nbytes for x in tensors)
    escapes = sum(encoded.planes["escapes"].numel() for encoded in stored if "escapes" in encoded.planes)
    return Row(
        network=network,
        dtype=str(tensors[0].dtype).removeprefix("torch."),
        codec=name,
        tensors=len(tensors),
        taken=len(taken),
        nbytes=every,
        taken_nbytes=dense,
        stored_nbytes=small,
        ratio=every / (every - dense + small),
        ratio_of_taken=dense / small if taken else None,
        escapes=escapes / sum(x.numel() for x in taken) if taken and isinstance(codec, Exponents) else None,
        encode=_speed(dense + small, seconds["encode"], 2 * dense, seconds["copy"]) if taken else None,
        decode=_speed(dense + small, seconds["decode"], 2 * dense, seconds["copy"]) if taken else None,
    )


def _seconds(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    result = run()
    seconds = time.perf_counter() - started
    del result  # giving memory back is not part of it
    return seconds


def _speed(nbytes: int, seconds: list[float], copied: int, copies: list[float]) -> Speed:
    speeds = [nbytes / one for one in seconds]
    shares = [speed * copy / copied for speed, copy in zip(speeds, copies, strict=True)]
    return Speed(summarise([speed / 1e9 for speed in speeds]), summarise(shares))


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures, prints a line for each network, dtype and codec, and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="the file to write")
    parser.add_argument("--networks", nargs="+", choices=list(NETWORKS), default=list(NETWORKS))
    parser.add_argument("--rounds", type=int, default=9, help="rounds of which the median counts (default: 9)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="threads (default: torch's)")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    asked = {"backend": backends.name("cpu"), "rounds": options.rounds, "threads": options.threads}
    results = Results("bench.exact", options.json, arguments, format=FORMAT, **asked)
    rows: list[Row] = []
    for network in options.networks:
        torch.manual_seed(0)
        tensors = NETWORKS[network]()
        for dtype in sorted({x.dtype for x in tensors}, key=str):
            for name in CODECS:
                rows.append(measure(network, name, [x for x in tensors if x.dtype == dtype], options.rounds))
                print(_line(rows[-1]), flush=True)
                results.write(rows=rows)
    print(results.close())


def _line(row: Row) -> str:
    start = f"{row.network}, {row.dtype}, {row.codec}: {row.taken} of {row.tensors} tensors, ratio {row.ratio:.3f}"
    speeds = [
        f"{way} {speed.gb_per_second.median:.1f} GB/s, {speed.share_of_copy.median:.2f} of a copy"
        for way, speed in (("encode", row.encode), ("decode", row.decode))
        if speed is not None
    ]
    return "; ".join([start, *speeds])


if __name__ == "__main__":
    main()
