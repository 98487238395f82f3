"""Plans that move values to a disk: the same bits, the budget, times that are measured, and nothing left behind."""

from __future__ import annotations

import gc
import os
import threading
from pathlib import Path

import pytest
import torch
from step_problems import gradients_of
from torch import Tensor, nn

import backstash as bs
from backstash.errors import BudgetError, PlanError
from backstash.planning.measure import link
from backstash.planning.measure.link import Link, Speed
from backstash.planning.measure.profiling import profile
from backstash.planning.model.problem import StepProfile
from backstash.planning.search.planner import Planner

FAST = Link("disk", "", Speed(0.0, 1e-10, 0.0), Speed(1e-4, 1e-10, 1.0), Speed(1e-4, 1e-10, 1.0))


def network(extra: nn.Module | None = None) -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()) for _ in range(3)]
    last = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2)]
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), *blocks, *([extra] if extra else []), *last)


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A disk whose speed is not measured, in a folder of its own."""

    def measured(device: str, offload_to: object = None) -> Link:
        return Link(FAST.store, str(tmp_path), FAST.hand_over, FAST.out, FAST.back)

    monkeypatch.setattr("backstash.planning.measure.link.measured", measured)
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("allow", [("offload",), ("offload", "lossless", "recompute")])
def test_what_was_moved_comes_back_with_the_same_bits_within_the_budget(fast: Path, allow: tuple[str, ...]) -> None:
    model, x = network(), torch.randn(4, 3, 96, 96)
    plain = gradients_of(model, x)
    found = profile(lambda: model(x).square().sum().backward(), model, allow=allow)
    with pytest.raises(BudgetError) as refused:
        bs.plan(found, 1, allow=allow)
    low = refused.value.smallest_nbytes  # which was reached in a step: how many values wait is up to the machine's disk
    plan = bs.plan(found, low + (found.plain_peak_nbytes - low) // 5, allow=allow)
    assert (plan.store, plan.directory, plan.error) == ("disk", str(fast), 0.0)
    assert any(decision.kind == "offload" for decision in plan.decisions) and plan.fetches
    session = bs.Session(bs.Plan.from_json(plan.to_json()), model=model)
    for _ in range(2):
        assert all(torch.equal(a, b) for a, b in zip(gradients_of(model, x, session), plain, strict=True))

    def again() -> None:
        with session:
            loss = model(x).square().sum()
        loss.backward()

    assert bs.measure(again).peak_nbytes <= plan.budget
    assert session.stores["disk"].usage().count == 0 and not list(fast.iterdir())


class Breaks(nn.Module):
    """Raises in its forward pass, or in backward, if it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.when = ""

    def forward(self, x: Tensor) -> Tensor:
        if self.when == "forward":
            raise RuntimeError("broken")
        if self.when == "backward":
            x.register_hook(self._break)
        return x

    def _break(self, gradient: Tensor) -> None:
        raise RuntimeError("broken")


@pytest.mark.parametrize("when", ["forward", "backward"])
def test_nothing_is_left_behind_by_a_step_that_breaks(fast: Path, when: str) -> None:
    extra = Breaks()
    model, x = network(extra), torch.randn(4, 3, 96, 96)
    found = profile(lambda: model(x).square().sum().backward(), model, allow="offload")
    planner = Planner(StepProfile.from_json(found.to_json()), "offload")
    plan = planner.plan(planner.solutions[0].peak_nbytes)
    del found, planner
    gc.collect()
    files, threads = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else 0, threading.active_count()
    session = bs.Session(plan, model=model)
    plain = gradients_of(model, x)
    extra.when = when
    with pytest.raises(RuntimeError, match="broken"):
        gradients_of(model, x, session)
    extra.when = ""
    gc.collect()
    assert session.stores["disk"].usage().count == 0
    assert all(torch.equal(a, b) for a, b in zip(gradients_of(model, x, session), plain, strict=True))
    del session
    gc.collect()
    assert not list(fast.iterdir())
    if files:
        assert len(os.listdir("/proc/self/fd")) <= files
    for thread in threading.enumerate():
        if thread.name.startswith("backstash-"):
            thread.join(10)
    assert threading.active_count() <= threads


def test_the_disk_of_a_plan_may_be_given(fast: Path, tmp_path: Path) -> None:
    model, x = network(), torch.randn(4, 3, 96, 96)
    found = profile(lambda: model(x).square().sum().backward(), model, allow="offload")
    planner = Planner(StepProfile.from_json(found.to_json()), "offload")
    plan = planner.plan(planner.solutions[0].peak_nbytes)
    with bs.stores.DiskStore(tmp_path / "mine") as store:
        session = bs.Session(plan, model=model, stores={"disk": store})
        assert session.stores["disk"] is store
        gradients_of(model, x, session)
        assert store.usage().peak_nbytes > 0


