"""A Session changes what is stored, and nothing else: autograd behaves as it does without one."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from gradient_checks import Copy, Everything, bits, difference, differences
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from backstash import Encoded, Keep, Need, Policy, Session, Stash
from backstash.codecs import Binary, Bitmask, Narrow, Shape, Zvc
from backstash.errors import (
    BackstashError,
    DamagedPlanesError,
    NeedNotMetError,
    SavedTensorModifiedError,
    SessionError,
    UnknownNameError,
)
from backstash.policies.base import Action, Outcome, Rules
from backstash.saved import Mask, SavedTensor, Test

POLICIES: dict[str, str | Policy] = {"lossless": "lossless", "everything": Everything()}
by_policy = pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)


def holds_nothing(session: Session) -> bool:
    """Whether nothing of any graph is left in the session."""
    gc.collect()
    usage = session.stores["device"].usage()
    return usage.nbytes == usage.count == session._live.saved == session._live.nbytes == 0


def hooks_installed() -> list[Any]:
    """Everything global or thread-wide that a Session installs."""
    module = nn.modules.module
    return [
        *module._global_forward_pre_hooks.values(),
        *module._global_forward_hooks.values(),
        *module._global_forward_hooks_always_called,
        *(torch._C._get_function_stack_at(i) for i in range(torch._C._len_torch_function_stack())),
        *filter(None, [torch._C._autograd._top_saved_tensors_default_hooks(True)]),
    ]


@pytest.fixture(autouse=True)
def _nothing_is_left_installed() -> Iterator[None]:
    before = hooks_installed()
    yield
    assert hooks_installed() == before


def network() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Dropout(0.5),
        nn.Linear(32, 5),
    )


def images(n: int = 4) -> Tensor:
    return torch.randn(n, 3, 8, 8, generator=torch.Generator().manual_seed(4))


def gradients_of(module: nn.Module) -> list[Tensor | None]:
    return [None if parameter.grad is None else parameter.grad.clone() for parameter in module.parameters()]


def codecs_used(session: Session) -> set[str]:
    return {row.codec for row in session.report().rows}


# -- backward more than once -----------------------------------------------------------------------------------------


@by_policy
@pytest.mark.parametrize("inside", [False, True], ids=["outside", "inside"])
def test_retain_graph(policy: str | Policy, inside: bool) -> None:
    def run(session: Session | None) -> list[Tensor | None]:
        torch.manual_seed(5)
        model = network()
        found = []

        def backward(loss: Tensor) -> None:
            for retain in (True, True, False):
                loss.backward(retain_graph=retain)
                found.extend(gradients_of(model))

        if session is None:
            backward(model(images()).square().sum())
        elif inside:
            with session:
                backward(model(images()).square().sum())
        else:
            with session:
                loss = model(images()).square().sum()
            backward(loss)
        return found

    session = Session(policy, min_nbytes=0)
    assert not differences(run(None), run(session))
    assert {"bitmask", "narrow"} <= codecs_used(session)
    assert holds_nothing(session)


@by_policy
def test_backward_twice_without_retain_graph_raises_as_in_plain_torch(policy: str | Policy) -> None:
    x = torch.randn(64, requires_grad=True)
    with Session(policy, min_nbytes=0) as session:
        loss = torch.tanh(F.relu(x * 2) * 3).sum()
    loss.backward()
    with pytest.raises(RuntimeError, match="Trying to backward through the graph a second time"):
        loss.backward()
    del loss
    assert holds_nothing(session)


@by_policy
@pytest.mark.parametrize("inside", [False, True], ids=["outside", "inside"])
def test_double_backward(policy: str | Policy, inside: bool) -> None:
    """The gradient penalty of a WGAN: only what runs inside the Session is stored in another form."""

    def run(session: Session | None) -> list[Tensor | None]:
        model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Softplus(), nn.Linear(16, 1))
        for i, parameter in enumerate(model.parameters()):
            nn.init.normal_(parameter, generator=torch.Generator().manual_seed(i))
        x = images(8).reshape(-1, 6).requires_grad_()

        def penalty(score: Tensor) -> Tensor:
            (slope,) = torch.autograd.grad(score, x, create_graph=True)
            return (slope.norm(dim=1) - 1).square().mean() + score

        if session is None:
            penalty(model(x).sum()).backward()
        elif inside:
            with session:
                penalty(model(x).sum()).backward()
        else:
            with session:
                score = model(x).sum()
            penalty(score).backward()
            del score
        return [x.grad, *gradients_of(model)]

    session = Session(policy, min_nbytes=0)
    assert not differences(run(None), run(session))
    assert holds_nothing(session)


def test_a_saved_tensor_can_be_looked_at() -> None:
    """Reading grad_fn._saved_result unpacks, any number of times, and harms nothing."""
    x = torch.randn(64)
    with Session(Everything(), min_nbytes=0):
        y = torch.tanh(x.clone().requires_grad_())
        z = y * 2
        node, expected = y.grad_fn, y.detach().clone()
        del y
    assert difference(expected, node._saved_result.detach()) is None
    assert difference(expected, node._saved_result.detach()) is None
    z.sum().backward()


# -- in-place changes ------------------------------------------------------------------------------------------------


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
    """It has no spec: the message must do without."""
    sparse = torch.eye(8).to_sparse()
    dense = torch.randn(8, 8, requires_grad=True)
    with Session(min_nbytes=0):
        loss = torch.sparse.mm(sparse, dense).sum()
    sparse.mul_(2)
    with pytest.raises(SavedTensorModifiedError, match="version 1; expected version 0"):
        loss.backward()


def _allowed_changes(x: Tensor) -> Tensor:
    """Plain torch accepts every one of these."""
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
        if session is None:
            loss = _allowed_changes(x)
        else:
            with session:
                loss = _allowed_changes(x)
        loss.backward()
        found.append(x.grad)
    assert difference(found[0], found[1]) is None


def test_change_of_what_only_its_shape_is_read_of() -> None:
    """The change cannot harm, for no value is read; but plain torch raises, so a Session does."""
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
    """The input buffer is overwritten after backward, as data loaders do."""
    model, buffer = network().eval(), torch.empty(4, 3, 8, 8)
    session = Session(policy, min_nbytes=0)
    for step in range(3):
        expected = [p.grad for p in model.parameters()]
        model.zero_grad()
        buffer.copy_(images() * (step + 1))
        model(buffer).sum().backward()
        expected = gradients_of(model)
        model.zero_grad()
        with session:
            loss = model(buffer).sum()
        loss.backward()
        assert not differences(expected, gradients_of(model))


# -- what is left ----------------------------------------------------------------------------------------------------


@by_policy
def test_abandoned_graphs_leave_nothing(policy: str | Policy) -> None:
    model, x = network(), images()
    with Session(policy, min_nbytes=0) as session:
        for _ in range(1000):
            model(x)
        assert session.stores["device"].usage().count < 40
        assert len(session._shapes) < 200
        assert len(session.report().rows) < 200
    assert holds_nothing(session)


def test_abandoned_graph_in_a_cycle() -> None:
    """The garbage collector frees it, perhaps while another value is being stored."""

    class Holder:
        pass

    x = torch.randn(64, 64, requires_grad=True)
    thresholds = gc.get_threshold()
    session = Session(Everything(), min_nbytes=0)

    def work() -> None:
        with session:
            for _ in range(200):
                holder: Any = Holder()
                holder.loss, holder.self = torch.tanh(F.relu(x * 2)).sum(), holder
                del holder

    worker = threading.Thread(target=work, daemon=True)
    gc.set_threshold(3, 2, 2)
    try:
        worker.start()
        worker.join(60)
    finally:
        gc.set_threshold(*thresholds)
    assert not worker.is_alive(), "deadlock"
    assert holds_nothing(session)


@by_policy
def test_backward_frees_what_it_has_read(policy: str | Policy) -> None:
    """Layer by layer, as plain torch does, and not at the end."""
    counts = []
    x = torch.randn(64, requires_grad=True)
    with Session(policy, min_nbytes=0) as session:
        h = x
        for _ in range(5):
            h = torch.sigmoid(h * 2)
            h.register_hook(lambda _: counts.append(session._live.saved))
        loss = h.sum()
        del h
    loss.backward()
    assert counts == sorted(counts, reverse=True)
    assert counts[0] - counts[-1] >= 4
    del loss
    assert holds_nothing(session)


class Failure(Exception):  # noqa: N818
    pass


class FailsInside(nn.Module):
    def __init__(self, when: str) -> None:
        super().__init__()
        self.layer, self.when = nn.Linear(8, 8), when

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.layer(x))
        if self.when == "forward":
            raise Failure
        if self.when == "op":
            return y @ y
        return y


@pytest.mark.parametrize("when", ["forward", "op", "pre-hook", "hook", "body"])
def test_exception_in_the_middle_leaves_no_hooks(when: str) -> None:
    module = FailsInside(when)
    outer = nn.Sequential(nn.Linear(8, 8), module, nn.Linear(8, 8))

    def fail(*_: Any) -> None:
        raise Failure

    if when == "pre-hook":
        module.register_forward_pre_hook(fail)
    if when == "hook":
        module.register_forward_hook(fail)
    session = Session(min_nbytes=0)
    with pytest.raises(RuntimeError if when == "op" else Failure), session:
        outer(torch.randn(3, 8))
        if when == "body":
            raise Failure
    assert hooks_installed() == []
    assert holds_nothing(session)
    assert len(session._names.frames) == 1
    with session:  # and it works again
        loss = nn.Sequential(nn.Linear(8, 8), nn.ReLU())(torch.randn(3, 8)).sum()
    loss.backward()


def test_exception_caught_inside_the_session() -> None:
    """A forward that fails (out of memory, say) and is tried again: names of modules stay right."""
    model = nn.Sequential(nn.Linear(8, 8), FailsInside("forward"))
    good = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    with Session(min_nbytes=0) as session:
        with pytest.raises(Failure):
            model(torch.randn(3, 8))
        loss = good(torch.randn(3, 8)).sum()
    loss.backward()
    assert any(row.key.startswith("1/Tanh#0") for row in session.report().rows)


def test_exception_in_backward_leaves_the_session_usable() -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            raise Failure

    x = torch.randn(64, requires_grad=True)
    session = Session(Everything(), min_nbytes=0)
    for _ in range(3):
        with session:
            loss = Fails.apply(torch.tanh(x * 2)).exp().sum()
        with pytest.raises(Failure):
            loss.backward()
        del loss
        assert holds_nothing(session)
    with session:
        loss = torch.tanh(x).sum()
    loss.backward()


def test_nothing_is_retained_of_the_model() -> None:
    model = network()
    reference = weakref.ref(model)
    with Session(min_nbytes=0) as session:
        loss = model(images()).sum()
    loss.backward()
    del model, loss
    gc.collect()
    assert reference() is None
    assert holds_nothing(session)


def test_a_session_dies_before_its_graph() -> None:
    x = torch.randn(64, requires_grad=True)
    expected = torch.autograd.grad(torch.tanh(F.relu(x * 2)).sum(), x)[0]
    session: Session | None = Session(Everything(), min_nbytes=0)
    with session:
        loss = torch.tanh(F.relu(x * 2)).sum()
    del session
    gc.collect()
    assert difference(expected, torch.autograd.grad(loss, x)[0]) is None


def test_a_session_again_and_again() -> None:
    model, session = network().eval(), Session(min_nbytes=0)
    keys = []
    for step in range(1, 4):
        model(images()).sum().backward()
        expected = gradients_of(model)
        model.zero_grad()
        with session:
            loss = model(images()).sum()
        loss.backward()
        assert not differences(expected, gradients_of(model))
        model.zero_grad()
        assert session.report().steps == step
        keys.append([row.key for row in session.report().rows])
        assert keys[-1] == keys[0]
        assert holds_nothing(session)


def test_several_root_modules_are_one_step() -> None:
    """One of them clamps to a tensor, whose row is decided by looking at the bounds that the node saved."""

    class Clamps(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.clamp(x * 2, torch.full((8,), -1.0), torch.full((8,), 1.0)) * 2

    parts = [nn.Sequential(nn.Linear(8, 8), nn.ReLU()), Clamps(), nn.Sequential(nn.Linear(8, 8), nn.ReLU())]
    with Session(min_nbytes=0) as session:
        h = torch.randn(4, 8)
        for part in parts:
            h = part(h)
    assert session.report().steps == 1
    assert [row.key for row in session.report().rows if "Relu" in row.key] == ["1/Relu#0:result"] * 2


# -- other hooks, modes and sessions ---------------------------------------------------------------------------------


def test_nested_session_is_refused() -> None:
    with Session(), pytest.raises(SessionError, match="opened inside another one"), Session():
        pass


def test_a_session_inside_itself_is_refused() -> None:
    session = Session()
    with session, pytest.raises(SessionError, match="opened inside another one|in use already"), session:
        pass
    with session:
        pass


def test_a_session_that_another_thread_is_in_is_refused() -> None:
    session, raised = Session(), []

    def enter() -> None:
        try:
            with session:
                pass
        except SessionError as error:
            raised.append(error)

    with session:
        thread = threading.Thread(target=enter)
        thread.start()
        thread.join()
    assert len(raised) == 1


def test_session_inside_a_checkpointed_function_is_refused() -> None:
    def function(x: Tensor) -> Tensor:
        with Session():
            return x.sin()

    with pytest.raises(SessionError, match="inside a checkpointed function"):
        checkpoint(function, torch.randn(3, requires_grad=True), use_reentrant=False)


def test_session_inside_save_on_cpu_is_refused() -> None:
    with (
        torch.autograd.graph.save_on_cpu(),
        pytest.raises(SessionError, match="save_on_cpu.*would switch"),
        Session(),
    ):
        pass


def test_other_hooks_inside_a_session_take_over_where_they_are() -> None:
    x = torch.randn(64, requires_grad=True)
    expected = torch.autograd.grad(torch.tanh(torch.sigmoid(x * 2) * 3).sum(), x)[0]
    with Session(Everything(), min_nbytes=0) as session:
        h = x * 2
        with torch.autograd.graph.save_on_cpu():
            h = torch.sigmoid(h)
        loss = torch.tanh(h * 3).sum()
    assert [row.key for row in session.report().rows] == ["/Tanh#0:result"]
    assert difference(expected, torch.autograd.grad(loss, x)[0]) is None


@by_policy
@pytest.mark.parametrize("inside", [False, True], ids=["outside", "inside"])
@pytest.mark.parametrize("reentrant", [False, True], ids=["hooks", "reentrant"])
def test_checkpoint_inside_a_session(policy: str | Policy, reentrant: bool, inside: bool) -> None:
    def run(session: Session | None) -> list[Tensor | None]:
        torch.manual_seed(6)
        model, x = network(), images().requires_grad_()

        def forward() -> Tensor:
            h = model[:2](x)
            h = checkpoint(model[2:6], h, use_reentrant=reentrant)
            return checkpoint(model[6:], h, use_reentrant=reentrant).square().sum()

        if session is None:
            forward().backward()
        elif inside:
            with session:
                forward().backward()
        else:
            with session:
                loss = forward()
            loss.backward()
        return [x.grad, *gradients_of(model)]

    session = Session(policy, min_nbytes=0)
    assert not differences(run(None), run(session))
    assert holds_nothing(session)


def test_reentrant_checkpoint_still_frees_segment_by_segment() -> None:
    """What is recomputed during backward must not be held until backward ends."""
    most: list[int] = []
    session = Session(min_nbytes=0)

    def block(x: Tensor) -> Tensor:
        y = torch.sigmoid(x * 2)
        if y.requires_grad:
            y.register_hook(lambda _: most.append(session._live.saved))
        return torch.tanh(y * 2)

    x = torch.randn(64, 64, requires_grad=True)
    with session:
        h = x
        for _ in range(8):
            h = checkpoint(block, h, use_reentrant=True)
        h.sum().backward()
    assert most == sorted(most, reverse=True), most  # each segment's input goes, and what it recomputed goes with it


def test_modes_outside_a_session_see_what_they_see_without_one() -> None:
    class Recorder(TorchFunctionMode):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[str] = []

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.seen.append(func.__name__)
            return func(*args, **(kwargs or {}))

    x = torch.randn(64, requires_grad=True)
    with Recorder() as plain:
        F.hardtanh(F.relu(x * 2) * 3).sum().backward()
    with Recorder() as under:
        with Session(min_nbytes=0):
            loss = F.hardtanh(F.relu(x * 2) * 3).sum()
        loss.backward()
    assert plain.seen == [name for name in under.seen if name != "_set_grad_enabled"]


def test_another_default_device() -> None:
    """Nothing that a Session makes for itself may land there."""
    x = torch.randn(64, requires_grad=True)

    def loss_of(x: Tensor) -> Tensor:
        return F.hardtanh(F.relu(x * 2) * 3, -0.5, 2.5).square().sum()

    (expected,) = torch.autograd.grad(loss_of(x), x)
    torch.set_default_device("meta")
    try:
        with Session(min_nbytes=0) as session:
            loss = loss_of(x)
        loss.backward()
    finally:
        torch.set_default_device(None)
    assert "bitmask" in codecs_used(session)
    assert x.grad is not None and x.grad.device.type == "cpu"
    assert not difference(expected, x.grad)


def test_inference_mode_and_no_grad_inside() -> None:
    model, x = network().eval(), images()
    model(x).sum().backward()
    expected = gradients_of(model)
    model.zero_grad()
    with Session(min_nbytes=0) as session:
        with torch.inference_mode():
            model(x)
        with torch.no_grad():
            model(x)
        assert not session.report().rows
        loss = model(x).sum()
        with torch.no_grad():
            model(x)
        with torch.inference_mode():
            model(x)
    loss.backward()
    assert not differences(expected, gradients_of(model))


def test_first_backward_after_inference_mode() -> None:
    """Buffers that are made lazily must not become inference tensors."""
    x = torch.randn(512, 512, requires_grad=True)

    def loss_of(x: Tensor) -> Tensor:
        return torch.exp(F.relu(x * 2)).sum()

    (expected,) = torch.autograd.grad(loss_of(x), x)
    with torch.inference_mode(), Session(min_nbytes=0):
        with torch.inference_mode(False):
            loss = loss_of(x)
        torch.zeros(3) + 1
    loss.backward()
    assert not difference(expected, x.grad)
    x.grad = None
    with Session(min_nbytes=0):
        loss = loss_of(x)
        with torch.inference_mode():
            torch.zeros(3) + 1
    loss.backward()
    assert not difference(expected, x.grad)


# -- threads ---------------------------------------------------------------------------------------------------------


def test_backward_on_another_thread() -> None:
    model = network().eval()

    def elsewhere(loss: Tensor) -> threading.Thread:
        """Plain torch's too: the number of threads, and so the order of summation, is each thread's own."""
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
        return thread

    elsewhere(model(images()).square().sum())
    expected = gradients_of(model)
    model.zero_grad()
    with Session(Everything(), min_nbytes=0) as session:
        loss = model(images()).square().sum()
    thread = elsewhere(loss)
    assert not differences(expected, gradients_of(model))
    del loss
    thread._target = None  # type: ignore[attr-defined]
    assert holds_nothing(session)


def test_two_sessions_in_two_threads() -> None:
    def steps(seed: int, session: Session | None) -> list[Tensor | None]:
        model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.Hardtanh(), nn.Linear(64, 1))
        generator = torch.Generator().manual_seed(seed)
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.2, generator=generator)
        found = []
        for _ in range(20):
            x = torch.randn(32, 64, generator=generator)
            model.zero_grad()
            if session is None:
                model(x).square().sum().backward()
            else:
                with session:
                    loss = model(x).square().sum()
                loss.backward()
            found.extend(gradients_of(model))
        return found

    expected = [steps(seed, None) for seed in range(3)]
    sessions = [Session(Everything(), min_nbytes=0) for _ in range(3)]
    got: dict[int, list[Tensor | None]] = {}

    def work(seed: int) -> None:
        got[seed] = steps(seed, sessions[seed])

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for seed in range(3):
        assert not differences(expected[seed], got[seed])
        keys = [key for row in sessions[seed].report().rows for key in (row.key, *row.shared_by)]
        assert [key for key in keys if "Relu" in key] == ["1/Relu#0:result"], keys
        assert holds_nothing(sessions[seed])


def test_many_threads_run_backward_of_one_session() -> None:
    """They share its buffers."""
    leaves = [torch.randn(300, 300, generator=torch.Generator().manual_seed(i), requires_grad=True) for i in range(6)]

    def forward(x: Tensor) -> Tensor:
        return (F.relu(x * 2).exp() * torch.tanh(x * 3)).sum()

    expected = [torch.autograd.grad(forward(x), x)[0] for x in leaves]
    session = Session(Everything(), min_nbytes=0)
    for _ in range(3):
        with session:
            losses = [forward(x) for x in leaves]
        threads = [threading.Thread(target=loss.backward) for loss in losses]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not differences(expected, [x.grad for x in leaves])
        for x in leaves:
            x.grad = None
        del losses, threads
        assert holds_nothing(session)


# -- kinds of gradients ----------------------------------------------------------------------------------------------


@by_policy
def test_autocast(policy: str | Policy) -> None:
    def run(session: Session | None) -> list[Tensor | None]:
        torch.manual_seed(7)
        model = network()

        def forward() -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return model(images()).float().square().sum() + model(images()).float().sum()

        if session is None:
            loss = forward()
        else:
            with session:
                loss = forward()
        loss.backward()
        return gradients_of(model)

    session = Session(policy, min_nbytes=0)
    assert not differences(run(None), run(session))
    assert holds_nothing(session)


@pytest.mark.parametrize("batch", [32, 64], ids=["narrower", "as many images as features"])
def test_autocast_tells_activations_from_copies_of_weights(batch: int) -> None:
    """autocast keeps its copies of the weights; an activation may have the shape of one."""
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    with Session(Everything(), min_nbytes=0) as session, torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(torch.randn(batch, 64)).sum()
    relus = [row for row in session.report().rows if any("Relu" in key for key in (row.key, *row.shared_by))]
    assert [(row.need, row.codec) for row in relus] == [("VALUE", "zvc")] * 2
    copies = [row for row in session.report().rows if "mat2" in row.key]
    assert copies == []
    loss.backward()


@by_policy
def test_gradient_hooks_and_retained_gradients(policy: str | Policy) -> None:
    def run(session: Session | None) -> list[Tensor | None]:
        x = torch.linspace(-2, 2, 64, requires_grad=True)
        seen: list[Tensor | None] = []

        def forward() -> tuple[Tensor, Tensor]:
            h = x * 2
            h.register_hook(lambda gradient: gradient * 3)
            y = F.relu(h)
            y.retain_grad()
            z = torch.tanh(y)
            z.register_hook(lambda gradient: seen.append(gradient.clone()))
            assert z.grad_fn is not None
            z.grad_fn.register_prehook(lambda gradients: (gradients[0] * 2,))
            return z.exp().sum(), y

        if session is None:
            loss, y = forward()
        else:
            with session:
                loss, y = forward()
        loss.backward()
        return [x.grad, y.grad, *seen]

    assert not differences(run(None), run(Session(policy, min_nbytes=0)))


@by_policy
def test_shared_weights(policy: str | Policy) -> None:
    def run(session: Session | None) -> list[Tensor | None]:
        torch.manual_seed(8)
        embedding, cell = nn.Embedding(20, 16), nn.Linear(16, 16)
        tokens = torch.arange(40).reshape(4, 10) % 20

        def forward() -> Tensor:
            h = embedding(tokens)
            for _ in range(4):
                h = F.relu(cell(h))
            return F.cross_entropy(F.linear(h, embedding.weight).flatten(0, 1), tokens.flatten())

        if session is None:
            loss = forward()
        else:
            with session:
                loss = forward()
        loss.backward()
        return [*gradients_of(embedding), *gradients_of(cell)]

    assert not differences(run(None), run(Session(policy, min_nbytes=0)))


@by_policy
def test_backward_through_part_of_the_graph(policy: str | Policy) -> None:
    def run(session: Session | None) -> list[Tensor | None]:
        x = torch.linspace(-2, 2, 64, requires_grad=True)

        def forward() -> tuple[Tensor, Tensor]:
            trunk = torch.tanh(F.relu(x * 2))
            return trunk.exp().sum(), torch.sigmoid(trunk).square().sum()

        if session is None:
            one, two = forward()
        else:
            with session:
                one, two = forward()
        first = torch.autograd.grad(one, x, retain_graph=True)[0]
        two.backward()
        return [first, x.grad]

    assert not differences(run(None), run(Session(policy, min_nbytes=0)))


def test_forward_on_a_graph_that_is_already_freed() -> None:
    """Looking for the node that saved must not trip over an older one whose tensors are gone."""
    x = torch.randn(6, 4, requires_grad=True)
    y = torch.linalg.multi_dot([x, x.t(), x])[torch.tensor([0, 1, 2])]
    y.sum().backward()
    with Session(min_nbytes=0):
        loss = F.cosine_similarity(y, torch.randn(3, 4)).sum()
    torch.autograd.grad(loss, y)


# -- custom functions ------------------------------------------------------------------------------------------------


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
    """Stores its gradients into what it saved, as Liger's kernels do."""

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
    """Other nodes read the same values first, in backward, so that plain torch allows it."""

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
    """The gradient then is the decoded memory itself; nobody else may write there."""

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

    x, y = torch.zeros(512, 512, requires_grad=True), torch.randn(512, 512, requires_grad=True)
    forward(x, y).backward()
    expected = [x.grad.clone(), y.grad.clone()]  # type: ignore[union-attr]
    x.grad = y.grad = None
    with Session(policy, min_nbytes=0):
        loss = forward(x, y)
    loss.backward()
    first = x.grad
    with Session(policy, min_nbytes=0):
        loss = forward(torch.zeros(512, 512, requires_grad=True), y * 0 + 1)
    loss.backward()
    assert difference(expected[0], first) is None


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


