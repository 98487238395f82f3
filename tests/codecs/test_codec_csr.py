from __future__ import annotations

import codec_strategies as tensors
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from backstash.codecs import Csr, Encoded, Zvc
from backstash.errors import CodecRefusedError, DamagedPlanesError
from backstash.saved import TensorSpec
from backstash.testing import equal_bits


@given(tensors.floats())
def test_every_bit_comes_back(x: Tensor) -> None:
    assert equal_bits(Csr().decode(Csr().encode(x)), x)


@given(tensors.floats())
def test_layout(x: Tensor) -> None:
    planes = Csr().encode(x).planes
    flat = x.as_strided((x.numel(),), (1,)).view(tensors.BITS[x.element_size()])
    where = flat.nonzero().view(-1)
    assert planes["columns"].tolist() == [place % 256 for place in where.tolist()]
    assert torch.equal(planes["values"].view(flat.dtype), flat[where])
    starts = [int(torch.count_nonzero(flat[:start])) for start in range(0, x.numel(), 256)]
    assert planes["rows"].tolist() == [*starts, len(where)]
    assert planes["rows"].dtype == torch.int32


def test_rows_that_are_empty_and_full() -> None:
    x = torch.zeros(5 * 256 + 3)
    x[256:512] = torch.arange(1, 257)
    x[-1] = -0.0
    encoded = Csr().encode(x)
    assert encoded.planes["rows"].tolist() == [0, 0, 256, 256, 256, 256, 257]
    assert encoded.planes["columns"].tolist() == [*range(256), 2]
    assert equal_bits(Csr().decode(encoded), x)


@given(st.integers(1, 3000), st.sampled_from([-(2**31), -1, 1, 7, 2**30]), st.data())
def test_rows_that_do_not_fit_are_damage(n: int, wrong: int, data: st.DataObject) -> None:
    encoded = Csr().encode(torch.arange(1, n + 1).float() % 3)
    rows = encoded.planes["rows"].long()
    rows[data.draw(st.integers(0, len(rows) - 1))] += wrong
    damaged = _with(encoded, rows=rows.to(torch.int32))
    out = torch.full((n,), 7.0)
    with pytest.raises(DamagedPlanesError, match="planes that disagree"):
        Csr().decode(damaged, out)
    assert (out == 7.0).all()


@given(st.integers(2, 3000), st.data())
def test_columns_that_do_not_rise_are_damage(n: int, data: st.DataObject) -> None:
    encoded = Csr().encode(torch.ones(n))
    columns = encoded.planes["columns"].clone()
    columns[data.draw(st.integers(0, n - 1))] += data.draw(st.integers(1, 255))  # wraps
    out = torch.full((n,), 7.0)
    with pytest.raises(DamagedPlanesError, match="planes that disagree"):
        Csr().decode(_with(encoded, columns=columns), out)
    assert (out == 7.0).all()


@pytest.mark.parametrize("plane", ["columns", "rows", "values"])
def test_a_plane_too_long_is_damage(plane: str) -> None:
    encoded = Csr().encode(torch.arange(5000).float() % 3)
    longer = torch.cat([encoded.planes[plane], encoded.planes[plane][:1]])
    with pytest.raises(DamagedPlanesError, match="compute the step again"):
        Csr().decode(_with(encoded, **{plane: longer}))


@pytest.mark.parametrize(("zeros", "taken"), [(0.0, False), (0.2, False), (0.23, True), (0.9, True), (1.0, True)])
def test_declines_by_the_share_saved(zeros: float, taken: bool) -> None:
    x = torch.ones(4000)
    x[: int(4000 * zeros)] = 0.0
    reason = Csr(min_saving=0.02).declines(x)
    assert (reason is None) == taken
    assert reason is None or reason.endswith("of a sample is not zero")


def test_the_sample_is_spread_over_the_tensor() -> None:
    x = torch.ones(1_000_000)
    x[100_000:] = 0.0
    assert Csr().declines(x) is None
    assert Csr(min_saving=0.95).declines(x) is not None


def test_empty_is_declined() -> None:
    assert Csr().declines(torch.empty(0)) == "it is empty"


@pytest.mark.parametrize("share", [-0.1, 1.0, float("nan")])
def test_min_saving_is_a_share(share: float) -> None:
    with pytest.raises(ValueError, match="but it is a share"):
        Csr(min_saving=share)


def test_more_elements_than_the_row_pointers_count_are_refused() -> None:
    spec = TensorSpec.of(torch.empty(2**31, device="meta"))
    assert Csr().accepts(spec) == "it takes at most 2,147,483,647 elements"
    assert Csr().accepts(TensorSpec.of(torch.empty(2**31 - 1, device="meta"))) is None
    with pytest.raises(CodecRefusedError, match="at most 2,147,483,647"):
        Csr().encode(torch.empty(2**31, device="meta"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("density", [0.01, 0.1, 0.108, 0.115, 0.13, 0.5])
def test_csr_is_smaller_than_zvc_below_its_crossing(density: float, dtype: torch.dtype) -> None:
    x = torch.zeros(1 << 20, dtype=dtype)
    x[torch.randperm(x.numel(), generator=torch.Generator().manual_seed(0))[: int(density * x.numel())]] = 1.0
    csr, zvc = Csr().encode(x).nbytes, Zvc().encode(x).nbytes
    assert (csr < zvc) == (density < Csr.crossing)


def _with(encoded: Encoded, **planes: Tensor) -> Encoded:
    return Encoded(encoded.codec, encoded.spec, {**encoded.planes, **planes}, encoded.meta)
