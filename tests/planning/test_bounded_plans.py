"""Plans whose codecs have an error: the predicted error of the gradients, and its limit."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
import torch
from step_problems import drawn_profile
from torch import Tensor, nn

import backstash as bs
from backstash.errors import BudgetError, PlanError
from backstash.planning.measure.probing import PASSES, Probe
from backstash.planning.measure.profiling import profile
from backstash.planning.model.budget import families, restrict
from backstash.planning.model.peak import PeakModel
from backstash.planning.model.problem import StepProfile
from backstash.planning.model.rounding import candidates, codec_name, codec_named
from backstash.planning.search.exact import brute_force
from backstash.planning.search.greedy import frontier
from backstash.planning.search.planner import Planner
from backstash.saved import Effect, Need, SavedTensor, TensorSpec

EVERYTHING = ("lossless", "recompute", "bounded")
FACTOR = 1.25
"""The measured error of a plan that was not rehearsed is at most so many times the predicted one."""

Made = tuple[nn.Module, Callable[[], Tensor]]


def convolutions() -> Made:
    blocks = [nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()) for _ in range(3)]
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)
    )
    x, y = torch.randn(4, 3, 32, 32), torch.randint(0, 4, (4,))
    return model, lambda: nn.functional.cross_entropy(model(x), y)


def transformer() -> Made:
    layer = nn.TransformerEncoderLayer(32, 4, 128, 0.0, "gelu", batch_first=True, norm_first=True)
    model = nn.Sequential(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(32, 8))
    x, y = torch.randn(4, 64, 32), torch.randint(0, 8, (4 * 64,))
    return model, lambda: nn.functional.cross_entropy(model(x).flatten(0, 1), y)


class Cells(nn.Module):
    """An LSTM of cells, with a large layer at each of its times."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTMCell(16, 32), nn.Sequential(nn.Linear(32, 256), nn.Tanh(), nn.Linear(256, 4))

    def forward(self, x: Tensor) -> Tensor:
        state = torch.zeros(len(x), 32), torch.zeros(len(x), 32)
        outputs = []
        for time in range(x.shape[1]):
            state = self.cell(x[:, time], state)
            outputs.append(state[0])
        found: Tensor = self.head(torch.stack(outputs, 1))
        return found


def lstm() -> Made:
    model = Cells()
    x, y = torch.randn(32, 6, 16), torch.randint(0, 4, (32 * 6,))
    return model, lambda: nn.functional.cross_entropy(model(x).flatten(0, 1), y)


def measured(plan: bs.Plan, model: nn.Module, loss: Callable[[], Tensor]) -> float:
    """By how much a Session with the plan makes the gradients wrong, with plain PyTorch's own gradients beside."""

    def gradients(session: bs.Session | None) -> list[Tensor]:
        model.zero_grad(set_to_none=True)
        if session is None:
            loss().backward()
        else:
            with session:
                found = loss()
            found.backward()
        return [parameter.grad.double() for parameter in model.parameters() if parameter.grad is not None]

    plain, mine = gradients(None), gradients(bs.Session(plan, model=model))
    off = sum(float((a - b).square().sum()) for a, b in zip(mine, plain, strict=True))
    return math.sqrt(off / sum(float(b.square().sum()) for b in plain))


_SLOW = [pytest.param(make, marks=pytest.mark.slow) for make in (lstm, transformer)]


