"""Ranks that keep one budget together: one plan, one error, and no exchange once all is settled."""

from __future__ import annotations

import gc
import json
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed.processes import Block, batch, local, loss_of, network, run_together
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from backstash import Budgeted
from backstash.bits import equal_bits
from backstash.errors import BudgetError, PlanError
from backstash.planning.run import agreement, course

ROWS = 8
"""So many times as many rows as in the other tests: the stash is more than gloo's buffers."""
MOST_STEPS = 90
BUDGET = 900_000
"""Between what a step of ROWS takes and what one of eight times as many rows takes under any plan."""


def sharded(model: nn.Sequential) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model:
        if isinstance(block, Block):
            fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


PARALLEL: dict[str, Callable[[nn.Sequential], nn.Module]] = {
    "DDP": DistributedDataParallel,
    "FSDP2": sharded,
    "each its own": lambda model: model[dist.get_rank() % 2 :],  # as stages of a pipeline have
}


def train(model: nn.Module, budget: Budgeted | None, steps: int, times: int = ROWS) -> list[Tensor]:
    """Trains until the ranks have agreed, and three steps more; returns losses and weights."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses: list[Tensor] = []
    for step in range(steps):
        x = batch(step, dist.get_rank()).repeat(times, 1)
        loss = loss_of(model(x) if budget is None else budget.step(model, x))
        loss.backward()
        losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return [*losses, *(local(parameter) for parameter in model.parameters())]


SHARES = {"DDP": "80%", "FSDP2": "97%", "each its own": "97%"}
"""What each kind of training can be planned within: a rank of FSDP2 holds gathered weights as well."""


def agreeing(name: str) -> dict[str, Any]:
    course.LEAST = math.inf  # this process is no one else's: whatever there is to compute is computed between two steps
    budget = Budgeted(SHARES[name], min_nbytes=0, agree=True)
    assert budget.agreement is not None
    model = PARALLEL[name](network())
    steps = 0
    while not budget.agreement.is_settled and steps < MOST_STEPS:
        train(model, budget, 1)
        steps += 1
    met, plan = budget.agreement.meetings, budget.found.plan
    train(model, budget, 3)
    expected, found = PARALLEL[name](network()), PARALLEL[name](network())
    again = Budgeted(SHARES[name], min_nbytes=0, plan=plan)
    same = [equal_bits(*pair) for pair in zip(train(expected, None, 4), train(found, again, 4), strict=True)]
    return {
        "settled": budget.agreement.is_settled,
        "met": (met, budget.agreement.meetings),
        "steps": steps,
        "plan": None if plan is None else plan.fingerprint,
        "equal": all(same),
    }


def refusing(name: str, heavy: int, nbytes: int) -> tuple[int, str, int]:
    course.LEAST = math.inf
    budget = Budgeted(nbytes, min_nbytes=0, agree=True)
    model = PARALLEL[name](network())
    times = 8 * ROWS if dist.get_rank() == heavy else ROWS
    for step in range(MOST_STEPS):
        try:
            train(model, budget, 1, times)
        except BudgetError as error:
            return step, str(error), error.smallest_nbytes
    return -1, str(budget.found), 0


def running_out(failing: int) -> tuple[str, str]:
    budget = Budgeted("80%", min_nbytes=0, agree=True)
    model = DistributedDataParallel(network())
    if dist.get_rank() == failing:

        def fail(module: nn.Module, args: Any) -> None:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes.")

        train(model, budget, 2)
        next(iter(model.module)).register_forward_pre_hook(fail)
    else:
        train(model, budget, 2)
    try:
        train(model, budget, 1)
    except RuntimeError as error:
        return type(error).__name__, str(error)
    return "", ""


WAITING_TEXT = '{"done": false, "plan": null}'


class Lost:
    """The store of a process group, of which every call of one name finds that the process that kept it has ended."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*args: object) -> str:
            if name == self.name:
                raise dist.DistNetworkError("Connection was likely closed")
            return WAITING_TEXT

        return call


