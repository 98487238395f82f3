from __future__ import annotations

import codec_strategies as tensors
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from backstash.codecs import Encoded, Zvc
from backstash.errors import DamagedPlanesError
from backstash.testing import equal_bits


@given(tensors.floats())
def test_every_bit_comes_back(x: Tensor) -> None:
    assert equal_bits(Zvc().decode(Zvc().encode(x)), x)


@given(tensors.floats())
def test_layout(x: Tensor) -> None:
    planes = Zvc().encode(x).planes
    flat = x.as_strided((x.numel(),), (1,)).view(tensors.BITS[x.element_size()])
    bits = np.unpackbits(planes["mask"].numpy(), bitorder="little")
    assert bits[: x.numel()].astype(bool).tolist() == (flat != 0).tolist()
    assert not bits[x.numel() :].any()
    assert torch.equal(planes["values"].view(flat.dtype), flat[flat != 0])
    starts = [int(torch.count_nonzero(flat[:start])) for start in range(0, x.numel(), 4096)]
    assert planes["offsets"].tolist() == starts


@given(st.integers(0, 9000), st.sampled_from([-(2**40), -1, 1, 7, 2**40]), st.data())
def test_offsets_that_do_not_fit_are_damage(n: int, wrong: int, data: st.DataObject) -> None:
    encoded = Zvc().encode(torch.arange(n).float() % 3)
    offsets = encoded.planes["offsets"].clone()
    if n == 0:
        return
    offsets[data.draw(st.integers(0, len(offsets) - 1))] += wrong
    with pytest.raises(DamagedPlanesError, match="planes that disagree"):
        Zvc().decode(_with(encoded, offsets=offsets))


@given(st.integers(1, 9000), st.data())
def test_a_flipped_bit_of_the_mask_is_damage(n: int, data: st.DataObject) -> None:
    encoded = Zvc().encode(torch.arange(n).float() % 3)
    mask = encoded.planes["mask"].clone()
    where = data.draw(st.integers(0, n - 1))
    mask[where // 8] ^= 1 << where % 8
    with pytest.raises(DamagedPlanesError, match="planes that disagree"):
        Zvc().decode(_with(encoded, mask=mask))


@pytest.mark.parametrize("plane", ["mask", "offsets", "values"])
def test_a_plane_too_long_is_damage(plane: str) -> None:
    encoded = Zvc().encode(torch.arange(5000).float() % 3)
    longer = torch.cat([encoded.planes[plane], encoded.planes[plane][:1]])
    with pytest.raises(DamagedPlanesError, match="compute the step again"):
        Zvc().decode(_with(encoded, **{plane: longer}))


@pytest.mark.parametrize(("zeros", "taken"), [(0.0, False), (0.04, False), (0.06, True), (0.9, True), (1.0, True)])
def test_declines_by_the_share_saved(zeros: float, taken: bool) -> None:
    x = torch.ones(4000)
    x[: int(4000 * zeros)] = 0.0
    reason = Zvc(min_saving=0.02).declines(x)
    assert (reason is None) == taken
    assert reason is None or reason.endswith("of a sample is not zero")


def test_the_sample_is_spread_over_the_tensor() -> None:
    x = torch.ones(1_000_000)
    x[100_000:] = 0.0
    assert Zvc().declines(x) is None
    assert Zvc(min_saving=0.95).declines(x) is not None


def test_empty_is_declined() -> None:
    assert Zvc().declines(torch.empty(0)) == "it is empty"


@pytest.mark.parametrize("share", [-0.1, 1.0, float("nan")])
def test_min_saving_is_a_share(share: float) -> None:
    with pytest.raises(ValueError, match="but it is a share"):
        Zvc(min_saving=share)


def _with(encoded: Encoded, **planes: Tensor) -> Encoded:
    return Encoded(encoded.codec, encoded.spec, {**encoded.planes, **planes}, encoded.meta)
