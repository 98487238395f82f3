"""Sessions on an accelerator: the same bits as on time when everything is late, and no wait or reference to spare."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import backstash as bs
from backstash import policies
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
    "comet": lambda: "comet",
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
    assert session is not None and session.report().stash_nbytes < session.report().saved_nbytes


@pytest.mark.parametrize("policy", list(POLICIES))
@pytest.mark.parametrize("network", ["resnet50", "llama"])
def test_late_operations_change_no_bit(network: str, policy: str) -> None:
    """The steps under test are those after the first, which the policy's state may be different in."""
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


def test_a_plan_has_the_bits_of_plain_steps() -> None:
    plain, _ = _trained("resnet50")
    plain.step()
    training = NETWORKS["resnet50"]().to("fake")
    training.step()
    allow = ("lossless", "recompute", "offload")
    plan = bs.plan(training.step, training.model, budget="50%", allow=allow, device="fake", min_nbytes=MIN_NBYTES)
    session = bs.Session(plan, model=training.model, min_nbytes=MIN_NBYTES)
    other = NETWORKS["resnet50"]().to("fake")
    session = bs.Session(plan, model=other.model, min_nbytes=MIN_NBYTES)
    for _ in range(3):
        other.step(session)
    assert same_bits(other.gradients(), plain.gradients())
    (plain_counts,), (counts,) = plain.count(), other.count(session)
    assert counts.peak < plain_counts.peak


def _no_wait_for_the_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host._Lane, "_waits_for", None, raising=False)
    park = host._Lane.park

    def early(self: Any, encoded: Any) -> Any:
        self.out, out = torch.Stream(self.device), self.out
        try:
            return park(_Deaf(self), encoded)
        finally:
            self.out = out

    monkeypatch.setattr(host._Lane, "park", early)


class _Deaf:
    """A lane whose streams wait for nothing."""

    def __init__(self, lane: Any) -> None:
        self._lane = lane

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lane, name)
