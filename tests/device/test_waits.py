"""No step waits for the device once its policy knows the network."""

from __future__ import annotations

import pytest

from bench.device_counts import WAYS
from tests.device import fake
from tests.device.networks import NETWORKS

assert fake.device.type == "fake"

QUIET = [way for way in WAYS if way != "comet, sz"]
SLOW = {"quantized, 8 bits", "quantized, 4 bits", "comet, szp"}
CASES = [
    pytest.param(network, way, marks=[pytest.mark.slow] if network == "resnet50" and way in SLOW else [])
    for network in NETWORKS
    for way in QUIET
]


@pytest.mark.parametrize(("network", "way"), CASES)
def test_no_step_waits_after_the_fifth(network: str, way: str) -> None:
    training = NETWORKS[network]().to("fake")
    training.step()
    session = WAYS[way](training)
    training.count(session, 5)
    for step in range(20):
        (counts,) = training.count(session)
        assert counts.waits == 0, (step, counts.lines("waits"))
