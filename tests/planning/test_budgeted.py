"""Each kind of steps has a plan of its own, whatever opens its Session; bits are plain's and nothing is left."""

from __future__ import annotations

import gc
import math
import resource
import subprocess
import sys
import warnings
import weakref
from collections import UserDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backstash.capture import modules
from backstash.capture.modules import signature_of
from backstash.errors import BatchTooLargeError, BudgetError, MeasureError, PlanError
from backstash.planning.measure.profiling import profile_of
from backstash.planning.model.plan import Plan
from backstash.planning.model.problem import StepProfile
from backstash.planning.run import course, retry
from backstash.planning.run.buckets import size_ratio
from backstash.planning.run.budgeted import Budgeted
from backstash.planning.search.planner import Planner
from backstash.report.meter import CountedPeak
from backstash.testing import equal_bits

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def network() -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Conv2d(3, 8, 3, padding=1)]
    for _ in range(4):
        layers += [nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.1), nn.Conv2d(8, 8, 3, padding=1)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(128, 10))


def trained(
    make: Callable[[nn.Module], AbstractContextManager[Any]], shapes: Sequence[int], accumulate: int = 1
) -> list[Tensor]:
    """The weights after steps with images of these widths, and the generator's state."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    torch.manual_seed(1)
    for number, width in enumerate(shapes):
        x, y = torch.randn(8, 3, width, width), torch.randint(0, 10, (8,))
        with make(model):
            loss = F.cross_entropy(model(x), y) / accumulate
        loss.backward()
        if (number + 1) % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
    return [*(p.detach().clone() for p in model.state_dict().values()), torch.get_rng_state()]


def assert_same(shapes: Sequence[int], session: Budgeted, accumulate: int = 1) -> None:
    expected = trained(lambda model: nullcontext(), shapes, accumulate)
    found = trained(lambda model: session, shapes, accumulate)
    assert all(torch.equal(x, y) for x, y in zip(expected, found, strict=True))


def assert_nothing_is_left() -> None:
    assert torch.autograd.backward.__module__ == "torch.autograd"
    assert not nn.modules.module._global_forward_pre_hooks
    assert not modules.is_active()
    assert not torch.autograd._profiler_enabled()


def peak_of(session: Budgeted, model: nn.Module, width: int) -> int:
    """The counted peak of a step above what is held before it, with gradients there."""
    with CountedPeak() as counter:
        with session:
            loss = model(torch.randn(8, 3, width, width)).square().mean()
        loss.backward()
        del loss
    return counter.peak_nbytes


def test_a_session_around_each_forward_pass_keeps_the_budget() -> None:
    session = Budgeted("60%", min_nbytes=1024)
    assert_same([16] * 10, session)
    found = session.found
    assert found.plan is not None and found.plan.unknown == () and not found.plan.is_empty
    assert {decision.key.split("/")[0] for decision in found.plan.decisions} >= {"1", "2", "4"}
    assert 0 < found.reached_nbytes <= found.budget_nbytes < found.plain_nbytes
    session.close()
    assert_nothing_is_left()
    report = session.report()
    assert report.steps == 10
    assert any("planned" in note and "reached" in note for note in report.notes)


@pytest.mark.slow
def test_each_shape_has_a_plan_of_its_own() -> None:
    session = Budgeted("60%", min_nbytes=1024)
    assert_same([16] * 8 + [16] * 20 + [12, 16, 12, 12, 12, 12, 12, 12, 12] + [12] * 20, session)
    assert session.found.shapes == 2
    plans = [bucket.plan for bucket in session.buckets]
    assert all(plan is not None and plan.unknown == () for plan in plans)
    assert {plan.budget for plan in plans if plan is not None} == {session.found.budget_nbytes}


@pytest.mark.slow
def test_the_first_step_of_a_larger_shape_keeps_the_budget_and_is_never_run_plainly() -> None:
    session = Budgeted("60%", min_nbytes=1024)
    model = network()
    for _ in range(40):
        with session:
            loss = model(torch.randn(8, 3, 16, 16)).square().mean()
        loss.backward()
    plain = session.found.plain_nbytes
    budget = session.found.budget_nbytes
    first = peak_of(session, model, 18)
    assert first < plain
    assert first <= 1.05 * budget
    for _ in range(8):
        assert peak_of(session, model, 18) < plain
    assert session.found.reached_nbytes <= budget
    assert session.buckets.of(signature_of([torch.randn(8, 3, 18, 18)])).planner is None


@pytest.mark.usefixtures("compiles_nothing")
def test_a_loop_inside_of_a_budget_hears_of_the_first_module_of_each_pass_alone() -> None:
    def fail(gradient: Tensor) -> None:
        raise ValueError("the program's own")

    model, seen, signatures = network(), list[list[int]](), list[Any]()
    model[3].register_forward_hook(lambda *_: seen.append(list(nn.modules.module._global_forward_pre_hooks)))
    with Budgeted("80%", min_nbytes=0) as session:
        for number in range(24):
            width = 16 if number < 20 else 12
            y = model(torch.randn(8, 3, width, width))
            assert session.last is not None
            signatures.append(session.last.signature)
            if number in (17, 19):
                y.register_hook(fail)
                with pytest.raises(ValueError, match="the program's own"):
                    y.sum().backward()
            else:
                y.square().mean().backward()
            assert modules._hearing == [session._before_module]
    # The Session's own; none in the plain step of the first shape.
    assert sorted(map(len, seen)) == [0] + [1] * (len(seen) - 1)
    assert len(set(signatures[:20])) == 1
    assert len(set(signatures[20:])) == 1 and signatures[20] != signatures[19]
    session.close()
    assert_nothing_is_left()


@pytest.mark.slow
def test_accumulated_gradients_count() -> None:
    session = Budgeted("70%", min_nbytes=1024)
    assert_same([16] * 18, session, accumulate=3)
    assert 0 < session.found.reached_nbytes <= session.found.budget_nbytes


class Branching(nn.Module):
    """Takes another branch in some steps."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(64, 256), nn.Linear(64, 256), nn.Linear(256, 1)
        self.takes_second = False

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.gelu(self.second(x)) if self.takes_second else F.relu(self.first(x))
        result: Tensor = self.last(torch.tanh(hidden))
        return result


