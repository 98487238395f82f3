"""Sessions inside and around other sessions, hooks, modes, checkpoints and threads of the program."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fresh import run_fresh
from gradient_checks import Everything, Remake, difference, differences
from session_checks import assert_same, by_policy, codecs_used, gradients_of, holds_nothing, images, network, run_step
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from backstash import Policy, Session
from backstash.errors import SessionError
from backstash.torch_internals import hooks_around_checkpoints


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


UNDER_A_MODE = """
import sys
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode
from backstash import Session


class Decomposes(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func.decompose(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {})) if found is NotImplemented else found


class Sees(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


modes = {
    "flops": lambda: FlopCounterMode(display=False),
    "fake": lambda: FakeTensorMode(allow_non_fake_inputs=True),
    "decomposes": Decomposes,
    "sees": Sees,
}
model = nn.Sequential(nn.Linear(8, 16), nn.Sigmoid(), nn.ReLU(), nn.Linear(16, 3))
for _ in range(2):
    with modes[sys.argv[1]](), Session("lossless", min_nbytes=0):
        loss = model(torch.randn(6, 8)).square().mean()
        loss.backward()
with Session("lossless", min_nbytes=0):
    loss = model(torch.randn(6, 8)).square().mean()
print("done")
"""


@pytest.mark.parametrize("mode", ["flops", "fake", "decomposes", "sees"])
def test_the_first_session_of_a_process_is_made_inside_a_dispatch_mode(mode: str) -> None:
    run = run_fresh(UNDER_A_MODE, mode)
    assert run.stdout == "done\n", run.stderr


PACKED: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "a tuple with the tensor first": (lambda x: (x.clone(), 7), lambda packed: packed[0]),
    "a tuple with the tensor last": (lambda x: (x.device, x.clone()), lambda packed: packed[1]),
    "a tuple of one": (lambda x: (x,), lambda packed: packed[0]),
    "other numbers and a version": (lambda x: (2 * x, x._version), lambda packed: packed[0] / 2),
    "a tuple of three": (lambda x: (2 * x, 0, 0), lambda packed: packed[0] / 2),
    "an object that has the tensor": (lambda x: SimpleNamespace(dense=x.half(), x=x), lambda packed: packed.x),
    "an array": (lambda x: x.numpy(force=True).copy(), torch.from_numpy),
}

NORMS: dict[str, Callable[[], nn.Module]] = {
    "batch": lambda: nn.BatchNorm1d(16),
    "group": lambda: nn.GroupNorm(4, 16),
    "layer": lambda: nn.LayerNorm(32),
    "instance": lambda: nn.InstanceNorm1d(16, affine=True),
    "rms": lambda: nn.RMSNorm(32),
}


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("packed", PACKED)
def test_whatever_other_hooks_pack_of_a_norm(packed: str, norm: str) -> None:
    def gradients(context: Any) -> list[Tensor]:
        torch.manual_seed(0)
        inner = NORMS[norm]()
        first, last = nn.Conv1d(16, 16, 1), nn.Conv1d(16, 16, 1)
        found = []
        for _ in range(12):
            with context:
                x = first(torch.randn(4, 16, 32))
                with torch.autograd.graph.saved_tensors_hooks(*PACKED[packed]):
                    x = inner(x)
                loss = torch.relu(last(x)).square().mean()
            loss.backward()
            for parameter in (*first.parameters(), *inner.parameters(), *last.parameters()):
                assert parameter.grad is not None
                found.append(parameter.grad.clone())
                parameter.grad = None
        return found

    expected = gradients(nullcontext())
    for policy in ("lossless", "lossless_stored"):
        assert not any(map(difference, expected, gradients(Session(policy, min_nbytes=0))))


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

        run_step(forward, session, inside)
        return [x.grad, *gradients_of(model)]

    assert_same(run, Session(policy, min_nbytes=0))


@by_policy
@pytest.mark.parametrize("asks_hooks", [False, True])
def test_selective_checkpoint_inside_a_session(policy: str | Policy, asks_hooks: bool) -> None:
    """What a selective checkpoint keeps is the checkpoint's own, unless torch is told to ask the Session's hooks."""
    is_known = "respect_saved_tensors_hooks" in inspect.signature(checkpoint).parameters
    settings = {"respect_saved_tensors_hooks": asks_hooks} if is_known else {}
    if asks_hooks and not is_known:
        pytest.skip("this torch has no such setting")

    def chosen(context: object, op: object, *args: object, **kwargs: object) -> CheckpointPolicy:
        kept = op in (torch.ops.aten.convolution.default, torch.ops.aten.relu.default)
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    def run(session: Session | None) -> list[Tensor | None]:
        torch.manual_seed(6)
        model, x = network(), images().requires_grad_()
        with nullcontext() if session is None else session:
            contexts = partial(create_selective_checkpoint_contexts, chosen)
            h = checkpoint(model[:5], x, use_reentrant=False, context_fn=contexts, **settings)
            loss = model[5:](h).square().sum()
        loss.backward()
        return [x.grad, *gradients_of(model)]

    assert_same(run, Session(policy, min_nbytes=0))


ASKS = "respect_saved_tensors_hooks" in inspect.signature(checkpoint).parameters
older_torch = pytest.mark.skipif(ASKS, reason="this torch asks by itself, and is not imitated")


def _successor(asked: list[Any]) -> Any:
    """Runs checkpoints as the torch after 2.15 will: with hooks around, it asks whether they are to be respected."""
    original = torch.utils.checkpoint._checkpoint_without_reentrant_generator  # type: ignore[attr-defined]

    def generator(
        fn: Any,
        preserve_rng_state: bool = True,
        context_fn: Any = None,
        determinism_check: str = "default",
        debug: bool = False,
        early_stop: bool = True,
        *args: Any,
        respect_saved_tensors_hooks: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        asked.append(respect_saved_tensors_hooks)
        has_hooks = torch._C._autograd._top_saved_tensors_default_hooks(False) is not None  # type: ignore[attr-defined]
        if respect_saved_tensors_hooks is None and has_hooks:
            raise RuntimeError("pass respect_saved_tensors_hooks=True|False")
        options = preserve_rng_state, context_fn, determinism_check, debug, early_stop
        return original(fn, *options, *args, **kwargs)

    return generator


@older_torch
@pytest.mark.parametrize("idle", [False, True])
def test_a_session_answers_where_a_checkpoint_asks_whether_hooks_are_respected(
    idle: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An imitation of the torch after 2.15, in which not to answer is an error."""
    asked: list[Any] = []
    successor = _successor(asked)
    monkeypatch.setattr(torch.utils.checkpoint, "_checkpoint_without_reentrant_generator", successor)
    keeping = partial(create_selective_checkpoint_contexts, [torch.ops.aten.convolution.default])

    def run(session: Session | None) -> list[Tensor | None]:
        torch.manual_seed(6)
        model, x = network(), images().requires_grad_()
        with nullcontext() if session is None else session:
            h = checkpoint(model[:2], x, use_reentrant=False)
            h = checkpoint(model[2:5], h, use_reentrant=False, context_fn=keeping)
            loss = model[5:](h).square().sum()
        loss.backward()
        return [x.grad, *gradients_of(model)]

    session = Session("keep" if idle else "lossless", min_nbytes=1 << 40 if idle else 0)
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)
    with hooks, pytest.raises(RuntimeError, match="pass respect"):
        run(None)
    del asked[:]
    assert not differences(run(session), run(session))
    assert asked == [False] * 4
    assert torch.utils.checkpoint._checkpoint_without_reentrant_generator is successor  # type: ignore[attr-defined]
    with session, hooks, pytest.raises(RuntimeError, match="pass respect"):  # the program's own hooks, its own answer
        checkpoint(torch.relu, torch.ones(4, requires_grad=True), use_reentrant=False)
    monkeypatch.undo()
    assert not differences(run(None), run(session))


