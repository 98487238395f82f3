"""JPEG-ACT's transform: what comes back, its planes, and what is refused."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from backstash.codecs import Encoded
from backstash.codecs.zvc.reference import zvc_decode
from backstash.errors import CodecRefusedError, DamagedPlanesError
from backstash.testing import check_codec
from studies.jpeg_act import BASIS, Dct

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def through(codec: Dct, x: Tensor) -> Tensor:
    return codec.decode(codec.encode(x))


def smooth(*shape: int) -> Tensor:
    """Images whose neighbours are alike."""
    noise = torch.randn(*shape, generator=torch.Generator().manual_seed(0))
    for _ in range(4):
        noise = (noise + noise.roll(1, -1) + noise.roll(1, -2) + noise.roll((1, 1), (-1, -2))) / 4
    return noise / noise.abs().max()


def test_the_transform_is_orthonormal() -> None:
    basis = torch.tensor(BASIS, dtype=torch.float64).view(8, 8)
    torch.testing.assert_close(basis @ basis.T, torch.eye(8, dtype=torch.float64))
    wave = torch.cos((2 * torch.arange(8.0) + 1) * 3 * math.pi / 16)
    assert (basis @ wave.double()).abs().argmax() == 3


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_images_come_back_nearly(layout: torch.memory_format, dtype: torch.dtype) -> None:
    x = smooth(2, 3, 29, 35).to(dtype).contiguous(memory_format=layout)
    errors = [float((through(Dct("optL", shift), x) - x).float().square().mean().sqrt()) for shift in range(8)]
    assert errors[0] < 0.02
    assert errors[1] < 2.2 * errors[0] and errors == sorted(errors)
    sizes = [Dct("optL", shift).encode(x).nbytes for shift in range(8)]
    assert sizes == sorted(sizes, reverse=True)


def test_the_layout_in_memory_changes_no_image() -> None:
    x = smooth(2, 3, 12, 20)
    assert torch.equal(through(Dct(), x), through(Dct(), x.to(memory_format=torch.channels_last)))


@pytest.mark.parametrize("codec", [Dct(), Dct("optH"), Dct("optH", 7)], ids=str)
@pytest.mark.parametrize("dtype", FLOATS)
def test_contract_on_images(codec: Dct, dtype: torch.dtype) -> None:
    images = [
        smooth(3, 9),
        smooth(1, 1),
        smooth(2, 3, 5, 7).to(memory_format=torch.channels_last),
        torch.zeros(4, 8, 8),
    ]
    extreme = torch.ones(2, 8, 8) * torch.tensor([torch.finfo(dtype).max, torch.finfo(dtype).tiny]).view(2, 1, 1)
    assert check_codec(codec, [x.to(dtype) for x in (*images, extreme)]).encoded == 5


def test_layout() -> None:
    x = torch.zeros(2, 8, 16)
    x[0, :, 8:] = 3.0  # one block of one image
    encoded = Dct().encode(x)
    assert encoded.planes["scales"].tolist() == [3.0, 0.0]
    assert encoded.planes["mask"].tolist() == [0] * 8 + [1] + [0] * 23
    assert encoded.planes["values"].tolist() == [127]  # 8 * 127 / 8
    torch.testing.assert_close(Dct().decode(encoded), x)
    one = Dct("optH").encode(x[:1] * torch.arange(16) % 5)
    codes = torch.empty(128, dtype=torch.uint8)
    zvc_decode(one.planes["mask"], one.planes["offsets"], one.planes["values"], codes)
    assert codes.view(2, 8, 8)[:, 1:].eq(0).all(), "rows are all alike"


def test_an_element_may_be_anything_within_the_largest_magnitude() -> None:
    x = torch.zeros(64).view(8, 8)
    x[3, 4] = 1.0
    y = through(Dct("optH", 3), x)
    assert y.eq(0).all()
    assert Dct().bound.abs == math.inf
    assert through(Dct(), torch.randn(5, 17, 33)).isfinite().all()


def test_parameters() -> None:
    with pytest.raises(ValueError, match=r"table='jpeg80', but there are 'optL', 'optH'"):
        Dct("jpeg80")
    with pytest.raises(ValueError, match=r"shift=8, but the choices are 0 to 7"):
        Dct(shift=8)
    assert [codec.label for codec in (Dct(), Dct("optH", 2))] == ["dct-optL", "dct-optH+2"]


def test_what_has_no_images_is_refused() -> None:
    for x, reason in (
        (torch.zeros(8), "it has no images in memory"),
        (torch.zeros(8, 8)[:, :4], "do not fill one block"),
        (torch.zeros(6, 5).t(), "it has no images in memory"),
        (torch.zeros(8, 8, dtype=torch.float64), "takes float32, bfloat16 and float16 only, not float64"),
        (torch.full((8, 8), math.nan), "got 64 infinite or NaN elements"),
    ):
        with pytest.raises(CodecRefusedError, match=reason):
            Dct().encode(x)
    assert "fill 12% of 8x8 blocks" in str(Dct().declines(torch.zeros(10, 1, 8)))
    assert Dct().declines(torch.zeros(10, 7, 7)) is None


@pytest.mark.parametrize("plane", ["mask", "offsets", "values", "scales"])
def test_damage(plane: str) -> None:
    encoded = Dct().encode(smooth(9, 30, 30))
    kept = encoded.planes[plane]
    for damaged in (kept[:-1], kept[:0], torch.cat([kept, kept[:1]])):
        with pytest.raises(DamagedPlanesError, match="compute the step again"):
            Dct().decode(Encoded(encoded.codec, encoded.spec, {**encoded.planes, plane: damaged}))