# -- kinds of tensors ------------------------------------------------------------------------------------------------


def _quantized(x: Tensor) -> Tensor:
    return torch.fake_quantize_per_tensor_affine(x, 0.1, 0, -128, 127).square()


KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "view": lambda x: torch.exp((x * 2)[1:3]).sum() + torch.tanh((x * 3).view(-1)[5:40]).sum(),
    "expanded": lambda x: torch.exp((x * 2)[:, :1].expand(4, 6)) * torch.tanh((x * 3)[:1].expand(8, 4, 16)[0, :, :6]),
    "stride 0": lambda x: (x * 2).sum().expand(4, 16) * torch.exp(x * 2),
    "transposed": lambda x: torch.exp((x * 2).t()) @ torch.tanh(x * 3),
    "diagonal": lambda x: torch.exp((x * 2)[:, :4].diagonal()) * torch.tanh((x * 3).diagonal(1)),
    "unfolded": lambda x: torch.exp((x * 2).unfold(1, 5, 2)).square(),
    "strided slice": lambda x: torch.exp((x * 2)[::2, 1::3]).square(),
    "flipped": lambda x: torch.exp((x * 2).flip(0)).square(),
    "channels_last": lambda x: torch.exp((x * 2).view(1, 2, 4, 8).contiguous(memory_format=torch.channels_last)),
    "scalar": lambda x: torch.exp((x * 2).sum()) * torch.tanh((x * 3)[0, 0]),
    "empty": lambda x: torch.exp((x * 2)[:0]).sum() + (x * 3)[:0].prod(),
    "complex": lambda x: torch.exp(torch.complex(x * 2, x * 3)).abs(),
    "conjugate": lambda x: (torch.complex(x * 2, x * 3).conj() * torch.complex(x * 4, x * 5)).abs(),
    "negative view": lambda x: torch.exp(torch.complex(x * 2, x * 3).conj().imag) * 2,
    "real view": lambda x: torch.view_as_real(torch.exp(torch.complex(x * 2, x * 3))).square(),
    "as another type": lambda x: torch.exp(torch.view_as_complex(torch.stack((x * 2, x * 3), -1))).real.square(),
    "sparse": lambda x: torch.sparse.mm((x * 2)[:, :4].relu().to_sparse(), torch.exp(x * 3)),
    "sparse csr": lambda x: torch.eye(4).to_sparse_csr() @ torch.exp(x * 2),
    "fake quantised": _quantized,
    "integers": lambda x: torch.gather(x * 2, 1, torch.tensor([[3, 0], [1, 2], [0, 0], [5, 6]])).exp(),
    "bool mask": lambda x: torch.where((x * 2) > 0, (x * 2).exp(), (x * 3).sin()),
    "indexed": lambda x: (x * 2)[torch.tensor([0, 2, 2])][:, torch.tensor([True, False] * 8)].exp(),
    "nested": lambda x: torch.nested.to_padded_tensor(
        torch.nested.as_nested_tensor([(x * 2)[:3], (x * 3)[:2]], layout=torch.jagged).sin(), 0.0
    ),
    "float64": lambda x: torch.exp(x.double() * 2).float(),
    "float16": lambda x: torch.exp(x.half() * 2).float(),
    "float8": lambda x: torch.exp(x.to(torch.float8_e4m3fn).float() * 2),
}


