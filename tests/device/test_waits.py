"""No step waits for the device once its policy knows the network."""

from __future__ import annotations

import pytest
import torch

import backstash as bs
from backstash import interpreter
from backstash import session as session_module
from backstash.planning.search.planner import Planner
from bench.device_counts import WAYS
from tests.device import fake
from tests.device.networks import MIN_NBYTES, NETWORKS, Training

assert fake.device.type == "fake"

QUIET = [way for way in WAYS if way not in ("comet, sz", "plan that encodes")]
SLOW = {"quantized, 8 bits", "quantized, 4 bits", "comet, szp"}
CASES = [
    pytest.param(network, way, marks=[pytest.mark.slow] if network == "resnet50" and way in SLOW else [])
    for network in NETWORKS
    for way in QUIET
]


OTHERS = [
    pytest.param(network, policy, marks=[] if (network, policy) == ("resnet50", "sliced") else [pytest.mark.slow])
    for network in NETWORKS
    for policy in bs.policies.names()
    if policy not in WAYS
]


PLANS = [
    ("resnet50", ("lossless",)),
    pytest.param("gpt2", ("lossless", "bounded"), marks=pytest.mark.slow),
    pytest.param("llama", ("lossless", "bounded"), marks=pytest.mark.slow),
]
"""Networks, and what plans may do that have values to encode."""


def no_wait(training: Training, session: bs.Session | None, steps: int) -> None:
    training.count(session, 5)
    for step in range(steps):
        (counts,) = training.count(session)
        assert counts.waits == 0, (step, counts.lines("waits"))


@pytest.mark.parametrize(("network", "way"), CASES)
def test_no_step_waits_after_the_fifth(network: str, way: str) -> None:
    training = NETWORKS[network]().to("fake")
    training.step()
    no_wait(training, WAYS[way](training), 20)


@pytest.mark.skipif(interpreter.module is None, reason="the interpreter of scripts is not built")
def test_dropouts_masks_are_encoded_by_scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "has_compiled", lambda: False)
    training = NETWORKS["gpt2"]().to("fake")
    session = WAYS["lossless"](training)
    for _ in range(9):
        training.step(session)
    told = session.report().programs()
    assert "Dropout#0:result1: Encode(narrow)" in told
    assert "\n0 values went the long way alone" in told


@pytest.mark.parametrize("is_guarded", [False, True], ids=["plan", "guarded"])
@pytest.mark.parametrize(("network", "allow"), PLANS)
def test_a_plan_that_encodes_does_not_wait(network: str, allow: tuple[str, ...], is_guarded: bool) -> None:
    training = NETWORKS[network]().to("fake")
    training.step()
    profile = bs.profile(training.step, training.model, allow=allow, device="fake", min_nbytes=MIN_NBYTES)
    planner = Planner(profile, allow, 0.05 if "bounded" in allow else None)
    lowest = planner.solutions[0]  # which encodes most
    plan = planner._with_drafts(planner._plan(int(1.1 * lowest.peak_nbytes), lowest), lowest)
    assert any(decision.kind == "encode" and decision.in_flight_nbytes for decision in plan.decisions)
    session = training.session(plan.guarded() if is_guarded else plan)
    no_wait(training, session, 5)
    before = torch.accelerator.memory_allocated()
    (counts,) = training.count(session)
    assert counts.peak - before <= plan.peak_nbytes <= plan.budget


@pytest.mark.parametrize(("network", "policy"), OTHERS)
def test_no_other_policy_with_a_name_waits(network: str, policy: str) -> None:
    training = NETWORKS[network]().to("fake")
    training.step()
    no_wait(training, training.session(policy), 5)
