from __future__ import annotations

import math

import codec_strategies as tensors
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from backstash import Session, Stash, policies
from backstash.codecs import BlockQuant, Codec, Encoded, FewBit, Minifloat, Signed, Sz, Szp, Zvc
from backstash.errors import CodecRefusedError, DamagedPlanesError
from backstash.policies import Rules
from backstash.saved import Mask, TensorSpec, Test
from backstash.testing import check_codec
from studies.jpeg_act import Dct

SINGLES = (torch.float32, torch.bfloat16, torch.float16)
VALUES = (
    Sz(0.1),
    Sz(0.1, nonzero=True),
    Sz(1e-2, "rel", nonzero=True),
    Sz(1e-2, "rel"),
    BlockQuant(2),
    BlockQuant(1, 16, "nearest"),
    Szp(0.3),
)


def through(codec: Codec, x: Tensor) -> Tensor:
    return codec.decode(codec.encode(x))


@given(tensors.floats(SINGLES), st.sampled_from(VALUES), st.floats(1e-6, 1e3))
def test_bounds_and_masks(x: Tensor, values: Codec, scale: float) -> None:
    x = (x * scale).nan_to_num()
    check_codec(Signed(values), [x, torch.ones(3)])


@pytest.mark.parametrize("values", VALUES, ids=repr)
@pytest.mark.parametrize("dtype", SINGLES)
def test_every_sign_stays(values: Codec, dtype: torch.dtype) -> None:
    x = torch.randn(9001, generator=torch.Generator().manual_seed(0)).mul(0.05).to(dtype)
    for part in (x, x.relu(), -x.relu(), x.abs(), -x.abs(), torch.zeros_like(x), x[:0]):
        y = through(Signed(values), part)
        assert torch.equal(y.sign(), part.sign())
        tiny = torch.finfo(dtype).smallest_normal * part.sign()
        assert torch.equal(through(Signed(values), tiny).sign(), part.sign())


@pytest.mark.parametrize("dtype", SINGLES)
def test_infinities_and_nans_stay_with_sz(dtype: torch.dtype) -> None:
    x = torch.tensor([0.0, -0.0, math.nan, math.inf, -math.inf, 1e-4, -1e-4, math.nan], dtype=dtype)
    for part in (x, x[:4], x[2:3], x[[0, 1, 4, 6]]):
        y = through(Signed(Sz(0.1)), part)
        assert torch.equal(y.isnan(), part.isnan())
        assert torch.equal(y[~y.isnan()].sign(), part[~y.isnan()].sign())
        assert torch.equal(y[part.isinf()], part[part.isinf()])
    with pytest.raises(CodecRefusedError, match="codec 'blockquant' was asked to encode"):
        Signed(BlockQuant()).encode(x)


def test_layout() -> None:
    x = torch.zeros(4100)
    x[[3, 9, 4099]] = torch.tensor([1.0, 0.25, 0.01])
    encoded = Signed(Sz(0.5)).encode(x)
    assert encoded.planes["mask"][:2].tolist() == [8, 2]
    assert encoded.planes["offsets"].tolist() == [0, 2]
    assert encoded.planes["least"].tolist() == [x[4099].item()]
    assert encoded.meta["nonzeros"] == 3
    assert "positive" not in encoded.planes
    assert torch.equal(Sz(0.5).encode(x[x != 0]).planes["stream"], encoded.planes["values.stream"])
    x[9] = -0.25
    encoded = Signed(Sz(0.5)).encode(x)
    assert encoded.planes["positive"].tolist() == [0b101]


def test_what_would_be_zero_becomes_the_least_there_is() -> None:
    x = torch.tensor([0.0, 0.02, -0.04, 1.0] * 4096)
    assert through(Signed(Sz(0.1)), x)[:4].tolist() == pytest.approx([0.0, 0.02, -0.02, 1.0])


def test_negative_zero_is_zero() -> None:
    x = torch.tensor([-0.0, 0.0, 1.0])
    encoded = Signed(Sz(0.1)).encode(x)
    assert encoded.planes["mask"].tolist() == [4]
    assert "positive" not in encoded.planes