@pytest.mark.parametrize("name", ["set", "check", "get", "delete_key"])
def test_a_rank_goes_on_by_itself_when_the_store_has_ended(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for of, value in {"is_initialized": True, "get_rank": 1, "get_world_size": 2}.items():
        monkeypatch.setattr(dist, of, lambda value=value: value)
    monkeypatch.setattr(dist, "PrefixStore", lambda prefix, store: store)
    monkeypatch.setattr(agreement, "default_group_store", lambda: Lost(name))
    model, budget = network(), Budgeted("80%", min_nbytes=0, agree=True)
    with pytest.warns(UserWarning, match="rank 1 of 2 .* has ended. This rank goes on under its own plan"):
        train(model, budget, 3)
    train(model, budget, 1)  # and says so once
    budget.close()


def of_two(rank: int, store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes this process that rank of two, which share a store."""
    for of, value in {"is_initialized": True, "get_rank": rank, "get_world_size": 2}.items():
        monkeypatch.setattr(dist, of, lambda value=value: value)
    monkeypatch.setattr(dist, "PrefixStore", lambda prefix, store: store)
    monkeypatch.setattr(agreement, "default_group_store", lambda: store)


@pytest.mark.parametrize("is_closed", [True, False])
def test_a_rank_goes_on_by_itself_when_another_one_has_ended(is_closed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    store.set("0/1", json.dumps(WAITING))
    of_two(1, store, monkeypatch)
    other = Budgeted("80%", min_nbytes=0, agree=True)
    if is_closed:
        other.close()
    del other
    gc.collect()
    of_two(0, store, monkeypatch)
    model, budget = network(), Budgeted("80%", min_nbytes=0, agree=True)
    train(model, budget, 1)  # where it has said something before it has ended
    with pytest.warns(UserWarning, match="rank 0 of 2 .* but rank 1 has ended. This rank goes on under its own plan"):
        train(model, budget, 1)
    train(model, budget, 1)
    budget.close()


def test_a_refused_rank_raises_its_own_error_when_another_one_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    store.set("ended/1", "")
    of_two(0, store, monkeypatch)
    owner, parameter = Planned(), nn.Parameter(torch.zeros(1))
    ranks = agreement.Agreement(owner.own, owner.take)
    ranks.refuse(BudgetError("500 are needed", 500, 1.0, None))
    parameter.grad = torch.zeros(1)
    with pytest.raises(BudgetError, match="500 are needed"):
        torch.optim.SGD([parameter], lr=0.1).step()
    ranks.close()


def test_a_meeting_takes_no_time_of_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(course, "clock", lambda: len(asked) * 1.0)
    asked: list[object] = []
    of_two(0, Lost("no call"), monkeypatch)  # it answers for the other rank
    with pytest.MonkeyPatch.context() as told:
        told.setattr(Lost, "__getattr__", lambda lost, name: lambda *args: asked.append(name) or WAITING_TEXT)
        budget = Budgeted("80%", min_nbytes=0, agree=True)
        before = budget.aside.program_clock()
        train(network(), budget, 1)
        assert asked and budget.aside.program_clock() == before
        budget.close()


def test_a_process_that_was_forked_ends_for_itself_alone() -> None:
    store = dist.HashStore()
    agreement._tell_end(store, "ended/0", os.getpid() + 1)
    assert not store.check(["ended/0"])
    agreement._tell_end(store, "ended/0", os.getpid())
    assert store.check(["ended/0"])


def test_a_rank_that_says_nothing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "SECONDS", 0.0)
    of_two(0, dist.HashStore(), monkeypatch)
    with pytest.raises(PlanError, match="but rank 1 has said nothing for 0 s. Step the optimizers of all ranks"):
        train(network(), Budgeted("80%", min_nbytes=0, agree=True), 1)


def uneven() -> tuple[int, float]:
    """Trains in one rank less than it takes to agree, and in the others on."""
    budget = Budgeted("97%", min_nbytes=0, agree=True)
    steps = 3 if dist.get_rank() else 8
    began = time.monotonic()
    train(network(), budget, steps)
    return steps, time.monotonic() - began


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_ranks_with_uneven_steps_do_not_wait_for_one_that_has_ended(tmp_path: Path) -> None:
    found = run_together(tmp_path, uneven)  # which waits for answers less long than ranks for each other
    assert [steps for steps, _ in found] == [8, 3]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "world"), [("DDP", 2), ("FSDP2", 2), ("each its own", 2), ("DDP", 4)])
def test_ranks_take_one_plan_and_then_exchange_nothing(tmp_path: Path, name: str, world: int) -> None:
    found = run_together(tmp_path, agreeing, name, world=world)
    assert all(each["settled"] and each["equal"] and each["plan"] for each in found), found
    assert all(each["met"] == (each["steps"], each["steps"]) for each in found), found
    assert len({each["steps"] for each in found}) == 1
    assert len({each["plan"] for each in found}) == (1 if name in ("DDP", "FSDP2") else 2)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "world"), [("DDP", 2), ("FSDP2", 2), ("each its own", 4)])
def test_a_budget_that_one_rank_cannot_keep_is_an_error_on_all_in_one_step(
    tmp_path: Path, name: str, world: int
) -> None:
    found = run_together(tmp_path, refusing, name, 1, BUDGET, world=world)
    assert len(set(found)) == 1 and found[0][0] >= 0, found
    assert f"of {world} ranks, 1 can not keep the budget. Rank 1 asks for the most: a plan was asked for" in found[0][1]
    assert found[0][2] > BUDGET


@pytest.mark.slow
@pytest.mark.parametrize(("name", "world"), [("DDP", 2), ("each its own", 4)])
def test_a_budget_that_no_rank_can_keep_is_refused_with_the_most_that_any_asks_for(
    tmp_path: Path, name: str, world: int
) -> None:
    found = run_together(tmp_path, refusing, name, 1, BUDGET // 50, world=world)
    assert len(set(found)) == 1 and found[0][0] >= 0, found
    assert f"of {world} ranks, {world} can not keep the budget. Rank 1 asks for the most: a plan" in found[0][1]
    assert found[0][2] > BUDGET  # rank 1 alone has so many rows


class Scripted:
    """The store of a process group of three, of which this process is rank 0, and what the others say is known."""

    def __init__(self, said: list[list[dict[str, Any]]]) -> None:
        self.said, self.own = said, ""

    def set(self, key: str, text: str) -> None:
        self.own = text

    def get(self, key: str) -> str:
        meeting, rank = map(int, key.split("/"))
        return json.dumps(self.said[min(meeting, len(self.said) - 1)][rank - 1]) if rank else self.own

    def check(self, keys: list[str]) -> bool:
        return True

    def delete_key(self, key: str) -> None:
        pass


class Planned:
    """What owns an agreement: ``own`` says that no plan is found yet, and nobody takes one."""

    def own(self) -> tuple[bool, None]:
        return False, None

    def take(self, plan: object) -> None:
        raise AssertionError


def refused(said: list[list[dict[str, Any]]], monkeypatch: pytest.MonkeyPatch) -> tuple[int, BudgetError]:
    """Has rank 0 refuse 500 bytes in the first meeting; returns in which meeting the ranks raise what."""
    for of, value in {"is_initialized": True, "get_rank": 0, "get_world_size": 3}.items():
        monkeypatch.setattr(dist, of, lambda value=value: value)
    monkeypatch.setattr(dist, "PrefixStore", lambda prefix, store: store)
    monkeypatch.setattr(agreement, "default_group_store", lambda: Scripted(said))
    owner = Planned()
    ranks = agreement.Agreement(owner.own, owner.take)
    ranks.refuse(BudgetError("500 are needed", 500, 1.0, None))
    parameter = nn.Parameter(torch.zeros(1))
    parameter.grad = torch.zeros(1)
    try:
        for _ in range(1000):
            torch.optim.SGD([parameter], lr=0.1).step()
    except BudgetError as error:
        return ranks.meetings, error
    finally:
        ranks.close()
    raise AssertionError("nobody has raised")


WAITING, DONE = {"done": False, "plan": None}, {"done": True, "plan": None}
ASKING = {"error": "900 are needed", "nbytes": 900, "seconds": 1.0, "plan": None}


def test_a_refused_rank_waits_until_all_have_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    said = [[WAITING, WAITING], [DONE, WAITING], [WAITING, WAITING], [DONE, ASKING]]
    meetings, error = refused(said, monkeypatch)
    assert meetings == 4 and error.smallest_nbytes == 900
    assert "of 3 ranks, 2 can not keep the budget. Rank 2 asks for the most: 900 are needed" in str(error)


def test_ranks_that_do_not_find_out_are_not_waited_for_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    meetings, error = refused([[WAITING, WAITING], [DONE, WAITING]], monkeypatch)
    assert meetings == agreement.MOST_MEETINGS and error.smallest_nbytes == 500
    told = (
        "of 3 ranks, 1 can not keep the budget, and 1 may ask for more, as no plan is found for them yet. Rank 0 asks"
    )
    assert told in str(error)


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_an_allocation_that_fails_on_one_rank_is_what_all_are_told(tmp_path: Path, world: int) -> None:
    found = run_together(tmp_path, running_out, 1, world=world)
    text = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes."
    assert found[1] == ("RuntimeError", text)
    assert {each for rank, each in enumerate(found) if rank != 1} == {("RuntimeError", f"rank 1 of {world}: {text}")}


def test_without_a_process_group_there_is_nobody_to_agree_with() -> None:
    with pytest.raises(PlanError, match=r"agree=True, but there is no process group\. Call torch\.distributed"):
        Budgeted("80%", agree=True)