def test_the_speed_of_a_disk_is_measured_once(tmp_path: Path) -> None:
    found = link.measured("cpu", tmp_path)
    assert found is link.measured("cpu", tmp_path)
    assert (found.store, found.directory) == ("disk", str(tmp_path)) and not list(tmp_path.iterdir())
    assert found.seconds_out(32 << 20, 0.0) > found.seconds_out(1 << 20, 0.0) > 0
    assert found.seconds_back(32 << 20, 0.0) > 0


def test_what_is_hidden_beside_computations_costs_nothing() -> None:
    half = Speed(0.0, 1e-9, 0.5)
    assert half.exposed(1000, 0.0) == pytest.approx(1e-6)
    assert half.exposed(1000, 1.0) == pytest.approx(0.5e-6)
    assert half.exposed(1000, 0.4e-6) == pytest.approx(0.8e-6)
    assert FAST.seconds_out(link.STAGING, 1.0) == pytest.approx(link.STAGING * 1e-10)
    more = link.STAGING + (1 << 20)  # what finds no room beside the step is waited for
    assert FAST.seconds_out(more, 1.0) == pytest.approx(more * 1e-10 + (1 << 20) * 1e-10)


def test_memory_is_no_place_to_move_to(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(link, "_file_system", lambda path: "tmpfs")
    monkeypatch.delenv("BACKSTASH_OFFLOAD_TO", raising=False)
    for offload_to in (None, tmp_path):
        with pytest.raises(
            PlanError, match=r"values are moved to a disk, but .* is in memory \(tmpfs\).* Name a folder"
        ):
            link.folder(offload_to)
    with pytest.raises(PlanError, match="offloading was asked for"):
        bs.profile(lambda: None, allow="offload")


def test_a_folder_that_cannot_be_written_to_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(PlanError, match="is no folder that can be written to"):
        link.folder(file)


def test_no_folder_is_made_of_a_name_that_may_be_mistyped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(link, "_file_system", lambda path: "ext4")
    with pytest.raises(PlanError, match=r"scrach/plans would be in .*scrach, which is not there\. Name a folder"):
        link.folder(tmp_path / "scrach" / "plans")
    assert link.folder(tmp_path / "plans") == str(tmp_path / "plans") and not list(tmp_path.iterdir())
    monkeypatch.delenv("BACKSTASH_OFFLOAD_TO", raising=False)
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path / "new" / "temporary"))
    link.folder()
    assert (tmp_path / "new").is_dir(), "what nobody has typed is made"


def test_over_a_slow_link_dense_values_are_moved_with_shorter_exponents(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    slow = Speed(1e-4, 1e-7, 0.0)
    monkeypatch.setattr(
        "backstash.planning.measure.link.measured", lambda *_: Link("disk", str(tmp_path), slow, slow, slow)
    )
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.LayerNorm(128), nn.Linear(128, 128), nn.GELU()) for _ in range(3)]
    model, x = nn.Sequential(*layers, nn.Linear(128, 16)).bfloat16(), torch.randn(2048, 128).bfloat16()
    plain = gradients_of(model, x)
    found = profile(lambda: model(x).square().sum().backward(), model, allow="offload")
    offered = [{choice.name: choice for choice in value.choices} for value in found.values]
    both = [each for each in offered if "offload exponents" in each]
    assert both and all("offload" in each for each in both)
    for each in both:
        as_it_is, shorter = each["offload"], each["offload exponents"]
        assert shorter.encode_seconds + shorter.decode_seconds < as_it_is.encode_seconds + as_it_is.decode_seconds
    planner = Planner(found, "offload")
    plan = planner.plan(planner.solutions[0].peak_nbytes + (64 << 10))
    moved = {each.key: each.nbytes for each in plan.decisions if each.choice == "offload exponents"}
    assert moved
    session = bs.Session(bs.Plan.from_json(plan.to_json()), model=model)
    for _ in range(2):
        assert all(torch.equal(a, b) for a, b in zip(gradients_of(model, x, session), plain, strict=True))
    rows = {row.key: row for row in session.report().rows}
    assert all((rows[key].codec, rows[key].store) == ("exponents", "disk") for key in moved)
    assert all(rows[key].stash_nbytes < 0.78 * nbytes for key, nbytes in moved.items())