@older_torch
@pytest.mark.parametrize("answer", [True, False])
def test_the_answer_of_the_program_is_not_overruled(answer: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    successor = _successor(asked)
    monkeypatch.setattr(torch.utils.checkpoint, "_checkpoint_without_reentrant_generator", successor)
    with Session():
        inside = torch.utils.checkpoint._checkpoint_without_reentrant_generator  # type: ignore[attr-defined]
        running = inside(torch.relu, True, torch.utils.checkpoint.noop_context_fn, respect_saved_tensors_hooks=answer)
    running.close()
    assert asked == [answer]


@pytest.mark.skipif(not ASKS, reason="this torch does not ask")
@pytest.mark.filterwarnings("error::FutureWarning")
def test_a_selective_checkpoint_in_a_session_warns_of_nothing() -> None:
    keeping = partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])
    torch.manual_seed(6)
    first, second = (nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(2))
    data = torch.randn(64, 64)

    def run(session: Session | None) -> list[Tensor | None]:
        x = data.clone().requires_grad_()
        with nullcontext() if session is None else session:
            h = checkpoint(first, x, use_reentrant=False, context_fn=keeping)
            nested = lambda y: checkpoint(second, y, use_reentrant=False, context_fn=keeping)  # noqa: E731
            loss = checkpoint(nested, h, use_reentrant=False).sum()
        loss.backward()
        return [x.grad]

    assert not differences(run(None), run(Session(min_nbytes=0)))


