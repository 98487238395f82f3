"""Steps that run on several threads: torch's profiler sees the one on which it was started, and training goes on."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from backstash.planning.run.budgeted import Budgeted
from backstash.torch_internals import profiler_runs
from tests.fuzz.pieces import in_thread

STEPS = 16

Run = Callable[[Callable[[], None]], None]
"""Runs something on some thread, and waits until it has ended."""


def here(work: Callable[[], None]) -> None:
    work()


@contextmanager
def worker() -> Iterator[Run]:
    """On one thread that lives on."""
    with ThreadPoolExecutor(1, initializer=torch.get_num_threads) as pool:
        yield lambda work: pool.submit(work).result()


def trained(
    session: AbstractContextManager[Any], places: Sequence[tuple[Run, Run]], sizes: Sequence[int] = (64,)
) -> list[Tensor]:
    """The gradients of steps whose forward and backward passes run at these places."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 8))
    found: list[Tensor] = []
    for number, (before, after) in enumerate(places):
        losses: list[Tensor] = []

        def forward(number: int = number, losses: list[Tensor] = losses) -> None:
            with session:
                losses.append(model(torch.randn(sizes[number % len(sizes)], 64)).square().sum())

        before(forward)
        after(lambda losses=losses: losses.pop().backward())  # type: ignore[misc]
        found += [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
        model.zero_grad()
    return found


def assert_same(session: Budgeted, places: Sequence[tuple[Run, Run]], sizes: Sequence[int] = (64,)) -> None:
    expected = trained(nullcontext(), places, sizes)
    found = trained(session, places, sizes)
    assert all(torch.equal(x, y) for x, y in zip(expected, found, strict=True))


def assert_nothing_is_left(session: Budgeted, runs: Sequence[Run]) -> None:
    for run in runs:
        found: list[bool] = []
        run(session.close)
        run(lambda found=found: found.append(profiler_runs()))  # type: ignore[misc]
        assert found == [False]


@pytest.mark.parametrize("kind", ["fresh", "worker", "swapped", "both fresh", "fresh, two sizes"])
def test_steps_on_several_threads_run_under_the_rules(kind: str) -> None:
    session = Budgeted("100%", min_nbytes=1024)
    with worker() as other, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        ways: dict[str, tuple[Run, Run]] = {
            "worker": (here, other),
            "swapped": (other, here),
            "fresh": (here, in_thread),
        }
        if kind == "both fresh":

            def step() -> None:
                with session:
                    loss = model(torch.randn(64, 64)).square().sum()
                loss.backward()

            model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256))
            for _ in range(STEPS):
                in_thread(step)
        else:
            sizes = (64, 64, 32) if "sizes" in kind else (64,)
            assert_same(session, [ways[kind.split(",")[0]]] * STEPS, sizes)
    assert "on more than one thread" in session.found.trouble
    assert any("on more than one thread" in str(each.message) for each in caught)
    assert repr(session.policy).startswith("Lossless(")
    session.close()


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("first", [0, 1])
def test_steps_on_one_other_thread_have_a_plan(first: int) -> None:
    session = Budgeted("100%", min_nbytes=1024)
    with worker() as other:
        assert_same(session, [(here, here)] * first + [(other, other)] * STEPS)
        assert_nothing_is_left(session, [other, here])
    assert session.found.plan is not None and session.found.reached_nbytes > 0


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("moved", range(2, 7))
@pytest.mark.parametrize("then", ["here", "fresh", "worker"])
def test_training_goes_on_where_its_thread_changes(moved: int, then: str) -> None:
    with worker() as first, worker() as second:
        run = {"here": here, "fresh": in_thread, "worker": second}[then]
        session = Budgeted("100%", min_nbytes=1024)
        assert_same(session, [(first, first)] * moved + [(run, run)] * 8 + [(first, first)] * 8)
        assert_nothing_is_left(session, [here, first, second])


@pytest.mark.parametrize("is_called", [True, False])
def test_a_thread_that_trains_by_itself_is_not_the_loop_s(is_called: bool) -> None:
    """The Session of the thread that is inside sees nothing of what another one saves, so it refuses no budget."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 8))
    given, session = torch.randn(64, 64), Budgeted("10%", min_nbytes=1024)
    session.is_hurried = True

    def train() -> None:
        for number in range(2 * STEPS):
            y = model(given) if is_called else (given @ model[0].weight.t()).relu()
            if number == 3:
                y.register_hook(fail)
                with pytest.raises(KeyError, match="of the program"):
                    y.square().mean().backward()
            else:
                y.square().mean().backward()

    def fail(gradient: Tensor) -> None:
        raise KeyError("of the program")

    with session:
        in_thread(train)
    assert session.found.plan is None and not session.found.trouble
    assert_nothing_is_left(session, [here])


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("seed", range(6))
def test_threads_at_random(seed: int) -> None:
    draw = random.Random(seed)
    with ExitStack() as stack:
        runs = [here, in_thread, *(stack.enter_context(worker()) for _ in range(draw.randint(1, 2)))]
        places: list[tuple[Run, Run]] = []
        while len(places) < 24:
            before, after = draw.choice(runs), draw.choice(runs)
            places += [(before, after if draw.random() < 0.3 else before)] * draw.randint(1, 7)
        session = Budgeted("100%", min_nbytes=1024)
        assert_same(session, places, draw.choice([(64,), (64, 32), (64, 64, 32)]))
        assert_nothing_is_left(session, runs)
