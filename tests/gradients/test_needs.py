"""Every row of needs.TABLE is proven: what the row keeps is enough for the same gradient bits.

Each case builds an op that hits one row, on values chosen to go wrong: NaN of both signs and with a payload,
infinities, both zeros, subnormals, the bounds and their neighbours, in numbers that fill vector registers and leave a
tail. It checks that the row was used, and that the gradients are the bits that plain torch computes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from gradient_checks import Everything, difference, differences
from torch import Tensor

from backstash import Need, Session, needs
from backstash.backward import unpack as unpack_module
from backstash.saved import TensorSpec
from backstash.stash.ledger import Entry

Key = tuple[str, str]
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
CODECS = {Need.SHAPE: "shape", Need.SIGN: "bitmask", Need.INDEX: "narrow"}
ROOT = Path(__file__).parents[2]


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
    """Every kind of number that a comparison may take the wrong way, with or without NaNs, [n]."""
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
    """A third of the elements special, the others normal; every special one at least once where there is room."""
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


# -- the proof -------------------------------------------------------------------------------------------------------


def run(case: Case, dtype: torch.dtype, session: Session | None, seed: int, nan: bool = True) -> list[Tensor]:
    """The gradient of the case's input, once with ones and once with special numbers coming in from above."""
    leaf = values(case.shape, dtype, case.bounds, seed, nan).to(memory_format=case.layout).requires_grad_()
    torch.manual_seed(seed)
    if session is None:
        output = case.call(leaf.clone()).clone()
    else:
        with session:
            output = case.call(leaf.clone()).clone()
    found = []
    for special_cotangent in (False, True):
        shape = tuple(output.shape)
        cotangent = values(shape, dtype, (), seed + 1) if special_cotangent else torch.ones(shape, dtype=dtype)
        (gradient,) = torch.autograd.grad(output, leaf, cotangent, retain_graph=not special_cotangent)
        found.append(gradient)
    return found


def row_of(session: Session, key: Key) -> Entry:
    """The report's row of what ``key`` names."""
    op, role = key
    rows = [row for row in session.report().rows if row.key == f"/{op}#0:{role}"]
    assert len(rows) == 1, [row.key for row in session.report().rows]
    return rows[0]


by_case = pytest.mark.parametrize("case", CASES, ids=str)


@by_case
def test_row(case: Case) -> None:
    """The row was used, and the gradients are the same bits, for every dtype that torch has a kernel for."""
    need = needs.TABLE[case.key].need
    nan = need is not Need.SIGN  # see test_row_with_nan
    for dtype in case.dtypes:
        expected = run(case, dtype, None, 1, nan)
        session = Session("lossless", min_nbytes=0)
        got = run(case, dtype, session, 1, nan)
        assert not differences(expected, got), dtype
        row = row_of(session, case.key)
        if leaves_it_to_value(case, dtype):
            assert row.need == "VALUE", dtype
        else:
            assert (row.need, row.codec) == (need.name, CODECS[need]), (dtype, row.reason)


@pytest.mark.parametrize("case", [case for case in CASES if needs.TABLE[case.key].need is Need.SIGN], ids=str)
def test_row_with_nan(case: Case) -> None:
    """Here a value need not be encoded, but the gradients must be the same bits.

    Note: [NaN by position]
        On CPU, torch's backward of hardtanh, hardshrink and softshrink treats a NaN as outside in its vector loop, and
        as inside (shrinks: as beyond the edge) in the loop over the tail, so that one bit per element cannot tell.
    """
    for dtype in FLOATS:
        expected = run(case, dtype, None, seed=2)
        for policy in ("lossless", Everything()):
            got = run(case, dtype, Session(policy, min_nbytes=0), seed=2)
            assert not differences(expected, got), (dtype, policy)


def leaves_it_to_value(case: Case, dtype: torch.dtype) -> bool:
    """Whether the row does not hold: a bound that ``dtype`` does not have, or one that no or every number is beyond."""
    if not case.bounds:
        return False
    if not all(float(torch.tensor(bound, dtype=dtype)) == bound for bound in case.bounds):
        return True
    infinite = [math.isinf(bound) for bound in case.bounds]
    if case.op in ("Clamp", "ClampMin", "ClampMax"):
        return all(infinite)
    if case.op == "Threshold":
        return case.bounds[0] == math.inf
    return any(infinite)