def test_it_takes_fewer_bits_than_what_codes_zeros_twice() -> None:
    x = torch.randn(1 << 16, generator=torch.Generator().manual_seed(0)).relu()
    bits = 8 * Signed(Sz(0.2)).encode(x).nbytes / x.numel()
    assert 2.2 < bits < 2.4
    assert bits < 1 + 8 * Sz(0.2).encode(x).nbytes / x.numel() - 0.3
    assert 8 * Signed(Sz(0.2, nonzero=True)).encode(x).nbytes / x.numel() < bits - 0.05


@pytest.mark.parametrize("dtype", SINGLES)
def test_images_go_through_dct_whole(dtype: torch.dtype) -> None:
    x = torch.randn(2, 3, 16, 24, generator=torch.Generator().manual_seed(0)).to(dtype)
    for images in (x, x.relu(), -x.abs(), x.contiguous(memory_format=torch.channels_last), torch.zeros_like(x)):
        y = through(Signed(Dct()), images)
        assert torch.equal(y.sign(), images.sign())
        lossy = through(Dct(), images)
        assert (y - images).abs().double().mean() <= (lossy - images).abs().double().mean()
    assert Signed(Dct()).accepts(TensorSpec.of(x[0, 0, 0])) is not None


def test_codecs_for_other_things() -> None:
    for values in (Zvc(), Minifloat("fp8"), FewBit()):
        with pytest.raises(ValueError, match="Signed was asked for values=.*, but it takes a codec such as Sz"):
            Signed(values)


def test_masks() -> None:
    assert Signed().keeps(Mask(Test.NOT_LE))
    assert not Signed().keeps(Mask(Test.NONZERO))
    assert not Signed().keeps(Mask(Test.NOT_LE, 1.0))


def test_declines() -> None:
    assert Signed().declines(torch.empty(0)) == "it is empty"
    assert Signed(Sz(1e-9)).declines(torch.randn(5000)) is not None
    assert Signed(Sz(0.1)).declines(torch.zeros(5000)) is None


@given(st.integers(1, 9000), st.data())
def test_damage(n: int, data: st.DataObject) -> None:
    codec = Signed(Sz(0.1))
    encoded = codec.encode(torch.randn(n, generator=torch.Generator().manual_seed(n)))
    name = data.draw(st.sampled_from(["mask", "offsets", "least", "positive", "values.index", "values.stream"]))
    plane = encoded.planes.get(name)
    if plane is not None and plane.numel():
        cut = plane[: data.draw(st.integers(0, plane.numel() - 1))]
        for damaged in (cut, torch.cat([plane, plane[:1]])):
            with pytest.raises(DamagedPlanesError, match="compute the step again"):
                codec.decode(Encoded(encoded.codec, encoded.spec, {**encoded.planes, name: damaged}, encoded.meta))


@pytest.mark.parametrize("values", [Sz(0.2), BlockQuant(2)], ids=repr)
def test_a_relu_between_convolutions_has_its_own_gradient(values: Codec) -> None:
    """The relu's gradient is exact, the convolution's is that of the decoded input."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3))
    x = torch.randn(2, 3, 16, 16)
    gradients = {}
    for name, policy in {
        "plain": policies.get("keep"),
        "signed": Rules((("2/Convolution#0:input", Stash(Signed(values))),), policies.get("keep")),
    }.items():
        model.zero_grad()
        with Session(policy, model=model, min_nbytes=0) as session:
            loss = model(x).square().sum()
        loss.backward()
        gradients[name] = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    row = next(row for row in session.report().rows if row.key == "2/Convolution#0:input")
    assert row.codec == Signed(values).label
    assert row.shared_by == ["1/Relu#0:result"]
    for number in (0, 1, 3):  # all but the second convolution's weight
        assert torch.equal(gradients["plain"][number], gradients["signed"][number])
    assert not torch.equal(gradients["plain"][2], gradients["signed"][2])
