"""Steps that are the same again and again settle, whatever a program does between them, and in its functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from backstash.policies import get
from tests.replay.twins import STEPS, Twin, costly

WIDTH, LENGTH = 16, 64


class Recurrent(nn.Module):
    """A network whose single steps save little, and save much in all.

    Args:
        kind: of the network.
        layers, is_bidirectional: of it.
    """

    def __init__(self, kind: Callable[..., nn.Module], layers: int, is_bidirectional: bool) -> None:
        super().__init__()
        self.cells = kind(WIDTH, WIDTH, layers, batch_first=True, bidirectional=is_bidirectional)

    def forward(self, x: Tensor) -> Tensor:
        """Rows [2, LENGTH, WIDTH] to a number."""
        return F.gelu(self.cells(x)[0]).square().mean()


@pytest.mark.parametrize("policy", [costly, lambda: get("lossless")], ids=["costly", "lossless"])
@pytest.mark.parametrize("is_bidirectional", [False, True])
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
def test_networks_of_many_small_steps_settle(
    kind: Callable[..., nn.Module], layers: int, is_bidirectional: bool, policy: Callable[[], Any]
) -> None:
    torch.manual_seed(0)
    twin = Twin(Recurrent(kind, layers, is_bidirectional), policy())
    for step in range(2 * STEPS):
        twin.step(torch.randn(2, LENGTH, WIDTH, generator=torch.Generator().manual_seed(step)))
    assert twin.session._is_replayed, twin.passes.refusal


class Layers(nn.Module):
    """Two layers with a function between them, which the test chooses."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.function = nn.Linear(64, 64), nn.Linear(64, 64), function

    def forward(self, x: Tensor) -> Tensor:
        """Rows [64, 64] to a number."""
        return F.gelu(self.last(self.function(self.first(x).tanh()))).square().mean()


def rows(seed: int = 0) -> Tensor:
    return torch.randn(64, 64, generator=torch.Generator().manual_seed(seed), requires_grad=True)


@pytest.mark.parametrize("policy", [costly, lambda: get("lossless")], ids=["costly", "lossless"])
@pytest.mark.parametrize(
    "function",
    [
        lambda x: x * x.argsort(-1).float(),
        lambda x: x * x.argmax(-1, keepdim=True).float(),
        lambda x: x.gather(-1, x.sort(-1)[1]),
        lambda x: x * (x.exp() > 1.0).float(),
    ],
    ids=["argsort", "argmax", "sort", "compared"],
)
def test_passes_settle_where_a_function_saves_for_no_result(
    function: Callable[[Tensor], Tensor], policy: Callable[[], Any]
) -> None:
    torch.manual_seed(0)
    twin = Twin(Layers(function), policy())
    for step in range(2 * STEPS):
        twin.step(rows(step))
    assert twin.session._is_replayed, twin.passes.refusal


def test_passes_settle_where_nodes_are_reached_on_many_ways() -> None:
    def power(x: Tensor) -> Tensor:
        return torch.linalg.matrix_power(torch.eye(64) + 1e-3 * x, 1 << 10)  # each square is read twice by the next one

    torch.manual_seed(0)
    twin = Twin(Layers(power))
    for step in range(2 * STEPS):
        twin.step(rows(step))
    assert twin.session._is_replayed, twin.passes.refusal


@pytest.mark.parametrize("is_before", [False, True])
def test_passes_settle_between_evaluations(is_before: bool) -> None:
    torch.manual_seed(0)
    twin = Twin(Layers(torch.sin))

    def evaluate() -> None:
        with torch.no_grad(), twin.session:
            twin.other(rows())

    for step in range(2 * STEPS):
        if is_before:
            evaluate()
        twin.step(rows(step))
        if not is_before:
            evaluate()
    assert twin.session._is_replayed, twin.passes.refusal


def test_a_pass_that_goes_on_behind_gradients_says_so() -> None:
    def penalty(x: Tensor) -> Tensor:
        (grad,) = torch.autograd.grad(x.square().sum(), x, create_graph=True)
        return x * grad

    torch.manual_seed(0)
    twin = Twin(Layers(penalty))
    for step in range(2 * STEPS):
        twin.step(rows(step))
    assert twin.passes.misses == 0
    assert not twin.session._is_replayed and "gradients in its middle" in twin.session.report().programs()


