"""Plans that may take the sums of a head's loss in another order: smaller, proven, and said."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import backstash as bs
from backstash.errors import BudgetError, PlanError, RewriteError
from backstash.planning.model.problem import StepProfile
from backstash.report.meter import CountedPeak

ALLOWED = ("lossless", "recompute", "reordered")


class Words(nn.Module):
    """A small language model, of which the logits are most of a step."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(1000, 16)
        self.body = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
        self.lm_head = nn.Linear(16, 1000, bias=False)

    def forward(self, words: Tensor) -> Tensor:
        return self.lm_head(self.body(self.embedding(words)))  # type: ignore[no-any-return]


MODEL = Words()
IDS = torch.randint(1000, (4, 64), generator=torch.Generator().manual_seed(1))
LOGITS = 4 * 64 * 1000 * 4


def step() -> Tensor:
    loss = F.cross_entropy(MODEL(IDS).view(-1, 1000), IDS.view(-1))
    loss.backward()
    return loss.detach()


@pytest.fixture(scope="module")
def profile() -> StepProfile:
    return bs.profile(step, MODEL, min_nbytes=0)


@pytest.fixture(scope="module")
def plan(profile: StepProfile) -> bs.Plan:
    return bs.plan(profile, LOGITS, allow=ALLOWED)


def gradients() -> list[Tensor]:
    found = [parameter.grad for parameter in MODEL.parameters() if parameter.grad is not None]
    MODEL.zero_grad()
    return found


def test_it_fits_where_nothing_exact_does(profile: StepProfile, plan: bs.Plan) -> None:
    budget = LOGITS
    with pytest.raises(BudgetError):
        bs.plan(profile, budget)
    assert plan.reordered == "lm_head" and plan.plain_peak_nbytes == profile.plain_peak_nbytes > 2 * LOGITS
    assert "; the loss of 'lm_head' in chunks, with sums in another order." in repr(plan)
    assert bs.Plan.from_json(plan.to_json()) == plan

    step()
    expected = gradients()
    session = bs.Session(plan, model=MODEL, min_nbytes=0)
    for _ in range(2):
        for parameter in MODEL.parameters():
            parameter.grad = torch.zeros_like(parameter)
        with CountedPeak() as counter:
            with session:
                loss = F.cross_entropy(MODEL(IDS).view(-1, 1000), IDS.view(-1))
            loss.backward()
        assert counter.peak_nbytes <= plan.peak_nbytes <= budget
        for a, b in zip(gradients(), expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-7)
    assert "forward" not in vars(MODEL.lm_head)


def test_sums_keep_their_order_where_that_fits(profile: StepProfile) -> None:
    assert not bs.plan(profile, "100%", allow=ALLOWED).reordered
    with pytest.raises(BudgetError) as caught:
        bs.plan(profile, "1%", allow=ALLOWED)
    assert caught.value.smallest_nbytes < LOGITS


def test_the_rewrite_is_undone_when_a_step_fails(plan: bs.Plan) -> None:
    with pytest.raises(ZeroDivisionError), bs.Session(plan, model=MODEL):
        assert "forward" in vars(MODEL.lm_head)
        raise ZeroDivisionError
    assert "forward" not in vars(MODEL.lm_head)


def test_what_cannot_be_done_is_refused(profile: StepProfile, plan: bs.Plan) -> None:
    with pytest.raises(PlanError, match=r"without a model, but it has the loss of 'lm_head' computed in chunks\. Pass"):
        bs.Session(plan)
    with pytest.raises(PlanError, match=r"asked to be followed by others, but it takes sums in another order"):
        bs.Session(plan, model=MODEL, replan="auto")
    with pytest.raises(PlanError, match=r"'reordered', but the profile comes from a file"):
        bs.plan(StepProfile.from_json(profile.to_json()), LOGITS, allow=ALLOWED)
    other = bs.profile(lambda: MODEL(IDS[:1]).square().mean().backward(), MODEL)
    with pytest.raises(RewriteError, match=r"square reads all logits"):
        bs.plan(other, "50%", allow=ALLOWED)
