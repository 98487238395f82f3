"""Programs that profile some of their own steps while a budget has others profiled: there is only one profiler."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from backstash import Budgeted
from backstash.planning.measure.events import others
from backstash.report.meter import CountedPeak
from backstash.torch_internals import profiler_runs

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def trained(session: AbstractContextManager[Any], step: Callable[[int, Callable[[], None]], object]) -> list[Tensor]:
    """The weights after some steps, each of which is run by a function that is told its number."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def run() -> None:
        with session:
            loss = model(torch.randn(256, 64)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    for number in range(24):
        step(number, run)
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("times", [(1, 1, 2, 0), (3, 1, 1, 1), (4, 1, 1, 2), (5, 2, 1, 1)], ids=str)
def test_a_schedule_of_profiles_is_kept(times: tuple[int, int, int, int]) -> None:
    wait, warmup, active, repeat = times
    session, seen = Budgeted("80%", min_nbytes=0), list[int]()
    planned = schedule(wait=wait, warmup=warmup, active=active, repeat=repeat)
    activities = [ProfilerActivity.CPU]

    def ready(profiled: Any) -> None:
        seen.append(sum(event.name == "aten::addmm" for event in profiled.events()))

    expected = trained(nullcontext(), lambda number, run: run())
    with profile(activities=activities, schedule=planned, on_trace_ready=ready, acc_events=True) as profiled:

        def step(number: int, run: Callable[[], None]) -> None:
            run()
            profiled.step()

        found = trained(session, step)
    assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))
    assert seen and all(calls >= 3 * active for calls in seen)
    assert (session.found.plan is not None) is bool(repeat)  # a loop that profiles without an end is not planned for
    session.close()
    assert not profiler_runs() and not others.is_busy


def test_each_step_is_profiled_by_the_program() -> None:
    def step(number: int, run: Callable[[], None]) -> None:
        with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiled:
            run()
        assert any(event.name == "aten::addmm" for event in profiled.events())

    session = Budgeted("80%", min_nbytes=0)
    expected, found = trained(nullcontext(), step), trained(session, step)
    assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))
    session.close()
    assert not profiler_runs() and not others.is_busy


ANNOTATED = """
import sys, threading
import torch
from torch import nn
from torch.profiler import record_function
from backstash import Budgeted

ends = sys.argv[1]
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
session, begun = Budgeted("80%", min_nbytes=0), []
for _ in range(24):
    annotation = record_function("step")
    annotation.__enter__()
    with session:
        loss = model(torch.randn(256, 64)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    begun.append(annotation)
    if ends != "here":
        begun[-1] = torch.futures.Future()
        annotation._call_end_callbacks_on_future(begun[-1])
        annotation.__exit__(None, None, None)
    if len(begun) > 2:
        first = begun.pop(0)
        if ends == "here":
            first.__exit__(None, None, None)
        elif ends == "by a future":
            first.set_result(1)
        else:
            thread = threading.Thread(target=first.set_result, args=(1,))
            thread.start()
            thread.join()
assert session.found.plan is not None
session.close()
"""


@pytest.mark.slow
@pytest.mark.parametrize("ends", ["here", "by a future", "on another thread"])
def test_annotations_begin_in_one_record_and_end_in_another(ends: str) -> None:
    """Torch would write to the memory of a record that is gone, which the process may end of much later."""
    command = [sys.executable, "-W", "ignore", "-c", ANNOTATED, ends]
    ended = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"MALLOC_CHECK_": "3"})
    assert ended.returncode == 0, ended.stderr


def test_a_peak_is_counted_inside_of_an_annotation() -> None:
    outer = record_function("outer")
    with CountedPeak() as counted:
        outer.__enter__()
        torch.ones(1000).sum()
        first = counted.mark()
        torch.ones(5000).sum()
    outer.__exit__(None, None, None)
    with record_function("around"), CountedPeak():
        torch.ones(1000).sum()
    assert counted.peak_nbytes - counted.peak_between(None, first) == 4 * (5000 - 1000)