@pytest.mark.parametrize("policy", [costly, lambda: get("lossless")], ids=["costly", "lossless"])
@pytest.mark.parametrize("period", [1, 2, 4])
def test_passes_settle_beside_those_that_are_dropped(period: int, policy: Callable[[], Any]) -> None:
    torch.manual_seed(0)
    twin = Twin(Layers(torch.sin), policy())
    are_replayed = []
    for step in range(3 * STEPS):
        if step % period == 0:
            with twin.session:
                twin.other(rows())  # as to log a loss, without no_grad
        twin.step(rows(step))
        are_replayed.append(twin.session._is_replayed)
    assert all(are_replayed[-4:]), twin.passes.refusal


def test_passes_that_are_all_dropped_settle() -> None:
    torch.manual_seed(0)
    twin = Twin(Layers(torch.sin))
    for step in range(2 * STEPS):
        with twin.session:
            loss = twin.other(rows(step))
        del loss
    assert twin.session._is_replayed, twin.passes.refusal
    for step in range(2 * STEPS):
        twin.step(rows(step))
    assert twin.session._is_replayed, twin.passes.refusal


class Scaled(torch.autograd.Function):
    """A function of the program's own, which saves outside of any of torch's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Rows to rows."""
        ctx.save_for_backward(x)
        return x * x.sigmoid()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        """Of the rows."""
        (x,) = ctx.saved_tensors
        return gradient * x.sigmoid()


class Dropping(nn.Module):
    """Drops all that its beginning has saved; then comes a function, which the test chooses."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.norm, self.layer, self.function = nn.BatchNorm1d(64), nn.Linear(64, 64), function

    def forward(self, x: Tensor) -> Tensor:
        """Rows [64, 64] to a number."""
        F.relu(self.norm(x))
        return self.function(self, x).square().mean()


@pytest.mark.parametrize(
    "function",
    [
        lambda model, x: checkpoint(lambda y: F.gelu(model.layer(y)), x, use_reentrant=True),
        lambda model, x: checkpoint(lambda y: F.gelu(model.layer(y)), x, use_reentrant=False),
        lambda model, x: F.gelu(model.layer(Scaled.apply(x))),
        lambda model, x: F.gelu(model.layer(x)),
    ],
    ids=["reentrant", "checkpoint", "function", "layer"],
)
def test_a_pass_whose_beginning_is_dropped(function: Callable[[Any, Tensor], Tensor]) -> None:
    """Another one begins then, in the middle of what the next function saves."""
    torch.manual_seed(0)
    twin = Twin(Dropping(function))
    for step in range(4 * STEPS):
        twin.step(rows(step))


def _of(made: str, then: str, end: str) -> Callable[[Tensor], Tensor]:
    """Applies a factor that is detached, while a local variable keeps what it is computed from."""
    scope: dict[str, Any] = {"F": F, "torch": torch}
    body = [f"kept = {made}", f"y = ({then}).detach() * x", "y = y.tanh()", *end.split("; "), "return y.sin()"]
    exec("\n    ".join(["def function(x):", *body]), scope)
    function: Callable[[Tensor], Tensor] = scope["function"]
    return function


@pytest.mark.parametrize("end", ["pass", "del kept", "kept = kept.exp()", "y = y + kept"])
@pytest.mark.parametrize("then", ["kept * 2", "kept.relu()", "kept.reshape(32, 128).abs().view(64, 64)", "kept"])
@pytest.mark.parametrize(
    "made",
    [
        "x.relu() * x.sigmoid()",
        "x.relu().square()",
        "(x * 2) * (x * 2)",
        "F.hardtanh(x).exp()",
        "x * x",
        "x.T.relu() * x",
    ],
)
@pytest.mark.parametrize("policy", ["lossless", "costly"])
def test_a_factor_whose_graph_is_dropped_settles(policy: str, made: str, then: str, end: str) -> None:
    torch.manual_seed(0)
    twin = Twin(Layers(_of(made, then, end)), costly() if policy == "costly" else get("lossless"))
    for step in range(2 * STEPS):
        twin.step(torch.randn(64, 64, generator=torch.Generator().manual_seed(step)))
    assert twin.session._is_replayed, twin.passes.refusal