def test_a_branch_that_was_not_seen_is_planned_for_and_both_branches_are_known_then() -> None:
    def run(session: Any) -> list[Tensor]:
        torch.manual_seed(0)
        model = Branching()
        for number in range(70):
            model.takes_second = number >= 30 and number % 3 > 0
            with session:
                loss = model(torch.randn(64, 64)).square().mean()
            loss.backward()
        return [torch.zeros(1) if p.grad is None else p.grad.clone() for p in model.parameters()]

    session = Budgeted("80%", min_nbytes=1024)
    assert all(torch.equal(x, y) for x, y in zip(run(nullcontext()), run(session), strict=True))
    plan = session.found.plan
    assert plan is not None
    keys = [decision.key for decision in plan.decisions]
    assert any("Relu" in key for key in keys) and any("Gelu" in key for key in keys)
    assert plan.unknown == ()


def test_autocast_is_another_kind_of_steps() -> None:
    x = torch.ones(2, 2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = signature_of([x])
    assert inside != signature_of([x])


class Rows(UserDict[str, Any]):
    """Iterates over the rows of its tensors and not over its keys."""

    def __iter__(self) -> Iterator[str]:
        raise TypeError("iteration over no rows")

    def values(self) -> Any:
        """The tensors."""
        return self.data.values()


class Closed(Rows):
    """Has nothing to do with those who look into it."""

    def values(self) -> Any:
        """Refuses."""
        raise RuntimeError("not yet")


def test_signatures_are_of_nested_inputs() -> None:
    x, ids = torch.ones(4, 3), torch.ones(4, 7, dtype=torch.int64)
    assert signature_of({"a": [x], "b": (ids, None, 3)}) == (((4, 3), "float32"), ((4, 7), "int64"))
    assert signature_of([1, None]) == ()
    assert signature_of(Rows({"a": x, "b": [ids]})) == (((4, 3), "float32"), ((4, 7), "int64"))
    assert signature_of([Closed({"a": x}), ids]) == (((4, 7), "int64"),)
    assert size_ratio(signature_of([x]), signature_of([torch.ones(8, 3)])) == 2
    assert size_ratio(signature_of([ids]), signature_of([torch.ones(4, 14, dtype=torch.int64)])) == 4
    assert size_ratio(signature_of([ids]), signature_of([ids[:, :3]])) < 1
    assert size_ratio(signature_of([x]), signature_of([x, ids])) == math.inf
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = signature_of([x])
    assert size_ratio(signature_of([x]), inside) == 1
    assert size_ratio(inside, signature_of([x])) == 2


@pytest.mark.parametrize("kind", ["another input", "one input less", "autocast"])
def test_steps_may_have_other_inputs_later(kind: str) -> None:
    model = network()
    session = Budgeted("90%", min_nbytes=0)
    x = torch.randn(8, 3, 16, 16)
    for number in range(36):
        is_late = number >= 18
        has_more = is_late != (kind == "one input less") and kind != "autocast"
        with session, torch.autocast("cpu", torch.bfloat16, enabled=is_late and kind == "autocast"):
            loss = Scaled(model)(x, *([torch.ones(8, 1)] if has_more else [])).float().square().mean()
        loss.backward()
        model.zero_grad()
    assert len({each.signature for each in session.buckets}) == 2
    assert session.found.plan is not None and session.found.reached_nbytes > 0


class Scaled(nn.Module):
    """A model whose result may be multiplied by a second input."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, *factors: Tensor) -> Tensor:
        result: Tensor = self.model(x).flatten(1)
        for factor in factors:
            result = result * factor
        return result


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided], ids=str)
def test_nested_tensors_are_inputs(layout: torch.layout) -> None:
    """Their sizes are no numbers, or there are none."""

    def gradients(session: Budgeted | None) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64), nn.GELU(), nn.Linear(64, 8))
        for step in range(10):
            parts = [torch.randn(40 + step % 2, 64), torch.randn(60, 64)]
            x = torch.nested.nested_tensor(parts, layout=layout)
            with session or nullcontext():
                found = model(x)
                loss = sum(part.square().mean() for part in found.unbind())
            assert isinstance(loss, Tensor)
            loss.backward()
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    expected, session = gradients(None), Budgeted("100%", min_nbytes=1024)
    assert all(map(equal_bits, expected, gradients(session)))
    session.close()


@pytest.mark.slow
def test_plans_are_kept_in_a_folder_and_spare_the_next_run_its_profile(tmp_path: Path) -> None:
    first = Budgeted("60%", min_nbytes=1024, folder=tmp_path)
    trained(lambda model: first, [16] * 12)
    (file,) = tmp_path.iterdir()
    plan = Plan.from_json(file.read_text())
    second = Budgeted("60%", min_nbytes=1024, folder=tmp_path)
    profiles: list[object] = []
    second.profiled = profiles.append  # type: ignore[method-assign]
    assert_same([16] * 12, second)
    assert profiles == []
    assert second.found.plan == plan


def test_a_folder_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="no such folder"):
        Budgeted("60%", folder=tmp_path / "missing")


@pytest.mark.slow
def test_a_budget_that_nothing_fits_is_an_error_of_the_backward_pass() -> None:
    session = Budgeted(1000, min_nbytes=1024)
    with pytest.raises(BudgetError, match="the smallest budget that fits"):
        trained(lambda model: session, [16] * 64)
    session.close()
    assert_nothing_is_left()


@pytest.mark.slow
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("step", [0, 2, 3, 5])
@pytest.mark.parametrize("error", [KeyError("the model's own"), KeyboardInterrupt()])
def test_an_exception_leaves_nothing_behind(where: str, step: int, error: BaseException) -> None:
    session, model = Budgeted("60%", min_nbytes=1024), network()

    def fail(*args: Any) -> None:
        raise error

    with pytest.raises(type(error)):
        for number in range(step + 1):
            x = torch.randn(8, 3, 16, 16)
            if number == step and where == "forward":
                model[4].register_forward_hook(fail)
            with session:
                loss = model(x).square().mean()
            if number == step:
                loss.register_hook(fail)
            loss.backward()
    assert_nothing_is_left()


def test_a_session_that_is_dropped_in_the_middle_leaves_nothing_behind() -> None:
    session, model = Budgeted("60%", min_nbytes=1024), network()
    for _ in range(3):
        with session:
            loss = model(torch.randn(8, 3, 16, 16)).square().mean()
        loss.backward()
    dropped, held = weakref.ref(session), weakref.ref(model)
    del session, model, loss
    gc.collect()
    assert dropped() is None and held() is None
    assert_nothing_is_left()


# -- allocations that fail -------------------------------------------------------------------------------------------


class Failing(nn.Module):
    """Its forward pass fails to allocate in one step, after a dropout and a batch norm have run."""

    def __init__(self, at: int, times: int = 1) -> None:
        super().__init__()
        self.body = network()
        self.at, self.times, self.calls = at, times, 0

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.body(x)
        self.calls += 1
        if self.at <= self.calls < self.at + self.times:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes.")
        return result


def stepped(session: Budgeted | None, at: int, times: int = 1, steps: int = 12) -> list[Tensor]:
    model = Failing(at if session is not None else 1000, times)
    torch.manual_seed(1)
    for _ in range(steps):
        x = torch.randn(8, 3, 16, 16)
        result = model(x) if session is None else session.step(model, x)
        result.square().mean().backward()
    return [*(p.detach().clone() for p in model.state_dict().values()), torch.get_rng_state()]


@pytest.mark.parametrize("at", [1, 2, 4, 6, 11])
def test_a_forward_pass_whose_allocation_failed_runs_once_more_with_the_same_bits(at: int) -> None:
    session = Budgeted("60%", min_nbytes=1024)
    assert all(torch.equal(x, y) for x, y in zip(stepped(None, at), stepped(session, at), strict=True))
    assert session.found.retried == 1
    session.close()
    assert_nothing_is_left()


@pytest.mark.slow
def test_a_second_failure_is_the_original_error_with_advice() -> None:
    session = Budgeted("60%", min_nbytes=1024)
    with pytest.raises(RuntimeError, match="DefaultCPUAllocator") as caught:
        stepped(session, 11, times=2)
    (note,) = caught.value.__notes__
    assert "within 60% was asked for" in note and "Ask for a smaller budget" in note
    assert_nothing_is_left()


@pytest.mark.slow
def test_a_pass_is_not_repeated_whose_buffers_are_too_large_to_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels of batch norm write new statistics without a new version, so nobody knows what was written."""
    monkeypatch.setattr(retry, "LARGEST_BUFFERS", 16)
    session = Budgeted("60%", min_nbytes=1024)
    with pytest.raises(RuntimeError, match="DefaultCPUAllocator") as caught:
        stepped(session, 11)
    (note,) = caught.value.__notes__
    assert "the step cannot be repeated" in note


SCRIPT = """
import resource, torch
from torch import nn
from backstash.planning.run.budgeted import Budgeted
torch.manual_seed(0)
layers = [nn.Sequential(nn.Tanh(), nn.Linear(64, 64)) for _ in range(4)]
model = nn.Sequential(nn.Linear(8, 64), *layers, nn.Linear(64, 1))
session = Budgeted("90%", min_nbytes=1024)
x, large = torch.randn(64, 8), torch.randn(1 << 20, 8)
for number in range(6):
    session.step(model, x).square().mean().backward()
used = int(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmSize"))) << 10
resource.setrlimit(resource.RLIMIT_AS, (used + (32 << 20), resource.RLIM_INFINITY))
try:
    session.step(model, large).square().mean().backward()
except RuntimeError as error:
    print(type(error).__name__, "can't allocate memory" in str(error), error.__notes__)
"""


@pytest.mark.slow
def test_memory_that_is_not_there_is_the_original_error_with_advice() -> None:
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", SCRIPT], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "RuntimeError True" in done.stdout and "was asked for" in done.stdout
    assert resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY


@pytest.mark.slow
def test_a_budget_is_not_refused_for_memory_that_one_step_held_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a communication library's thread may do, whose frees the profiler does not see."""
    profiles: list[StepProfile] = []

    def profile_with_more(*args: Any, **kwargs: Any) -> StepProfile:
        profile = profile_of(*args, **kwargs)
        profiles.append(profile)
        if len(profiles) > 1:
            return profile
        more = [nbytes + profile.plain_peak_nbytes for nbytes in profile.base_nbytes]
        moments = [tuple(nbytes + profile.plain_peak_nbytes for nbytes in each) for each in profile.moments]
        above = replace(profile, moments=())
        above = replace(above, base_nbytes=tuple(more), plain_peak_nbytes=2 * profile.plain_peak_nbytes)
        return replace(above, moments=tuple(moments))

    session = hurried("100%")
    assert_same([16] * 12, session)
    planner = session.buckets.largest().planner
    enough = (planner.at_most(0).peak_nbytes + planner.profile.plain_peak_nbytes) // 2  # on any machine
    session.close()
    monkeypatch.setattr(course, "profile_of", profile_with_more)
    session = Budgeted(enough, min_nbytes=1024)
    assert_same([16] * 12, session)
    assert len(profiles) == 2
    assert session.found.plan is not None and 0 < session.found.reached_nbytes <= session.found.budget_nbytes
    session.close()
    assert_nothing_is_left()


@pytest.mark.parametrize("is_alone", [True, False])
def test_a_budget_that_is_far_too_small_is_refused_by_one_survey(
    is_alone: bool, monkeypatch: pytest.MonkeyPatch, compiles_nothing: None
) -> None:
    """Where there are other processes, a thread of their library may free what the profiler does not see."""
    profiles: list[StepProfile] = []

    def counted(*args: Any, **kwargs: Any) -> StepProfile:
        profiles.append(profile_of(*args, **kwargs))
        return profiles[-1]

    monkeypatch.setattr(course, "profile_of", counted)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: not is_alone)
    session = hurried("1%")
    with pytest.raises(BatchTooLargeError, match="the smallest budget that fits"):
        trained(lambda model: session, [16] * 60)
    assert len(profiles) == (1 if is_alone else course.MOST_SURVEYED)
    session.close()
    assert_nothing_is_left()


