from __future__ import annotations

from itertools import chain, groupby

import codec_strategies as tensors
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from backstash.codecs import Encoded, Rle, Zvc
from backstash.errors import DamagedPlanesError
from backstash.testing import equal_bits


def tokens_of(flags: list[bool]) -> list[int]:
    """The tokens of one chunk, run by run."""
    tokens, expected = [], False
    for flag, run in groupby(flags):
        if flag != expected:
            tokens.append(0)
        length = len(list(run))
        while length > 255:
            tokens += [255, 0]
            length -= 255
        tokens.append(length)
        expected = not flag
    return tokens


@given(tensors.floats())
def test_every_bit_comes_back(x: Tensor) -> None:
    assert equal_bits(Rle().decode(Rle().encode(x)), x)


@given(tensors.floats())
def test_layout(x: Tensor) -> None:
    planes = Rle().encode(x).planes
    flat = x.as_strided((x.numel(),), (1,)).view(tensors.BITS[x.element_size()])
    chunks = [(flat[start : start + 4096] != 0).tolist() for start in range(0, x.numel(), 4096)]
    tokens = [tokens_of(chunk) for chunk in chunks]
    assert planes["tokens"].tolist() == [*chain(*tokens)]
    first_tokens = [sum(map(len, tokens[:i])) for i in range(len(chunks))]
    first_values = [sum(map(sum, chunks[:i])) for i in range(len(chunks))]
    assert planes["starts"].tolist() == first_tokens + first_values
    assert torch.equal(planes["values"].view(flat.dtype), flat[flat != 0])


@given(st.integers(1, 9000), st.sampled_from([-(2**40), -1, 1, 7, 2**40]), st.data())
def test_starts_that_do_not_fit_are_damage(n: int, wrong: int, data: st.DataObject) -> None:
    encoded = Rle().encode(torch.arange(n).float() % 3)
    starts = encoded.planes["starts"].clone()
    starts[data.draw(st.integers(0, len(starts) - 1))] += wrong
    with pytest.raises(DamagedPlanesError, match="planes that disagree"):
        Rle().decode(_with(encoded, starts=starts))


@given(st.integers(1, 9000), st.integers(1, 255), st.data())
def test_a_changed_token_is_damage(n: int, wrong: int, data: st.DataObject) -> None:
    encoded = Rle().encode(torch.arange(n).float() % 3)
    tokens = encoded.planes["tokens"].clone()
    tokens[data.draw(st.integers(0, len(tokens) - 1))] ^= wrong
    with pytest.raises(DamagedPlanesError, match="planes that disagree"):
        Rle().decode(_with(encoded, tokens=tokens))


@pytest.mark.parametrize("plane", ["tokens", "starts", "values"])
def test_a_plane_too_long_is_damage(plane: str) -> None:
    encoded = Rle().encode(torch.arange(5000).float() % 3)
    longer = torch.cat([encoded.planes[plane], encoded.planes[plane][-1:]])
    with pytest.raises(DamagedPlanesError, match="compute the step again"):
        Rle().decode(_with(encoded, **{plane: longer}))


def test_clustered_zeros_are_smaller_than_as_a_mask() -> None:
    clustered, scattered = torch.ones(100_000), torch.ones(100_000)
    clustered[:50_000] = 0.0
    scattered[::2] = 0.0
    assert Rle().encode(clustered).nbytes < Zvc().encode(clustered).nbytes
    assert Rle().encode(scattered).nbytes > Zvc().encode(scattered).nbytes


def test_declines_what_is_dense_or_scattered() -> None:
    x = torch.ones(10_000, dtype=torch.bfloat16)
    assert Rle().declines(x) == "a sample is 100% not zero, in 1 runs"
    x[::2] = 0.0
    assert "50% not zero" in (Rle().declines(x) or "")
    assert Rle().declines(x.float()) is None
    assert Rle().declines(torch.empty(0)) == "it is empty"


@pytest.mark.parametrize("share", [-0.1, 1.0, float("nan")])
def test_min_saving_is_a_share(share: float) -> None:
    with pytest.raises(ValueError, match="but it is a share"):
        Rle(min_saving=share)


def _with(encoded: Encoded, **planes: Tensor) -> Encoded:
    return Encoded(encoded.codec, encoded.spec, {**encoded.planes, **planes}, encoded.meta)
