"""An exception at any instruction of Python, as a signal's handler raises it, leaves no profiler that runs."""

from __future__ import annotations

import gc
import os
import random
import signal
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from backstash.errors import SessionError
from backstash.planning.measure import events, recording
from backstash.planning.measure.profiling import profile as profile_step
from backstash.planning.measure.recording import Recording
from backstash.planning.run.budgeted import Budgeted
from backstash.planning.search.planner import plan
from backstash.session import Session
from backstash.torch_internals import profiler_runs

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
FILES = {events.__file__, recording.__file__}


class AlarmError(Exception):
    """What the handler raises."""


@contextmanager
def interrupted(at: int) -> Iterator[list[int]]:
    """Inside, the instruction of the profiler's modules that has this number raises. Yields how many there were."""
    count = [0]

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        if frame.f_code.co_filename not in FILES:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            count[0] += 1
            if count[0] == at + 1:
                raise AlarmError
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield count
    except AlarmError:
        pass
    finally:
        sys.settrace(before)


def record(found: Recording) -> None:
    assert found.start()
    torch.ones(3) + 1
    found.begin_step()
    torch.ones(3) * 2
    assert found.stop() is not None


def assert_usable(found: Recording, also_by_the_program: bool = True) -> None:
    """Nothing runs after it was closed, and everything can be recorded then, here and by the program."""
    found.close()
    assert not profiler_runs() and not found.is_running
    record(found)
    if not also_by_the_program:
        return
    with profile(activities=[ProfilerActivity.CPU]) as own:
        torch.ones(3) + 1
    assert any(event.key == "aten::add" for event in own.key_averages())
    events.others.is_busy = False


def test_an_interrupt_at_each_instruction_leaves_no_profiler() -> None:
    with interrupted(1 << 30) as count:
        record(Recording())
    assert count[0] > 100
    for at in range(count[0]):
        found = Recording()
        with interrupted(at):
            record(found)
        assert_usable(found, at % 16 == 0)


def test_two_interrupts_in_a_row_leave_no_profiler() -> None:
    """The second one while the first one is cleaned up, or when the recording is closed."""
    draw = random.Random(0)
    with interrupted(1 << 30) as count:
        record(Recording())
    for _ in range(100):
        found = Recording()
        with interrupted(draw.randrange(count[0])):
            record(found)
        with interrupted(draw.randrange(40)):
            found.close()
        assert_usable(found, also_by_the_program=False)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs processes that fork")
def test_alarms_that_the_program_catches() -> None:
    """At any moment, in native code too: a process that dies has an exit status of its own."""

    def alarmed(seed: int) -> bool:
        draw = random.Random(seed)

        def ring(number: int, frame: object) -> None:
            raise AlarmError

        signal.signal(signal.SIGALRM, ring)
        found = Recording()
        for _ in range(100):
            try:
                signal.setitimer(signal.ITIMER_REAL, draw.random() * 2e-3)
                for _ in range(20):
                    record(found) if not found.is_running else found.close()
            except (AlarmError, AssertionError):
                pass
            try:
                signal.setitimer(signal.ITIMER_REAL, 0)
            except AlarmError:
                signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_IGN)
        events.others.is_busy = False
        assert_usable(found)
        return True

    assert [_status_of(lambda seed=seed: alarmed(seed)) for seed in range(8)] == [0] * 8  # type: ignore[misc]


def _status_of(function: Callable[[], bool]) -> int:
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = 0 if function() else 1
        finally:
            os._exit(code)
    return os.waitpid(pid, 0)[1]


# -- what is dropped or refused -------------------------------------------------------------------------------------


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 64), nn.GELU(), nn.Linear(64, 8))


@pytest.mark.parametrize("steps", range(6))
def test_a_dropped_session_that_plans_anew_stops_the_profiler_at_once(steps: int) -> None:
    model, x = _model(), torch.randn(512, 64)
    planned = plan(profile_step(lambda: model(x).square().mean().backward(), model), "99%")
    gc.collect()
    gc.disable()
    try:
        session = Session(planned, replan="auto")
        for _ in range(steps):
            with session:
                loss = model(x).square().mean()
            loss.backward()
        dropped = weakref.ref(session)
        del session
        assert dropped() is None
        assert not profiler_runs()
        assert torch.autograd.backward.__module__ == "torch.autograd"
    finally:
        gc.enable()


@pytest.mark.parametrize("steps", [0, 1, 3, 8])
def test_a_budget_that_is_entered_twice_leaves_nothing_behind(steps: int) -> None:
    model, x = _model(), torch.randn(512, 64)
    session = Budgeted("100%", min_nbytes=0)
    for _ in range(steps):
        with session:
            loss = model(x).square().mean()
        loss.backward()
    with session:
        with pytest.raises(SessionError, match="inside itself"), session:
            pass
        loss = model(x).square().mean()  # the outer one goes on
    loss.backward()
    assert not nn.modules.module._global_forward_pre_hooks
    for _ in range(8):
        with session:
            loss = model(x).square().mean()
        loss.backward()
    assert session.found.plan is not None
    dropped = weakref.ref(session)
    del session
    assert dropped() is None
