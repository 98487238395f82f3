"""Ranks that keep one budget together: a plan for all of them, and one error where one of them has none.

Note: [ranks that agree]
    Ranks meet where an optimizer's step has ended. Each gets there without waiting for what another one does in its
    next step, whatever the parallelism: with DDP, FSDP2 and tensor parallelism, and in pipelines, where forward and
    backward passes of ranks wait for each other. They meet after each step until all of them have a plan, and then no
    more: a settled step exchanges nothing. What they tell each other goes through the store of keys and values that the
    process group was made with, and not through collectives, so it cannot come between those of the program.

    A rank for which no plan fits says so there, instead of raising an error in its backward pass while the others go
    on, and trains on. When each rank has a plan or none, all raise the same error, that of the rank which asks for the
    most. Steps that never settle are not waited for without end. An allocation that fails does so in the middle of a
    step, where the others wait for this rank in a collective, which nobody can call off. So the error is left in the
    store before it is raised; when this rank's process ends, the collectives of the others fail, and they raise that
    error in place of theirs.

    The process that keeps the store may end first, because the training is over. Then each of the others goes on under
    its own plan. A rank that ends before the ranks have agreed says so in the store, when its budget is closed or gone
    or its process ends, and the others go on likewise. One that is killed cannot say it, and is waited for.
"""

from __future__ import annotations

import json
import os
import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import timedelta
from itertools import count
from typing import Any
from weakref import WeakMethod, finalize

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from backstash.errors import BatchTooLargeError, BudgetError, PlanError
from backstash.planning.model.plan import Plan
from backstash.torch_internals import default_group_store

SECONDS = 600.0
"""How long a rank waits for the others after a step."""

PAUSES = 0.001, 0.1
"""Seconds between two looks whether another rank has said something, or has ended: the first, and the longest."""

MOST_MEETINGS = 100
"""In so many meetings at most a rank waits with its refused budget for what the others find."""

LATEST = 2.0
"""How long it waits for the reason why a collective has failed, which is written before the connection ends."""


class _HasEndedError(Exception):
    """A rank that is waited for meets no more."""


_numbers = count()
"""Of the budgets of this process: each rank makes them in the same order."""


