"""A budget whose store is full: the training goes on with the same bits, under plans that move nothing."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from backstash.errors import BudgetError, StoreError
from backstash.planning.measure.link import Link, Speed
from backstash.planning.run.budgeted import Budgeted
from backstash.stores import DiskStore

FREE = Speed(0.0, 1e-15, 1.0)
"""Of transfers that take less than whatever makes a value again."""

ROOM, LITTLE = 64 << 20, 1 << 20
LATER = 20
"""In which step a store that had room is full."""


def trained(session: AbstractContextManager[Any], before: Callable[[int], None] = lambda step: None) -> list[Tensor]:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()) for _ in range(3)]
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten())
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    x = torch.randn(4, 3, 96, 96)
    for step in range(2 * LATER):
        before(step)
        with session:
            loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return [x.detach().clone() for x in model.parameters()]


class Disk:
    """The stores of plans, which have so much room."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.folder, self.room, self.is_missing = folder, ROOM, False
        self._stores: list[DiskStore] = []
        link = Link("disk", str(folder), FREE, FREE, FREE)
        monkeypatch.setattr("backstash.planning.measure.link.measured", lambda device, offload_to=None: link)
        monkeypatch.setattr("backstash.planning.model.plan.open_store", self._open)

    def _open(self, store: str, directory: str) -> DiskStore:
        if self.is_missing:
            raise StoreError("no file can be made.")
        self._stores.append(DiskStore(directory, capacity=self.room, in_flight=8 << 20))
        return self._stores[-1]

    def fill(self, step: int) -> None:
        """From a step on there is little room."""
        if step == LATER:
            for store in self._stores:
                store._holdings.capacity = LITTLE

    def assert_nothing_is_left(self) -> None:
        self._stores.clear()
        gc.collect()
        assert not list(self.folder.iterdir())
        if Path("/proc/self/fd").exists():
            entries = [entry for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()]
            assert not any(os.readlink(entry).startswith(str(self.folder)) for entry in entries)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Disk:
    return Disk(monkeypatch, tmp_path)


def hurried(allow: tuple[str, ...], **options: Any) -> Budgeted:
    session = Budgeted("75%", allow, min_nbytes=1024, **options)
    session.is_hurried = True
    return session


@pytest.mark.parametrize("when", ["at once", "later", "as it is opened"])
def test_training_goes_on_under_plans_that_move_nothing(disk: Disk, when: str, compiles_nothing: None) -> None:
    session = hurried(("offload", "recompute"))
    disk.room = LITTLE if when == "at once" else ROOM
    disk.is_missing = when == "as it is opened"
    moved = []

    def before(step: int) -> None:
        moved.append(session.found.plan is not None and session.found.plan.fetches is not None)
        if when == "later":
            disk.fill(step)

    with pytest.warns(UserWarning, match="nothing is moved any more") as told:
        found = trained(session, before)
    assert len(told) == 1
    assert all(torch.equal(x, y) for x, y in zip(found, trained(nullcontext()), strict=True))
    assert any(moved) and not moved[-1]
    assert session.found.plan is not None and session.found.plan.remakes_anything
    assert max(session.found.planned_nbytes, session.found.reached_nbytes) <= session.found.budget_nbytes
    assert "nothing is moved any more" in session.found.trouble in str(session.report().notes[-1])
    disk.assert_nothing_is_left()


def test_a_budget_that_nothing_fits_without_the_store_is_refused(disk: Disk, compiles_nothing: None) -> None:
    disk.room = LITTLE
    session = hurried(("offload",))
    with (
        pytest.warns(UserWarning, match="nothing is moved any more"),
        pytest.raises(BudgetError, match="smallest budget that fits.*has no room for.*make room there"),
    ):
        trained(session)
    session.close()


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_budget_that_was_kept_is_kept_as_well_as_it_can_be(disk: Disk, compiles_nothing: None) -> None:
    session = hurried(("offload",))
    with pytest.warns(UserWarning, match="nothing is moved any more"):
        found = trained(session, disk.fill)
    assert all(torch.equal(x, y) for x, y in zip(found, trained(nullcontext()), strict=True))
    assert "the budget is not kept" in session.found.trouble and "has no room" in session.found.trouble


def test_a_store_of_the_users_may_be_full_as_well(disk: Disk, compiles_nothing: None) -> None:
    with DiskStore(disk.folder, capacity=LITTLE, in_flight=8 << 20) as store:
        session = hurried(("offload", "recompute"), stores={"disk": store})
        with pytest.warns(UserWarning, match="nothing is moved any more"):
            found = trained(session)
        assert all(torch.equal(x, y) for x, y in zip(found, trained(nullcontext()), strict=True))
        assert store.usage().count == 0
