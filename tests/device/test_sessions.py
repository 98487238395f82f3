"""Sessions on an accelerator: the same bits as on time when everything is late, and no wait or reference to spare."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch

import backstash as bs
from backstash import policies
from backstash.codecs import Raw
from backstash.policies.comet import comet
from backstash.stores import host
from tests.device import fake
from tests.device.networks import MIN_NBYTES, NETWORKS, Training, same_bits

EXACT: dict[str, Callable[[], Any]] = {
    "lossless": policies.lossless,
    "lossless_stored": lambda: policies.lossless(recompute=False),
    "offload": lambda: "offload",
    "cdma": lambda: "cdma",
}
LOSSY: dict[str, Callable[[], Any]] = {
    "gist_fp8": lambda: "gist_fp8",
    "quantized8": lambda: policies.quantized(bits=8),
    "quantized4": lambda: policies.quantized(bits=4),
    "comet": lambda: comet("conv", every=4, codec="szp"),
}
POLICIES = EXACT | LOSSY


def _trained(network: str, policy: str | None = None) -> tuple[Training, bs.Session | None]:
    """Returns a training on the device that has run some steps, and its Session."""
    training = NETWORKS[network]().to("fake")
    session = None if policy is None else training.session(POLICIES[policy]())
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
    """Whether values come back from a store as they went. Two streams read them; the host waits at the end alone."""
    found, current, side = [], torch.accelerator.current_stream(), torch.Stream()
    for number in range(3):
        tickets = []
        for at in range(6):
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
