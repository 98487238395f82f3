"""A Session is left wherever it is left: in backward, out of order, on another thread, late, twice, or interrupted."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

import backstash
from backstash import Session, interpreter
from backstash.capture import leaving
from backstash.errors import SessionError
from backstash.planning.run.budgeted import Budgeted
from backstash.remake import repeating
from backstash.torch_internals import in_filled_memory, recording, under_autocast, without_gradients
from tests.fuzz import interrupts
from tests.fuzz.interrupts import Trial, left_behind, places_of, prepare


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 1))


def gradients(model: nn.Module) -> list[Tensor]:
    return [x.grad.clone() for x in model.parameters() if x.grad is not None]


def plain_gradients() -> list[Tensor]:
    model = network()
    model(torch.ones(4, 8)).sum().backward()
    return gradients(model)


def assert_plain(model: nn.Module) -> None:
    assert all(map(torch.equal, gradients(model), plain_gradients()))
    assert len(gradients(model)) == 6


def left_behind_by(session: Any) -> list[str]:
    """What is left behind when a budget has stopped what it measures, for which it listens to backward passes."""
    if isinstance(session, Budgeted):
        session.close()
    return left_behind()


def sessions() -> list[Any]:
    return [Session("lossless", min_nbytes=0), Session("keep", min_nbytes=0), Budgeted("90%", min_nbytes=0)]


NAMES = ("lossless", "keep", "budget")
by_session = pytest.mark.parametrize("number", range(3), ids=NAMES)


def leave(session: Any) -> None:
    session.__exit__(None, None, None)


def on_tensor(model: nn.Module, y: Tensor, function: Callable[[], None]) -> None:
    def hook(gradient: Tensor) -> None:
        function()

    y.register_hook(hook)


def on_module(model: nn.Module, y: Tensor, function: Callable[[], None]) -> None:
    def hook(module: nn.Module, before: Any, after: Any) -> None:
        function()

    model.get_submodule("2").register_full_backward_hook(hook)


def on_parameter(model: nn.Module, y: Tensor, function: Callable[[], None]) -> None:
    def hook(parameter: Tensor) -> None:
        function()

    next(model.parameters()).register_post_accumulate_grad_hook(hook)


def by_method(loss: Tensor, model: nn.Module) -> None:
    loss.backward()


def by_function(loss: Tensor, model: nn.Module) -> None:
    torch.autograd.backward(loss)


def by_grad(loss: Tensor, model: nn.Module) -> None:
    for x, gradient in zip(model.parameters(), torch.autograd.grad(loss, list(model.parameters())), strict=True):
        x.grad = gradient


@by_session
@pytest.mark.parametrize("hook", [on_tensor, on_module, on_parameter])
@pytest.mark.parametrize("backward", [by_method, by_function, by_grad])
def test_left_in_a_backward_hook(number: int, hook: Any, backward: Any) -> None:
    session, model = sessions()[number], network()
    for step in range(3):
        model.zero_grad()
        called: list[int] = []
        session.__enter__()
        y = model[0](torch.ones(4, 8))

        def leave_in_backward() -> None:
            called.append(1)  # noqa: B023
            leave(session)

        hook(model, y, leave_in_backward)
        loss = model[1:](y).sum()
        backward(loss, model)
        if hook is on_parameter and backward is by_grad:
            assert not called
            leave(session)
        else:
            assert called
        if hook is not on_module:
            assert_plain(model)
        for each in model.modules():
            each._backward_hooks.clear()
        for x in model.parameters():
            x._post_accumulate_grad_hooks = None
        assert left_behind_by(session) == [], step


def test_left_in_a_hook_and_by_the_with_statement() -> None:
    session, model = Session("lossless", min_nbytes=0), network()
    with session:
        y = model[0](torch.ones(4, 8))
        y.register_hook(lambda gradient: leave(session))
        model[1:](y).sum().backward()
    assert_plain(model)
    assert left_behind() == []


def test_left_in_a_hook_of_a_backward_pass_that_fails() -> None:
    session, model = Session("lossless", min_nbytes=0), network()

    def fail(gradient: Tensor) -> None:
        leave(session)
        raise ValueError("of the program")

    session.__enter__()
    y = model(torch.ones(4, 8))
    y.register_hook(fail)
    with pytest.raises(ValueError, match="of the program"):
        y.sum().backward()
    gc.collect()
    with session:
        loss = model(torch.ones(4, 8)).sum()
    model.zero_grad()
    loss.backward()
    assert_plain(model)
    assert left_behind() == []


class Mode(TorchFunctionMode):
    """A mode of the program, which counts what it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += 1
        return func(*args, **(kwargs or {}))


