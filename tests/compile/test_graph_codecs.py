"""Codecs as graphs: every decoded bit is that of the eager codec, and Inductor has a lowering for every operator."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from backstash.codecs import Bitmask, BlockQuant, Codec, FewBit, Minifloat
from backstash.compile.forms.codecs import Bits, GraphCodec, GraphFacts, Integers, form_of
from backstash.compile.graph.emit import run_now
from backstash.compile.graph.layout import in_memory_order, like_original
from backstash.saved import Mask, TensorSpec, Test

LOSSY: list[Codec] = [
    Minifloat("fp8"),
    Minifloat("fp16"),
    Minifloat("fp10"),
    Minifloat("float8_e4m3fn"),
    Minifloat("float8_e5m2"),
    Minifloat("float8_e4m3fn", group_size=0),
    Minifloat("float8_e5m2", group_size=64),
    Minifloat("bfloat16"),
    *(BlockQuant(bits) for bits in (1, 2, 4, 8)),
    BlockQuant(4, 64, "nearest"),
    BlockQuant(2, 64, seed=7),
    *(FewBit("gelu", bits) for bits in (1, 2, 3, 4)),
    FewBit("silu", 3),
    FewBit("tanh", 2),
]
MASKS = [
    Mask(Test.NOT_LE),
    Mask(Test.GT),
    Mask(Test.INSIDE, -3.0, 3.0, if_set=0.0, if_clear=3.0),
    Mask(Test.NOT_OUTSIDE, 0.0, 6.0, if_set=3.0, if_clear=0.0, nan=True),
    Mask(Test.CLOSED, -0.5, 0.5, if_set=0.0, if_clear=float("inf"), nan=True),
    Mask(Test.GT, 0.0, ternary=True),
    Mask(Test.NONZERO),
]
SHAPES = [(8, 3, 5), (7, 37), (1000,), (3, 16, 6, 6)]


def round_trip(codec: GraphCodec, x: Tensor) -> Tensor:
    ordered = in_memory_order(run_now, x)
    planes = codec.encode(run_now, ordered)
    assert sum(plane.nbytes for plane in planes) <= codec.nbytes(tuple(x.shape), x.dtype)
    decoded: Tensor = like_original(run_now, codec.decode(run_now, planes, ordered), x)
    assert (decoded.shape, decoded.stride(), decoded.dtype) == (x.shape, x.stride(), x.dtype)
    return decoded


def bits(x: Tensor) -> Tensor:
    if not x.is_floating_point():
        return x
    # Which of the NaNs it is has no meaning, and is not kept by arithmetic.
    whole = x.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])
    return torch.where(x.contiguous().isnan(), 0x7E00, whole)


def values(shape: tuple[int, ...], dtype: torch.dtype, spread: float = 3.0) -> Tensor:
    generator = torch.Generator().manual_seed(hash(shape) % 1000)
    x = torch.randn(shape, generator=generator) * spread
    flat = x.view(-1)
    flat[::17] = 0.0
    flat[1::29] = -0.0
    flat[2::31] *= 1e-5
    flat[3::37] *= 1e4
    return x.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("codec", LOSSY, ids=repr)
def test_a_rounding_codec_decodes_the_bits_of_the_eager_one(codec: Codec, dtype: torch.dtype) -> None:
    for shape in SHAPES:
        x = values(shape, dtype, 1.0 if dtype == torch.float16 else 3.0)
        if codec.accepts(TensorSpec.of(x)) is not None:
            continue
        form = form_of(codec, GraphFacts(dtype))
        assert not isinstance(form, str)
        assert torch.equal(bits(round_trip(form, x)), bits(codec.decode(codec.encode(x)))), shape


@pytest.mark.parametrize("name", ["fp8", "fp16", "float8_e4m3fn", "float8_e5m2", "bfloat16"])
def test_infinities_and_nan_are_rounded_as_the_eager_codec_rounds_them(name: str) -> None:
    x = torch.tensor([float("inf"), -float("inf"), float("nan"), 3e38, -3e38, 1e-40, -1e-45, 2.0**-9, 0.0, -0.0] * 60)
    for codec in (Minifloat(name), Minifloat(name, group_size=0)):
        form = form_of(codec, GraphFacts(x.dtype))
        assert not isinstance(form, str)
        assert torch.equal(bits(round_trip(form, x)), bits(codec.decode(codec.encode(x))))


@pytest.mark.parametrize("channels_last", [False, True])
def test_the_memory_order_decides_what_a_group_is(channels_last: bool) -> None:
    x = values((3, 16, 6, 6), torch.float32)
    x = x.contiguous(memory_format=torch.channels_last) if channels_last else x
    codec = BlockQuant(2, 16)
    form = form_of(codec, GraphFacts(x.dtype))
    assert not isinstance(form, str)
    assert torch.equal(round_trip(form, x), codec.decode(codec.encode(x)))


@pytest.mark.parametrize("broken", [float("nan"), float("inf"), -float("inf")])
def test_few_bits_of_an_element_that_is_not_finite_are_decoded_to_nothing_finite(broken: float) -> None:
    form = form_of(FewBit("gelu", 2), GraphFacts(torch.float32))
    assert not isinstance(form, str)
    x = torch.linspace(-2, 2, 512)
    assert round_trip(form, x).isfinite().all()
    x[300] = broken
    assert round_trip(form, x).isnan().all()


def test_a_group_with_an_element_that_is_not_finite_is_not_decoded_to_numbers() -> None:
    form = form_of(BlockQuant(4), GraphFacts(torch.float32))
    assert not isinstance(form, str)
    for broken in (float("nan"), float("inf"), -float("inf")):
        x = torch.ones(512)
        x[300] = broken
        decoded = round_trip(form, x)
        assert torch.equal(decoded[:256], x[:256])
        assert not decoded[256:].isfinite().any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("mask", MASKS, ids=repr)
def test_a_mask_decodes_to_the_stand_ins_of_the_eager_codec(mask: Mask, dtype: torch.dtype) -> None:
    for shape in SHAPES:
        x = values(shape, dtype)
        x.view(-1)[:3] = torch.tensor([float("nan"), float("inf"), -float("inf")])
        codec = Bitmask(mask)
        form = form_of(codec, GraphFacts(dtype))
        assert not isinstance(form, str)
        expected = codec.decode(codec.encode(x), torch.empty_like(x))
        assert torch.equal(bits(round_trip(form, x)), bits(expected))


@pytest.mark.parametrize("limit", [2, 3, 4, 9, 16, 17, 256, 257, 1 << 16, 1 << 20, 1 << 31])
def test_integers_come_back(limit: int) -> None:
    for shape in SHAPES:
        x = torch.randint(0, limit, shape)
        x.view(-1)[:2] = torch.tensor([0, limit - 1])
        assert torch.equal(round_trip(Integers(limit), x), x)


def test_integers_take_the_fewest_bits() -> None:
    widths = {2: 1, 3: 2, 4: 2, 9: 4, 17: 8, 257: 16, 1 << 16: 16, (1 << 16) + 1: 32, 1 << 31: 32, 1 << 32: 64}
    assert {limit: Integers(limit).width for limit in widths} == widths


@pytest.mark.parametrize("shape", [*SHAPES, (1,), (9, 8), (1, 1, 24)])
def test_bools_come_back_in_a_bit_each(shape: tuple[int, ...]) -> None:
    x = torch.rand(shape) < 0.5
    (plane,) = Bits().encode(run_now, x)
    assert plane.nbytes == -(-x.numel() // 8)
    assert torch.equal(Bits().decode(run_now, (plane,), x), x)


def test_inductor_has_a_lowering_for_every_operator() -> None:
    from torch._inductor.lowering import lowerings

    used: set[Any] = set()

    def note(op: Any, *args: Any, **kwargs: Any) -> Any:
        used.add(op)
        return op(*args, **kwargs)

    x = values((7, 37), torch.float32)
    for codec in [*LOSSY, *map(Bitmask, MASKS)]:
        form = form_of(codec, GraphFacts(x.dtype))
        assert not isinstance(form, str)
        form.decode(note, form.encode(note, x), x)
    for limit in (2, 16, 257, 1 << 20):
        Integers(limit).decode(note, Integers(limit).encode(note, x.long()), x.long())
    assert not {op for op in used if op not in lowerings}