@pytest.mark.parametrize("make", [convolutions, *_SLOW])
def test_the_error_of_a_plan_is_the_predicted_one_and_within_the_limit(make: Callable[[], Made]) -> None:
    torch.manual_seed(0)
    model, loss = make()
    found = profile(lambda: loss().backward(), model, allow=EVERYTHING, min_nbytes=1024)
    unrehearsed = StepProfile.from_json(found.to_json())
    for limit in (0.003, 0.03):
        planner = Planner(unrehearsed, EVERYTHING, limit)
        some = [each for each in planner.solutions if each.error][:: max(1, len(planner.solutions) // 3)]
        assert some
        for solution in some[:3]:
            plan = planner.plan(solution.peak_nbytes)
            off = measured(plan, model, loss)
            assert 0 < plan.error <= limit
            assert off <= FACTOR * plan.error + 1e-6
            assert plan.error <= 3 * off + 1e-6  # it is a prediction, and no bound that is far away
    rehearsed = Planner(found, EVERYTHING, 0.003)
    plan = rehearsed.plan(rehearsed.solutions[0].peak_nbytes * 6 // 5)
    assert measured(plan, model, loss) <= plan.error_limit == 0.003


@pytest.mark.slow
def test_what_fits_with_an_error_alone_is_feasible_with_it_alone() -> None:
    torch.manual_seed(0)
    model, loss = convolutions()
    found = profile(lambda: loss().backward(), model, min_nbytes=1024)
    with pytest.raises(BudgetError) as caught:
        bs.plan(found, 1, allow=("lossless",))
    budget = caught.value.smallest_nbytes - 100_000
    with pytest.raises(BudgetError):
        bs.plan(found, budget, allow=("lossless",))
    plan = bs.plan(found, budget, allow=("lossless", "bounded"), error_limit=0.02)  # tries codecs on the step now
    assert 0 < plan.error <= 0.02 and plan.peak_nbytes <= budget
    session = bs.Session(plan, model=model)

    def step() -> None:
        with session:
            value = loss()
        value.backward()

    loss().backward()
    step()
    assert bs.measure(step).peak_nbytes <= budget
    assert "gradients off by" in str(session.report()) and "gradients off by" in plan.explain()
    rounded = [decision for decision in plan.decisions if decision.error]
    assert all(f"{decision.error:.1g}" in plan.explain() for decision in rounded)
    again = bs.Plan.from_json(plan.to_json())
    assert again == plan and again.error == plan.error
    with pytest.raises(PlanError, match="checksum"):
        bs.Plan.from_json(plan.to_json().replace(f'"error": {plan.error!r}', '"error": 0.0'))


def test_codecs_may_be_named_and_others_stay_out() -> None:
    torch.manual_seed(0)
    model, loss = convolutions()
    found = profile(lambda: loss().backward(), model, allow="bounded", min_nbytes=1024)
    names = {choice.name for value in found.values for choice in value.choices if choice.error}
    assert {"fp16", "blockquant8"} <= names
    only = restrict(found, ("blockquant8", "bitmask"))
    left = {choice.name for value in only.values for choice in value.choices}
    assert left <= {"keep", "bitmask", *(name for name in names if name.partition("/")[0] == "blockquant8")}
    exact = restrict(found, ("lossless", "recompute"))
    assert not any(choice.error for value in exact.values for choice in value.choices)


def test_a_profile_of_a_file_says_what_it_has_not_tried() -> None:
    torch.manual_seed(0)
    model, loss = convolutions()
    found = StepProfile.from_json(profile(lambda: loss().backward(), model, min_nbytes=1024).to_json())
    with pytest.raises(
        PlanError, match=r"has tried lossless, recompute alone, .* Take it with bs.profile\(step, allow="
    ):
        bs.plan(found, "50%", allow=("recompute", "bounded"))


def test_words_need_families() -> None:
    assert families(()) == () and families("zvc") == ("lossless",)
    assert families(("blockquant4/64", "offload")) == ("offload", "bounded")


@pytest.mark.parametrize("effect", list(Effect))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_candidates_suit_the_value_and_their_names_find_them(effect: Effect, dtype: torch.dtype) -> None:
    spec = TensorSpec.of(torch.empty(4, 512, dtype=dtype))
    saved = SavedTensor("a", "Convolution", "input", "", spec, Need.VALUE, effect=effect, row=512)
    found = candidates(saved, (saved,))
    assert bool(found) == (effect is not Effect.UNKNOWN and dtype is not torch.float64)
    assert all(codec_named(codec_name(codec)) == codec and codec.bound is not None for codec in found)
    if effect is Effect.SENSITIVE:
        assert not {"blockquant4", "blockquant2"} & {codec_name(codec) for codec in found}


@pytest.mark.parametrize("seed", range(8))
def test_nothing_is_remade_from_what_has_an_error(seed: int) -> None:
    model = PeakModel(drawn_profile(seed, 5))
    for each in frontier(model, 0.12):
        assert not model.remakes_what_has_an_error(each.choices) and each.error <= 0.12 + 1e-9
    assert any(each.peak_nbytes <= 10**9 for each in brute_force(model, 0.0))


@pytest.mark.parametrize("number", [0, 1, PASSES, PASSES + 1, 40, 500])
def test_what_causes_most_of_the_error_is_measured_alone(number: int) -> None:
    causes = {f"{n}": 1e-6 * (n + 1) for n in range(number)} | ({"7": 1.0} if number > 7 else {})
    asked: list[tuple[str, ...]] = []

    def errors(keys: Sequence[str]) -> list[float]:
        asked.append(tuple(keys))
        return [sum(causes[key] for key in keys), 0.0]

    found = Probe({})._shared(list(causes), errors)
    assert len(asked) <= PASSES
    assert sorted(key for group, _ in found for key in group) == sorted(causes)
    assert all(square == sum(causes[key] for key in group) for group, square in found)
    assert number > 40 or not causes.get("7") or (["7"], 1.0) in [(list(group), square) for group, square in found]


class Block(nn.Module):
    """A transformer's block, all of whose biases begin with zeros."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        sizes = (width, 3 * width), (width, width), (width, 4 * width), (4 * width, width)
        self.qkv, self.out, self.wide, self.narrow = (nn.Linear(*each) for each in sizes)

    def forward(self, x: Tensor) -> Tensor:
        """[n, tokens, width] to the same."""
        q, k, v = (each.unflatten(2, (2, -1)).transpose(1, 2) for each in self.qkv(self.norms[0](x)).chunk(3, -1))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        x = x + self.out(mixed.flatten(2))
        return x + self.narrow(nn.functional.gelu(self.wide(self.norms[1](x))))  # type: ignore[no-any-return]


@pytest.mark.parametrize("is_tied", [False, True])
def test_the_limit_holds_where_weights_begin_with_zeros(is_tied: bool) -> None:
    """Sizes are those behind the first update, where no weight is zero; errors are those of the step that comes."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(200, 64), Block(), Block(), Block(), nn.LayerNorm(64), nn.Linear(64, 200))
    for each in model.modules():
        if isinstance(each, (nn.Linear, nn.Embedding)):
            nn.init.normal_(each.weight, std=0.02)
        if isinstance(each, nn.Linear):
            nn.init.zeros_(each.bias)
    if is_tied:
        model[0].weight = model[-1].weight  # type: ignore[union-attr]
    ids = torch.randint(0, 200, (8, 64))

    def loss() -> Tensor:
        return nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())

    found = bs.profile(lambda: loss().backward(), model)
    for limit in (0.002, 0.01):
        plan = bs.plan(found, "36%", allow=EVERYTHING, error_limit=limit)
        off = measured(plan, model, loss)
        assert plan.error <= limit
        assert off <= 1.001 * plan.error