@by_session
def test_left_before_a_mode_and_hooks_that_were_entered_inside(number: int) -> None:
    session, model, mode = sessions()[number], network(), Mode()
    packed: list[Tensor] = []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: packed.append(x.detach()) or x.detach(), lambda x: x)
    session.__enter__()
    mode.__enter__()
    hooks.__enter__()
    y = model(torch.ones(4, 8))
    leave(session)
    assert torch._C._len_torch_function_stack() == 1
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
    before = len(packed)
    z = model(torch.ones(4, 8))
    assert len(packed) > before and mode.seen
    hooks.__exit__(None, None, None)
    mode.__exit__(None, None, None)
    z.sum().backward()
    del y
    assert_plain(model)
    assert left_behind_by(session) == []


def test_left_after_a_mode_that_was_entered_before() -> None:
    session, model, mode = Session("lossless", min_nbytes=0), network(), Mode()
    mode.__enter__()
    session.__enter__()
    loss = model(torch.ones(4, 8)).sum()
    mode.__exit__(None, None, None)  # which takes away what is on top
    leave(session)
    loss.backward()
    assert_plain(model)
    assert left_behind() == []


@by_session
def test_left_twice(number: int) -> None:
    session, model = sessions()[number], network()
    with session:
        loss = model(torch.ones(4, 8)).sum()
        leave(session)
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    leave(session)
    loss.backward()
    assert_plain(model)
    assert left_behind_by(session) == []


@by_session
def test_left_on_another_thread(number: int) -> None:
    session, model = sessions()[number], network()
    session.__enter__()
    loss = model(torch.ones(4, 8)).sum()
    raised: list[str] = []

    def elsewhere() -> None:
        try:
            leave(session)
        except SessionError as error:
            raised.append(str(error))

    thread = threading.Thread(target=elsewhere, name="another")
    thread.start()
    thread.join()
    assert "'another'" in raised[0] and "entered on" in raised[0]
    loss.backward()
    assert_plain(model)
    with session:  # which leaves it first
        model(torch.ones(4, 8))
    assert left_behind_by(session) == []


@by_session
def test_entered_on_a_thread_that_has_ended(number: int) -> None:
    session, model = sessions()[number], network()
    losses: list[Tensor] = []

    def elsewhere() -> None:
        session.__enter__()
        losses.append(model(torch.ones(4, 8)).sum())

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    with session:
        model(torch.ones(4, 8))
    losses.pop().backward()
    assert_plain(model)
    assert left_behind_by(session) == []


def test_a_generator_that_is_closed_late() -> None:
    model = network()

    def steps() -> Iterator[Tensor]:
        for _ in range(3):
            with Session("lossless", min_nbytes=0):
                yield model(torch.ones(4, 8)).sum()

    running = steps()
    loss = next(running)
    with pytest.raises(SessionError, match="inside another one"), Session("lossless"):
        pass
    running.close()
    loss.backward()
    assert_plain(model)
    assert left_behind() == []
    running = steps()
    next(running)
    del running
    gc.collect()
    assert left_behind() == []


def test_an_exit_stack_that_is_dropped() -> None:
    stack = ExitStack()
    stack.enter_context(Session("lossless", min_nbytes=0))
    with pytest.raises(SessionError, match="inside another one"), Session("lossless"):
        pass
    stack.pop_all()  # and nobody closes it
    del stack
    gc.collect()
    assert left_behind() == []


def test_a_context_manager_around_a_session_stays_open() -> None:
    @contextmanager
    def opened() -> Iterator[None]:
        with Session("lossless", min_nbytes=0):
            yield

    model = network()
    with opened():
        with pytest.raises(SessionError, match="inside another one"), Session("lossless"):
            pass
        loss = model(torch.ones(4, 8)).sum()
    loss.backward()
    assert_plain(model)
    assert left_behind() == []


@by_session
def test_a_nested_one_is_refused_and_the_outer_one_goes_on(number: int) -> None:
    session, model = sessions()[number], network()
    with session:
        with pytest.raises(SessionError), session:
            pass
        for other in sessions():
            with pytest.raises(SessionError), other:
                pass
        loss = model(torch.ones(4, 8)).sum()
    loss.backward()
    assert_plain(model)
    assert session.report().saved_nbytes
    assert left_behind_by(session) == []


