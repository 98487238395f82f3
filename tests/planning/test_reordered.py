"""Plans that may take the sums of a head's loss in another order: smaller, proven, and said."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import backstash as bs
from backstash.errors import BudgetError, PlanError, RewriteError
from backstash.planning.model.problem import StepProfile
from backstash.report.meter import CountedPeak
from backstash.rewrites.cross_entropy import ChunkedCrossEntropy

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


class Deep(Words):
    """One whose body saves more than its logits take, so that exact plans fit in less."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Sequential(nn.Linear(16, 512), nn.GELU(), nn.Linear(512, 16), nn.Tanh()) for _ in range(3)]
        self.body = nn.Sequential(*layers)
        self.lm_head = nn.Linear(16, 50, bias=False)


def training(model: nn.Module) -> None:
    """A step that ends with an update, which a proof refuses."""
    F.cross_entropy(model(IDS % 50).view(-1, 50), IDS.view(-1) % 50).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)


def reading(model: nn.Module) -> None:
    """A step that reads all logits."""
    model(IDS % 50).square().mean().backward()


def without_head(model: nn.Module) -> None:
    """A step of a part of the model."""
    body: Tensor = model.get_submodule("body")(model.get_submodule("embedding")(IDS))
    body.square().mean().backward()


def wrong(model: nn.Module) -> None:
    """A step that the rewrite is made to change."""
    F.cross_entropy(model(IDS % 50).view(-1, 50), IDS.view(-1) % 50).backward()


@pytest.mark.parametrize(
    ("run", "reason"),
    [
        (training, "the step changes parameters"),
        (reading, "square reads all logits"),
        (without_head, "the step has none"),
        (wrong, "of its length away then, where 0.00035 is allowed"),
    ],
)
def test_a_failed_proof_leaves_the_plan_without_it(
    run: Callable[[nn.Module], None], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Deep()
    profile = bs.profile(lambda: run(model), model, min_nbytes=0)
    plain = bs.plan(profile, "60%")
    original = ChunkedCrossEntropy.apply
    if run is wrong:
        monkeypatch.setattr(ChunkedCrossEntropy, "apply", lambda *args: 1.05 * original(*args))
    said = rf"'reordered', but a loss in another order is not allowed.*: chunked_loss .*{reason}.*without it\."
    with pytest.warns(UserWarning, match=said) as caught:
        plan = bs.plan(profile, "60%", allow=ALLOWED)
    assert [warning.filename for warning in caught] == [__file__]
    assert not plan.reordered and plan.budget == plain.budget and plan.peak_nbytes <= 0.6 * profile.plain_peak_nbytes
    assert "forward" not in vars(model.lm_head)
    with pytest.raises(RewriteError, match=reason) as refused:
        bs.plan(profile, "1%", allow=ALLOWED)
    assert isinstance(refused.value.__cause__, BudgetError)


def test_a_step_under_autocast_is_proven() -> None:
    def under_autocast() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(MODEL(IDS).view(-1, 1000), IDS.view(-1))
        loss.backward()

    profile = bs.profile(under_autocast, MODEL, min_nbytes=0)
    assert bs.plan(profile, LOGITS, allow=ALLOWED).reordered == "lm_head"
