"""The table of effects of an error in a saved value is right, and useful for the gradients of models."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backstash import Session, policies
from backstash.codecs import BlockQuant
from backstash.formulas import op_of, requirement_of
from backstash.policies.base import Keep, Outcome, Stash
from backstash.saved import Effect, SavedTensor, TensorSpec


def weight(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).requires_grad_()


def effect_of_value(node: Any, op: str, role: str, x: Tensor) -> tuple[Effect, int]:
    """The effect of an error in ``x``, which the node has saved, and how many neighbours share its scale."""
    spec = TensorSpec.of(x)
    found = requirement_of(node, role, spec, {role: spec}, op)
    return found.effect, found.row


CASES: dict[str, tuple[Callable[[Tensor], Tensor], tuple[int, ...]]] = {
    "Convolution:input": (lambda x: F.conv2d(x, weight(4, 4, 3, 3)), (2, 4, 8, 8)),
    "Addmm:mat1": (lambda x: F.linear(x, weight(5, 8), weight(5)), (6, 8)),
    "Mm:self": (lambda x: F.linear(x, weight(5, 8)), (6, 8)),
    "Mm:mat2": (lambda x: weight(5, 6) @ x, (6, 8)),
    "Bmm:self": (lambda x: torch.bmm(x, weight(3, 8, 5)), (3, 6, 8)),
    "Bmm:mat2": (lambda x: torch.bmm(weight(3, 5, 6), x), (3, 6, 8)),
    "Mul:self": (lambda x: x * weight(6, 8), (6, 8)),
    "Mul:other": (lambda x: weight(6, 8) * x, (6, 8)),
    "Div:self": (lambda x: x / weight(6, 8), (6, 8)),
    "Pow:self": (lambda x: x.pow(2), (6, 8)),
}


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_linear_in_what_is_called_so(case: str) -> None:
    """The mean of the gradients with an error and with its opposite is the gradient without."""
    function, shape = CASES[case]
    op, role = case.split(":")
    torch.manual_seed(0)
    x, error = torch.randn(shape), torch.randn(shape)

    def gradients(shift: Tensor) -> list[Tensor]:
        def unpack(saved: Tensor) -> Tensor:
            return saved + shift if saved.data_ptr() == leaf.data_ptr() else saved

        leaf = x.clone().requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, unpack):
            result = function(leaf)
        grad = torch.randn(result.shape, generator=torch.Generator().manual_seed(2))
        assert result.grad_fn is not None
        made = result.grad_fn(grad)
        return [gradient for gradient in (made if isinstance(made, tuple) else (made,)) if gradient is not None]

    exact, above, below = gradients(torch.zeros(shape)), gradients(error), gradients(-error)
    assert any(not torch.equal(a, b) for a, b in zip(exact, above, strict=True))
    for middle, a, b in zip(exact, above, below, strict=True):
        torch.testing.assert_close((a + b) / 2, middle, rtol=1e-4, atol=1e-4)
    result = function(x.requires_grad_())
    effect, _ = effect_of_value(result.grad_fn, op, role, x)
    assert effect in (Effect.LINEAR, Effect.NORMALISED)


def test_what_is_broadcast_or_a_divisor_is_not_known_to_bear_an_error() -> None:
    x, factor = torch.randn(6, 8, requires_grad=True), torch.rand(6, 1, requires_grad=True)
    for result, op, role, value in (
        (x * factor, "Mul", "other", factor),
        (factor * x, "Mul", "self", factor),
        (x / factor, "Div", "other", factor),
        (factor.rsqrt(), "Rsqrt", "result", factor),
        (x.logsumexp(1), "Logsumexp", "result", factor),
        (factor.pow(-0.5), "Pow", "self", factor),
    ):
        assert effect_of_value(result.grad_fn, op, role, value) == (Effect.UNKNOWN, 0)


@pytest.mark.parametrize(
    ("norm", "shape", "row"),
    [
        (nn.BatchNorm2d(8), (2, 8, 6, 6), 36),
        (nn.GroupNorm(2, 8), (2, 8, 6, 6), 144),
        (nn.LayerNorm([6, 6]), (2, 8, 6, 6), 36),
        (nn.LayerNorm(6), (2, 8, 6, 6), 6),
    ],
)
def test_a_row_is_what_shares_statistics(norm: nn.Module, shape: tuple[int, ...], row: int) -> None:
    x = torch.randn(shape, requires_grad=True)
    node = norm(x).grad_fn
    assert effect_of_value(node, op_of(node), "input", x) == (Effect.NORMALISED, row)


def test_channels_that_lie_apart_have_no_row() -> None:
    x = torch.randn(2, 8, 6, 6).to(memory_format=torch.channels_last).requires_grad_()
    node = nn.BatchNorm2d(8)(x).grad_fn
    assert effect_of_value(node, "NativeBatchNorm", "input", x) == (Effect.NORMALISED, 1)


class RmsNorm(nn.Module):
    """An RMS norm out of elementary functions, as many models write it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class Block(nn.Module):
    """Attention with norms of its queries and keys, turned by position, and a gated layer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([RmsNorm(width), RmsNorm(width // heads), RmsNorm(width // heads), RmsNorm(width)])
        self.to_queries, self.to_keys, self.to_values, self.out = (nn.Linear(width, width, False) for _ in range(4))
        self.gate, self.up = nn.Linear(width, 3 * width, False), nn.Linear(width, 3 * width, False)
        self.down = nn.Linear(3 * width, width, False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        h = self.norms[0](x)
        q, k, v = (f(h).view(batch, tokens, self.heads, -1) for f in (self.to_queries, self.to_keys, self.to_values))
        q, k = (turn(norm(y).transpose(1, 2), cos, sin) for norm, y in ((self.norms[1], q), (self.norms[2], k)))
        y = F.scaled_dot_product_attention(q, k, v.transpose(1, 2), is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, tokens, width))
        h = self.norms[3](x)
        gated: Tensor = x + self.down(F.silu(self.gate(h)) * self.up(h))
        return gated


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(200, 128), nn.Linear(128, 200, False)
        self.blocks = nn.ModuleList([Block(128, 4) for _ in range(2)])

    def forward(self, tokens: Tensor) -> Tensor:
        angles = torch.arange(tokens.shape[1])[:, None] / 100 ** (torch.arange(32) % 16 / 16)
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, angles.cos(), angles.sin())
        logits: Tensor = self.head(x)
        return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def gradient(model: nn.Module, x: Tensor, session: Session | None) -> Tensor:
    model.zero_grad()
    with session or nullcontext():
        loss = model(x)
    loss.backward()
    return torch.cat([p.grad.flatten().double() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize(("bits", "largest"), [(8, 0.03), (4, 0.3), (2, 1.0)])
def test_a_transformer_has_useful_gradients(bits: int, largest: float) -> None:
    """Rounding all that is saved to 2 bits, its logarithms of sums too, made gradients 100 times as large."""
    torch.manual_seed(0)
    model, tokens = Tokens(), torch.randint(200, (2, 128))
    expected = gradient(model, tokens, None)
    session = Session(policies.quantized(bits), min_nbytes=0, check=1, check_limit=10)
    error = gradient(model, tokens, session) - expected
    relative = float(error.norm() / expected.norm())
    assert 0 < relative < largest
    assert session.report().gradient_error[0].error == pytest.approx(relative, rel=1e-6)


def test_nothing_is_made_again_of_a_value_that_is_rounded_later() -> None:
    """The residual is held while its norm is decided on; then it is nobody's, and rounded."""
    torch.manual_seed(0)
    norm, layer = nn.LayerNorm(128), nn.Linear(128, 128)
    x = torch.randn(64, 128, requires_grad=True)

    def run() -> Tensor:
        residual = x * 1.0
        return (torch.tanh(layer(norm(residual))) + residual).square().sum()

    leaves = [x, *norm.parameters(), *layer.parameters()]
    exact = torch.autograd.grad(run(), leaves)
    with Session(policies.quantized(8), min_nbytes=0, check=1) as session:
        loss = run()
    got = torch.autograd.grad(loss, leaves)
    (found,) = session.report().gradient_error
    wrong, total = (
        float(torch.cat([y.double().flatten() for y in many]).norm())
        for many in ([a - b for a, b in zip(got, exact, strict=True)], exact)
    )
    assert found.error == pytest.approx(wrong / total, rel=1e-6)
    codecs = {key: row.codec for row in session.report().rows for key in (row.key, *row.shared_by)}
    read = {key.partition("/")[2]: codec for key, codec in codecs.items()}
    assert read["NativeLayerNorm#0:input"] == read["Addmm#0:mat1"] == "blockquant8"


def test_a_row_of_a_norm_is_not_rounded_by_its_neighbours_range() -> None:
    """One token is a thousandth of the others: a norm divides its error by its deviation."""
    torch.manual_seed(0)
    scale = torch.ones(64, 1)
    scale[::8] = 1e-3
    x = torch.randn(64, 64) * scale
    norm, targets = nn.LayerNorm(64), torch.randn(64, 64)
    leaf = x.clone().requires_grad_()
    (expected,) = torch.autograd.grad((norm(leaf * 1.0) * targets).square().sum(), [leaf])

    class Everything:
        def decide(self, saved: SavedTensor) -> Stash | Keep:
            return Stash(BlockQuant(2)) if saved.role == "input" else Keep()

        def observe(self, outcome: Outcome) -> None: ...

    errors = []
    for policy in (policies.quantized(2), Everything()):
        with Session(policy, min_nbytes=0):
            loss = (norm(leaf * 1.0) * targets).square().sum()
        (got,) = torch.autograd.grad(loss, [leaf])
        errors.append(float((got - expected).norm() / expected.norm()))
    assert errors[0] < 0.7 < 5 < errors[1]
