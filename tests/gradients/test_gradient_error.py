"""``Session(check=...)`` measures the error that an observer would measure, and leaves training unchanged."""

from __future__ import annotations

import gc
import json
import re
import warnings
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from backstash import Session, policies
from backstash.policies.base import Policy
from backstash.stash.ledger import GradientError


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(8 * 64, 32),
        nn.GELU(),
        nn.Linear(32, 10),
    )


X, Y = torch.randn(16, 3, 8, 8, generator=torch.Generator().manual_seed(3)), torch.arange(16) % 10


def loss_of(model: nn.Module) -> Tensor:
    return F.cross_entropy(model(X), Y)


def gradients(model: nn.Module, session: Session | None) -> list[Tensor]:
    model.zero_grad()
    with session or nullcontext():
        loss = loss_of(model)
    loss.backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def relative_error(got: list[Tensor], expected: list[Tensor]) -> float:
    difference = torch.cat([(a.double() - b.double()).flatten() for a, b in zip(got, expected, strict=True)])
    return float(difference.norm() / torch.cat([b.double().flatten() for b in expected]).norm())


def only(session: Session) -> GradientError:
    (found,) = session.report().gradient_error
    return found


@pytest.mark.parametrize(
    "policy",
    [policies.quantized(2), policies.quantized(8), policies.gist("fp8"), policies.gist("fp8", 2)],
    ids=["quantized2", "quantized8", "fp8", "fp8-fewbit"],
)
def test_it_is_the_error_seen_from_outside(policy: Policy) -> None:
    model = network()
    expected = gradients(model, None)
    session = Session(policy, min_nbytes=0, check=1, check_limit=10)
    got = gradients(model, session)
    found = only(session)
    assert found.error == pytest.approx(relative_error(got, expected), rel=1e-6)
    assert found.error is not None and found.error > 0
    names = [name for name, _ in model.named_parameters()]
    parts = [float((a - b).norm()) for a, b in zip(got, expected, strict=True)]
    worst = parts.index(max(parts))
    a, b = got[worst].double().flatten(), expected[worst].double().flatten()
    assert found.worst == names[worst]
    assert found.cosine == pytest.approx(float(F.cosine_similarity(a, b, 0)), abs=1e-6)