def test_two_surveys_refuse_such_a_budget_where_no_plain_step_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that has compiled something, where what is compiled would be compiled anew for plain steps."""
    profiles: list[StepProfile] = []

    def counted(*args: Any, **kwargs: Any) -> StepProfile:
        profiles.append(profile_of(*args, **kwargs))
        return profiles[-1]

    monkeypatch.setattr(course, "profile_of", counted)
    monkeypatch.setattr(course, "may_compile", lambda: True)
    session = hurried("1%")
    with pytest.raises(BatchTooLargeError, match="the smallest budget that fits"):
        trained(lambda model: session, [16] * 60)
    assert len(profiles) == 2
    session.close()
    assert_nothing_is_left()


def count_more(monkeypatch: pytest.MonkeyPatch, more: Callable[[int], int]) -> None:
    """Has steps under a plan reach more bytes than they do, by how many plans were made."""
    count = course.Course._count

    def counted(self: course.Course) -> Any:
        result = yield from count(self)
        found = self._bucket.found
        self._bucket.found = replace(found, reached_nbytes=found.reached_nbytes + more(found.plans))
        return result

    monkeypatch.setattr(course.Course, "_count", counted)


def hurried(budget: str, **options: Any) -> Budgeted:
    """Returns a budget whose plans need few steps, as many on every machine."""
    session = Budgeted(budget, min_nbytes=1024, **options)
    session.is_hurried = True
    return session


def test_a_share_of_what_is_reserved_is_one_of_what_a_plain_step_reserves() -> None:
    session = hurried("100%", of="reserved")
    assert_same([16] * 40, session)
    found = session.found
    assert found.plan is not None and found.plan.is_empty and not found.trouble
    assert 0 < found.reached_nbytes == found.plain_nbytes == found.budget_nbytes > found.planned_nbytes
    session.close()


def test_a_budget_that_no_plan_keeps_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """With as much room left as steps have reached above what was predicted, no plan fits."""
    count_more(monkeypatch, lambda plans: 1 << 20)
    session = hurried("60%")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert_same([16] * 60, session)
    found = session.found
    assert found.reached_nbytes > found.budget_nbytes
    assert "the budget is not kept" in found.trouble and f"({found.reached_nbytes} bytes)" in found.trouble
    (said,) = [str(each.message) for each in caught if "was asked for" in str(each.message)]
    assert "60%" not in said and f"({found.budget_nbytes} bytes) of allocated memory was asked for" in said
    assert f"has reached {found.reached_nbytes} bytes" in said and "train on smaller batches" in said
    session.close()


def test_a_strict_budget_that_no_plan_keeps_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    count_more(monkeypatch, lambda plans: 1 << 20)
    session = hurried("60%", strict=True)
    with pytest.raises(BatchTooLargeError, match="the smallest that may fit") as caught:
        trained(lambda model: session, [16] * 60)
    assert caught.value.smallest_nbytes == session.found.reached_nbytes > 1 << 20
    session.close()
    assert_nothing_is_left()


def test_the_leanest_plan_is_tried_where_none_leaves_the_room_that_the_first_lacked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    count_more(monkeypatch, lambda plans: 1 << 20 if plans == 1 else 0)
    session = hurried("60%")
    assert_same([16] * 60, session)
    found = session.found
    assert 0 < found.reached_nbytes <= found.budget_nbytes and not found.trouble
    (bucket,) = session.buckets
    assert found.plan is not None and found.plan.peak_nbytes == bucket.planner.at_most(0).peak_nbytes
    session.close()


def test_a_plan_above_the_budget_is_told_from_one_that_keeps_it() -> None:
    """Before a budget is refused a step runs under the leanest plan, which may reach less than it predicts."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 4000, bias=False))
    session, said = hurried("70%"), []
    with pytest.raises(BatchTooLargeError):
        for _ in range(60):
            with session:
                loss = nn.functional.cross_entropy(model(torch.randn(32, 16)), torch.randint(4000, (32,)))
            loss.backward()
            said.append(str(session.found))
    (tried,) = {each for each in said if each.startswith("budget ")}
    assert "(above the budget)" in tried and "no plan keeps it: the smallest budget that fits is" in tried
    session.close()


