"""torch.func inside a Session: its hooks step aside, and everything around is stored as ever."""

import contextlib
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, grad_and_value, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.nn import functional as F

import backstash as bs
from backstash.torch_internals import saved_tensor_hooks

STEPS = 4


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1))


def penalty_of_grad(model, x):
    slope = vmap(grad(lambda row: model(row).sum()))(x)
    return model(x).square().mean() + (slope.norm(dim=1) - 1).square().mean()


def equation(model, x):
    """A residual of second derivatives, as in a physics-informed network."""
    return vmap(lambda row: torch.trace(hessian(lambda at: model(at)[0])(row)))(x[:4]).square().mean() + model(x).mean()


def learned_in_the_loop(model, x):
    weights = {name: p.clone() for name, p in model.named_parameters()}
    for _ in range(2):
        step = grad(lambda w: functional_call(model, w, (x,)).square().mean())(weights)
        weights = {name: w - 0.1 * step[name] for name, w in weights.items()}
    return functional_call(model, weights, (x,)).square().mean()


def per_sample(model, x):
    weights = {name: p.detach() for name, p in model.named_parameters()}
    each = vmap(grad_and_value(lambda w, row: functional_call(model, w, (row,)).sum()), (None, 0))(weights, x)
    noise = sum(part.square().sum() for part in each[0].values())
    return model(x).square().mean() * (1 + noise)


def products(model, x):
    out, back = vjp(model, x)
    _, ahead = jvp(model, (x,), (torch.ones_like(x),))
    return back(torch.ones_like(out))[0].square().sum() + ahead.sum()


def jacobians(model, x):
    return sum(way(model)(x[0]).square().sum() for way in (jacrev, jacfwd)) + F.softplus(model(x)).mean()


LOSSES = [penalty_of_grad, equation, learned_in_the_loop, per_sample, products, jacobians]


def gradients(loss_of, policy=None):
    model, found = network(), []
    session = None if policy is None else bs.Session(policy, model=model, min_nbytes=64)
    for _ in range(STEPS):
        x = torch.randn(16, 32)
        model.zero_grad()
        with session or nullcontext():
            loss = loss_of(model, x)
        loss.backward()
        found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return found, session


@pytest.mark.parametrize("policy", ["lossless", "keep", "gist_lossless"])
@pytest.mark.parametrize("loss_of", LOSSES)
def test_bits(loss_of, policy):
    wanted, _ = gradients(loss_of)
    found, _ = gradients(loss_of, policy)
    assert all(torch.equal(a, b) for a, b in zip(wanted, found, strict=True))


def test_what_is_outside_is_still_stored():
    _, session = gradients(per_sample, "lossless")
    assert any(row.codec == "recompute" for row in session.report().rows)


def test_hooks_are_back_after_a_transform_that_raised():
    model, x = network(), torch.randn(16, 32)
    session = bs.Session("lossless", model=model, min_nbytes=64)
    with session:
        top = saved_tensor_hooks(True)
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            grad(lambda at: model(at).sum())(x[:, 1:])
        assert saved_tensor_hooks(True)[0] is top[0]
        loss = model(x).mean()
    assert saved_tensor_hooks(True) is None
    loss.backward()


def test_nothing_is_replaced_outside_a_session():
    before = torch._C._autograd._saved_tensors_hooks_disable
    model = network()
    with bs.Session("lossless", model=model):
        assert torch._C._autograd._saved_tensors_hooks_disable is not before
        model(torch.randn(4, 32)).sum().backward()
    assert torch._C._autograd._saved_tensors_hooks_disable is before


def test_hooks_of_the_program_are_refused_as_in_plain_torch():
    model, x = network(), torch.randn(4, 32)
    with bs.Session("lossless", model=model), torch.autograd.graph.save_on_cpu():
        with pytest.raises(RuntimeError, match="don't yet support saved tensor hooks"):
            grad(lambda at: model(at).sum())(x)


@pytest.mark.parametrize("transform", [grad, jacrev, hessian, lambda f: lambda at: vjp(f, at)[1](torch.ones(()))[0]])
@pytest.mark.parametrize("opened", [lambda: bs.Session("lossless", min_nbytes=64), lambda: bs.Budgeted("1GiB")])
def test_a_session_is_opened_inside_a_transform(transform, opened):
    model, at = network(), torch.randn(32)
    wanted = transform(lambda row: model(row).square().sum())(at)
    session = opened()

    def loss_of(row):
        with session:
            return model(row).square().sum()

    for _ in range(STEPS):
        assert torch.equal(transform(loss_of)(at), wanted)
    assert saved_tensor_hooks(True) is None


def test_a_session_is_opened_where_hooks_are_switched_off():
    model, x = network(), torch.randn(16, 32, generator=torch.Generator().manual_seed(0))
    before = torch._C._autograd._saved_tensors_hooks_disable
    session = bs.Session("lossless", model=model, min_nbytes=64)
    with torch.autograd.graph.disable_saved_tensors_hooks("none here"):
        with session:
            first = model(x).square().mean()
        with pytest.raises(RuntimeError, match="none here"), torch.autograd.graph.save_on_cpu():
            pass
    with contextlib.ExitStack() as stack:
        with torch.autograd.graph.disable_saved_tensors_hooks("none here"):
            stack.enter_context(session)
        assert saved_tensor_hooks(True) is not None  # they follow
        second = model(x).square().mean()
    assert session.report().rows
    slopes = [torch.autograd.grad(loss, list(model.parameters())) for loss in (first, second)]
    assert all(torch.equal(a, b) for a, b in zip(*slopes, strict=True))
    assert saved_tensor_hooks(True) is None
    assert torch._C._autograd._saved_tensors_hooks_disable is before


def test_inside_a_compiled_function():
    def loss_of(model, x):
        compiled = torch.compile(lambda at: grad(lambda row: row.tanh().square().sum())(at), backend="eager")
        return model(x * compiled(x)).square().mean()

    wanted, _ = gradients(loss_of)
    found, _ = gradients(loss_of, "lossless")
    assert all(torch.equal(a, b) for a, b in zip(wanted, found, strict=True))