@by_policy
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("min_nbytes", [0, 1 << 20], ids=["all", "large only"])
@pytest.mark.parametrize("forward", KINDS.values(), ids=KINDS)
def test_kinds_of_tensors(forward: Callable[[Tensor], Tensor], min_nbytes: int, policy: str | Policy) -> None:
    x = torch.linspace(-2, 2, 64).reshape(4, 16).requires_grad_()
    expected = torch.autograd.grad(forward(x).sum(), x)[0]
    with Session(policy, min_nbytes=min_nbytes) as session:
        loss = forward(x).sum()
    assert difference(expected, torch.autograd.grad(loss, x)[0]) is None
    del loss
    assert holds_nothing(session)


def test_one_storage_with_many_views_is_stored_once() -> None:
    x = torch.randn(16, 16, requires_grad=True)

    def forward() -> Tensor:
        h = F.relu(x * 2)
        return (h.exp() @ h.t()).sum() + (h[2:5] * h[:, 3:4].expand(16, 16)[2:5]).sum() + h.view(-1)[7:90].sin().sum()

    expected = torch.autograd.grad(forward(), x)[0]
    with Session(Everything(), min_nbytes=0) as session:
        loss = forward()
    assert difference(expected, torch.autograd.grad(loss, x)[0]) is None
    (row,) = [row for row in session.report().rows if row.key == "/Relu#0:result" or "/Relu#0:result" in row.shared_by]
    assert row.need == "VALUE"
    assert row.codec == "zvc"
    assert len(row.shared_by) >= 4


