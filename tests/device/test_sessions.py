"""Sessions on an accelerator: the same bits as on time when everything is late, and no wait or reference to spare."""

from __future__ import annotations

import gc
import inspect
import types
from collections.abc import Callable
from itertools import count
from statistics import median
from typing import Any

import pytest
import torch
from torch import nn

import backstash as bs
from backstash import accelerator, policies
from backstash.capture.learned import LOOK_AGAIN
from backstash.codecs import Raw
from backstash.planning.measure import profiling
from backstash.planning.measure.events import MemoryProfiler, memory_profiler
from backstash.planning.measure.link import of_speed
from backstash.stash import looking
from backstash.stores import host
from tests.device import fake
from tests.device.networks import EVERY, MIN_NBYTES, NETWORKS, Training, same_bits

EXACT: dict[str, Callable[[Training], bs.Session]] = {
    name: lambda training, name=name: training.session(name)  # type: ignore[misc]
    for name in ("lossless", "lossless_stored", "offload", "cdma")
} | {"offload_hidden": lambda training: training.session(hiding())}
LOSSY: dict[str, Callable[[Training], bs.Session]] = {
    "gist_fp8": lambda training: training.session("gist_fp8"),
    "quantized8": lambda training: training.session(policies.quantized(bits=8)),
    "quantized4": lambda training: training.session(policies.quantized(bits=4)),
    "comet": lambda training: training.comet("szp"),
}
POLICIES = EXACT | LOSSY


def hiding() -> policies.OffloadHidden:
    """Returns a policy that is told of a fast link, and that a second lies between any two things that happen."""
    return policies.offload_hidden(smallest=MIN_NBYTES, link=of_speed(1e12), clock=count(0.0, 1.0).__next__)


def _trained(network: str, policy: str | None = None) -> tuple[Training, bs.Session | None]:
    """Returns a training on the device that has run some steps, and its Session."""
    training = NETWORKS[network]().to("fake")
    session = None if policy is None else POLICIES[policy](training)
    for _ in range(3):
        training.step(session)
    return training, session


@pytest.mark.parametrize("policy", list(EXACT))
@pytest.mark.parametrize("network", list(NETWORKS))
def test_exact_policies_have_the_bits_of_plain_steps(network: str, policy: str) -> None:
    plain, _ = _trained(network)
    plain.step()
    training, session = _trained(network, policy)
    training.step(session)
    assert same_bits(training.gradients(), plain.gradients())


LATE = [
    pytest.param(network, policy, marks=[pytest.mark.slow] if network == "resnet50" and policy in LOSSY else [])
    for network in ("resnet50", "llama")
    for policy in POLICIES
]


@pytest.mark.parametrize(("network", "policy"), LATE)
def test_late_operations_change_no_bit(network: str, policy: str) -> None:
    """The gradients of three steps, of which the policy may hold a state, are those of the same steps on time."""
    on_time, session = _trained(network, policy)
    gradients = []
    for _ in range(3):
        on_time.step(session)
        gradients.append(on_time.gradients())
    late, session = _trained(network, policy)
    for seed, expected in enumerate(gradients):
        with fake.late(seed):
            late.step(session)
            assert same_bits(late.gradients(), expected), f"step {seed}"


def test_a_plan_has_the_bits_of_plain_steps_and_a_lower_peak() -> None:
    plain, _ = _trained("resnet50")
    plain.step()
    profiled = NETWORKS["resnet50"]().to("fake")
    profiled.step()
    allow = ("lossless", "recompute", "offload")
    profile = bs.profile(profiled.step, profiled.model, allow=allow, device="fake", min_nbytes=MIN_NBYTES)
    planned = NETWORKS["resnet50"]().to("fake")
    session = planned.session(bs.plan(profile, "50%", allow))
    for _ in range(4):
        planned.step(session)
    assert same_bits(planned.gradients(), plain.gradients())
    (plain_counts,), (counts,) = plain.count(), planned.count(session)
    assert counts.peak < plain_counts.peak


