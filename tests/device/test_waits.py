"""No step waits for the device once its policy knows the network."""

from __future__ import annotations

import pytest

import backstash as bs
from bench.device_counts import WAYS
from tests.device import fake
from tests.device.networks import NETWORKS, Training

assert fake.device.type == "fake"

QUIET = [way for way in WAYS if way != "comet, sz"]
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


@pytest.mark.parametrize(("network", "policy"), OTHERS)
def test_no_other_policy_with_a_name_waits(network: str, policy: str) -> None:
    training = NETWORKS[network]().to("fake")
    training.step()
    no_wait(training, training.session(policy), 5)