def test_one_use_reads_a_sign_and_another_the_value() -> None:
    """The strongest need counts, whichever comes first."""
    x = torch.randn(64, requires_grad=True)
    for swap in (False, True):

        def forward(swap: bool = swap) -> Tensor:
            h = x * 2
            uses = [lambda: F.leaky_relu(h).sum(), lambda: h.sin().sum()]
            first, second = reversed(uses) if swap else uses
            return first() + second()

        expected = torch.autograd.grad(forward(), x)[0]
        with Session(Everything(), min_nbytes=0) as session:
            loss = forward()
        assert difference(expected, torch.autograd.grad(loss, x)[0]) is None
        assert [(row.need, row.codec) for row in session.report().rows] == [("VALUE", "zvc")]


def test_two_uses_read_different_signs() -> None:
    x = torch.randn(64, requires_grad=True)

    def forward() -> Tensor:
        h = x * 2
        return F.leaky_relu(h).sum() + F.hardtanh(h, -0.5, 1.5).sum() + h.abs().sum()

    expected = torch.autograd.grad(forward(), x)[0]
    with Session(Everything(), min_nbytes=0) as session:
        loss = forward()
    assert difference(expected, torch.autograd.grad(loss, x)[0]) is None
    assert [row.codec for row in session.report().rows] == ["zvc"]