def test_several_are_told_of_the_end_of_a_function_of_torch() -> None:
    """A Session that is left in backward, and a budget that goes on to its next pass there."""
    told: list[int] = []
    x = torch.ones(2, requires_grad=True)
    y = x * 2.0
    is_over = [leaving.at_end_of_torch(lambda: told.append(0))]

    def hook(grad: Tensor) -> None:
        is_over.extend(leaving.at_end_of_torch(lambda number=number: told.append(number)) for number in (1, 2))  # type: ignore[misc]
        assert not told

    y.register_hook(hook)
    y.sum().backward()
    assert told == [1, 2] and is_over == [False, True, True]


def test_entered_and_left_in_a_hook() -> None:
    session, model, inner = Session("lossless", min_nbytes=0), network(), network()

    def hook(gradient: Tensor) -> None:
        with session, torch.enable_grad():
            inner(torch.ones(4, 8)).sum().backward()

    y = model(torch.ones(4, 8))
    y.register_hook(hook)
    y.sum().backward()
    assert_plain(model)
    assert_plain(inner)
    assert left_behind() == []


def test_entered_in_a_hook_and_left_after() -> None:
    session, model = Session("lossless", min_nbytes=0), network()
    y = model(torch.ones(4, 8))
    y.register_hook(lambda gradient: session.__enter__() and None)
    y.sum().backward()
    leave(session)
    assert_plain(model)
    assert left_behind() == []


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("again", [False, True])
def test_left_in_a_checkpointed_function(reentrant: bool, again: bool) -> None:
    session, model = Session("lossless", min_nbytes=0), network()
    calls = 0

    def function(x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        y = model[1:3](x)
        if (calls == 2) == again:
            leave(session)
        return model[3:](y)

    session.__enter__()
    loss = checkpoint(function, model[0](torch.ones(4, 8)), use_reentrant=reentrant).sum()
    loss.backward()
    leave(session)
    assert_plain(model)
    assert left_behind() == []


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.vmap])
def test_left_in_a_transform(transform: Any) -> None:
    session, model = Session("lossless", min_nbytes=0), network()

    def function(x: Tensor) -> Tensor:
        leave(session)
        return (x * x).sum()

    session.__enter__()
    loss = model(torch.ones(4, 8)).sum()
    found = transform(function)(torch.ones(3))
    assert torch.equal(found, torch.full((3,), 2.0 if transform is torch.func.grad else 1.0))
    loss.backward()
    assert_plain(model)
    assert left_behind() == []


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_left_in_a_compiled_region() -> None:
    torch._dynamo.reset()
    session, model = Session("lossless", min_nbytes=0), network()

    @torch.compile(backend="eager")
    def function(x: Tensor) -> Tensor:
        y = model[:3](x)
        leave(session)
        return model[3:](y).sum()

    session.__enter__()
    function(torch.ones(4, 8)).backward()
    assert_plain(model)
    assert left_behind() == []
    torch._dynamo.reset()


def test_a_thread_that_python_takes_for_ended_although_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """As CPython does after Ctrl-C inside of Thread.is_alive (Note: [interrupted leaving])."""
    monkeypatch.setattr(threading.Thread, "is_alive", lambda thread: False)
    for session in sessions():
        for _ in range(3):
            model = network()
            with session:
                loss = model(torch.ones(4, 8)).sum()
            loss.backward()
            assert_plain(model)
        assert left_behind_by(session) == []


# -- interrupts --------------------------------------------------------------------------------------------------------