@pytest.mark.parametrize("garbage", [math.nan, -1e30], ids=["NaN", "large"])
@pytest.mark.parametrize("case", [case for case in CASES if needs.TABLE[case.key].need is Need.SHAPE], ids=str)
def test_shape_is_enough(case: Case, garbage: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever stands in the memory of the stand-in, the gradients are the same."""
    made = []

    def filled(spec: TensorSpec) -> Tensor:
        made.append(torch.full([], 0))
        return torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype).fill_(garbage)

    monkeypatch.setattr(unpack_module, "stand_in", filled)
    expected = run(case, torch.float32, None, seed=3)
    got = run(case, torch.float32, Session("lossless", min_nbytes=0), seed=3)
    assert made, "the stand-in was not asked for"
    assert not differences(expected, got)


WINDOWS: dict[str, tuple[dict[str, Any], int]] = {
    "2": ({"kernel_size": 2}, 2),
    "3 overlapping": ({"kernel_size": 3, "stride": 2, "padding": 1}, 3),
    "3 ceil": ({"kernel_size": 3, "stride": 3, "padding": 1, "ceil_mode": True}, 3),
    "2 dilated": ({"kernel_size": 2, "stride": 1, "padding": 1, "dilation": 3}, 2),
}


@pytest.mark.parametrize("fill", [None, -math.inf, math.nan], ids=["numbers", "-inf", "NaN"])
@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("d", [2, 3])
@pytest.mark.parametrize(("options", "kernel"), WINDOWS.values(), ids=WINDOWS)
def test_pool_indices_are_positions_in_their_window(
    options: dict[str, Any], kernel: int, d: int, last: bool, fill: float | None
) -> None:
    """Where nothing in a window is greater than -inf, max_pool3d may point out of it: then they are plain integers."""
    shape = IMAGE if d == 2 else VOLUME
    pool = getattr(F, f"max_pool{d}d")
    layout = (LAST if d == 2 else LAST_3D) if last else torch.contiguous_format
    x = torch.randn(shape) if fill is None else torch.full(shape, fill)
    x = x.contiguous(memory_format=layout).requires_grad_()
    cotangent = torch.randn_like(pool(x, **options))
    expected = torch.autograd.grad(pool(x, **options), x, cotangent)
    with Session("lossless", min_nbytes=0) as session:
        output = pool(x.clone(), **options).clone()
    assert not differences(expected, torch.autograd.grad(output, x, cotangent))
    row = row_of(session, (f"MaxPool{d}DWithIndices", "result1"))
    assert row.codec == "narrow"
    bits = (kernel**d - 1).bit_length()
    in_windows = row.stash_nbytes == (cotangent.numel() * bits + 7) // 8
    assert in_windows or (fill == -math.inf and d == 3)


def test_stand_in_has_the_layout_and_no_memory() -> None:
    for x in (torch.empty(3, 5, 67), torch.empty(2, 3, 4, 5).contiguous(memory_format=LAST), torch.empty(0, 3)):
        for dtype in (*FLOATS, torch.int64, torch.bool, torch.complex64):
            spec = TensorSpec.of(x.to(dtype))
            assert TensorSpec.of(unpack_module.stand_in(spec)) == spec
    expanded = TensorSpec.of(torch.empty(3, 1).expand(3, 1000))
    assert TensorSpec.of(unpack_module.stand_in(expanded)) == expanded


def test_every_row_has_a_case() -> None:
    assert {case.key for case in CASES} == set(needs.TABLE)


def test_every_sign_row_was_really_used_in_every_dtype() -> None:
    """Not all of its cases may be left to VALUE."""
    for key, row in needs.TABLE.items():
        if row.need is not Need.SIGN:
            continue
        for dtype in FLOATS:
            assert any(case.key == key and not leaves_it_to_value(case, dtype) for case in CASES), (key, dtype)


# -- what is not in the table ----------------------------------------------------------------------------------------


def test_without_its_row_a_tensor_needs_its_value(monkeypatch: pytest.MonkeyPatch) -> None:
    for key in (("Relu", "result"), ("AvgPool2D", "self"), ("MaxPool2DWithIndices", "result1")):
        case = next(case for case in CASES if case.key == key)
        expected = run(case, torch.float32, None, seed=4)
        with monkeypatch.context() as patch:
            patch.delitem(needs.TABLE, key)
            session = Session("lossless", min_nbytes=0)
            got = run(case, torch.float32, session, seed=4)
        assert row_of(session, key).need == "VALUE"
        assert not differences(expected, got)


UNLISTED: dict[str, Callable[[Tensor], Tensor]] = {
    "Sin:self": torch.sin,
    "Elu:result": lambda x: F.elu_(x * 1),
    "Hardswish:self": F.hardswish,
    "Clamp:self": lambda x: torch.clamp(x, torch.full((67,), -0.5), torch.full((67,), 0.5)),
    "ClampMin:self": lambda x: torch.clamp_min(x, torch.full((67,), -0.5)),
    "ClampMax:self": lambda x: torch.clamp_max(x, torch.full((67,), 0.5)),
    "Maximum:self": lambda x: torch.maximum(x, torch.zeros(67)),
}


@pytest.mark.parametrize(("key", "call"), UNLISTED.items(), ids=UNLISTED)
def test_what_is_not_listed_needs_its_value(key: str, call: Callable[[Tensor], Tensor]) -> None:
    """Overloads too: clamping to tensors is another formula, although its node has the same name."""
    op, role = key.split(":")
    case = Case(op, role, "unlisted", call, (67,))
    expected = run(case, torch.float32, None, seed=5)
    session = Session(Everything(), min_nbytes=0)
    got = run(case, torch.float32, session, seed=5)
    assert not differences(expected, got)
    row = row_of(session, case.key)
    assert (row.need, row.codec) == ("VALUE", "zvc")


def test_clamp_with_impossible_bounds() -> None:
    """NaN, or a lower bound above the upper one: no element is inside."""
    for low, high in ((2.0, 1.0), (math.nan, 1.0), (-1.0, math.nan)):
        case = Case("Clamp", "self", "impossible", lambda x, a=low, b=high: x.clamp(a, b), (67,))
        expected = run(case, torch.float32, None, seed=6)
        got = run(case, torch.float32, Session("lossless", min_nbytes=0), seed=6)
        assert not differences(expected, got)


def test_complex_has_no_sign() -> None:
    x = torch.randn(67, dtype=torch.complex64, requires_grad=True)
    expected = torch.autograd.grad(x.clone().abs().sum(), x)
    with Session(Everything(), min_nbytes=0) as session:
        loss = x.clone().abs().sum()
    assert difference(expected[0], torch.autograd.grad(loss, x)[0]) is None
    assert row_of(session, ("Abs", "self")).need == "VALUE"


# -- the table against torch's own formulas --------------------------------------------------------------------------


@cache
def derivatives() -> dict[str, str]:
    """Op, as its autograd node is named, to the text of all formulas of its overloads."""
    torchgen = pytest.importorskip("torchgen")
    yaml = pytest.importorskip("yaml")
    file = Path(torchgen.__file__).parent / "packaged" / "autograd" / "derivatives.yaml"
    if not file.exists():
        pytest.skip(f"this torch has no {file.name}")
    texts: dict[str, str] = {}
    for entry in yaml.safe_load(file.read_text()):
        name = re.match(r"\w+", entry["name"])
        assert name is not None
        node = "".join(part.title() for part in name[0].split("_")) + "Backward"
        op = node.replace("ForwardBackward", "Backward").removesuffix("Backward")
        formulas = (
            str(text) for key, text in entry.items() if key not in ("name", "dispatch", "output_differentiability")
        )
        texts[op] = texts.get(op, "") + " | ".join(formulas)
    return texts


@pytest.mark.parametrize("key", needs.TABLE, ids=":".join)
def test_torch_s_formula_reads_the_role(key: Key) -> None:
    op, role = key
    assert op in derivatives(), f"no derivative is called {op}"
    assert re.search(rf"\b{role}\b", derivatives()[op]), f"{op} reads no {role}: {derivatives()[op]}"


# -- the documentation -----------------------------------------------------------------------------------------------


def documented() -> dict[Key, tuple[str, str]]:
    """Rows of the table in docs/needs.md: (op, role) to need and what it is proven for."""
    text = (ROOT / "docs" / "needs.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| `(\w+)` \| (\w+) \|.*\| ([^|]+) \|$", text, re.MULTILINE)
    assert len(rows) == len({(op, role) for op, role, *_ in rows}), "a row occurs twice"
    return {(op, role): (need, proven) for op, role, need, proven in rows}


def proven(key: Key) -> str:
    """What the cases of a row cover: ``"3-d, 4-d, channels_last; f32 f64 bf16 f16"``."""
    cases = [case for case in CASES if case.key == key]
    dims = [f"{d}-d" for d in sorted({len(case.shape) for case in cases})]
    last = ["channels_last"] if any(case.layout is not torch.contiguous_format for case in cases) else []
    names = {torch.float32: "f32", torch.float64: "f64", torch.bfloat16: "bf16", torch.float16: "f16"}
    dtypes = [name for dtype, name in names.items() if any(dtype in case.dtypes for case in cases)]
    return f"{', '.join(dims + last)}; {' '.join(dtypes)}"


def test_documentation_lists_exactly_the_rows() -> None:
    listed = {key: need for key, (need, _) in documented().items()}
    assert listed == {key: row.need.name for key, row in needs.TABLE.items()}


def test_documentation_says_what_is_proven() -> None:
    assert {key: text for key, (_, text) in documented().items()} == {key: proven(key) for key in needs.TABLE}