def test_two_uses_read_the_same_sign() -> None:
    x = torch.randn(64, requires_grad=True)

    def forward() -> Tensor:
        h = x * 2
        return F.leaky_relu(h).sum() + F.leaky_relu(h, 0.3).square().sum()

    expected = torch.autograd.grad(forward(), x)[0]
    with Session("lossless", min_nbytes=0) as session:
        loss = forward()
    assert difference(expected, torch.autograd.grad(loss, x)[0]) is None
    assert [row.codec for row in session.report().rows if row.need == "SIGN"] == ["bitmask"]


def test_a_value_that_several_nodes_read_is_encoded_once_and_decoded_in_turn() -> None:
    """Gradients of the uses arrive one after the other; what was decoded for one serves the next."""
    x = torch.randn(512, 512, requires_grad=True)

    def forward() -> Tensor:
        h = F.relu(x * 2)
        return (h.exp() + h.sin() + h.cos()).sum()

    expected = torch.autograd.grad(forward(), x)[0]
    with Session(Everything(), min_nbytes=0) as session:
        loss = forward()
    assert difference(expected, torch.autograd.grad(loss, x)[0]) is None
    (row,) = [row for row in session.report().rows if "/Relu#0:result" in (row.key, *row.shared_by)]
    assert row.codec == "zvc"
    assert row.decodes >= 1
    usage = session.stores["device"].usage()
    assert usage.count == 0


