"""The largest batch within a budget: it fits, the next one does not, and its plan keeps the budget."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import backstash as bs
from backstash.errors import BudgetError, PlanError
from backstash.report.meter import CountedPeak

MODEL = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 1))
EXAMPLES = torch.randn(400, 64, generator=torch.Generator().manual_seed(0))


def loss_of(count: int) -> Tensor:
    return MODEL(EXAMPLES[:count]).square().mean()  # type: ignore[no-any-return]


def make_step(count: int) -> Callable[[], None]:
    return lambda: loss_of(count).backward()


@pytest.mark.slow
def test_it_fits_and_the_next_one_does_not() -> None:
    budget = 300_000
    found = bs.fit_batch(make_step, budget, MODEL, start=4, grain=4, min_nbytes=0, device="cpu")
    assert found.tried[found.size] <= budget < found.tried[found.size + 4] and len(found.tried) <= 8
    assert 0 < found.plain_size <= found.size and found.plan.peak_nbytes <= budget
    assert str(found).startswith(f"{found.size} examples: Plan(")
    session = bs.Session(found.plan, model=MODEL, min_nbytes=0)
    for parameter in MODEL.parameters():
        parameter.grad = torch.zeros_like(parameter)
    for _ in range(2):
        with CountedPeak() as counter:
            with session:
                loss = loss_of(found.size)
            loss.backward()
    assert counter.peak_nbytes <= budget


def test_the_search_ends_at_the_largest_batch_that_there_is() -> None:
    found = bs.fit_batch(make_step, "1GiB", MODEL, start=300, grain=50, most=390, min_nbytes=0, device="cpu")
    assert (found.size, found.plain_size, found.plan.is_empty) == (350, 350, True)


def test_a_profile_that_runs_out_of_memory_counts_as_too_large() -> None:
    def limited(count: int) -> Callable[[], None]:
        def step() -> None:
            if count > 6:
                raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes.")
            loss_of(count).backward()

        return step

    found = bs.fit_batch(limited, "1GiB", MODEL, start=1, min_nbytes=0, device="cpu")
    assert found.size == 6 and found.tried[7] == float("inf")


def test_what_cannot_be_found_is_said() -> None:
    fit = partial(bs.fit_batch, make_step, model=MODEL, min_nbytes=0, device="cpu")
    with pytest.raises(BudgetError, match="the smallest budget that fits"):
        fit(budget=1000, start=64)
    with pytest.raises(PlanError, match="'60%', but that is a share of a peak that grows with the batch"):
        fit(budget="60%")
    for wrong in (0, -1):
        with pytest.raises(PlanError, match=rf"asked for start={wrong}, but a batch has examples\. Pass 1 or more"):
            fit(budget="1MiB", start=wrong)
    with pytest.raises(PlanError, match="'reordered' is a choice of a whole step, which backstash.plan alone proves"):
        fit(budget="1MiB", allow="reordered")
    with pytest.raises(PlanError, match="asked for grain=0, but a batch has examples"):
        fit(budget="1MiB", grain=0)
    with pytest.raises(PlanError, match="batches from 8 to 4, but there are none"):
        fit(budget="1MiB", start=8, most=4)