def test_a_step_that_cannot_be_profiled_runs_under_the_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one whose backward pass is compiled, in which no node of autograd runs."""

    def no_profile(*args: Any) -> StepProfile:
        raise MeasureError("no autograd node ran in it")

    monkeypatch.setattr(course, "profile_of", no_profile)
    session = hurried("60%")
    with pytest.warns(UserWarning, match=r"but no autograd node runs .* The policy is lossless now"):
        assert_same([16] * 12, session)
    assert "as with compiled autograd" in session.found.trouble
    session.close()
    assert_nothing_is_left()


def test_no_plan_is_searched_for_below_what_is_there_whatever_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three steps that are profiled to refuse a budget, only the last one needs to say which would fit."""
    searched: list[Planner] = []
    search = Planner.search

    def noted(self: Planner) -> Any:
        searched.append(self)
        return search(self)

    monkeypatch.setattr(Planner, "search", noted)
    session = hurried("1 KiB")
    with pytest.raises(BatchTooLargeError, match="the smallest budget that fits"):
        trained(lambda model: session, [16] * 60)
    assert len({id(each) for each in searched}) == 1
    session.close()


@pytest.mark.parametrize("drops", [False, True], ids=["results stay", "results are dropped"])
@pytest.mark.parametrize("zeroed", ["before", "inside", "after", "kept"])
def test_the_plain_peak_is_above_what_is_held_when_the_forward_pass_begins(zeroed: str, drops: bool) -> None:
    """Wherever the program lets go of its results, loads a batch, and frees gradients, which count as held."""

    def peak(session: Budgeted | None) -> int:
        """Above what is held when the last step begins; the step before is counted too, for what it leaves behind."""
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64), nn.Tanh(), nn.Linear(64, 128))
        optimizer = torch.optim.Adam(model.parameters(), 1e-3)
        with ExitStack() as counting:
            for number in range(8):
                if number == 6 and session is None:
                    counter = counting.enter_context(CountedPeak())
                x = torch.randn(512, 64)
                if zeroed == "before":
                    optimizer.zero_grad()
                if number == 7 and session is None:
                    began = counter.mark()
                with session or nullcontext():
                    y = model(x)
                    loss = y.square().mean()
                if zeroed == "inside":
                    optimizer.zero_grad()
                loss.backward()
                if number == 7 and session is None:
                    ended = counter.mark()
                if drops:
                    del y, loss
                optimizer.step()
                if zeroed == "after":
                    optimizer.zero_grad()
        if session is not None:
            return session.found.plain_nbytes
        is_anew = zeroed in ("before", "after")
        return counter.peak_between(began, ended) - is_anew * sum(parameter.nbytes for parameter in model.parameters())

    session = Budgeted("100%", min_nbytes=1024)
    assert abs(peak(session) - peak(None)) <= 4096
    session.close()


def test_a_loop_that_was_left_in_the_middle_of_a_record_keeps_no_other_one_from_a_plan() -> None:
    def train(session: Budgeted, model: nn.Sequential, steps: int, until: Any = None) -> None:
        for _ in range(steps):
            with session:
                loss = model(torch.randn(8, 3, 16, 16)).square().mean()
            loss.backward()
            model.zero_grad()
            if until is not None and until():
                return

    left, other = Budgeted("80%", min_nbytes=0), Budgeted("80%", min_nbytes=0)
    first, second = network(), network()
    train(left, first, 40, lambda: left.recording.is_running)
    assert left.recording.is_running
    train(other, second, 60)
    assert other.found.plan is not None and other.found.reached_nbytes > 0
    train(left, first, 40)  # and it goes on where it was
    assert left.found.plan is not None and left.found.reached_nbytes > 0
    left.close()
    other.close()
    assert_nothing_is_left()
