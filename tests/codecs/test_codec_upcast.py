"""Float32 numbers that were bfloat16: every bit comes back, the layout, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import codec_strategies as tensors
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from backstash.codecs import Exponents, Upcast, get
from backstash.errors import CodecRefusedError, DamagedPlanesError
from backstash.saved import TensorSpec
from backstash.testing import equal_bits

EITHER = st.sampled_from([Upcast(), Upcast(Exponents()), Upcast(Exponents(3))])


@st.composite
def upcasts(draw: st.DrawFn) -> Tensor:
    """Bfloat16 numbers as float32, in any dense layout: -0.0, subnormals, infinities and NaN payloads among them."""
    x = draw(tensors.floats((torch.bfloat16,)))
    n = x.numel()
    wide = torch.empty_strided(x.shape, x.stride(), dtype=torch.float32)
    words = x.as_strided((n,), (1,)).view(torch.int16).int() << 16
    wide.as_strided((n,), (1,)).copy_(words.view(torch.float32))
    return wide


@given(upcasts(), EITHER)
def test_every_bit_comes_back(x: Tensor, codec: Upcast) -> None:
    encoded = codec.encode(x)
    assert encoded.nbytes <= codec.nbytes_bound(encoded.spec)
    assert equal_bits(codec.decode(encoded), x)
    out = torch.empty_strided(x.shape, x.stride())
    assert codec.decode(encoded, out) is out and equal_bits(out, x)
    if x.numel():
        draft = codec.draft(x, codec.known(encoded))
        judged = draft.judge(draft.numbers.tolist())
        assert judged.refusal is None and judged.known == codec.known(encoded)
        cut = draft.encoded if judged.cut is None else judged.cut(draft.encoded)
        assert cut.nbytes <= draft.encoded.nbytes and equal_bits(codec.decode(cut), x)


@given(upcasts())
def test_layout(x: Tensor) -> None:
    words = x.as_strided((x.numel(),), (1,)).view(torch.int32)
    planes = Upcast().encode(x).planes
    assert list(planes) == ["upper"] and planes["upper"].dtype is torch.bfloat16
    assert torch.equal(planes["upper"].view(torch.int16), (words >> 16).to(torch.int16))
    inner = Exponents().encode(planes["upper"]).planes
    for name, plane in Upcast(Exponents()).encode(x).planes.items():
        assert torch.equal(plane, inner[name.removeprefix("values.")])


@given(upcasts().filter(lambda x: x.numel() > 0), EITHER, st.data())
def test_one_other_number_is_refused(x: Tensor, codec: Upcast, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, x.numel() - 1))
    row = x.as_strided((x.numel(),), (1,)).view(torch.int32)
    row[at] |= data.draw(st.integers(1, 0xFFFF))
    with pytest.raises(CodecRefusedError, match="got 1 elements that are no bfloat16 numbers"):
        codec.encode(x)
    draft = codec.draft(x, None)
    assert "Use Exponents" in (draft.judge(draft.numbers.tolist()).refusal or "")


def test_sizes_of_normal_numbers() -> None:
    x = torch.randn(100, 1000, generator=torch.Generator().manual_seed(0)).bfloat16().float()
    assert x.nbytes / Upcast().encode(x).nbytes == 2.0
    assert x.nbytes / Upcast(Exponents()).encode(x).nbytes > 2.65
    assert Upcast().declines(x) is None and Upcast(Exponents()).declines(x) is None


def test_what_is_declined_and_not_accepted() -> None:
    generator = torch.Generator().manual_seed(0)
    assert "100% of a sample" in (Upcast().declines(torch.randn(9000, generator=generator)) or "")
    assert Upcast().declines(torch.empty(0)) == "it is empty"
    noise = torch.randint(-(1 << 15), 1 << 15, (9000,), generator=generator, dtype=torch.int32) << 16
    assert Upcast().declines(noise.view(torch.float32)) is None
    assert "out of its window" in (Upcast(Exponents()).declines(noise.view(torch.float32)) or "")
    for dtype in (torch.bfloat16, torch.float16, torch.float64, torch.int32):
        assert "float32 only" in (Upcast().accepts(TensorSpec.of(torch.ones(4, dtype=dtype))) or "")
    assert get("upcast") == Upcast()
    assert [codec.label for codec in (Upcast(), Upcast(Exponents()))] == ["upcast", "upcast exponents"]


@pytest.mark.parametrize("codec", [Upcast(), Upcast(Exponents())])
def test_planes_that_were_cut_short_are_damage(codec: Upcast) -> None:
    encoded = codec.encode(torch.ones(5000))
    name = next(iter(encoded.planes))
    damaged = replace(encoded, planes={**encoded.planes, name: encoded.planes[name][:-1]})
    with pytest.raises(DamagedPlanesError):
        codec.decode(damaged)