def trials(name: str, kind: str, number: int, step: int | None = None) -> list[str]:
    """Interrupts so many trainings at places that are spread evenly; returns what is wrong."""
    expected, seconds = prepare(name)
    most = {"depth": 60, "signal": number, "memory": 600}.get(kind) or places_of(name, step or 0)
    found = []
    for place in range(1, most + 1, max(1, most // number)):
        trial = interrupts.in_child(lambda place=place: _run(Trial(name, kind, place, expected, seconds, step)))
        if isinstance(trial, str) and kind == "memory":
            continue  # of some allocations torch's own C++ code, pybind11's for one, does not see that they have failed
        found += [f"{place}: {each}" for each in ([trial] if isinstance(trial, str) else trial)]
    return found


def _run(trial: Trial) -> list[str]:
    return trial.run()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lossless", "idle", "offload", "around", "wrap"])
def test_ctrl_c_wherever_python_looks_for_it(name: str) -> None:
    assert trials(name, "call", 12, step=2) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lossless", "around", "wrap", "budget", "wrap budget"])
def test_the_recursion_limit_at_each_depth(name: str) -> None:
    assert trials(name, "depth", 15, step=2) == []


@pytest.mark.parametrize("name", ["lossless", "stored"])
def test_a_signal_at_any_time(name: str) -> None:
    assert trials(name, "signal", 4) == []


@pytest.mark.slow
@pytest.mark.skipif(interpreter.module is None, reason="nothing is compiled")
def test_an_allocation_that_fails() -> None:
    pytest.importorskip("_testcapi")
    assert trials("lossless", "memory", 15, step=3) == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["call", "depth", "signal", "memory"])
@pytest.mark.parametrize("name", [name for name in interrupts.LOOPS if name != "plain"])
def test_interrupts_of_each_loop(name: str, kind: str) -> None:
    if kind == "memory":
        pytest.importorskip("_testcapi")
    assert trials(name, kind, 40, step=None if kind == "signal" else 3) == []


class _Interrupt:
    """Raises as Ctrl-C may: after a function of C has returned, or when one of Python begins."""

    def __init__(self, place: int) -> None:
        self.left = place

    def __call__(self, frame: Any, event: str, arg: Any) -> None:
        if event in ("call", "c_return"):
            self.left -= 1
            if self.left < 0:
                raise KeyboardInterrupt


def _state() -> tuple[object, ...]:
    nested = torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    return (
        nested,
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch._C._autograd._saved_tensors_hooks_is_enabled(),
        torch._C._autograd._top_saved_tensors_default_hooks(True),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.is_autocast_cache_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,
        torch.get_rng_state().sum().item(),
    )


def _of_called(args: dict[str, Any]) -> Callable[[], Any]:
    x = torch.ones(2, 2, requires_grad=True)
    return lambda: repeating.as_called(torch.mm, (x, x), {}, **args)


_DRAWN: Any = SimpleNamespace(
    random_state=torch.Generator().manual_seed(5).get_state(), spec=SimpleNamespace(device=torch.device("cpu"))
)

STATES: dict[str, Callable[[], Any]] = {
    "as called": _of_called({}),
    "as called under autocast": _of_called({"autocast": ("cpu", torch.bfloat16)}),
    "drawn": lambda: repeating._as_drawn(_DRAWN, lambda: torch.rand(2)),
    "recording": lambda: recording(lambda: torch.ones(2)),
    "autocast": lambda: under_autocast("cpu", torch.bfloat16, lambda: torch.ones(2)),
    "no autocast": lambda: under_autocast("cpu", None, lambda: torch.ones(2)),
    "without gradients": lambda: without_gradients(lambda: torch.ones(2)),
    "filled memory": lambda: in_filled_memory("cpu", lambda: torch.ones(2)),
}


@pytest.mark.parametrize("name", STATES)
def test_a_state_is_undone_wherever_ctrl_c_interrupts_it(name: str) -> None:
    run = STATES[name]
    no_hooks = torch.autograd.graph.disable_saved_tensors_hooks("none here")
    with torch.inference_mode("recording" in name), no_hooks if "recording" in name else nullcontext():
        for place in range(200):
            before = _state()
            sys.setprofile(_Interrupt(place))
            try:
                run()
            except KeyboardInterrupt:
                pass
            else:
                break
            finally:
                sys.setprofile(None)
            assert _state() == before, place
        assert 3 < place < 199


def test_grad_mode_is_on_where_encoding_was_interrupted() -> None:
    """What was interrupted between switching grad mode off and on leaves it on."""
    model = network()

    class Stops(backstash.Policy):
        recomputes = remakes_anything = False
        is_fixed = True

        def decide(self, saved: Any) -> Any:
            raise KeyboardInterrupt

        def decide_together(self, saved: Any, readers: Any) -> Any:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), Session(Stops(), min_nbytes=0):
        model(torch.ones(4, 8)).sum()
    assert torch.is_grad_enabled()
    assert left_behind() == []


def test_losses_are_plain_after_an_interrupted_fused_layer() -> None:
    """The observer, which is away inside of a fused layer, is not put back when its Session was left."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval().requires_grad_(False)
    layer.linear1.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    session = Session("lossless", min_nbytes=0)
    layer.norm1.eps = 1e-4
    with pytest.raises(KeyboardInterrupt), session:
        layer.norm2.eps = 1e-5
        layer(F.relu(torch.randn(2, 3, 8)))
    assert left_behind() == []