def test_parameters_are_kept_by_reference() -> None:
    layer = nn.Linear(32, 32)
    with Session(Everything(), min_nbytes=0) as session:
        loss = layer(torch.randn(4, 32).requires_grad_().clone()).sum() + (torch.randn(4, 32) @ layer.weight.t()).sum()
    report = session.report()
    assert report.parameter_nbytes == layer.weight.nbytes
    assert not any("32, 32" in row.spec for row in report.rows)
    loss.backward()


def test_values_that_the_program_holds_are_kept_by_reference() -> None:
    x = torch.randn(64, requires_grad=True)
    with Session(Everything(), min_nbytes=0) as session:
        held = x * 2
        loss = torch.sin(held).sum()
    (row,) = session.report().rows
    assert (row.codec, row.reason) == ("kept", "held by the program, kept by reference")
    loss.backward()


# -- randomness ------------------------------------------------------------------------------------------------------

RANDOM: dict[str, Callable[[Tensor], Tensor]] = {
    "rrelu": lambda x: F.rrelu(x, training=True),
    "rrelu_": lambda x: F.rrelu_(x * 1, training=True),
    "rrelu eval": lambda x: F.rrelu(x, training=False),
    "dropout": lambda x: F.dropout(x, 0.3),
    "dropout inplace": lambda x: F.dropout(x * 1, 0.3, inplace=True),
    "dropout 0": lambda x: F.dropout(x, 0.0),
    "dropout 1": lambda x: F.dropout(x, 1.0),
    "dropout eval": lambda x: F.dropout(x, 0.3, training=False),
    "native_dropout": lambda x: torch.native_dropout(x, 0.3, True)[0],
    "dropout1d": lambda x: F.dropout1d(x.view(1, 16, 64), 0.3),
    "dropout2d": lambda x: F.dropout2d(x.view(1, 16, 8, 8), 0.3),
    "dropout3d": lambda x: F.dropout3d(x.view(1, 16, 4, 4, 4), 0.3),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.3, training=True),
    "alpha_dropout inplace": lambda x: F.alpha_dropout(x * 1, 0.3, training=True, inplace=True),
    "feature_alpha_dropout": lambda x: F.feature_alpha_dropout(x.view(1, 16, 64), 0.3, training=True),
    "gumbel_softmax": lambda x: F.gumbel_softmax(x),
    "gumbel_softmax hard": lambda x: F.gumbel_softmax(x, hard=True),
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid()) * x,
    "normal": lambda x: torch.normal(x, x.exp()),
    "fractional_max_pool2d": lambda x: F.fractional_max_pool2d(x.view(1, 4, 16, 16), 2, output_ratio=(0.5, 0.5)),
    "attention": lambda x: F.scaled_dot_product_attention(*[x.view(1, 2, 32, 16)] * 3, dropout_p=0.3),
}


