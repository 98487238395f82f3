"""Cases for the rows of ``formulas.FORMULAS``: ops and values that are chosen to go wrong."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Key = tuple[str, str]
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Case:
    """One op that hits one row.

    Args:
        op, role: the row.
        name: what is special about it.
        call: the op, from a differentiable tensor that only autograd will hold; makes any other input itself.
        shape: of that tensor.
        bounds: numbers that the formula compares with; where the dtype does not hold one of them, VALUE is expected.
        dtypes: element types that the op takes on CPU.
        layout: memory format of the tensor.
    """

    op: str
    role: str
    name: str
    call: Callable[[Tensor], Tensor]
    shape: tuple[int, ...]
    bounds: tuple[float, ...] = ()
    dtypes: tuple[torch.dtype, ...] = FLOATS
    layout: torch.memory_format = torch.contiguous_format

    @property
    def key(self) -> Key:
        return self.op, self.role

    def __str__(self) -> str:
        return f"{self.op}-{self.role}-{self.name}"


# -- values that go wrong --------------------------------------------------------------------------------------------


def special(dtype: torch.dtype, bounds: tuple[float, ...] = (), nan: bool = True) -> Tensor:
    """Returns the numbers that a comparison may decide wrongly, with or without NaNs, [n]."""
    info = torch.finfo(dtype)
    smallest = info.smallest_normal * info.eps
    plain = [0.0, -0.0, 1.0, -1.0, math.inf, -math.inf, info.max, info.min, info.tiny, -info.tiny, smallest, -smallest]
    edges = torch.tensor([*bounds, *[-bound for bound in bounds]], dtype=dtype)
    ends = torch.tensor([math.inf, -math.inf], dtype=dtype)
    neighbours = [torch.nextafter(edges, end) for end in ends]
    nans = torch.tensor([math.nan] * 4, dtype=dtype)
    bits = nans.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize])
    bits[1] |= 1  # a payload
    bits[2:] |= torch.iinfo(bits.dtype).min  # the sign
    bits[3] |= 1
    return torch.cat([torch.tensor(plain, dtype=dtype), edges, *neighbours, *([nans] if nan else [])])


def values(
    shape: tuple[int, ...], dtype: torch.dtype, bounds: tuple[float, ...], seed: int, nan: bool = True
) -> Tensor:
    """Returns a tensor with a third of special numbers, each at least once if there is room, among normal numbers."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator).to(dtype).flatten()
    chosen = special(dtype, bounds, nan)
    chosen = chosen.repeat(-(-x.numel() // (3 * len(chosen))))
    where = torch.randperm(x.numel(), generator=generator)[: len(chosen)]
    x[where] = chosen[: len(where)]
    return x.reshape(shape)


# -- the cases -------------------------------------------------------------------------------------------------------

LAST, LAST_3D = torch.channels_last, torch.channels_last_3d
ROW = (3, 5, 67)
IMAGE = (2, 3, 9, 11)
VOLUME = (2, 3, 7, 8, 9)


def pools() -> Iterator[Case]:
    """Poolings read the sizes of their input; a max-pooling reads its indices too."""
    dims: dict[int, tuple[tuple[int, ...], torch.memory_format]] = {2: (IMAGE, LAST), 3: (VOLUME, LAST_3D)}
    for d, (shape, last) in dims.items():
        max_pool, avg_pool = getattr(F, f"max_pool{d}d"), getattr(F, f"avg_pool{d}d")
        windows: dict[str, dict[str, Any]] = {
            "2": {"kernel_size": 2},
            "3 overlapping": {"kernel_size": 3, "stride": 2, "padding": 1},
            "1": {"kernel_size": 1},
            "uneven": {"kernel_size": (3, 1, 2)[:d], "stride": (1, 2, 3)[:d], "padding": (1, 0, 1)[:d]},
            "ceil": {"kernel_size": 3, "stride": 2, "ceil_mode": True},
        }
        dilated = {"dilated": {"kernel_size": 2, "stride": 1, "dilation": (2, 3, 1)[:d], "padding": 1}}
        for role in ("self", "result1"):
            for name, options in (windows | dilated).items():
                for suffix, layout in (("", torch.contiguous_format), (" channels_last", last)):
                    call = lambda x, f=max_pool, o=options: f(x, **o)  # noqa: E731
                    yield Case(f"MaxPool{d}DWithIndices", role, name + suffix, call, shape, layout=layout)
            unbatched = lambda x, f=max_pool: f(x, 2)  # noqa: E731
            yield Case(f"MaxPool{d}DWithIndices", role, "unbatched", unbatched, shape[1:])
        for name, options in windows.items():
            for suffix, layout in (("", torch.contiguous_format), (" channels_last", last)):
                call = lambda x, f=avg_pool, o=options: f(x, **o)  # noqa: E731
                dtypes = FLOATS if d == 2 else (torch.float32, torch.float64)
                yield Case(f"AvgPool{d}D", "self", name + suffix, call, shape, dtypes=dtypes, layout=layout)
        adaptive_max, adaptive_avg = getattr(F, f"adaptive_max_pool{d}d"), getattr(F, f"adaptive_avg_pool{d}d")
        for size in (2, (3, 5, 4)[:d]):
            for suffix, layout in (("", torch.contiguous_format), (" channels_last", last)):
                name = f"{size}{suffix}"
                mean = lambda x, f=adaptive_avg, s=size: f(x, s)  # noqa: E731
                most = lambda x, f=adaptive_max, s=size: f(x, s)  # noqa: E731
                yield Case(f"AdaptiveAvgPool{d}D", "self", name, mean, shape, layout=layout)
                for role in ("self", "result1"):
                    yield Case(f"AdaptiveMaxPool{d}D", role, name, most, shape, layout=layout)
        fractional = getattr(F, f"fractional_max_pool{d}d")
        for role in ("self", "result1"):
            call = lambda x, f=fractional, s=(3, 4, 5)[:d]: f(x, 2, output_size=s)  # noqa: E731
            yield Case(f"FractionalMaxPool{d}D", role, "2", call, shape, dtypes=(torch.float32, torch.float64))
        yield Case(f"MaxUnpool{d}D", "indices", "2", UNPOOLS[d], (2, 3, *(4, 5, 3)[:d]))
    for role in ("self", "result1"):
        yield Case("MaxPool2DWithIndices", role, "1-d", lambda x: F.max_pool1d(x, 3, 2, 1), ROW)
        yield Case("AdaptiveMaxPool2D", role, "1-d", lambda x: F.adaptive_max_pool1d(x, 7), ROW)
    yield Case("AvgPool2D", "self", "1-d", lambda x: F.avg_pool1d(x, 3, 2, 1), ROW)
    yield Case("AdaptiveAvgPool2D", "self", "1-d", lambda x: F.adaptive_avg_pool1d(x, 7), ROW)
    yield Case("MaxUnpool2D", "indices", "1-d", lambda x: F.max_unpool1d(x, _unpool_indices(x, 1), 2), (2, 3, 9))


def _unpool_indices(x: Tensor, d: int) -> Tensor:
    pool = getattr(F, f"max_pool{d}d")
    source = torch.randn(*x.shape[:2], *(2 * size for size in x.shape[2:]), generator=torch.Generator().manual_seed(7))
    return pool(source, 2, return_indices=True)[1]  # type: ignore[no-any-return]


UNPOOLS: dict[int, Callable[[Tensor], Tensor]] = {
    2: lambda x: F.max_unpool2d(x, _unpool_indices(x, 2), 2),
    3: lambda x: F.max_unpool3d(x, _unpool_indices(x, 3), 2),
}


def pads() -> Iterator[Case]:
    for mode, op in (("reflect", "ReflectionPad"), ("replicate", "ReplicationPad")):
        for d, shape, last in ((1, ROW, None), (2, IMAGE, LAST), (3, VOLUME, LAST_3D)):
            padding = [1, 2, 0, 3, 2, 1][: 2 * d]
            call = lambda x, p=padding, m=mode: F.pad(x, p, mode=m)  # noqa: E731
            yield Case(f"{op}{d}D", "self", "batched", call, shape)
            yield Case(f"{op}{d}D", "self", "unbatched", call, shape[1:])
            if last is not None:
                yield Case(f"{op}{d}D", "self", "channels_last", call, shape, layout=last)


def integers(high: int, *shape: int) -> Tensor:
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(8))


def indexing() -> Iterator[Case]:
    """Ops that read the sizes of what they index, and the indices."""
    for role in ("self", "index"):
        for dim in (0, 1, -1):
            gather = lambda x, d=dim: torch.gather(x, d, integers(5, 4, 5, 6))  # noqa: E731
            yield Case("Gather", role, f"dim {dim}", gather, (6, 7, 8))
        yield Case("Gather", role, "1-d", lambda x: torch.gather(x, 0, integers(67, 300)), (67,))
        sparse = lambda x: torch.gather(x, 1, integers(5, 4, 5), sparse_grad=True)  # noqa: E731
        yield Case("Gather", role, "sparse gradient", sparse, (6, 7))
        transposed = lambda x: torch.gather(x.t(), 1, integers(5, 4, 5))  # noqa: E731
        yield Case("Gather", role, "transposed", transposed, (9, 8))
    for dim in (0, 1, -1):
        select = lambda x, d=dim: x.index_select(d, integers(6, 40))  # noqa: E731
        yield Case("IndexSelect", "index", f"dim {dim}", select, (6, 7, 8))
    int32 = lambda x: x.index_select(0, integers(6, 40).int())  # noqa: E731
    yield Case("IndexSelect", "index", "int32", int32, (6, 7))
    yield Case("Take", "self", "3-d", lambda x: torch.take(x, integers(300, 40)), (6, 7, 8))
    yield Case("Take", "self", "repeated", lambda x: torch.take(x, torch.zeros(9, dtype=torch.int64)), (67,))
    yield Case("Take", "self", "channels_last", lambda x: torch.take(x, integers(300, 40)), IMAGE, layout=LAST)
    yield Case("MaskedSelect", "self", "2-d", lambda x: x.masked_select(integers(2, 6, 67).bool()), (6, 67))
    yield Case("MaskedSelect", "self", "mask expands", lambda x: x.masked_select(integers(2, 67).bool()), (6, 67))
    wider = lambda x: x.masked_select(integers(2, 4, 6, 67).bool())  # noqa: E731
    yield Case("MaskedSelect", "self", "self expands", wider, (6, 67))
    masked = lambda x: x.masked_select(integers(2, *IMAGE).bool())  # noqa: E731
    yield Case("MaskedSelect", "self", "channels_last", masked, IMAGE, layout=LAST)
    for op, function in (("Cummax", torch.cummax), ("Cummin", torch.cummin)):
        for dim in (0, 1, -1):
            call = lambda x, f=function, d=dim: f(x, d)[0]  # noqa: E731
            yield Case(op, "self", f"dim {dim}", call, (6, 7, 8))
        yield Case(op, "self", "channels_last", lambda x, f=function: f(x, 2)[0], IMAGE, layout=LAST)
    for dim in (0, 1, -1):
        for descending in (False, True):
            name = f"dim {dim}{' descending' if descending else ''}"
            sort = lambda x, d=dim, o=descending: torch.sort(x, d, o)[0]  # noqa: E731
            topk = lambda x, d=dim, o=descending: torch.topk(x, 3, d, largest=o)[0]  # noqa: E731
            yield Case("Sort", "indices", name, sort, (6, 7, 8))
            yield Case("Topk", "indices", name, topk, (6, 7, 8))
    yield Case("Sort", "indices", "stable", lambda x: torch.sort(x, stable=True)[0], (6, 67))
    yield Case("Sort", "indices", "channels_last", lambda x: torch.sort(x, 1)[0], IMAGE, layout=LAST)
    for name, options in (
        ("plain", {}),
        ("padding", {"padding_idx": 3}),
        ("by frequency", {"scale_grad_by_freq": True}),
    ):
        embed = lambda x, o=options: F.embedding(integers(10, 4, 9), x, **o)  # noqa: E731
        yield Case("Embedding", "indices", name, embed, (10, 7))
    sparse_embed = lambda x: F.embedding(integers(10, 4, 9), x, sparse=True)  # noqa: E731
    yield Case("Embedding", "indices", "sparse gradient", sparse_embed, (10, 7))
    yield Case("Embedding", "indices", "int32", lambda x: F.embedding(integers(10, 40).int(), x), (10, 7))


def losses() -> Iterator[Case]:
    weight = torch.linspace(0.5, 2, 7)
    options: dict[str, dict[str, Any]] = {
        "mean": {},
        "sum": {"reduction": "sum"},
        "none": {"reduction": "none"},
        "ignored": {"ignore_index": 3},
        "weighted": {"weight": weight},
    }
    for role in ("self", "target"):
        for name, option in options.items():

            def loss(x: Tensor, option: dict[str, Any] = option) -> Tensor:
                kept = {k: v.to(x.dtype) if isinstance(v, Tensor) else v for k, v in option.items()}
                return F.nll_loss(x, integers(7, x.shape[0], *x.shape[2:]), **kept)

            yield Case("NllLoss", role, name, loss, (67, 7))
            yield Case("NllLoss2D", role, name, loss, (3, 7, 9, 11))
    yield Case("NllLoss", "self", "unbatched", lambda x: F.nll_loss(x, torch.tensor(3)), (7,))
    yield Case("NllLoss2D", "self", "1-d", lambda x: F.nll_loss(x, integers(7, 3, 11)), (3, 7, 11))


def activations() -> Iterator[Case]:
    """Formulas that read on which side of a bound each element is. In 1, 2, 3 and 4 dimensions, with a tail."""
    ops: list[tuple[Key, str, Callable[[Tensor], Tensor], tuple[float, ...]]] = [
        (("Relu", "result"), "plain", F.relu, ()),
        (("Relu", "result"), "in place", lambda x: F.relu_(x * 1), ()),
        (("LeakyRelu", "self"), "plain", F.leaky_relu, ()),
        (("LeakyRelu", "self"), "steep", lambda x: F.leaky_relu(x, 2.5), ()),
        (("LeakyRelu", "self"), "negative slope", lambda x: F.leaky_relu(x, -0.3), ()),
        (("LeakyRelu", "self"), "slope 0", lambda x: F.leaky_relu(x, 0.0), ()),
        (("LeakyRelu", "result"), "in place", lambda x: F.leaky_relu_(x * 1), ()),
        (("LeakyRelu", "result"), "in place, slope 0", lambda x: F.leaky_relu_(x * 1, 0.0), ()),
        (("Hardsigmoid", "self"), "plain", F.hardsigmoid, (3.0,)),
        (("Hardsigmoid", "self"), "in place", lambda x: F.hardsigmoid(x * 1, inplace=True), (3.0,)),
        (("Abs", "self"), "plain", torch.abs, ()),
        (("Abs", "self"), "in place", lambda x: (x * 1).abs_(), ()),
        (("NanToNum", "self"), "plain", torch.nan_to_num, ()),
        (("NanToNum", "self"), "numbers", lambda x: torch.nan_to_num(x, 1.5, 2.5, -2.5), ()),
        (("NanToNum", "self"), "in place", lambda x: (x * 1).nan_to_num_(), ()),
        (("Nansum", "self"), "all", torch.nansum, ()),
        (("Nansum", "self"), "dim", lambda x: torch.nansum(x, -1), ()),
        (("Nansum", "self"), "dim kept", lambda x: torch.nansum(x, 0, keepdim=True), ()),
    ]
    for low, high in ((-1.0, 1.0), (0.0, 6.0), (-0.5, 2.5), (-2.0, -1.0), (0.1, 0.7), (-math.inf, 1.0), (1.0, 2.0)):
        bounds = (low, high, low / 2 + high / 2)
        name, in_place = f"[{low}, {high}]", f"[{low}, {high}] in place"
        hardtanh = lambda x, a=low, b=high: F.hardtanh(x, a, b)  # noqa: E731
        ops.append((("Hardtanh", "self"), name, hardtanh, bounds))
        ops.append((("Hardtanh", "self"), in_place, lambda x, a=low, b=high: F.hardtanh_(x * 1, a, b), bounds))
        ops.append((("Clamp", "self"), name, lambda x, a=low, b=high: x.clamp(a, b), (low, high)))
        ops.append((("Clamp", "self"), in_place, lambda x, a=low, b=high: (x * 1).clamp_(a, b), (low, high)))
    for edge in (0.5, 0.0, 0.3, -0.25, 1e-3, math.inf, -math.inf):
        ops += [
            (("Threshold", "self"), f"{edge}", lambda x, t=edge: F.threshold(x, t, 1.5), (edge,)),
            (("Threshold", "self"), f"{edge} in place", lambda x, t=edge: F.threshold_(x * 1, t, 1.5), (edge,)),
            (("Clamp", "self"), f"min {edge}", lambda x, t=edge: x.clamp(min=t), (edge,)),
            (("Clamp", "self"), f"max {edge}", lambda x, t=edge: x.clamp(max=t), (edge,)),
            (("ClampMin", "self"), f"{edge}", lambda x, t=edge: torch.clamp_min(x, t), (edge,)),
            (("ClampMax", "self"), f"{edge}", lambda x, t=edge: torch.clamp_max(x, t), (edge,)),
        ]
        if 0 <= edge < math.inf:
            ops.append((("Hardshrink", "self"), f"{edge}", lambda x, t=edge: F.hardshrink(x, t), (edge,)))
            ops.append((("Softshrink", "self"), f"{edge}", lambda x, t=edge: F.softshrink(x, t), (edge,)))
    for (op, role), name, call, bounds in ops:
        for shape in ((67,), (131, 3), ROW):
            yield Case(op, role, f"{name}, {len(shape)}-d", call, shape, bounds)
        yield Case(op, role, f"{name}, channels_last", call, IMAGE, bounds, layout=LAST)


CASES = [*pools(), *pads(), *indexing(), *losses(), *activations()]