def _later(run: Any, asked: list[Any]) -> Any:
    """What runs every checkpoint in torch, as it will be if it refuses at once to run without an answer."""

    def checkpoint_impl(
        function: Any,
        args: Any,
        kwargs: Any,
        *,
        use_reentrant: bool | None = None,
        respect_saved_tensors_hooks: bool | None = None,
        **options: Any,
    ) -> Any:
        if use_reentrant and respect_saved_tensors_hooks is not None:
            raise ValueError("only supported when use_reentrant=False")
        if not use_reentrant:
            asked.append(respect_saved_tensors_hooks)
            if respect_saved_tensors_hooks is None and hooks_around_checkpoints() is not None:
                raise RuntimeError("pass respect_saved_tensors_hooks=True|False")
        if ASKS:
            options["respect_saved_tensors_hooks"] = respect_saved_tensors_hooks
        return run(function, args, kwargs, use_reentrant=use_reentrant, **options)

    return checkpoint_impl


@pytest.mark.filterwarnings("error::FutureWarning")
@pytest.mark.parametrize("idle", [False, True])
def test_a_session_answers_where_torch_refuses_to_run_a_checkpoint_without_an_answer(
    idle: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An imitation of a torch that raises before anything runs; this torch's own path where it has that function."""
    asked: list[Any] = []
    plain = getattr(torch.utils.checkpoint, "_checkpoint_impl", None)
    run_plain = plain or (lambda function, args, kwargs, **options: checkpoint(function, *args, **options, **kwargs))
    later = _later(run_plain, asked)
    monkeypatch.setattr(torch.utils.checkpoint, "_checkpoint_impl", later, raising=False)
    keeping = partial(create_selective_checkpoint_contexts, [torch.ops.aten.convolution.default])

    def call(function: Any, x: Tensor, **options: Any) -> Tensor:
        if plain is not None:
            return checkpoint(function, x, **options)  # type: ignore[no-any-return]
        return torch.utils.checkpoint._checkpoint_impl(function, (x,), {}, **options)  # type: ignore[no-any-return, attr-defined]

    def run(session: Session | None) -> list[Tensor | None]:
        torch.manual_seed(6)
        model, x = network(), images().requires_grad_()
        with nullcontext() if session is None else session:
            h = call(model[:2], call(torch.sin, x, use_reentrant=True), use_reentrant=False)
            h = call(model[2:5], h, use_reentrant=False, context_fn=keeping)
            loss = model[5:](h).square().sum()
        loss.backward()
        return [x.grad, *gradients_of(model)]

    session = Session("keep" if idle else "lossless", min_nbytes=1 << 40 if idle else 0)
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)
    with hooks, pytest.raises(RuntimeError, match="pass respect"):
        run(None)
    del asked[:]
    assert not differences(run(session), run(session))
    assert asked == [False] * 4
    assert torch.utils.checkpoint._checkpoint_impl is later  # type: ignore[attr-defined]
    with session, hooks, pytest.raises(RuntimeError, match="pass respect"):  # the program's own hooks, its own answer
        call(torch.relu, torch.ones(4, requires_grad=True), use_reentrant=False)
    monkeypatch.undo()
    if plain is not None:
        assert not differences(run(None), run(session))