@by_policy
@pytest.mark.parametrize("op", RANDOM.values(), ids=RANDOM)
def test_random_ops(op: Callable[[Tensor], Tensor], policy: str | Policy) -> None:
    def forward() -> Tensor:
        torch.manual_seed(9)
        return op(torch.tanh(x * 2)).exp().sum()

    x = torch.linspace(-2, 2, 1024).reshape(16, 64).requires_grad_()
    expected = torch.autograd.grad(forward(), x)[0]
    with Session(policy, min_nbytes=0) as session:
        loss = forward()
    assert difference(expected, torch.autograd.grad(loss, x)[0]) is None
    del loss
    assert holds_nothing(session)


@by_policy
@pytest.mark.parametrize("reentrant", [False, True], ids=["hooks", "reentrant"])
@pytest.mark.parametrize("name", ["rrelu", "rrelu_", "dropout", "alpha_dropout", "attention"])
def test_random_ops_in_a_checkpoint(name: str, reentrant: bool, policy: str | Policy) -> None:
    """rrelu writes its noise after autograd has saved it, here while the backward pass runs."""

    def run(session: Session | None) -> list[Tensor | None]:
        x = torch.linspace(-2, 2, 1024).reshape(16, 64).requires_grad_()
        torch.manual_seed(9)

        def step() -> None:
            h = checkpoint(lambda y: RANDOM[name](torch.tanh(y * 2)).exp(), x * 1, use_reentrant=reentrant)
            h.sum().backward()

        if session is None:
            step()
        else:
            with session:
                step()
        return [x.grad]

    session = Session(policy, min_nbytes=0)
    assert not differences(run(None), run(session))
    assert holds_nothing(session)


# -- compiled models -------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*when there are global hooks on modules:UserWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("inside", [False, True], ids=["outside", "inside"])
def test_compiled_model(backend: str, inside: bool) -> None:
    dynamo = pytest.importorskip("torch._dynamo")
    dynamo.reset()

    def run(session: Session | None, compiled: bool) -> list[Tensor | None]:
        torch.manual_seed(10)
        model = network()
        model[7].p = 0.0  # dropout draws other numbers when it is decomposed
        function = torch.compile(model, backend=backend) if compiled else model
        found: list[Tensor | None] = []
        for _ in range(2):
            if session is None:
                function(images()).square().sum().backward()
            elif inside:
                with session:
                    function(images()).square().sum().backward()
            else:
                with session:
                    loss = function(images()).square().sum()
                loss.backward()
            found += gradients_of(model)
        return found

    expected = run(None, compiled=True)
    dynamo.reset()
    session = Session(Everything(), min_nbytes=0)
    assert not differences(expected, run(session, compiled=True))
    dynamo.reset()


# -- policies and stores ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Always:
    """One action for everything."""

    action: Action

    def decide(self, saved: SavedTensor) -> Action:
        return self.action

    def observe(self, outcome: Outcome) -> None:
        pass


SIGN = Bitmask(Mask(Test.NOT_LE))


@pytest.mark.parametrize("codec", [SIGN, Shape()], ids=["bitmask", "shape"])
def test_codec_that_preserves_too_little(codec: Any) -> None:
    x = torch.randn(64, requires_grad=True)
    with pytest.raises(NeedNotMetError, match=r"preserves \{.*\}, but backward of Sin reads the VALUE of its 'self'"):
        with Session(Always(Stash(codec)), min_nbytes=0):
            loss = torch.sin(x * 2).sum()
        loss.backward()
    assert hooks_installed() == []


def test_mask_of_another_op() -> None:
    """SIGN is not one thing: the bits must be those of the test that this formula makes."""
    x = torch.linspace(-2, 2, 64, requires_grad=True)
    expected = torch.autograd.grad(F.hardtanh(x * 2).sum(), x)[0]
    try:
        with Session(Always(Stash((SIGN, Zvc()))), min_nbytes=0):
            loss = F.hardtanh(x * 2).sum()
        got = torch.autograd.grad(loss, x)[0]
    except NeedNotMetError:
        return
    assert difference(expected, got) is None


def test_unknown_policy_lists_the_names() -> None:
    with pytest.raises(UnknownNameError, match=r"'lossles' was asked for, but there are .*keep.*lossless"):
        Session("lossles")


