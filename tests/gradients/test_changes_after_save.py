"""Values that are changed after autograd has saved them: an error where plain torch raises, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from gradient_checks import difference, differences
from session_checks import by_policy, gradients_of, images, network
from torch import Tensor

from backstash import Policy, Session
from backstash.errors import SavedTensorModifiedError


def _save_then_change(change: Callable[[Tensor], Any], held: bool) -> Tensor:
    x = torch.linspace(-2, 2, 64, requires_grad=True)
    h = x * 1.5
    y = torch.sigmoid(h)
    z = torch.exp(y)
    change(y)
    if held:
        _save_then_change.held = y  # type: ignore[attr-defined]
    return z.sum() + (y * 2).sum()


CHANGES: dict[str, Callable[[Tensor], Any]] = {
    "add_": lambda y: y.add_(1),
    "zero_": lambda y: y.zero_(),
    "setitem": lambda y: y.__setitem__(0, 3.0),
    "view": lambda y: y[3:7].mul_(2),
    "reshaped": lambda y: y.view(8, 8).neg_(),
    "relu_": lambda y: F.relu_(y),
    "out": lambda y: y.detach().copy_(torch.zeros(64)),
}


@by_policy
@pytest.mark.parametrize("held", [True, False], ids=["held", "dropped"])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_change_after_save_raises(policy: str | Policy, held: bool, change: Callable[[Tensor], Any]) -> None:
    with pytest.raises(RuntimeError, match="modified by an inplace operation") as plain:
        _save_then_change(change, held).backward()
    session = Session(policy, min_nbytes=0)
    with session:
        loss = _save_then_change(change, held)
    with pytest.raises(SavedTensorModifiedError, match="modified by an inplace operation") as raised:
        loss.backward()
    wording = "is at version 1; expected version 0 instead"
    assert wording in str(plain.value)
    assert wording in str(raised.value)
    assert isinstance(raised.value, RuntimeError)


@pytest.mark.parametrize("min_nbytes", [0, 1 << 20], ids=["all", "large only"])
def test_change_of_a_leaf_after_save_raises(min_nbytes: int) -> None:
    weight = torch.randn(32, 32, requires_grad=True)
    with Session(min_nbytes=min_nbytes):
        loss = (torch.randn(4, 32).requires_grad_() @ weight).sum()
    with torch.no_grad():
        weight.sub_(0.1)
    with pytest.raises(SavedTensorModifiedError, match="version 1; expected version 0"):
        loss.backward()


def test_change_of_a_sparse_tensor_after_save_raises() -> None:
    """The message cannot describe the tensor, because a sparse tensor has no ``TensorSpec``."""
    sparse = torch.eye(8).to_sparse()
    dense = torch.randn(8, 8, requires_grad=True)
    with Session(min_nbytes=0):
        loss = torch.sparse.mm(sparse, dense).sum()
    sparse.mul_(2)
    with pytest.raises(SavedTensorModifiedError, match="version 1; expected version 0"):
        loss.backward()


def _allowed_changes(x: Tensor) -> Tensor:
    """Plain torch accepts each of these changes."""
    total = x.new_zeros(())
    h = x * 2
    y = h + 1  # add saves nothing
    h.mul_(3)
    z = F.relu_(y)  # saves its result
    w = z.exp()
    z2 = w * 1
    z2.add_(5)  # mul by a number saves nothing
    v = w.clone()
    v[2:5] = 0
    s = v.sin()
    detached = s.detach().clone()
    detached.zero_()
    u = s.cos_()  # saves a copy of its input
    with torch.no_grad():
        unsaved = u.clone()
        unsaved.fill_(7)
    return total + z2.sum() + s.sum() + (h * 0.5).sum()


@by_policy
def test_changes_that_plain_torch_accepts(policy: str | Policy) -> None:
    found = []
    for session in (None, Session(policy, min_nbytes=0)):
        x = torch.linspace(-2, 2, 64, requires_grad=True)
        with session or nullcontext():
            loss = _allowed_changes(x)
        loss.backward()
        found.append(x.grad)
    assert difference(found[0], found[1]) is None


def test_change_of_a_value_whose_shape_alone_is_read() -> None:
    """The change harms nothing, because backward reads no element; a Session still raises where plain torch does."""
    x = torch.randn(1, 2, 8, 8, requires_grad=True)
    for context in (nullcontext(), Session(min_nbytes=0)):
        with context:
            h = x * 1
            loss = F.avg_pool2d(h, 2).sum()
            h.zero_()
        with pytest.raises(RuntimeError, match=r"modified by an inplace operation.* is at version 1"):
            torch.autograd.grad(loss, x)


@by_policy
def test_a_buffer_that_is_reused_for_the_next_step(policy: str | Policy) -> None:
    """The input buffer is overwritten after each backward, as data loaders do."""
    model, buffer = network().eval(), torch.empty(4, 3, 8, 8)
    session = Session(policy, min_nbytes=0)
    for step in range(3):
        buffer.copy_(images() * (step + 1))
        model(buffer).sum().backward()
        expected = gradients_of(model)
        model.zero_grad()
        with session:
            loss = model(buffer).sum()
        loss.backward()
        assert not differences(expected, gradients_of(model))
        model.zero_grad()