@pytest.mark.parametrize("network", ["gpt2", "llama"])
def test_the_generator_goes_on_as_in_plain_steps(network: str) -> None:
    """An attention without dropout moves the generator on too, so one that is called once more must not."""
    plain = NETWORKS[network]().to("fake")
    tried = NETWORKS[network]().to("fake")
    entered = bs.Budgeted("120%", model=tried.model, device="fake", min_nbytes=MIN_NBYTES)
    for step in range(8):
        plain.step()
        expected, bits = accelerator.rng_state(fake.device), plain.gradients()
        tried.step(entered)
        assert torch.equal(accelerator.rng_state(fake.device), expected), step
        assert same_bits(tried.gradients(), bits), step


def test_garbage_that_is_collected_in_a_recorded_step_is_not_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan of such a step was refused, because its peak seemed to be below 0."""

    class Garbage:
        def __init__(self) -> None:
            self.itself, self.held = self, torch.empty(16 << 20, device="fake")

    def step() -> None:
        gc.collect()
        model(x).square().sum().backward()

    def recorder() -> MemoryProfiler:
        Garbage()
        return memory_profiler()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)).to("fake")
    x = torch.randn(256, 64, device="fake")
    step()
    profiles = [bs.profile(step, model, device="fake", min_nbytes=0)]
    monkeypatch.setattr(profiling, "memory_profiler", recorder)
    profiles.append(bs.profile(step, model, device="fake", min_nbytes=0))
    assert profiles[1].base_nbytes == profiles[0].base_nbytes
    assert bs.plan(profiles[1], "95%").peak_nbytes > 0


def test_gradients_that_a_step_frees_are_part_of_no_budget() -> None:
    """A step that drops the gradients of the step before and makes new ones takes no more for them, as measured."""

    def step() -> None:
        model.zero_grad()
        model(x).square().sum().backward()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 1)).to("fake")
    x = torch.randn(64, 512, device="fake")
    profile = bs.profile(step, model, device="fake", min_nbytes=0)
    peak_nbytes = bs.measure(step, device="fake").peak_nbytes
    assert profile.plain_peak_nbytes == peak_nbytes
    assert peak_nbytes < sum(parameter.nbytes for parameter in model.parameters())
    assert max(profile.base_nbytes) <= peak_nbytes


def test_bounds_begin_in_the_same_step_on_every_device() -> None:
    def first_step_with_bounds(device: str) -> int:
        torch.manual_seed(0)
        layers = (nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3))
        batch = {"x": torch.randn(4, 3, 8, 8)}
        training = Training(nn.Sequential(*layers), batch, lambda model, batch: model(batch["x"]).square().sum())
        training = training.to(device)
        session = training.comet("szp")
        for step in range(1, 9):
            training.step(session)
            if session.policy.bounds:
                return step
        raise AssertionError(session.policy.history)

    assert first_step_with_bounds("cpu") == first_step_with_bounds("fake") == EVERY + 1


def test_what_hides_is_moved_once_it_is_decided_and_the_host_does_not_wait() -> None:
    training, session = _trained("gpt2", "offload_hidden")
    policy = session.policy if session is not None else None
    assert isinstance(policy, policies.OffloadHidden) and policy.decision is not None
    for counts in training.count(session, 3):
        assert counts.waits == 0, counts.lines("waits")
    assert session is not None and session.report().moved_nbytes > 0
    assert policy.decision.fetches and policy.move_timer is None


# -- waits and launches ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", list(EXACT))
def test_no_step_launches_many_more_operations_than_others(policy: str) -> None:
    training, session = _trained("resnet50", policy)
    training.count(session, 2)
    operations = [counts.operations for counts in training.count(session, 20)]
    assert max(operations) <= 1.05 * median(operations)


@pytest.mark.parametrize("policy", ["lossless_stored", "offload"])
def test_codecs_are_asked_again_when_numbers_change(policy: str) -> None:
    """Values without zeros are held dense. When zeros come, that is found out; when they go, it is noticed at once."""
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64, bias=False, device="fake")
    session = bs.Session(policy, model=model, min_nbytes=0)
    given = torch.rand(256, 64, device="fake") + 0.5

    def compressed(share: float) -> bool:
        x = torch.where(torch.rand(256, 64, device="fake") < share, 0.0, given)
        expected = torch.autograd.grad(torch.nn.functional.linear(x, model.weight).sum(), model.weight)[0]
        with session:
            loss = model(x).sum()
            del x
        model.zero_grad()
        loss.backward()
        assert model.weight.grad is not None and torch.equal(model.weight.grad, expected)
        report = session.report()
        return report.stash_nbytes < 0.5 * report.saved_nbytes

    assert not compressed(0.0) and not compressed(0.0)
    steps = [compressed(0.9) for _ in range(LOOK_AGAIN + looking.PERIOD)]
    assert steps[-1] and steps == sorted(steps)
    assert compressed(0.9) and not compressed(0.0)


# -- the host store, with and without each of its waits and references -------------------------------------------------

NEEDED = {
    "nothing": "",
    "a copy out waits for the value": "self.out.wait_stream(torch.accelerator.current_stream(self.device))",
    "a copy back waits for the memory": "self.back.wait_stream(value.stream)",
    "a copy back waits for the copy out": "self.back.wait_event(value.done)",
    "a reader waits for the copy back": "current.wait_event(value.done)",
    "a value is held until it is copied": "self._keep(value.done, list(planes.values()))",
    "a place is used again when it is free": "self.out.wait_event(value.done)",
}
"""What is left out of the store, by what it is for."""


def _store_without(line: str) -> Any:
    """Returns a host store that lacks a line."""
    source = inspect.getsource(host)
    assert line in source
    module = types.ModuleType("backstash.stores.mutant")
    exec(source.replace(line, "pass") if line else source, module.__dict__)
    return module.HostStore()


def _moves(store: Any) -> bool:
    """Whether values come back from a store as they went. One stream makes them, two read them, the host waits last."""
    found, current, side, source = [], torch.accelerator.current_stream(), torch.Stream(), torch.Stream()
    for number in range(3):
        tickets = []
        for at in range(6):
            with source:
                x = torch.zeros(1 << 14, device="fake")
                for _ in range(3):
                    x += number + at
                tickets.append((store.put(Raw().encode(x)), 3.0 * (number + at)))
                del x
                torch.full((1 << 14,), -1.0, device="fake") * 2
        for ticket, expected in reversed(tickets):
            torch.full((1 << 14,), -3.0, device="fake") * 2
            store.prefetch(ticket)
            with side if expected % 2 else current:
                found.append(Raw().decode(store.get(ticket)) - expected)
            store.drop(ticket)
    current.wait_stream(side)
    return not torch.stack(found).any().item()


@pytest.mark.parametrize("what", list(NEEDED))
def test_the_host_store_has_the_waits_and_references_that_it_needs(what: str) -> None:
    store = _store_without(NEEDED[what])
    wrong = 0
    for seed in range(8):
        _moves(store)  # shapes are learned, slabs are allocated
        with fake.late(seed, gigabytes_per_second=0.25):
            wrong += not _moves(store)
    assert (wrong == 0) == (what == "nothing")


@pytest.mark.parametrize("seed", range(4))
def test_a_link_that_is_behind_has_the_device_wait_and_not_the_host(seed: int) -> None:
    """No more bytes than may be under way are held for copies, and each value comes back as it went."""
    nbytes, number_of = 1 << 16, 12
    store = host.HostStore(in_flight=3 * nbytes)

    def put_all() -> list[Any]:
        tickets = []
        for number in range(number_of):
            x = torch.full((nbytes // 4,), -1.0, device="fake")
            x += number + 1
            tickets.append(store.put(Raw().adopt(x)))
            del x
        return tickets

    def are_whole(tickets: list[Any]) -> bool:
        found = []
        for number, ticket in enumerate(tickets):
            found.append(Raw().decode(store.get(ticket)) == number)
            store.drop(ticket)
        return bool(torch.stack(found).all().item())

    assert are_whole(put_all())  # shapes are learned, slabs are allocated
    torch.accelerator.synchronize()
    with fake.late(seed, gigabytes_per_second=0.01):
        before = torch.accelerator.memory_allocated()
        with fake.counting() as counts:
            tickets = put_all()
        assert counts.waits == 0 and counts.blocks > number_of
        assert counts.peak - before <= 5 * nbytes
        assert are_whole(tickets)
