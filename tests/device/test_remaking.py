"""Values remade on an accelerator: one kernel for a batch norm, a sum and an activation, and what guards it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from statistics import median
from typing import Any

import pytest
import torch
from torch import Tensor

import backstash as bs
from backstash.errors import RecomputedDifferentlyError
from backstash.ops import backends
from backstash.ops.layout import Rounding
from backstash.proofs import proofs
from backstash.stash import sample
from backstash.torch_internals import no_torch_function
from tests.device import fake
from tests.device.networks import NETWORKS, same_bits

BUDGETS = {"lossless": (520, 700), "offload": (750, 800), "lossless_stored": (650, 800)}
"""Operations and allocations of a step of ResNet-50's graph. A plain step has 408 and 540."""


@pytest.mark.parametrize("policy", list(BUDGETS))
def test_a_step_stays_within_its_operations_and_allocations(policy: str) -> None:
    training = NETWORKS["resnet50"]().to("fake")
    training.step()
    session = training.session(policy)
    training.count(session, 5)
    found = training.count(session, 20)
    operations = [counts.operations for counts in found]
    most_operations, most_allocations = BUDGETS[policy]
    assert median(operations) <= most_operations
    assert median(counts.allocations for counts in found) <= most_allocations
    assert max(operations) <= 1.05 * median(operations)


@pytest.fixture
def unproven() -> Iterator[None]:
    """Nothing is known of the device's orders, neither before the test nor from it."""
    proofs.forget()
    yield
    proofs.forget()


def _kernel_of_another_order(*given: Any) -> None:
    """The kernel of a device that computes its own batch norms in the order ``SCALED``, and knows another one alone."""
    arguments = list(given)
    arguments[13:14] = [Rounding.WEIGHTED]
    _affine(*arguments)


_affine: Callable[..., None] = backends.serving("fake").affine


@pytest.mark.usefixtures("unproven")
@pytest.mark.parametrize("knows_the_order", [True, False])
def test_a_kernel_with_other_bits_is_not_used(knows_the_order: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not knows_the_order:
        monkeypatch.setattr(backends.serving("fake"), "affine", _kernel_of_another_order)
    plain, training = NETWORKS["resnet50"]().to("fake"), NETWORKS["resnet50"]().to("fake")
    session = training.session("lossless")
    for _ in range(3):
        plain.step()
        (counts,) = training.count(session)
    assert same_bits(training.gradients(), plain.gradients())
    assert (counts.names["operations", "affine"] > 0) == knows_the_order
    assert (counts.names["operations", "aten::native_batch_norm"] > 53) != knows_the_order


def test_what_changed_unseen_is_told_by_the_elements_that_the_kernel_picks() -> None:
    """A convolution's result, from which a value is to be remade, is written over where no observer looks."""
    training = NETWORKS["resnet50"]().to("fake")
    session, changed = training.session("lossless"), list[Tensor]()
    for _ in range(3):
        training.step(session)

    def keep(module: torch.nn.Module, given: Any, result: Tensor) -> None:
        changed.append(result.detach())

    convolutions = [module for module in training.model.modules() if isinstance(module, torch.nn.Conv2d)]
    handle = convolutions[5].register_forward_hook(keep)
    with session:
        loss = training.loss(training.model, training.batch)
        handle.remove()
        with no_torch_function(), torch.no_grad():
            changed.pop().data.mul_(2.0)
    with pytest.raises(RecomputedDifferentlyError, match="other bits than the value had"):
        loss.backward()
        session.report()


def test_samples_lie_many_in_one_allocation_that_is_freed_with_them() -> None:
    rows = sample.Rows()
    x = torch.arange(1000.0, device="fake")
    with fake.counting() as counts:
        samples = [sample.Sample.of(x, step, rows=rows) for step in range(sample.ROWS + 1)]
    assert counts.allocations == 2
    assert all(not each.differs(x) for each in samples)
    assert all(each.differs(x + 1) for each in samples)
    slabs = {weakref.ref(each.slab) for each in samples}
    del samples
    assert all(slab() is None for slab in slabs)


class _CastUp(torch.nn.Module):
    """Exponentials of what autocast has cast down: autocast has these in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.linears = torch.nn.ModuleList(torch.nn.Linear(32, 32) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for linear in self.linears:
            y = linear(x)
            x = y * torch.exp(y)
        return x.square().sum()


@pytest.mark.parametrize("casts", [[True] * 6, [True, True, True, False, False, False, True, True]])
def test_what_autocast_has_made_is_made_again_under_autocast(casts: list[bool]) -> None:
    torch.manual_seed(0)
    model = _CastUp().to("fake")
    x, session = torch.randn(64, 32).to("fake"), bs.Session("lossless", model=model, min_nbytes=256)
    for cast in casts:
        found = []
        for opened in (None, session):
            model.zero_grad()
            with opened or nullcontext(), torch.autocast("fake", torch.bfloat16, enabled=cast):
                loss = model(x)
            loss.backward()
            found.append([parameter.grad.cpu() for parameter in model.parameters() if parameter.grad is not None])
        assert same_bits(*found)
        recomputed = [account for account in session._forward.step.accounts if account.codec == "recompute"]
        assert len(recomputed) >= 4
