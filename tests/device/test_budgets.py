"""A budget on an accelerator is kept, or it is said that it is not; a planned step has plain's bits."""

from __future__ import annotations

import warnings
from typing import Literal

import pytest

from backstash.errors import BudgetError
from backstash.planning.run.budgeted import Budgeted
from tests.device.networks import MIN_NBYTES, NETWORKS, same_bits

STEPS = 60
"""At most; training ends earlier where all is planned."""


@pytest.mark.parametrize("allow", [("lossless", "recompute"), ("lossless", "recompute", "offload")], ids="+".join)
@pytest.mark.parametrize("of", ["reserved", "allocated"])
@pytest.mark.parametrize("budget", ["30%", "60%", "85%", "120%"])
@pytest.mark.parametrize("network", ["gpt2", pytest.param("resnet50", marks=pytest.mark.slow)])
def test_a_budget_is_kept_or_it_is_said_that_it_is_not(
    network: str, budget: str, of: Literal["allocated", "reserved"], allow: tuple[str, ...]
) -> None:
    """GPT-2's plans reserve more than 60%, because they cannot use all of what they reserve."""
    plain = NETWORKS[network]().to("fake")
    plain.step()
    expected = plain.gradients()
    training = NETWORKS[network]().to("fake")
    session = Budgeted(budget, allow, of=of, device="fake", min_nbytes=MIN_NBYTES)
    session.is_hurried = True
    is_refused = False
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(STEPS):
            try:
                training.step(session)
                assert same_bits(training.gradients(), expected)
            except BudgetError:
                is_refused = True
            if is_refused or session.is_quiet:
                break
    session.close()
    found = session.found
    said = [str(each.message) for each in caught if "smallest that may fit" in str(each.message)]
    assert is_refused or session.is_quiet
    is_kept = 0 < found.reached_nbytes <= found.budget_nbytes
    assert is_refused or is_kept != ("the budget is not kept" in found.trouble)
    assert len(said) == (not is_refused and not is_kept)