@pytest.mark.skipif(not ASKS, reason="this torch does not ask")
def test_what_a_program_tells_a_checkpoint_reaches_torch() -> None:
    """True hands what is kept to the Session, and a checkpoint with reentrance is still not given an answer."""
    keeping = partial(create_selective_checkpoint_contexts, [torch.ops.aten.tanh.default])
    x = torch.randn(64, 64, requires_grad=True)
    seen = []
    for answer in (True, False):
        with Session("keep", min_nbytes=0) as session:
            call = partial(checkpoint, lambda y: y.tanh().exp(), x, context_fn=keeping, use_reentrant=False)
            call(respect_saved_tensors_hooks=answer).sum().backward()
        seen.append(len(session.report().rows))
    assert seen[0] > seen[1]
    with Session(), pytest.raises(ValueError, match="use_reentrant=False"):
        checkpoint(torch.relu, x, use_reentrant=True, respect_saved_tensors_hooks=False)


def test_reentrant_checkpoint_still_frees_segment_by_segment() -> None:
    """What a checkpoint recomputes during backward is not held until backward ends."""
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
    """No tensor that a Session creates for itself may be on that device."""
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


@pytest.mark.parametrize("policy", ["lossless", "lossless_stored", "keep", Remake()])
def test_a_teacher_in_inference_mode(policy: Any) -> None:
    """Its results have no version. Torch lets nothing save them, but calls that can be repeated may read them."""
    student, teacher, x = network(), network().eval(), images()

    def step(context: Any) -> list[Tensor]:
        student.zero_grad()
        torch.manual_seed(0)  # for the dropout
        with context:
            with torch.inference_mode():
                wanted, mean = teacher(x), x.mean((0, 2, 3), keepdim=True)
                wanted.mul_(0.5)
            target = (wanted * 2.0 - 1.0).sigmoid()
            loss = F.mse_loss(student(x - mean), target) + (student(torch.cat([x, mean + x])) * 1.0).mean()
        loss.backward()
        return gradients_of(student)

    state = {name: each.clone() for name, each in student.state_dict().items()}
    expected = [step(nullcontext()) for _ in range(4)]
    student.load_state_dict(state)
    session = Session(policy, min_nbytes=0)
    for each in expected:
        assert not differences(each, step(session))


def test_first_backward_after_inference_mode() -> None:
    """The Session creates buffers on first use, and they must not become inference tensors."""
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


def test_backward_on_another_thread() -> None:
    model = network().eval()

    def elsewhere(loss: Tensor) -> threading.Thread:
        """Plain torch runs there too: each thread has its own number of threads, which decides the order of sums."""
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
            run_step(lambda x=x: model(x).square().sum(), session)
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
    """All threads use the buffers of one Session."""
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


class Unhashable:
    """A function of a program that offers itself to modes, and is equal to others."""

    def __eq__(self, other: object) -> bool:
        return type(other) is Unhashable

    def __call__(self, x: Tensor) -> Tensor:
        if torch.overrides._is_torch_function_mode_enabled():
            found: Tensor = torch.overrides.handle_torch_function(self, (x,), x)
            return found
        return torch.tanh(x * 2.0)


def test_a_function_that_cannot_be_hashed() -> None:
    def train(session: Session | None) -> list[Tensor | None]:
        torch.manual_seed(0)
        first, second = nn.Linear(16, 64), nn.Linear(64, 8)
        found: list[Tensor | None] = []
        for _ in range(14):
            with nullcontext() if session is None else session:
                loss = second(torch.relu(Unhashable()(first(torch.randn(32, 16))))).square().mean()
            found += torch.autograd.grad(loss, [*first.parameters(), *second.parameters()])
        return found

    assert differences(train(None), train(Session("lossless", min_nbytes=0, stop_if_useless=False))) == []
