"""Custom autograd functions under a Session, also those that write into what they saved."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from gradient_checks import Everything, difference, differences
from session_checks import by_policy, holds_nothing
from torch import Tensor

from backstash import Policy, Session


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        square = x * x
        ctx.save_for_backward(x, square)
        return x * square

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        _x, square = ctx.saved_tensors
        return 3 * gradient * square


class Swiglu(torch.autograd.Function):
    """Writes its gradients into the tensors that it saved, as Liger's kernels do."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return F.silu(a) * b

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        a, b = ctx.saved_tensors
        s = torch.sigmoid(a)
        silu = a * s
        a.copy_(gradient * b * (s + silu * (1 - s)))
        b.copy_(gradient * silu)
        return a, b


@by_policy
@pytest.mark.parametrize("size", [64, 512 * 512], ids=["small", "pooled"])
def test_function_that_overwrites_what_it_saved(policy: str | Policy, size: int) -> None:
    """Plain torch allows it, because the other nodes read the same values earlier in backward."""

    def forward(x: Tensor) -> Tensor:
        a, b = F.relu(x * 2) - 0.5, x * -3
        early = torch.exp(x * 2).sum()
        return early + (Swiglu.apply(a, b) + torch.sin(a) * torch.cos(b)).sum()

    x = torch.linspace(-2, 2, size, requires_grad=True)
    expected = torch.autograd.grad(forward(x), x)[0]
    with Session(policy, min_nbytes=0):
        loss = forward(x)
    assert difference(expected, torch.autograd.grad(loss, x)[0]) is None


@by_policy
def test_function_that_returns_what_it_saved_as_its_gradient(policy: str | Policy) -> None:
    """The gradient is then the decoded memory itself, which nothing may write over, not even the next step."""

    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, factor: Tensor) -> Tensor:
            ctx.save_for_backward(factor)
            return x * factor

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
            (factor,) = ctx.saved_tensors
            return factor, None

    def forward(x: Tensor, y: Tensor) -> Tensor:
        factor = F.relu(y * 2)
        return Scale.apply(x, factor).sum() + torch.exp(factor).sum() + torch.exp(y * 3).sum()

    leaves = [torch.zeros(512, 512), torch.randn(512, 512)]

    def two_steps(context: Callable[[], AbstractContextManager[Any]]) -> list[Tensor | None]:
        found = []
        for shift in (0, 1):
            x, y = (leaf.clone().requires_grad_() for leaf in leaves)
            with context():
                loss = forward(x, y * 0.5 + shift)
            loss.backward()
            found += [x.grad, y.grad]
        return found

    assert not differences(two_steps(nullcontext), two_steps(lambda: Session(policy, min_nbytes=0)))


@by_policy
def test_function_that_saves_inputs_outputs_and_others(policy: str | Policy) -> None:
    def forward(x: Tensor) -> Tensor:
        h = Cube.apply(x * 2)
        return torch.exp(Cube.apply(torch.tanh(h))).sum()

    x = torch.linspace(-1, 1, 64, requires_grad=True)
    expected = torch.autograd.grad(forward(x), x)[0]
    with Session(policy, min_nbytes=0) as session:
        loss = forward(x)
    got = torch.autograd.grad(loss, x, retain_graph=True)[0]
    assert difference(expected, got) is None
    assert difference(expected, torch.autograd.grad(loss, x)[0]) is None
    del loss
    assert holds_nothing(session)


@by_policy
def test_function_that_saves_its_output_and_its_input_unchanged(policy: str | Policy) -> None:
    class Identity(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            y = x.view_as(x)
            ctx.save_for_backward(x, y)
            return y

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            x, y = ctx.saved_tensors
            return gradient * x * y

    x = torch.linspace(-1, 1, 64, requires_grad=True)
    expected = torch.autograd.grad(Identity.apply(x * 2).exp().sum(), x)[0]
    with Session(policy, min_nbytes=0) as session:
        loss = Identity.apply(x * 2).exp().sum()
    assert difference(expected, torch.autograd.grad(loss, x)[0]) is None
    del loss
    assert holds_nothing(session)


def test_function_in_place_with_mark_dirty() -> None:
    class Doubles(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            x.mul_(2)
            ctx.mark_dirty(x)
            ctx.save_for_backward(x)
            return x

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            (y,) = ctx.saved_tensors
            return gradient * 2 + 0 * y

    x = torch.linspace(-1, 1, 64, requires_grad=True)
    expected = torch.autograd.grad(Doubles.apply(x * 3).exp().sum(), x)[0]
    with Session(Everything(), min_nbytes=0):
        loss = Doubles.apply(x * 3).exp().sum()
    assert difference(expected, torch.autograd.grad(loss, x)[0]) is None


@pytest.mark.parametrize("hooks", ["identity", "Session"])
def test_attributes_of_saved_tensors_are_lost_to_functions_under_hooks(hooks: str) -> None:
    """As docs/understand/hazards.md says; those of parameters under hooks that do nothing as well."""
    found = []

    class Looks(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
            ctx.save_for_backward(x, weight)
            ctx.main = weight.main  # type: ignore[attr-defined]
            return x @ weight

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
            x, weight = ctx.saved_tensors
            found.append((hasattr(weight, "main"), ctx.main is main))
            return gradient @ weight.t(), x.t() @ gradient

    weight, main = torch.nn.Parameter(torch.randn(8, 8)), torch.zeros(8, 8)
    weight.main = main  # type: ignore[attr-defined]
    Looks.apply(torch.randn(8, 8), weight).sum().backward()
    inside = torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)
    with inside if hooks == "identity" else Session(min_nbytes=0):
        loss = Looks.apply(torch.randn(8, 8), weight).sum()
    loss.backward()
    assert found == [(True, True), (False, True)]
