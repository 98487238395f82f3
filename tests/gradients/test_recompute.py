"""Values that are remade instead of stored have the same bits, and nothing of them is left behind."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from gradient_checks import differences
from torch import Tensor, nn

from backstash import Session
from backstash.ops.backends import has_own_kernel, serving
from backstash.ops.layout import Activation
from backstash.policies import Lossless
from backstash.policies.base import Keep, Recompute
from backstash.repeatable import CHEAP
from backstash.saved import Need, SavedTensor
from backstash.stash.ledger import Entry
from backstash.testing import equal_bits
from backstash.torch_internals import clamp_passes_bounds


class Block(nn.Module):
    """A residual block whose values come from a batch norm, an in-place relu and an in-place sum."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(width, width, 3, padding=1), nn.Conv2d(width, width, 1)
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norms[0](self.first(x)), inplace=True)
        y = self.norms[1](self.second(y))
        y += x
        return F.relu(y, inplace=True)


class Gated(nn.Module):
    """Layer norm, a gelu written out, a gate, a residual sum."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.up(self.norm(x)).chunk(2, -1)
        b = 0.5 * b * (1.0 + torch.tanh(0.8 * (b + 0.04 * torch.pow(b, 3.0))))
        return x + self.down(F.silu(a) * b)


def resnet(depth: int = 4) -> tuple[nn.Module, Callable[[int], Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), *[Block(8) for _ in range(depth)], nn.Flatten(), nn.LazyLinear(3))
    model(torch.randn(2, 3, 12, 12))
    return model, lambda seed: torch.randn(4, 3, 12, 12, generator=torch.Generator().manual_seed(seed))


def transformer() -> tuple[nn.Module, Callable[[int], Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(*[Gated(16) for _ in range(3)], nn.Dropout(0.3), nn.Linear(16, 3))
    return model, lambda seed: torch.randn(5, 7, 16, generator=torch.Generator().manual_seed(seed))


def train(model: nn.Module, data: Callable[[int], Tensor], session: Session | None, steps: int = 3) -> list[Tensor]:
    """Returns losses, gradients, buffers and weights of a few steps."""
    seen = []
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    torch.manual_seed(1)
    for step in range(steps):
        optimizer.zero_grad()
        with session or nullcontext():
            loss = model(data(step)).square().mean()
        loss.backward()
        seen += [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        optimizer.step()
    return seen + [x.clone() for x in model.state_dict().values()]


def rows(session: Session) -> dict[str, Entry]:
    return {row.key: row for row in session.report().rows}


@pytest.mark.parametrize("make", [resnet, transformer])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["nchw", "channels_last"])
@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
def test_steps_are_bit_equal(
    make: Callable[[], tuple[nn.Module, Callable[[int], Tensor]]], layout: torch.memory_format, autocast: bool
) -> None:
    results = []
    for session in (None, Session("lossless", min_nbytes=64), Session("lossless", min_nbytes=2000)):
        model, data = make()
        if layout is torch.channels_last and make is resnet:
            model = model.to(memory_format=layout)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            results.append(train(model, data, session))
    for other in results[1:]:
        assert all(equal_bits(a, b) for a, b in zip(results[0], other, strict=True))


def test_batch_norm_add_and_relu_hold_nothing() -> None:
    model, data = resnet()
    session = Session("lossless", min_nbytes=64, model=model)
    train(model, data, session)
    made = {key: row.reason for key, row in rows(session).items() if row.codec == "recompute"}
    assert made["1.second/Convolution#0:input"] == "relu(batch_norm)"
    assert made["2.first/Convolution#0:input"] == "relu(add(batch_norm))"
    assert all(row.stash_nbytes == 0 for row in rows(session).values() if row.codec == "recompute")
    assert session.report().ratio > 1.8


def test_a_chain_ends_at_its_depth() -> None:
    model, data = resnet(depth=6)

    class Shallow(Lossless):
        def decide(self, saved: SavedTensor) -> Keep | Recompute:  # type: ignore[override]
            return Recompute(Keep(), max_depth=2) if saved.need is Need.VALUE else Keep()

    session = Session(Shallow(), min_nbytes=64, model=model)
    train(model, data, session)
    reasons = {key: row for key, row in rows(session).items() if key.endswith("first/Convolution#0:input")}
    stored = [key for key, row in reasons.items() if row.codec == "kept" and "chain of 2" in row.reason]
    assert stored == ["4.first/Convolution#0:input"], reasons


def test_running_statistics_are_updated_once() -> None:
    model, data = resnet()
    session = Session("lossless", min_nbytes=64)
    train(model, data, session, steps=2)
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    assert all(norm.num_batches_tracked == 3 for norm in norms)  # one more when the model was made


def test_dropout_draws_the_same_numbers_again_and_leaves_the_generator_alone() -> None:
    layer = nn.Linear(64, 64)
    for seed in range(3):
        states, grads = [], []
        for session in (None, Session("lossless", min_nbytes=64)):
            torch.manual_seed(seed)
            x = torch.randn(32, 64, generator=torch.Generator().manual_seed(5), requires_grad=True)
            layer.zero_grad()

            def loss(x: Tensor = x) -> Tensor:
                return layer(F.dropout(x.sigmoid(), 0.5)).square().sum()

            if session is None:
                loss().backward()
            else:
                with session:
                    loss().backward()
                row = next(row for row in session.report().rows if row.key.endswith("Addmm#0:mat1"))
                assert (row.codec, row.reason) == ("recompute", "dropout")
            assert layer.weight.grad is not None and x.grad is not None
            states.append(torch.get_rng_state())
            grads += [(layer.weight.grad.clone(), x.grad)]
        assert torch.equal(*states)
        assert all(equal_bits(a, b) for a, b in zip(*grads, strict=True))


def test_a_producer_that_does_not_repeat_itself_is_stored() -> None:
    calls = []

    def unsteady(x: Tensor) -> Tensor:
        calls.append(1)
        return x.square() + 1e-3 * len(calls)

    CHEAP[unsteady] = "unsteady"
    try:
        x, w = torch.randn(64, 64, requires_grad=True), torch.randn(64, 64, requires_grad=True)
        with Session("lossless", min_nbytes=64) as session:
            loss = (torch.overrides.handle_torch_function(unsteady, (x,), x) @ w).sum()  # type: ignore[no-untyped-call]
            loss.backward()
    finally:
        del CHEAP[unsteady]
    row = next(row for row in session.report().rows if row.key.endswith("Mm#0:self"))
    assert row.codec != "recompute"
    assert "unsteady does not repeat itself bit for bit" in row.reason


@pytest.mark.parametrize("unseen", [False, True])
def test_a_parameter_changed_before_backward_changes_no_recomputed_value(unseen: bool) -> None:
    shift, w = nn.Parameter(torch.randn(64)), nn.Parameter(torch.randn(64, 64))
    module = nn.Module()
    module.shift, module.w = shift, w
    module.forward = lambda x: (x.tanh() + module.shift) @ module.w  # type: ignore[method-assign]
    x = torch.randn(64, 64, requires_grad=True)
    with Session("lossless", min_nbytes=64) as session:
        loss = module(x.exp()).sum()
    row = next(row for row in session.report().rows if row.key.endswith("Mm#0:self"))
    assert (row.codec, row.reason) == ("recompute", "add")
    plain = torch.autograd.grad(module(x.exp()).sum(), (x, shift, w))
    with torch.no_grad():
        (shift.data if unseen else shift).add_(1)
    assert not differences(plain, torch.autograd.grad(loss, (x, shift, w)))


def test_an_input_changed_in_place_is_never_a_wrong_gradient() -> None:
    def program(session: Session | None) -> tuple[Tensor, ...] | str:
        x = torch.linspace(-2, 2, 4096).view(64, 64).requires_grad_()
        w = torch.linspace(-1, 1, 4096).view(64, 64).requires_grad_()
        try:
            with session or nullcontext():
                y = x * 2
                z = y.sigmoid() @ w
                y.add_(1)
                (z.sum() + y.square().sum()).backward()
        except RuntimeError as error:
            return str(error)
        assert x.grad is not None and w.grad is not None
        return x.grad, w.grad

    expected, got = program(None), program(Session("lossless", min_nbytes=64))
    assert not isinstance(expected, str)
    assert not isinstance(got, str), got
    assert all(equal_bits(a, b) for a, b in zip(expected, got, strict=True))


@pytest.mark.parametrize("retain", [False, True])
def test_backward_twice_and_in_parts(retain: bool) -> None:
    grads = []
    for session in (None, Session("lossless", min_nbytes=64)):
        model, data = resnet()
        x = data(0).requires_grad_()
        with session or nullcontext():
            features = model[:3](x)
            loss = model[3:](features).square().mean()
        first = torch.autograd.grad(loss, [features, model[4].first.weight], retain_graph=True)
        second = torch.autograd.grad(features.square().sum(), [x, model[1].first.weight], retain_graph=True)
        if retain:
            loss.backward(retain_graph=True)
        loss.backward()
        grads.append([*first, *second, *(p.grad for p in model.parameters())])
    assert all(equal_bits(a, b) for a, b in zip(*grads, strict=True))


def test_nothing_is_left_behind() -> None:
    model, data = resnet()
    session = Session("lossless", min_nbytes=64)
    train(model, data, session)
    gc.collect()
    assert session._live.saved == 0
    assert session._live.nbytes == 0
    assert not session._tape.contents
    storages = [x for x in gc.get_objects() if type(x) is Tensor and x.shape == (4, 8, 10, 10)]
    assert not storages


def test_what_was_made_again_goes_when_it_was_read() -> None:
    """After backward with a retained graph, the Session holds as much as before it."""
    model, data = resnet()
    session = Session("lossless", min_nbytes=64)
    with session:
        loss = model(data(0)).square().mean()
    loss.backward(retain_graph=True)
    made = [x for x in gc.get_objects() if type(x).__name__ == "_Value" and x.made is not None]
    assert not made


def test_a_running_average_does_not_remember_its_steps() -> None:
    model, data = nn.Linear(64, 64), torch.randn(64, 64)
    session = Session("lossless", min_nbytes=64)
    average = torch.zeros(64, 64)
    gc.collect()
    before = sum(type(x).__name__ == "Content" for x in gc.get_objects())
    for _ in range(5):
        with session:
            y = model(data)
            average = 0.9 * average + 0.1 * y.detach()
            y.sum().backward()
        gc.collect()
    assert sum(type(x).__name__ == "Content" for x in gc.get_objects()) - before < 12


@pytest.mark.parametrize(
    "function",
    [
        lambda h: torch.tanh(input=h.square()),
        lambda h: torch.sigmoid(input=h.square()),
        lambda h: torch.relu(input=h.square()),
        lambda h: torch.add(input=h.square(), other=h),
        lambda h: torch.add(other=h, input=h.square(), alpha=2),
        lambda h: torch.mul(input=h.square(), other=1.5),
        lambda h: nn.functional.relu6(input=h.square()),
        lambda h: nn.functional.hardtanh(h.square(), -0.5, max_val=2.0),
        lambda h: nn.functional.leaky_relu(h.square(), 0.2),
    ],
)
def test_a_call_whose_input_has_a_name_is_remade(function: Callable[[Tensor], Tensor]) -> None:
    """What writes over a temporary takes it as its first argument, so it is not used where the input has a name."""

    def run(session: Session | None) -> list[Tensor | None]:
        torch.manual_seed(0)
        first, second = nn.Linear(16, 16), nn.Linear(16, 16)
        with session or nullcontext():
            loss = second(function(first(torch.randn(32, 16)))).square().sum()
        loss.backward()
        return [parameter.grad for module in (first, second) for parameter in module.parameters()]

    session = Session("lossless", min_nbytes=0)
    assert not differences(run(None), run(session))
    assert "recompute" in {row.codec for row in session.report().rows}


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "relu6": F.relu6,
    "relu6 in place": lambda y: F.relu6(y, inplace=True),
    "hardtanh": lambda y: F.hardtanh(y, -0.25, max_val=1),
    "a module of hardtanh": nn.Hardtanh(-1, 0.5),
    "clamp": lambda y: y.clamp(max=0.5),
    "clamp in place": lambda y: y.clamp_(-0.5, 0.5),
    "leaky_relu": lambda y: F.leaky_relu(y, 0.3),
    "hardswish": F.hardswish,
    "clamp by a tensor": lambda y: torch.clamp(y, max=torch.full((1,), 0.5)),
}
CALL_BY_CALL = {"hardswish", "clamp by a tensor"} | ({"clamp"} if not clamp_passes_bounds else set())
"""Those that the kernel of batch norm does not know, or whose result is stored as it is (an upper bound alone)."""


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("residual", [False, True])
def test_an_activation_after_batch_norm_is_remade_with_it(
    name: str, residual: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    function, numbers = ACTIVATIONS[name], torch.Generator().manual_seed(3)
    images = torch.randn(4, 4, 9, 7, generator=numbers)

    def run(session: Session | None) -> list[Tensor | None]:
        torch.manual_seed(0)
        first, norm, second = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 1)
        with session or nullcontext():  # the Session is open until backward, because the program holds ``images``
            if residual:
                second(function(norm(first(images)) + images)).square().sum().backward()
            else:
                second(function(norm(first(images)))).square().sum().backward()
        return [parameter.grad for module in (first, norm, second) for parameter in module.parameters()]

    kernels, used = serving("cpu"), []
    affine = kernels.affine

    def noted(*arguments: Any) -> None:
        used.append(arguments[6])
        affine(*arguments)

    monkeypatch.setattr(kernels, "affine", noted)
    session = Session("lossless", min_nbytes=64)
    assert not differences(run(None), run(session))
    assert "recompute" in {row.codec for row in session.report().rows}
    if has_own_kernel("affine", "cpu"):
        assert bool(set(used) - {Activation.NONE}) == (name not in CALL_BY_CALL)