class Agreement:
    """What the ranks of a training tell each other (Note: [ranks that agree]).

    Args:
        own: a method that returns whether this rank is done with planning, and its plan, None if there is none.
        agreed: a method that is called with the plan of all ranks when all are done; None if their steps differ.

    Attributes:
        is_settled: whether all ranks are done.

    Raises:
        PlanError: there is no process group.
    """

    def __init__(
        self,
        own: Callable[[], tuple[bool, Plan | None]],
        agreed: Callable[[Plan | None], None],
        aside: AbstractContextManager[object] | None = None,
    ) -> None:
        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            raise PlanError(
                "training within a budget was asked for with agree=True, but there is no process group. Call "
                "torch.distributed.init_process_group() first, or leave agree= out."
            )
        from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # torch exports it for everybody

        self.rank, self._count = torch.distributed.get_rank(), torch.distributed.get_world_size()
        self._store = PrefixStore(f"backstash/budget{next(_numbers)}", default_group_store())
        self._own, self._agreed = WeakMethod(own), WeakMethod(agreed)  # torch holds this object by its hook
        self._aside = nullcontext() if aside is None else aside
        self._refused: BudgetError | None = None
        self._waits = 0  # in so many meetings a budget was refused
        self._is_inside = False
        self.meetings = 0
        self.is_settled = self._count == 1
        self._meets = not self.is_settled
        self._hook = register_optimizer_step_post_hook(self._after_step) if self._meets else None
        self._ends = finalize(self, _tell_end, self._store, f"ended/{self.rank}", os.getpid())
        if not self._meets:
            self._ends.detach()

    def close(self) -> None:
        """Meets no more, which the others are told unless all have agreed."""
        self._meets = False
        self._ends()
        if not self._is_inside:
            self.tidy()

    def tidy(self) -> None:
        """Takes the hook away that is needed no more, between steps: an optimizer that is calling its hooks fails."""
        if self._hook is not None and not self._meets:
            self._hook.remove()
            self._hook = None

    def refuse(self, error: BudgetError) -> None:
        """No plan fits this rank's steps: all ranks raise that error when they meet.

        Raises:
            BudgetError: the error itself, where they meet no more.
        """
        if not self._meets:
            raise BatchTooLargeError(error)
        self._refused = error

    # -- meetings ------------------------------------------------------------------------------------------------------

    def _after_step(self, optimizer: object, args: object, kwargs: object) -> None:
        if self._meets and not self._is_inside:  # an optimizer may hold another one
            self._is_inside = True
            try:
                with self._aside:
                    self._meet()
            finally:
                self._is_inside = False

    def _meet(self) -> None:
        """Tells the others how far this rank is, and hears how far they are."""
        own = self._own()
        if own is None:  # whoever kept the budget is gone
            self.close()
            return
        (is_done, plan), error = own(), self._refused
        mine: dict[str, Any] = {"done": is_done, "plan": plan.to_json() if is_done and plan is not None else None}
        if error is not None:
            smallest = error.plan.to_json() if isinstance(error.plan, Plan) else None
            mine = {"error": str(error), "nbytes": error.smallest_nbytes, "seconds": error.seconds, "plan": smallest}
        try:
            said = self._exchange(mine)
        except (torch.distributed.DistNetworkError, _HasEndedError) as ended:
            self.close()
            if error is not None:
                raise BatchTooLargeError(error) from ended
            is_rank = isinstance(ended, _HasEndedError)
            who = str(ended) if is_rank else "the process that keeps the process group's store"
            warnings.warn(
                f"rank {self.rank} of {self._count} was asked to agree on a plan after a step, but {who} has ended. "
                f"This rank goes on under its own plan.",
                stacklevel=2,
            )
            return
        failed = [(rank, each) for rank, each in enumerate(said) if "error" in each]
        unknown = sum("error" not in each and not each["done"] for each in said)
        self._waits += bool(failed)
        if failed and (not unknown or self._waits >= MOST_MEETINGS):
            self.close()
            others = f", and {unknown} may ask for more, as no plan is found for them yet" if unknown else ""
            rank, worst = max(failed, key=lambda pair: (pair[1]["nbytes"], -pair[0]))
            smallest_plan = None if worst["plan"] is None else Plan.from_json(worst["plan"])
            said_by = f"of {self._count} ranks, {len(failed)} can not keep the budget{others}"
            facts = worst["nbytes"], worst["seconds"], smallest_plan
            raise BatchTooLargeError(BudgetError(f"{said_by}. Rank {rank} asks for the most: {worst['error']}", *facts))
        if not (failed or unknown):
            self._ends.detach()
            self.close()
            self.is_settled = True
            plans = [Plan.from_json(each["plan"]) for each in said if each["plan"] is not None]
            agreed = self._agreed()
            if agreed is not None:
                agreed(_common(plans) if len(plans) == self._count else None)

    def _exchange(self, mine: dict[str, Any]) -> list[dict[str, Any]]:
        """Returns what each rank has said in this meeting."""
        number, self.meetings = self.meetings, self.meetings + 1
        self._store.set(f"{number}/{self.rank}", json.dumps(mine))
        said = []
        for rank in range(self._count):
            key = f"{number}/{rank}"
            self._wait_for(key, rank)
            said.append(json.loads(self._store.get(key)))
        if number:  # all are here, so all have read what was said in the meeting before
            self._store.delete_key(f"{number - 1}/{self.rank}")
        return said

    def _wait_for(self, key: str, rank: int) -> None:
        """Waits until a rank has said something under a key."""
        until, pause = time.monotonic() + SECONDS, PAUSES[0]
        while not self._store.check([key]):  # torch would warn of each wait that has a shorter end
            if self._store.check([f"ended/{rank}"]) and not self._store.check([key]):  # it says the latter first
                raise _HasEndedError(f"rank {rank}")
            if time.monotonic() >= until:
                self.close()
                raise PlanError(
                    f"rank {self.rank} of {self._count} was asked to agree on a plan after a step, but rank {rank} has "
                    f"said nothing for {SECONDS:.0f} s. Step the optimizers of all ranks equally often, or leave "
                    f"agree= out."
                )
            time.sleep(pause)
            pause = min(2 * pause, PAUSES[1])

    # -- failures ------------------------------------------------------------------------------------------------------

    def fail(self, error: BaseException) -> None:
        """An allocation has failed in this rank's step: whoever waits for it finds out why."""
        kind = "gpu" if isinstance(error, torch.OutOfMemoryError) else "cpu"
        text = f"rank {self.rank} of {self._count}: {error}"
        with suppress(torch.distributed.DistNetworkError):  # nobody waits any more
            self._store.set("failed", json.dumps({"kind": kind, "text": text, "rank": self.rank}))

    def reason(self) -> BaseException | None:
        """Returns another rank's failure, which is why a collective of this one has failed; None for no such reason."""
        try:
            self._store.wait(["failed"], timedelta(seconds=LATEST))
            found = json.loads(self._store.get("failed"))
        except RuntimeError:  # nobody has left one, or whoever kept the store is gone
            return None
        if found["rank"] == self.rank:
            return None
        return torch.OutOfMemoryError(found["text"]) if found["kind"] == "gpu" else RuntimeError(found["text"])


def _tell_end(store: Any, key: str, process: int) -> None:
    """Leaves word that a rank meets no more, unless a process that was forked from it ends."""
    with suppress(RuntimeError):  # nobody keeps the store any more
        if os.getpid() == process:
            store.set(key, "")


def _common(plans: list[Plan]) -> Plan | None:
    """Returns the plan that all ranks take, the one with the largest peak; None if they have other values each."""
    values = [sorted((each.key, each.spec) for each in plan.decisions) for plan in plans]
    if any(each != values[0] for each in values):
        return None
    return max(plans, key=lambda plan: (plan.peak_nbytes, plan.fingerprint))