def test_unknown_store_lists_the_names() -> None:
    x = torch.randn(64, requires_grad=True)
    with pytest.raises(UnknownNameError, match="'attic' was asked for .* there are device"):
        with Session(Always(Stash(Zvc(0.0), store="attic")), min_nbytes=0):
            torch.sin(F.relu(x * 2)).sum()
    assert hooks_installed() == []


def test_unknown_codec_lists_the_names() -> None:
    with pytest.raises(UnknownNameError, match="codec 'zvcc' was asked for, but there are .*zvc"):
        Stash("zvcc")


def test_not_a_policy() -> None:
    with pytest.raises(TypeError, match=r"has no decide\(\) and observe\(\)"):
        Session(42)  # type: ignore[arg-type]


def test_keep_and_rules() -> None:
    model = network()
    rules = Rules((("2/*", Keep("the first relu")),), otherwise=Everything())
    with Session(rules, min_nbytes=0) as session:
        model(images()).sum().backward()
    by_key = {row.key: row for row in session.report().rows}
    assert by_key["2/Relu#0:result"].codec == "kept"
    assert by_key["2/Relu#0:result"].reason == "the first relu"


def test_error_of_a_policy_reaches_the_program() -> None:
    @dataclass(frozen=True)
    class Fails:
        def decide(self, saved: SavedTensor) -> Action:
            raise Failure

        def observe(self, outcome: Outcome) -> None:
            pass

    x = torch.randn(64, requires_grad=True)
    session = Session(Fails(), min_nbytes=0)
    with pytest.raises(Failure), session:
        torch.sin(x * 2).sum()
    assert hooks_installed() == []
    assert holds_nothing(session)


def test_policy_hears_what_became_of_every_value() -> None:
    outcomes: list[Outcome] = []

    class Listens(Everything):
        def observe(self, outcome: Outcome) -> None:
            outcomes.append(outcome)

    x = torch.randn(64, requires_grad=True)
    with Session(Listens(), min_nbytes=0) as session:
        loss = torch.tanh(F.relu(x * 2).exp()).sum()
    loss.backward()
    assert [outcome.saved.key for outcome in outcomes] == [row.key for row in session.report().rows]
    assert [outcome.codec for outcome in outcomes] == [row.codec for row in session.report().rows]


PLANES: dict[str, tuple[Callable[[Tensor], Tensor], str, Any]] = {
    "bitmask": (lambda x: F.relu(x * 2), "mask", None),
    "zvc mask": (lambda x: torch.sin(F.relu(x * 2)), "mask", Zvc(0.0)),
    "zvc offsets": (lambda x: torch.sin(F.relu(x * 2)), "offsets", Zvc(0.0)),
    "zvc values": (lambda x: torch.sin(F.relu(x * 2)), "values", Zvc(0.0)),
    "narrow": (lambda x: (x * 2)[torch.arange(64) % 7], "packed", Narrow()),
}


@pytest.mark.parametrize(("forward", "plane", "codec"), PLANES.values(), ids=PLANES)
def test_damaged_planes(forward: Callable[[Tensor], Tensor], plane: str, codec: Any) -> None:
    """A plane that was cut short between forward and backward is noticed."""
    x = torch.randn(64, requires_grad=True)
    policy: str | Policy = "lossless" if codec is None else Always(Stash((codec, Copy())))
    with Session(policy, min_nbytes=0) as session:
        loss = forward(x).sum() * 1
    values = session.stores["device"]._values  # type: ignore[attr-defined]
    (number,) = [number for number, encoded in values.items() if plane in encoded.planes]
    encoded = values[number]
    planes = {**encoded.planes, plane: encoded.planes[plane][:-1]}
    values[number] = Encoded(encoded.codec, encoded.spec, planes, encoded.meta)
    with pytest.raises(DamagedPlanesError, match="overwritten or cut short") as raised:
        loss.backward()
    assert isinstance(raised.value, BackstashError)


def test_damaged_bits_of_zvc() -> None:
    """Flipped bits in the mask disagree with the offsets."""
    x = torch.randn(64, requires_grad=True)
    with Session(Always(Stash((Zvc(0.0), Copy()))), min_nbytes=0) as session:
        loss = torch.sin(F.relu(x * 2)).sum()
    (encoded,) = session.stores["device"]._values.values()  # type: ignore[attr-defined]
    encoded.planes["mask"].fill_(0xFF)
    with pytest.raises(DamagedPlanesError, match="overwritten or cut short"):
        loss.backward()


class Attic:
    """A store that counts."""

    puts: ClassVar[int] = 0

    def __init__(self) -> None:
        from backstash.stores import DeviceStore

        self.inner = DeviceStore()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def test_another_store() -> None:
    x = torch.randn(64, requires_grad=True)
    attic = Attic()
    with Session(Always(Stash((Binary(), Zvc(0.0)), store="attic")), stores={"attic": attic}, min_nbytes=0) as session:
        loss = torch.sin(F.relu(x * 2)).sum()
    assert attic.usage().count == 1
    assert session.stores["device"].usage().count == 0
    loss.backward()
    del loss
    gc.collect()
    assert attic.usage().nbytes == 0


def test_needs_in_the_report_are_the_table_s() -> None:
    with Session(Everything(), min_nbytes=0) as session:
        loss = network()(images()).sum()
    needs = {
        row.key.split(":")[0].split("#")[0] + ":" + row.key.split(":")[1]: row.need for row in session.report().rows
    }
    assert needs["3/MaxPool2DWithIndices:result1"] == Need.INDEX.name
    assert needs["5/Relu:result"] in (Need.SIGN.name, Need.VALUE.name)
    loss.backward()


def test_bits_helper_tells_zeros_and_nans_apart() -> None:
    zeros = torch.tensor([0.0, -0.0])
    assert bits(zeros).tolist() == [0, -(2**31)]
    assert difference(zeros, -zeros) is not None
    nan = torch.tensor([float("nan")])
    assert difference(nan, nan.clone()) is None
