from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import backstash as bs
from backstash.codecs.base import EXACT, Encoded
from backstash.saved import SavedTensor, TensorSpec
from backstash.testing import equal_bits, gradients_equal


def test_equal_bits() -> None:
    nan = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert equal_bits(nan, nan.clone())
    assert not equal_bits(nan[:1], nan[1:])
    assert not equal_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert not equal_bits(torch.zeros(2), torch.zeros(2, dtype=torch.int32))
    assert not equal_bits(torch.zeros(2), torch.zeros(2, 1))
    assert equal_bits(torch.zeros(2, 3).t(), torch.zeros(3, 2))
    assert equal_bits(torch.tensor(1.5), torch.tensor(1.5))
    assert equal_bits(torch.empty(0), torch.empty(0))
    assert equal_bits(torch.tensor([True]), torch.tensor([True]))
    conjugated = torch.tensor([1 + 2j]).conj()
    assert equal_bits(conjugated, torch.tensor([1 - 2j]))


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_equal_bits_of_quantized_tensors() -> None:
    """Their integers are compared, of whose memory torch's own comparison dies."""
    x = torch.quantize_per_tensor(torch.arange(4.0), 0.5, 0, torch.qint8)
    assert equal_bits(x, x.clone())
    assert not equal_bits(x, torch.quantize_per_tensor(-torch.arange(4.0), 0.5, 0, torch.qint8))


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Dropout(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(72, 3),
    )


class DropsHalf:
    """A policy whose codec loses what it promises to keep."""

    def __init__(self, only: str = "") -> None:
        self.only = only

    def decide(self, saved: SavedTensor) -> bs.Stash | bs.Keep:
        return bs.Stash(_Lossy()) if self.only in saved.key else bs.Keep()

    def observe(self, outcome: object) -> None:
        pass


class _Lossy:
    id, preserves, bound = "lossy", EXACT, None

    def accepts(self, spec: TensorSpec) -> str | None:
        return None if spec.dtype.is_floating_point else "a wrong index would be a wild pointer"

    def declines(self, x: Tensor) -> None:
        return None

    def encode(self, x: Tensor) -> Encoded:
        return Encoded("lossy", TensorSpec.of(x), {"values": x.clone()})

    def decode(self, encoded: Encoded, out: Tensor) -> Tensor:
        return out.copy_(encoded.planes["values"]).mul_(2)

    def nbytes_bound(self, spec: object) -> int:
        return 0


def test_lossless_gradients_are_equal_and_nothing_is_left_behind() -> None:
    model = network()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    gradients = {name: torch.ones_like(leaf) for name, leaf in model.named_parameters()}
    for name, leaf in model.named_parameters():
        leaf.grad = gradients[name]
    random_state = torch.get_rng_state()
    result = gradients_equal(lambda: model(torch.randn(2, 3, 8, 8)).square().sum(), model)
    assert result.compared == tuple(gradients)
    assert result.report.ratio > 1
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(equal_bits(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert all(leaf.grad is gradients[name] for name, leaf in model.named_parameters())


def test_the_first_gradient_that_differs_is_named() -> None:
    model = network()
    x = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    with pytest.raises(AssertionError, match=r"another gradient of 0\.weight \(float32 \[8, 3, 3, 3\]\): it"):
        gradients_equal(lambda: model(x).square().sum(), model, DropsHalf())


def test_leaves_by_name() -> None:
    a, b = torch.ones(64, requires_grad=True), torch.ones(64)
    assert gradients_equal(lambda: (a * b).relu().sum(), {"a": a, "b": b}).compared == ("a",)


def test_a_gradient_on_one_side_only_is_a_difference() -> None:
    a, b = torch.ones(4, requires_grad=True), torch.ones(4, requires_grad=True)
    calls = []

    def forward() -> Tensor:
        calls.append(1)
        return (a + b).sum() if len(calls) == 2 else (a + b.detach()).sum()

    with pytest.raises(AssertionError, match="another gradient of b: there is one only under the policy"):
        gradients_equal(forward, {"a": a, "b": b})


def test_an_unsteady_step_is_told_apart() -> None:
    weight = torch.ones(4, requires_grad=True)
    losses = iter(range(9))
    with pytest.raises(AssertionError, match=r"another loss: 0\.0 plain, 4\.0 .* Two plain steps differ as well"):
        gradients_equal(lambda: (weight * next(losses)).sum(), {"weight": weight})
