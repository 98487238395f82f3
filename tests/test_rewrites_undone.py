"""Rewrites of activations that fail, or that are undone, leave nothing behind."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from rewrite_checks import Net, Step, backward, conv, step_of
from torch import Tensor, nn

from backstash import Session
from backstash.errors import RewriteError, SessionError
from backstash.rewrites import inplace
from backstash.testing import equal_bits

# ---- errors --------------------------------------------------------------------------------------


def test_a_model_without_activations_is_an_error() -> None:
    model = Net(lambda net, x: F.relu(net.linear(x)), linear=nn.Linear(8, 8))
    with pytest.raises(RewriteError, match=r"asked to switch the activations of Net, but there is none .* functional"):
        inplace(model, step_of(model, 4, 8))


def test_what_runs_in_place_already_is_left_alone() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True))
    with inplace(model, lambda: pytest.fail("nothing to try")) as rewrite:
        assert (rewrite.switched, rewrite.refused, rewrite.already, rewrite.steps) == ((), {}, ("1",), 0)
    assert model[1].inplace


def test_a_step_that_changes_parameters_is_an_error_and_they_are_put_back() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step = step_of(model, 4, 8)
    before = [x.detach().clone() for x in model.parameters()]
    with pytest.raises(RewriteError, match=r"the step changes parameters \(0.weight, 0.bias\)"):
        inplace(model, lambda: (step(), optimizer.step()))
    assert all(equal_bits(x, old) and x.grad is None for x, old in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("zero", [True, False])
def test_a_step_without_gradients_is_an_error(zero: bool) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    step = step_of(model, 4, 8)
    with pytest.raises(RewriteError, match="leaves no parameter of the model a gradient"):
        inplace(model, lambda: (step(), model.zero_grad()) if zero else model(torch.ones(1, 8)).sum())


def test_a_step_that_computes_something_else_each_time_is_an_error() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    generator = torch.Generator().manual_seed(0)
    with pytest.raises(RewriteError, match="two plain ones differ: what the step returns differs by"):
        inplace(model, lambda: backward(model(torch.randn(4, 8, generator=generator))))


# ---- nothing is left behind ----------------------------------------------------------------------


def with_everything() -> nn.Module:
    """A model that changes its buffers and draws random numbers, and keeps one ReLU from running in place."""
    return nn.Sequential(
        conv(), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(), conv(), nn.BatchNorm2d(4), nn.LeakyReLU(), nn.Dropout2d()
    )


def state(model: nn.Module) -> list[Any]:
    flags = [(module.training, getattr(module, "inplace", None)) for module in model.modules()]
    hooks = [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]
    tensors = [x.detach().clone() for x in (*model.parameters(), *model.buffers())]
    gradients = [None if x.grad is None else (id(x.grad), x.grad.clone()) for x in model.parameters()]
    generators = [random.getstate(), str(np.random.get_state()), torch.get_rng_state()]
    return [flags, hooks, tensors, gradients, generators, [id(x) for x in (*model.parameters(), *model.buffers())]]


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return equal_bits(a, b)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


def restless(model: nn.Module, fail_at: int | None = None, error: type[BaseException] = KeyError) -> Step:
    step, calls = step_of(model), [0]

    def noisy() -> Tensor:
        calls[0] += 1
        scale = random.random() + float(np.random.rand())
        model.eval()
        model[1].running_mean = model[1].running_mean + 1.0
        if calls[0] == fail_at:
            raise error("in the middle")
        model.train()
        return step() * scale

    return noisy


@pytest.mark.parametrize("old_gradients", [True, False])
@pytest.mark.parametrize("policy", [None, "lossless"])
def test_trials_leave_nothing_behind(old_gradients: bool, policy: str | None) -> None:
    model = with_everything()
    if old_gradients:
        step_of(model)()
    step = restless(model)
    before = state(model)
    rewrite = inplace(model, step, session=None if policy is None else Session(policy, min_nbytes=0))
    assert rewrite.switched == ("2", "6") and list(rewrite.refused) == ["3", "7"]
    rewrite.undo()
    assert same(before, state(model))
    assert "2 activations switched to run in place, 2 refused" in str(rewrite)


@pytest.mark.parametrize("fail_at", [1, 2, 3, 4])
@pytest.mark.parametrize("error", [KeyError, KeyboardInterrupt])
def test_an_exception_in_the_middle_of_a_trial_leaves_nothing_behind(fail_at: int, error: type[BaseException]) -> None:
    model = with_everything()
    step = restless(model, fail_at, error)
    before = state(model)
    with pytest.raises(error, match="in the middle"):
        inplace(model, step, session=Session("lossless"))
    assert same(before, state(model))


def test_a_session_that_is_open_already_is_its_own_error() -> None:
    model = with_everything()
    session = Session("lossless")
    with session, pytest.raises(SessionError, match="inside another one"):
        inplace(model, step_of(model), session=session)
    assert not any(getattr(module, "inplace", False) for module in model.modules())


def test_running_out_of_memory_is_not_a_refusal() -> None:
    model = nn.Sequential(conv(), nn.BatchNorm2d(4), nn.ReLU())
    with pytest.raises(torch.OutOfMemoryError):
        inplace(model, restless(model, 3, torch.OutOfMemoryError))
    assert not model[2].inplace


def test_leaving_undoes_also_after_an_exception() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    with pytest.raises(KeyError), inplace(model, step_of(model, 4, 8)):
        assert model[1].inplace
        raise KeyError
    assert not model[1].inplace


def test_undo_is_for_what_was_switched_only() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(inplace=True))
    rewrite = inplace(model, step_of(model, 4, 8))
    rewrite.undo()
    assert not model[1].inplace and model[3].inplace
    model[1].inplace = True
    rewrite.undo()
    assert model[1].inplace
