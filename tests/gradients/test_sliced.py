"""Backward in slices of the batch: gradients equal up to the order of a sum, a lower peak, and a row in the report."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from backstash import Session, policies
from backstash.codecs import Binary, Zvc
from backstash.codecs.sliced import Sliced
from backstash.policies import Rules, Slice
from backstash.report.meter import CountedPeak
from backstash.testing import check_codec


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.Conv2d(16, 16, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.Conv2d(16, 8, 3, stride=2, groups=2, bias=False),
        nn.ReLU(),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.LazyLinear(4),
    )


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    model(x).square().sum().backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("batch", [2, 3, 8])
@pytest.mark.parametrize("parts", [2, 5])
def test_the_same_sum(parts: int, batch: int, layout: torch.memory_format) -> None:
    model = network()
    x = torch.randn(batch, 3, 32, 32, dtype=torch.float64).to(memory_format=layout)
    model(x.float())
    model = model.to(dtype=torch.float64, memory_format=layout)
    expected = gradients(model, x)
    session = Session(Rules((("*Convolution*:input", Slice(parts, (Binary(), Zvc()))),), policies.get("lossless")))
    with session:
        for _ in range(2):
            for a, b in zip(expected, gradients(model, x), strict=True):
                assert a.stride() == b.stride()
                torch.testing.assert_close(b, a, rtol=1e-12, atol=1e-12)
    sliced = [row for row in session.report().rows if "slices" in row.codec]
    assert len(sliced) == 2
    assert f"zvc in {parts} slices" in str(session.report())


def test_the_policy_slices_the_largest() -> None:
    model = network()
    x = torch.randn(4, 3, 64, 64)
    expected = gradients(model, x)
    with Session("sliced") as session:
        for _ in range(2):
            got = gradients(model, x)
    for a, b in zip(expected, got, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-4)
    assert {row.key for row in session.report().rows if "slices" in row.codec} == {
        "2/Convolution#0:input",
        "4/Convolution#0:input",
    }


def test_the_peak_is_smaller() -> None:
    model = network()
    x = torch.randn(8, 3, 96, 96)
    model(x)
    peaks = {}
    for policy in ("lossless", "sliced"):
        session = Session(policy)
        for _ in range(2):
            with session, CountedPeak() as counter:
                gradients(model, x)
        peaks[policy] = counter.peak_nbytes
    assert peaks["sliced"] < 0.85 * peaks["lossless"]


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_the_codec(layout: torch.memory_format) -> None:
    x = torch.randn(5, 3, 7, 6).relu().to(memory_format=layout)
    codec = Sliced(Zvc(), 3)
    assert check_codec(codec, tensors=[x])
    encoded = codec.encode(x)
    assert [tuple(codec.decode_part(encoded, number).shape[:1]) for number in range(3)] == [(2,), (2,), (1,)]
    assert torch.equal(torch.cat([codec.decode_part(encoded, number) for number in range(3)]), x)
    assert "no batch of slices" in str(codec.accepts(encoded.spec.__class__.of(x.transpose(0, 1))))


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match="Slice was asked for 1 parts"):
        Slice(1)
    with pytest.raises(ValueError, match="Sliced was asked for 0 parts"):
        Sliced(Zvc(), 0)
    with pytest.raises(ValueError, match=r"a share of 1\.5"):
        policies.sliced(share=1.5)