@pytest.mark.parametrize("policy", ["lossless", "lossless_stored", "gist_lossless", "keep", "offload"])
def test_an_exact_policy_has_none(policy: str) -> None:
    session = Session(policy, min_nbytes=0, check=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gradients(network(), session)
    assert only(session) == GradientError(1, 0.0)


@pytest.mark.parametrize("policy", ["quantized", "gist_fp8", "lossless"])
def test_training_does_not_notice(policy: str) -> None:
    found = []
    for check in (0, 2):
        model = network()
        model.insert(7, nn.Dropout(0.5))  # type: ignore[operator]
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        session = Session(policy, min_nbytes=0, check=check, check_limit=10)
        torch.manual_seed(1)
        for _ in range(3):
            with session:
                loss = loss_of(model)
            loss.backward()
            optimizer.step()
        assert [error.step for error in session.report().gradient_error] == list(range(1, check + 1))
        found.append([*model.state_dict().values(), *(p.grad for p in model.parameters()), torch.get_rng_state()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_the_values_in_a_store_are_measured_too() -> None:
    model = network()
    expected = gradients(model, None)
    session = Session(policies.offload("szp", ahead=1), min_nbytes=0, check=2, check_limit=10)
    for _ in range(2):
        got = gradients(model, session)
    errors = [found.error for found in session.report().gradient_error]
    assert errors == pytest.approx([relative_error(got, expected)] * 2, rel=1e-5)


def test_without_a_check_nothing_is_measured_and_nothing_is_replaced() -> None:
    start = torch.autograd._engine_run_backward  # type: ignore[attr-defined]
    session = Session("quantized", min_nbytes=0)
    with session:
        loss = loss_of(network())
        assert torch.autograd._engine_run_backward is start  # type: ignore[attr-defined]
    loss.backward()
    assert session.report().gradient_error == ()


def test_what_is_replaced_is_put_back() -> None:
    gc.collect()  # Sessions of other tests, of which the next backward pass finds out
    loss_of(network()).backward()
    start = torch.autograd._engine_run_backward  # type: ignore[attr-defined]
    model, session = network(), Session("quantized", min_nbytes=0, check=1, check_limit=10)
    gradients(model, session)
    gradients(model, session)
    assert torch.autograd._engine_run_backward is start  # type: ignore[attr-defined]
    dropped = Session("quantized", min_nbytes=0, check=1, check_limit=10)
    with dropped:
        loss = loss_of(model)
    del dropped
    loss.backward()
    gc.collect()
    loss_of(model).backward()
    assert torch.autograd._engine_run_backward is start  # type: ignore[attr-defined]


def test_it_warns_once() -> None:
    model, session = network(), Session("quantized", min_nbytes=0, check=3, check_limit=1e-3)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for _ in range(3):
            gradients(model, session)
    (warning,) = (warning for warning in warned if "check_limit" in str(warning.message))
    assert issubclass(warning.category, UserWarning)
    assert re.match(r"backstash: in step 1 .*check_limit is 0.001.* Give the policy more bits", str(warning.message))
    assert warning.filename == __file__
    assert len(session.report().gradient_error) == 3


def test_the_report_states_it() -> None:
    session = Session("quantized", min_nbytes=0, check=1, check_limit=10)
    gradients(network(), session)
    found = only(session)
    assert f"gradient error: step 1: {found.error:.3g} (worst leaf {found.worst}: cosine" in str(session.report())
    (loaded,) = json.loads(session.report().to_json())["gradient_error"]
    assert GradientError(**loaded) == found


def test_hooks_run_three_times() -> None:
    model, session = network(), Session("quantized", min_nbytes=0, check=1, check_limit=10)
    calls: list[Any] = []
    next(model.parameters()).register_hook(calls.append)
    gradients(model, session)
    assert len(calls) == 3


def test_two_losses_are_measured_each() -> None:
    model = network()
    session = Session("quantized", min_nbytes=0, check=1, check_limit=10)
    with session:
        result = model(X)
        first, second = F.cross_entropy(result, Y), result.square().mean()
    first.backward(retain_graph=True)
    second.backward()
    assert [found.error is not None and found.error > 0 for found in session.report().gradient_error] == [True, True]


def test_many_roots_that_are_no_scalars() -> None:
    model = network()
    session = Session("quantized", min_nbytes=0, check=1, check_limit=10)
    with session:
        roots = model(X).tensor_split(2)
    grads = [torch.ones_like(root) for root in roots]
    got = torch.autograd.grad(roots, list(model.parameters()), grads)
    exact = torch.autograd.grad(model(X).tensor_split(2), list(model.parameters()), grads)
    assert only(session).error == pytest.approx(relative_error(list(got), list(exact)), rel=1e-6)


def test_another_graph_is_not_measured() -> None:
    session = Session("quantized", min_nbytes=0, check=1, check_limit=10)
    other = network()
    with session:
        loss = loss_of(network())
    loss_of(other).backward()
    assert session.report().gradient_error == ()
    loss.backward()
    assert only(session).error is not None


def test_a_graph_of_the_gradient_is_not_measured_and_said() -> None:
    session = Session("quantized", min_nbytes=0, check=1)
    model = network()
    with session:
        loss = loss_of(model)
    torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    assert "create_graph=True" in only(session).reason
    assert "gradient error: step 1 not measured: backward was asked for a graph" in str(session.report())


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_is_not_measured_and_said(reentrant: bool) -> None:
    model, session = network(), Session("quantized", min_nbytes=0, check=1)
    assert isinstance(model, nn.Sequential)
    with session:
        x = model[:2](X) * 1.0
        x = checkpoint(model[2:5], x, use_reentrant=reentrant)
        loss = F.cross_entropy(model[5:](x), Y)
    before = model[1].running_mean.clone()  # type: ignore[union-attr,operator]
    loss.backward()
    found = session.report().gradient_error
    assert [error.error for error in found] == [None] * len(found) and "checkpoint" in found[0].reason
    assert torch.equal(model[1].running_mean, before)  # type: ignore[arg-type]
    assert all(p.grad is not None for p in model.parameters())


class Inner(torch.autograd.Function):
    """Computes a layer whose graph it keeps, and goes backward through that in its own backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: nn.Module, adds_up: bool) -> Tensor:
        ctx.layer, ctx.adds_up = layer, adds_up
        with torch.enable_grad():
            ctx.x = x.detach().requires_grad_()
            ctx.y = layer(ctx.x)
        return ctx.y.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        if ctx.adds_up:
            ctx.y.backward(grad)
            return ctx.x.grad, None, None
        return torch.autograd.grad(ctx.y, ctx.x, grad)[0], None, None


@pytest.mark.parametrize("adds_up", [False, True])
def test_a_backward_pass_within_a_function_changes_gradients_once(adds_up: bool) -> None:
    def trained(session: Session | None) -> list[Tensor | None]:
        model, layer = network(), nn.Linear(10, 10)
        for _ in range(2):
            with session or nullcontext():
                loss = F.cross_entropy(Inner.apply(model(X), layer, adds_up), Y)  # type: ignore[no-untyped-call]
            loss.backward()
        return [layer.weight.grad]

    session = Session("quantized", min_nbytes=0, check=2, check_limit=1e9)
    torch.manual_seed(2)
    (expected,) = trained(None)
    torch.manual_seed(2)
    (got,) = trained(session)
    assert (got is None) is (expected is None) is (not adds_up)
    if got is not None and expected is not None:
        assert relative_error([got], [expected]) < 0.5  # added up once more each time, it is three times as long
    assert [("backward pass of its own" in found.reason) for found in session.report().gradient_error] == [adds_up] * 2


def test_gradients_that_overflow_are_said() -> None:
    model, session = network(), Session("quantized", min_nbytes=0, check=1)
    with session:
        loss = loss_of(model)
    (loss * float("inf")).backward()
    found = only(session)
    assert found == GradientError(1, reason="the gradient is not finite")


def test_a_function_that_writes_into_what_it_saved() -> None:
    class Writes(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            return grad * x.mul_(2)

    weight = torch.randn(32, 32, requires_grad=True)

    def run() -> Tensor:
        y = torch.full((32, 32), 0.5).add(weight * 1.0)
        return (Writes.apply(y) @ weight).sum()  # type: ignore[no-any-return]

    (expected,) = torch.autograd.grad(run(), [weight])
    session = Session(policies.gist("fp8"), min_nbytes=0, check=1, check_limit=10)
    with session:
        loss = run()
    (got,) = torch.autograd.grad(loss, [weight])
    assert only(session).error == pytest.approx(relative_error([got], [expected]), rel=1e-6)
