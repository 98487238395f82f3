"""Values that are remade from values with a bounded error: their bounds, their signs, and which recipes are refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from backstash import Session
from backstash.codecs import Szp
from backstash.ops import backends
from backstash.policies import Lossless, Rules
from backstash.policies.base import Action, Outcome, Recompute, Stash
from backstash.remake import proving
from backstash.saved import Need, SavedTensor
from backstash.stash.ledger import Entry

BOUND = 0.05


@dataclass
class Within:
    """Batch norms' inputs within a bound, and what is made of those that are named made again within it."""

    named: frozenset[str] = frozenset()
    otherwise: Stash = field(default_factory=lambda: Stash("zvc"))
    traced: dict[str, dict[str, Tensor] | None] = field(default_factory=dict)
    recomputes: ClassVar[bool] = True

    def decide(self, saved: SavedTensor) -> Action:
        if saved.need is not Need.VALUE or "result" in saved.role or saved.op == "LogSoftmax":
            return Lossless(recompute=False).decide(saved)
        if "BatchNorm" in saved.op:
            return Stash((Szp(BOUND), *self.otherwise.codecs))
        return Recompute(self.otherwise, within=self.named)

    def trace(
        self, saved: SavedTensor, readers: Sequence[SavedTensor], sources: Callable[[], dict[str, Tensor] | None]
    ) -> None:
        self.traced[saved.key] = sources()

    def observe(self, outcome: Outcome) -> None:
        pass


class Network(nn.Module):
    """Batch norm, relu, convolution; then with a residual sum, or with two branches side by side, in front of one."""

    def __init__(self, kind: str = "chain", inplace: bool = True, width: int = 8) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind, self.inplace = kind, inplace
        self.convs = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(3))
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for _ in range(3))
        for norm in self.norms:
            nn.init.uniform_(norm.weight, 0.5, 2.0)  # type: ignore[arg-type]
            nn.init.uniform_(norm.bias, -0.5, 0.5)  # type: ignore[arg-type]
        self.last = nn.Conv2d(2 * width if kind == "cat" else width, 4, 3, bias=False)
        self.read: list[tuple[nn.Module, Tensor, Any]] = []  # convolution, input, node

    def convolve(self, conv: nn.Module, x: Tensor) -> Tensor:
        y: Tensor = conv(x)
        self.read.append((conv, x.detach().clone(), y.grad_fn))
        return y

    def relu(self, x: Tensor) -> Tensor:
        return F.relu(x, inplace=self.inplace)

    def forward(self, x: Tensor) -> Tensor:
        self.read = []
        y = self.relu(self.norms[0](self.convs[0](x)))
        if self.kind != "chain":
            more = self.norms[1](self.convolve(self.convs[1], y))
            if self.kind == "residual":
                more += y
                y = self.relu(more)
                y = self.relu(self.norms[2](self.convolve(self.convs[2], y)) + y)
            else:
                y = torch.cat([self.relu(more), self.relu(self.norms[2](self.convs[2](x)))], 1)
        return self.convolve(self.last, y)


NORMS = frozenset(f"norms.{number}/NativeBatchNorm#0:input" for number in range(3))


def inputs(size: int = 12) -> Tensor:
    return torch.randn(8, 8, size, size, generator=torch.Generator().manual_seed(1), requires_grad=True)


def rows(session: Session) -> dict[str, Entry]:
    return {key: row for row in session.report().rows for key in (row.key, *row.shared_by)}


def forward(model: Network, x: Tensor, policy: Any) -> tuple[Tensor, Session]:
    session = Session(policy, model=model, min_nbytes=0)
    with session:
        loss = model(x).square().mean()
    return loss, session


