"""check_codec must catch what it is for: each class below breaks one promise."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from backstash.codecs.base import EXACT, Codec, Encoded, ErrorBound, like, refuses_layout, require_accepted
from backstash.errors import CodecRefusedError, DamagedPlanesError
from backstash.saved import Need, TensorSpec
from backstash.testing import FLOATS, check_codec, probes


@dataclass(frozen=True)
class Copy:
    """Keeps the promises."""

    level: int = 1

    id: ClassVar[str] = "copy"
    preserves: ClassVar[frozenset[Need]] = EXACT
    bound: ClassVar[ErrorBound | None] = None

    def accepts(self, spec: TensorSpec) -> str | None:
        return refuses_layout(spec) if spec.dtype in FLOATS else "it takes floats"

    def declines(self, x: Tensor) -> str | None:
        return None

    def encode(self, x: Tensor) -> Encoded:
        return Encoded(self.id, require_accepted(self, x), {"values": x.detach().reshape(-1).clone()})

    def decode(self, encoded: Encoded, out: Tensor | None = None) -> Tensor:
        values = encoded.planes["values"]
        if values.numel() != encoded.spec.numel:
            raise DamagedPlanesError("asked, got, do")
        return like(encoded.spec, out).copy_(values.view(encoded.spec.shape))

    def nbytes_bound(self, spec: TensorSpec) -> int:
        return spec.numel * spec.dtype.itemsize


@dataclass(frozen=True)
class Mutates(Copy):
    def encode(self, x: Tensor) -> Encoded:
        encoded = super().encode(x)
        x.detach().zero_()
        return encoded


@dataclass(frozen=True)
class KeepsAView(Copy):
    def encode(self, x: Tensor) -> Encoded:
        return Encoded(self.id, require_accepted(self, x), {"values": x.detach().reshape(-1)})


@dataclass(frozen=True)
class KeepsTheGraph(Copy):
    def encode(self, x: Tensor) -> Encoded:
        return Encoded(self.id, require_accepted(self, x), {"values": x.reshape(-1).clone()})


@dataclass(frozen=True)
class LosesNegativeZero(Copy):
    def encode(self, x: Tensor) -> Encoded:
        flat = x.detach().reshape(-1)
        return Encoded(self.id, require_accepted(self, x), {"values": torch.where(flat == 0, 0, flat)})


@dataclass(frozen=True)
class IgnoresOut(Copy):
    def decode(self, encoded: Encoded, out: Tensor | None = None) -> Tensor:
        return super().decode(encoded)


@dataclass(frozen=True)
class LosesStrides(Copy):
    def decode(self, encoded: Encoded, out: Tensor | None = None) -> Tensor:
        return super().decode(encoded, out).contiguous()


@dataclass(frozen=True)
class WritesBeside(Copy):
    def decode(self, encoded: Encoded, out: Tensor | None = None) -> Tensor:
        if out is not None and out.numel():
            out.as_strided((1,), (1,), out.storage_offset() + out.numel()).zero_()
        return super().decode(encoded, out)


@dataclass(frozen=True)
class LeavesTheTail(Copy):
    def decode(self, encoded: Encoded, out: Tensor | None = None) -> Tensor:
        filled = super().decode(encoded)
        if out is None:
            return filled
        out.view(-1)[:-1] = filled.view(-1)[:-1]
        return out


@dataclass(frozen=True)
class DecodesOnce(Copy):
    def decode(self, encoded: Encoded, out: Tensor | None = None) -> Tensor:
        out = super().decode(encoded, out)
        encoded.planes["values"].zero_()
        return out


@dataclass(frozen=True)
class TrustsPlanes(Copy):
    def decode(self, encoded: Encoded, out: Tensor | None = None) -> Tensor:
        out = like(encoded.spec, out)
        return out.copy_(encoded.planes["values"].view(encoded.spec.shape))


@dataclass(frozen=True)
class SwallowsDamage(Copy):
    def decode(self, encoded: Encoded, out: Tensor | None = None) -> Tensor:
        try:
            return super().decode(encoded, out)
        except DamagedPlanesError:
            return like(encoded.spec, out).zero_()


@dataclass(frozen=True)
class PromisesFewerBytes(Copy):
    def nbytes_bound(self, spec: TensorSpec) -> int:
        return spec.numel


@dataclass(frozen=True)
class TakesWhatItRefuses(Copy):
    def encode(self, x: Tensor) -> Encoded:
        return Encoded(self.id, TensorSpec.of(x), {"values": x.detach().reshape(-1).clone()})


@dataclass(frozen=True)
class CrashesOnEmpty(Copy):
    def encode(self, x: Tensor) -> Encoded:
        x.detach().reshape(-1)[0]
        return super().encode(x)


@dataclass(frozen=True)
class PreservesHalf(Copy):
    preserves: ClassVar[frozenset[Need]] = frozenset({Need.SHAPE, Need.VALUE})


@dataclass(frozen=True)
class PreservesNoShape(Copy):
    preserves: ClassVar[frozenset[Need]] = frozenset({Need.SIGN})


@dataclass(frozen=True)
class SignWithoutMask(Copy):
    preserves: ClassVar[frozenset[Need]] = frozenset({Need.SHAPE, Need.SIGN})


@dataclass(frozen=True)
class BoundOfNothing(Copy):
    bound: ClassVar[ErrorBound | None] = ErrorBound()


class NotFrozen(Copy):
    __dataclass_params__ = SimpleNamespace(frozen=False)


@dataclass(frozen=True, repr=False)
class OddRepr(Copy):
    def __repr__(self) -> str:
        return "<odd>"


@dataclass(frozen=True)
class ForgetsItsLevel(Copy):
    def __repr__(self) -> str:
        return "ForgetsItsLevel()"


@dataclass(frozen=True)
class Rounded(Copy):
    """Within ``step / 2`` of the original, and refuses what is not finite or too large for its integers."""

    step: float = 0.25

    bound: ClassVar[ErrorBound | None] = ErrorBound(abs=0.125)

    def encode(self, x: Tensor) -> Encoded:
        spec = require_accepted(self, x)
        flat = x.detach().reshape(-1).double()
        if not bool((flat.abs() < 1e6).all()):
            raise CodecRefusedError("asked, got, do")
        return Encoded(self.id, spec, {"values": (flat / self.step).round().to(x.dtype)})

    def decode(self, encoded: Encoded, out: Tensor | None = None) -> Tensor:
        return super().decode(encoded, out).mul_(self.step)


BROKEN = [
    (Mutates(), "leave its input alone"),
    (KeepsAView(), "a view of the input"),
    (KeepsTheGraph(), "without a graph"),
    (LosesNegativeZero(), r"where 0x\w+ became 0x0+\. Compare and copy bits"),
    (IgnoresOut(), "fill and return out"),
    (LosesStrides(), "fill and return out"),
    (WritesBeside(), "written beside it"),
    (LeavesTheTail(), "1 other elements of "),
    (DecodesOnce(), "the bits of what was encoded|leave the planes alone"),
    (TrustsPlanes(), "cut short by one of its .*got RuntimeError: .* Raise DamagedPlanesError"),
    (SwallowsDamage(), "cut short by one of its .*got no error"),
    (PromisesFewerBytes(), r"nbytes_bound\(\) promised at most"),
    (TakesWhatItRefuses(), r"what accepts\(\) refuses"),
    (CrashesOnEmpty(), "got IndexError.* Raise CodecRefusedError"),
    (PreservesHalf(), "Use codecs.base.EXACT"),
    (PreservesNoShape(), "SHAPE among them"),
    (SignWithoutMask(), "Give it a field 'mask: Mask'"),
    (BoundOfNothing(), r"asked .* for its bound"),
    (NotFrozen(), "frozen dataclass"),
    (OddRepr(), "raises SyntaxError"),
    (ForgetsItsLevel(2), r"repr that makes ForgetsItsLevel\(\) again, got"),
    (object(), "no id, preserves, bound, accepts"),
    (Rounded(step=0.5), "was promised, here 0.125, got an error of 0.25"),
]


def test_a_good_codec_passes() -> None:
    check = check_codec(Copy())
    assert check.encoded > 100
    assert check.refused > 100


def test_a_bounded_codec_passes() -> None:
    assert check_codec(Rounded(), [torch.randn(50), torch.randn(9, dtype=torch.float64)]).encoded == 2


@pytest.mark.parametrize(("codec", "message"), BROKEN, ids=[type(codec).__name__ for codec, _ in BROKEN])
def test_a_broken_promise_is_caught(codec: Codec, message: str) -> None:
    with pytest.raises(AssertionError, match=message) as caught:
        check_codec(codec, _few(codec))
    assert ", got " in str(caught.value)


def _few(codec: Codec) -> Iterator[Tensor]:
    if isinstance(codec, Rounded):
        return iter([torch.linspace(0, 1, 101)])
    return (x for x in probes() if x.dtype in (torch.float32, torch.int32, torch.complex64))


def test_bits_and_order_of_what_was_encoded_do_not_depend_on_chance() -> None:
    @dataclass(frozen=True)
    class Salted(Copy):
        def encode(self, x: Tensor) -> Encoded:
            encoded = super().encode(x)
            return Encoded(self.id, encoded.spec, {**encoded.planes, "salt": torch.rand(1)})

        def nbytes_bound(self, spec: TensorSpec) -> int:
            return spec.nbytes + 4

        def __repr__(self) -> str:
            return "Salted()"

    with pytest.raises(AssertionError, match="an equal codec was asked to encode it, got other planes"):
        check_codec(Salted(), [torch.ones(3)])


def test_all_refused_is_no_proof() -> None:
    with pytest.raises(AssertionError, match=r"encode 2 tensors, got refusals of all .* Pass tensors that it takes"):
        check_codec(Copy(), [torch.ones(3, dtype=torch.int32), torch.empty(0)])


def test_given_tensors_are_not_touched() -> None:
    x = torch.randn(3, 4).t()
    before = x.clone()
    check_codec(Copy(), [x])
    assert torch.equal(x, before)


def test_probes_have_all_there_is() -> None:
    every = list(probes())
    assert {x.dtype for x in every} >= {*FLOATS, torch.int64, torch.int8, torch.uint8, torch.bool, torch.complex64}
    assert any(x.dim() == 0 for x in every)
    assert any(x.numel() == 0 for x in every)
    assert any(x.storage_offset() for x in every)
    assert any(x.requires_grad for x in every)
    floats = torch.cat([x.detach().reshape(-1) for x in every if x.dtype == torch.float32])
    bits = floats.view(torch.int32)
    assert (bits == -(2**31)).any()
    assert floats.isinf().any()
    assert bits[floats.isnan()].unique().numel() > 2
    assert ((floats != 0) & (floats.abs() < torch.finfo(torch.float32).tiny)).any()
