"""Planes that backward kernels read without decoding them: each form, and a codec that is not one of ours."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import codec_strategies as tensors
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from backstash import Session, codecs
from backstash.codecs import Binary, Bitmask, Codec, Encoded, ErrorBound, FewBit, Narrow, Zvc, base
from backstash.codecs.base import ReadPlanes, flat, refuses_layout, require_accepted
from backstash.codecs.direct import Direct, Factors, MaskBits, Slices, Slopes, WindowOffsets
from backstash.codecs.raw import Raw
from backstash.codecs.shape import Shape
from backstash.codecs.sliced import Sliced
from backstash.ops import cpu
from backstash.policies.base import Action, Keep, Outcome, Stash
from backstash.saved import Mask, Need, SavedTensor, TensorSpec, Test
from tests.gradients.gradient_checks import Copy

FORMS = (MaskBits, Slopes, Factors, WindowOffsets, Slices)


def read(codec: Codec, form: type[Direct], encoded: Encoded) -> Any:
    planes = base.direct(codec, form)
    assert planes is not None
    return planes(encoded)


def fields(packed: Tensor, n: int, bits: int) -> Tensor:
    """A little-endian stream of ``n`` fields, as integers."""
    ones = (packed[:, None] >> torch.arange(8, dtype=torch.uint8)) & 1
    return (ones.flatten()[: n * bits].view(n, bits).long() << torch.arange(bits)).sum(1)


OFFERED = [
    (Bitmask(), {MaskBits, Slopes}),
    (FewBit(), {Slopes}),
    (Binary(), {Factors}),
    (Narrow(), set()),
    (Sliced(Zvc(), 2), {Slices}),
    (Zvc(), set()),
]


@pytest.mark.parametrize(("codec", "offered"), OFFERED)
def test_which_forms_a_codec_offers(codec: Codec, offered: set[type[Direct]]) -> None:
    assert {form for form in FORMS if base.direct(codec, form) is not None} == offered


@given(tensors.floats())
def test_mask_bits_are_the_outcomes(x: Tensor) -> None:
    codec = Bitmask(Mask(Test.NOT_LE))
    bits = read(codec, MaskBits, codec.encode(x)).bits
    assert torch.equal(fields(bits, x.numel(), 1).bool(), ~(flat(x) <= 0.0))


def test_mask_bits_alone_do_not_tell_a_third_value_or_a_nan() -> None:
    x = torch.tensor([-1.0, 0.0, float("nan"), 2.0])
    for mask in (Mask(Test.GT, ternary=True), Mask(Test.CLOSED, -1.0, 1.0, 0.5, 2.0, nan=True)):
        codec = Bitmask(mask)
        for form in (MaskBits, Slopes):
            assert read(codec, form, codec.encode(x)) is None
    assert read(Bitmask(mask), MaskBits, Bitmask(mask).encode(x[:2])) is not None  # no NaN: one plane


@given(tensors.two_values().filter(lambda x: x.numel() > 0))
def test_factors_are_the_numbers(x: Tensor) -> None:
    factors = read(Binary(), Factors, Binary().encode(x))
    decoded = factors.values[fields(factors.packed, x.numel(), 1)]
    bits = tensors.BITS[x.element_size()]
    assert torch.equal(decoded.view(bits), flat(x).view(bits))


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_slopes_are_at_the_decoded_numbers(bits: int, dtype: torch.dtype) -> None:
    x = torch.randn(37).to(dtype)
    codec = FewBit("silu", bits)
    encoded = codec.encode(x)
    slopes = read(codec, Slopes, encoded)
    assert slopes.points.dtype is dtype
    assert torch.equal(slopes.points[fields(slopes.packed, 37, bits)], codec.decode(encoded))


@given(tensors.pooled())
def test_window_offsets_are_positions_in_the_window(case: Any) -> None:
    window, indices = case
    codec = Narrow(window)
    if not tensors.inside(window, indices) or codec.accepts(TensorSpec.of(indices)) is not None:
        return
    encoded = codec.encode(indices)
    offsets = read(codec, WindowOffsets, encoded)
    restored = torch.empty_like(indices)
    torch.ops.backstash.window_decode(offsets.packed, *offsets.geometry, flat(restored))
    assert torch.equal(restored, indices)


@given(st.integers(2, 9), st.integers(2, 5))
def test_slices_cover_the_batch(batch: int, parts: int) -> None:
    x = torch.randn(batch, 3).relu()
    codec = Sliced(Zvc(), parts)
    slices = read(codec, Slices, codec.encode(x))
    assert torch.equal(torch.cat([slices.decode(number) for number in range(len(slices.ranges))]), x)
    assert torch.equal(torch.cat([x[begin:end] for begin, end in slices.ranges]), x)


# -- a codec of somebody else ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcomes:
    """A bit per element, in a plane of another name; nothing is inherited, and it cannot be decoded."""

    mask: Mask
    offers: bool = True

    id: ClassVar[str] = "outcomes"
    preserves: ClassVar[frozenset[Need]] = frozenset({Need.SHAPE, Need.SIGN})
    bound: ClassVar[ErrorBound | None] = None

    def accepts(self, spec: TensorSpec) -> str | None:
        return refuses_layout(spec)

    def declines(self, x: Tensor) -> str | None:
        return None

    def encode(self, x: Tensor) -> Encoded:
        outcomes = ~(flat(x) <= self.mask.lo)
        padded = torch.zeros(-(-x.numel() // 8), 8, dtype=torch.uint8)
        padded.view(-1)[: x.numel()] = outcomes
        bits = (padded << torch.arange(8, dtype=torch.uint8)).sum(1, dtype=torch.uint8)
        return Encoded(self.id, require_accepted(self, x), {"outcomes": bits})

    def decode(self, encoded: Encoded, out: Tensor | None = None) -> Tensor:
        raise ZeroDivisionError("decoded")

    def nbytes_bound(self, spec: TensorSpec) -> int:
        return -(-spec.numel // 8)

    def direct(self, form: type[Direct]) -> ReadPlanes | None:
        return (lambda encoded: MaskBits(encoded.planes["outcomes"])) if self.offers and form is MaskBits else None


@dataclass(frozen=True)
class OutcomesForSigns:
    """That codec for what relus read, nothing else."""

    offers: bool = True

    def decide(self, saved: SavedTensor) -> Action:
        return Stash(Outcomes(saved.mask, self.offers)) if saved.need is Need.SIGN and saved.mask else Keep()

    def observe(self, outcome: Outcome) -> None:
        pass


def gradient(session: Session | None) -> Tensor:
    x = torch.randn(37, 5, generator=torch.Generator().manual_seed(0)).requires_grad_()
    with session or nullcontext():
        F.relu(x * 2.0).mul(3.0).cos().sum().backward()
    assert x.grad is not None
    return x.grad


@pytest.mark.skipif(not cpu.available(), reason="the native kernels are not built")
def test_relus_backward_reads_a_foreign_codecs_planes_which_are_never_decoded() -> None:
    session = Session(OutcomesForSigns(), min_nbytes=0)
    assert torch.equal(gradient(session), gradient(None))
    assert "outcomes" in {row.codec for row in session.report().rows}


def test_a_foreign_codec_without_the_form_is_decoded() -> None:
    with pytest.raises(ZeroDivisionError, match="decoded"):
        gradient(Session(OutcomesForSigns(offers=False), min_nbytes=0))


# -- the optional members ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bare(Copy):
    """A codec with no optional member at all."""

    id: ClassVar[str] = "bare"


@dataclass(frozen=True)
class BareWithBits(Bare):
    """Offers bits without saying by a ``mask`` which test they are the outcomes of."""

    def direct(self, form: type[Direct]) -> ReadPlanes | None:
        return lambda encoded: MaskBits(torch.zeros(-(-encoded.spec.numel // 8), dtype=torch.uint8))


@dataclass(frozen=True)
class BareForSigns(OutcomesForSigns):
    def decide(self, saved: SavedTensor) -> Action:
        return Stash(BareWithBits()) if saved.need is Need.SIGN else Keep()


def test_bits_that_are_not_of_the_readers_mask_are_not_read() -> None:
    session = Session(BareForSigns(), min_nbytes=0)
    assert torch.equal(gradient(session), gradient(None))
    assert "bare" in {row.codec for row in session.report().rows}


def test_what_counts_for_a_codec_without_optional_members() -> None:
    codec, x = Bare(), torch.randn(3, 4)
    assert isinstance(codec, Codec)
    assert base.label(codec) == "bare"
    assert base.mask_of(codec) is None
    assert not base.keeps(codec, Mask(Test.NOT_LE))
    assert base.serves_function(codec, None)
    assert base.serves_function(codec, "gelu")
    assert all(base.direct(codec, form) is None for form in FORMS)
    assert base.view(codec) is None
    encoded = base.adopt(codec, x)
    assert encoded.planes["copy"].data_ptr() != x.data_ptr()
    assert torch.equal(codec.decode(encoded), x)


def test_what_counts_for_codecs_that_have_them() -> None:
    assert base.label(codecs.get("zvc", values=codecs.Minifloat("fp8"))) == "zvc+fp8"
    assert base.mask_of(Bitmask(Mask(Test.GT))) == Mask(Test.GT)
    assert base.keeps(codecs.Szp(), Mask(Test.NOT_LE))
    assert not base.serves_function(FewBit("gelu"), None)
    assert base.serves_function(FewBit("gelu"), "gelu")
    x = torch.randn(3, 4)
    encoded = base.adopt(Raw(), x)
    view = base.view(Raw())
    assert view is not None
    assert view(encoded).data_ptr() == x.data_ptr()
    assert base.direct(Shape(), MaskBits) is None