@pytest.mark.parametrize("kernels", ["native", "none"])
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize(("kind", "depth"), [("chain", 1), ("residual", 3), ("cat", 2)])
def test_values_are_off_by_no_more_than_the_gains_allow_and_zeros_are_zeros(
    kind: str, depth: int, inplace: bool, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kernels == "none":
        monkeypatch.setattr(backends, "has_own_kernel", lambda kernel, device: False)
        plain = backends.kernels("reference").mask_select
        monkeypatch.setattr(backends.serving("cpu"), "mask_select", plain)
    model, x, policy = Network(kind, inplace), inputs(), Within(NORMS)
    loss, session = forward(model, x, policy)
    found = rows(session)
    assert len(model.read) == depth
    for conv, value, node in model.read:
        name = next(name for name, one in model.named_modules() if one is conv)
        row = found[f"{name}/Convolution#0:input"]
        assert row.codec == "recompute within"
        by_relu = row.reason.startswith("relu")
        assert row.stash_nbytes == (value.numel() // 8 if by_relu else 0)
        made = node._saved_input.detach()
        assert made.stride() == value.stride()
        assert 0.0 < float((made - value).abs().max()) < 1.0
        if by_relu:
            assert torch.equal(made > 0, value > 0)
            assert torch.equal(made == 0, value == 0)
        if kind == "chain":
            norm = model.norms[0]
            _, _, scale = torch.native_batch_norm(
                model.convs[0](x), norm.weight, norm.bias, None, None, True, 0.1, norm.eps
            )
            gain = (norm.weight * scale).detach()
            (traced,) = (found for found in policy.traced.values() if found)
            assert torch.allclose(traced["norms.0/NativeBatchNorm#0:input"], gain)
            off = (made - value).abs().amax([0, 2, 3])
            assert bool((off <= gain * BOUND + 1e-5).all()) and bool((off > gain * BOUND / 2).all())
    loss.backward()


def gradients(model: Network, policy: Any, x: Tensor | None = None) -> dict[str, Tensor]:
    model.zero_grad()
    loss, _ = forward(model, inputs() if x is None else x, policy)
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(("kind", "exact"), [("chain", 0), ("residual", 2), ("cat", 2)])
def test_gradients_are_off_where_a_bounded_value_is_read_and_nowhere_else(kind: str, exact: int) -> None:
    """A batch norm's bias has the sum of what the relu behind it lets through."""
    model = Network(kind)
    expected, got = gradients(model, "keep"), gradients(model, Within(NORMS))
    errors = {name: float((got[name] - grad).norm() / grad.norm()) for name, grad in expected.items()}
    assert all(error < 0.1 for error in errors.values())
    assert errors["last.weight"] > 0.0 < errors[f"norms.{exact}.weight"]
    assert errors[f"norms.{exact}.bias"] == 0.0


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layouts_and_low_precision(dtype: torch.dtype, memory_format: torch.memory_format) -> None:
    model, x = Network("residual"), inputs().detach().to(memory_format=memory_format)
    expected = gradients(model, "keep", x)
    session = Session(Within(NORMS), model=model, min_nbytes=0)
    model.zero_grad()
    with session, torch.autocast("cpu", dtype, enabled=dtype is not torch.float32):
        loss = model(x).float().square().mean()
    loss.backward()
    assert rows(session)["last/Convolution#0:input"].codec == "recompute within"
    for name, p in model.named_parameters():
        assert p.grad is not None and float((p.grad - expected[name]).norm() / expected[name].norm()) < 0.1


def test_a_value_that_is_not_named_is_not_begun_from() -> None:
    """A recipe that begins from such a value would not be exact."""
    for policy in (Within(), Within(frozenset({"norms.1/NativeBatchNorm#0:input"}))):
        loss, session = forward(Network("chain"), inputs(), policy)
        codecs = {row.codec for row in session.report().rows}
        assert not any("recompute" in codec for codec in codecs)
        assert any(codec.startswith("szp") for codec in codecs)
        loss.backward()


def test_a_chain_needs_the_names_of_all_whose_errors_it_has() -> None:
    named = NORMS - {"norms.1/NativeBatchNorm#0:input"}
    _, session = forward(Network("residual"), inputs(), Within(named))
    codecs = {name: rows(session)[f"{name}/Convolution#0:input"].codec for name in ("convs.1", "convs.2", "last")}
    assert codecs == {"convs.1": "recompute within", "convs.2": "zvc", "last": "recompute within"}


def test_what_is_made_of_exact_values_stays_exact() -> None:
    class Exact(Within):
        def decide(self, saved: SavedTensor) -> Action:
            return self.otherwise if "BatchNorm" in saved.op and saved.need is Need.VALUE else super().decide(saved)

    model = Network("residual")
    expected = gradients(model, "keep")
    got = gradients(model, Exact(NORMS))
    assert all(torch.equal(got[name], grad) for name, grad in expected.items())


def test_what_is_off_by_more_than_the_gains_allow_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    original = proving.gains
    monkeypatch.setattr(
        proving, "gains", lambda recipe: {leaf: gain / 3 for leaf, gain in (original(recipe) or {}).items()}
    )
    _, session = forward(Network(), inputs(), Within(NORMS))
    row = rows(session)["last/Convolution#0:input"]
    assert row.codec == "zvc" and "does not repeat itself within its bounds" in row.reason


@pytest.mark.parametrize("through", [torch.neg, lambda x: x * 2.0, lambda x: x + 1.0])
def test_what_is_made_in_another_way_is_stored(through: Callable[[Tensor], Tensor]) -> None:
    class Other(Network):
        def relu(self, x: Tensor) -> Tensor:
            return torch.relu(through(x))

    loss, session = forward(Other(), inputs(), Within(NORMS))
    assert rows(session)["last/Convolution#0:input"].codec == "zvc"
    loss.backward()


def test_a_batch_norm_in_evaluation_mode_has_no_gains() -> None:
    model, policy = Network().eval(), Within(NORMS)
    loss, session = forward(model, inputs(), policy)
    assert rows(session)["last/Convolution#0:input"].codec == "zvc"
    assert not any(policy.traced.values())
    loss.backward()


def test_another_threshold_than_zero_is_not_a_bit() -> None:
    class Other(Network):
        def relu(self, x: Tensor) -> Tensor:
            y = torch.relu(x)
            self.shrunk = F.hardshrink(y, 0.5).sum()
            return y

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + self.shrunk

    loss, session = forward(Other(inplace=False), inputs(), Within(NORMS))
    row = rows(session)["last/Convolution#0:input"]
    assert row.codec == "zvc" and "its sign is read in another way" in row.reason
    loss.backward()


def test_backward_twice_and_gradients_of_gradients() -> None:
    model, x = Network("residual"), inputs()
    loss, _ = forward(model, x, Within(NORMS))
    once = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    twice = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    assert all(torch.equal(one, other) for one, other in zip(once, twice, strict=True))
    (grad,) = torch.autograd.grad(loss, [x], create_graph=True)
    second = torch.autograd.grad(grad.square().sum(), [model.last.weight])[0]
    loss, _ = forward(model, x, "keep")
    (grad,) = torch.autograd.grad(loss, [x], create_graph=True)
    expected = torch.autograd.grad(grad.square().sum(), [model.last.weight])[0]
    assert 0.0 < float((second - expected).norm() / expected.norm()) < 0.1


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_inside(reentrant: bool) -> None:
    class Checkpointed(Network):
        def forward(self, x: Tensor) -> Tensor:
            made: Tensor = checkpoint(super().forward, x, use_reentrant=reentrant)
            return made

    expected, got = gradients(Network("residual"), "keep"), gradients(Checkpointed("residual"), Within(NORMS))
    assert all(float((got[name] - grad).norm() / grad.norm()) < 0.1 for name, grad in expected.items())


def test_rules_pass_on_what_could_be_made_again() -> None:
    policy = Within(NORMS)
    forward(Network(), inputs(), Rules((), policy))
    assert any(policy.traced.values())
