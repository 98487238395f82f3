"""Plans that are made with fresh weights keep their budgets in training: zeros of an initialisation do not last."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import backstash as bs
from backstash.bits import equal_bits
from backstash.errors import BudgetError
from backstash.planning.measure import profiling
from backstash.planning.measure.survey import RESERVE
from backstash.planning.measure.zeros import without_initial_zeros
from backstash.planning.search.planner import Planner
from backstash.report.meter import CountedPeak
from backstash.rewrites.state import State

CHANNELS, STEPS = 8, 5


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiling, "SECONDS", 0.0)  # times decide nothing here
    torch.manual_seed(0)


class Branch(nn.Module):
    """What a block adds to its input: a convolution that begins with zeros, and what is made of it."""

    def __init__(self, after: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last = (nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1) for _ in range(2))
        nn.init.zeros_(self.last.weight)
        assert self.last.bias is not None
        nn.init.zeros_(self.last.bias)
        self.after = after

    def forward(self, x: Tensor) -> Tensor:
        return x + self.after(self.last(torch.sin(self.first(x))))


class Scaled(nn.Module):
    """A branch times a number per channel, or a single one, that begins with zero."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.branch, self.scale = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1), nn.Parameter(torch.zeros(shape))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.sin(self.scale * self.branch(x))


class LowRank(nn.Module):
    """A layer with an update of a low rank, whose second factor begins with zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.down = nn.Conv2d(CHANNELS, CHANNELS, 1), nn.Conv2d(CHANNELS, 2, 1, bias=False)
        self.up = nn.Conv2d(2, CHANNELS, 1, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layer(x) + torch.sin(self.up(self.down(x)))
        return result


class Gate(nn.Module):
    """A branch times a gate that is open by half everywhere, as long as its weights are zero."""

    def __init__(self) -> None:
        super().__init__()
        self.branch, self.gate = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1), nn.Conv2d(CHANNELS, CHANNELS, 1)
        for weight in self.gate.parameters():
            nn.init.zeros_(weight)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + torch.sigmoid(self.gate(x)) * self.branch(x)
        return result


class Padded(nn.Module):
    """Layers on mostly padding, of which they make their biases, which begin with zeros, as in windows of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(CHANNELS, CHANNELS, 1), nn.Conv2d(CHANNELS, CHANNELS, 1)
        for layer in (self.first, self.second):
            assert layer.bias is not None
            nn.init.zeros_(layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        small = nn.functional.pad(x[:, :, :8, :8], (0, x.shape[3] - 8, 0, x.shape[2] - 8))
        return x + torch.sin(self.second(torch.sin(self.first(small))))


BLOCKS: dict[str, Callable[[], nn.Module]] = {
    "convolution": lambda: Branch(torch.sin),
    "relu after it": lambda: Branch(torch.relu),
    "its square": lambda: Branch(torch.square),
    "low rank": LowRank,
    "one scale": lambda: Scaled(1),
    "a scale per channel": lambda: Scaled(CHANNELS, 1, 1),
    "gate": Gate,
    "padding": Padded,
    "batch norm": lambda: nn.Sequential(nn.Conv2d(CHANNELS, CHANNELS, 1), zero_norm(), nn.Softplus()),
}


def zero_norm() -> nn.Module:
    norm = nn.BatchNorm2d(CHANNELS)
    nn.init.zeros_(norm.weight)
    return norm


def network(block: Callable[[], nn.Module]) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, CHANNELS, 3, padding=1), *(block() for _ in range(3)), nn.Conv2d(CHANNELS, 3, 1))


def step(model: nn.Module, x: Tensor) -> None:
    (model(x) - x.flip(1)).square().mean().backward()


def planner_of(model: nn.Module) -> Planner:
    x = torch.randn(4, 3, 32, 32)
    step(model, x)  # gradients are there
    profile = bs.profile(lambda: step(model, x), model, min_nbytes=1024)
    object.__setattr__(profile, "clock", None)  # times decide nothing here
    return Planner(profile)


def smallest(planner: Planner) -> int:
    with pytest.raises(BudgetError) as refused:
        planner.plan(1)
    return refused.value.smallest_nbytes


def peaks(model: nn.Module, plan: bs.Plan) -> list[int]:
    """The counted peak of each step of a training under the plan."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step(model, torch.randn(4, 3, 32, 32))  # gradients are there
    session, found = bs.Session(plan, model=model, min_nbytes=1024), []
    for _ in range(STEPS):
        optimizer.zero_grad(set_to_none=False)
        x = torch.randn(4, 3, 32, 32)
        with CountedPeak() as counter:
            with session:
                loss = (model(x) - x.flip(1)).square().mean()
            loss.backward()
            del loss
        found.append(counter.peak_nbytes)
        optimizer.step()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", BLOCKS)
def test_a_plan_of_fresh_weights_keeps_its_budget_in_every_step(name: str) -> None:
    planner = planner_of(network(BLOCKS[name]))
    low, high = smallest(planner), planner.profile.plain_peak_nbytes
    for budget in (low, (2 * low + high) // 3, (low + 2 * high) // 3):
        plan = planner.plan(budget)
        assert max(peaks(network(BLOCKS[name]), plan)) <= budget


def encoded(model: nn.Module) -> list[float]:
    """The shares of its bytes to which a codec that depends on the numbers makes each value, where one does."""
    values = planner_of(model).profile.values
    choices = [(value, choice) for value in values for choice in value.choices]
    return [choice.held_nbytes / value.nbytes for value, choice in choices if choice.name in ("zvc", "binary")]


def test_zeros_that_an_op_makes_are_counted_on() -> None:
    layers = [nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 3, 1)]
    shares = encoded(nn.Sequential(*layers))
    assert shares and all(0.3 < share < 0.8 for share in shares)


def test_padding_is_counted_on_and_what_a_bias_makes_of_it_is_not() -> None:
    shares = encoded(network(Padded))
    assert len(shares) == 3 and max(shares) < 0.2  # what is padded in each block, and nothing behind its first layer


def test_weights_that_are_not_trained_keep_their_zeros() -> None:
    model = network(BLOCKS["convolution"])
    assert not encoded(model)
    model = network(BLOCKS["convolution"])
    for block in list(model)[1:4]:
        assert isinstance(block, Branch)
        for weight in block.last.parameters():
            weight.requires_grad_(False)
    assert encoded(model)


def test_a_profile_leaves_a_model_as_it_was() -> None:
    model = network(BLOCKS["convolution"])
    before = {name: (x, x.detach().clone()) for name, x in model.named_parameters()}
    generator = torch.get_rng_state()
    x = torch.ones(4, 3, 32, 32)
    bs.profile(lambda: step(model, x), model, min_nbytes=1024)
    assert torch.equal(torch.get_rng_state(), generator)
    for name, weight in model.named_parameters():
        assert weight is before[name][0] and equal_bits(weight, before[name][1]) and weight.grad is None


def test_a_step_that_fails_leaves_a_model_as_it_was() -> None:
    model = network(BLOCKS["convolution"])
    before = [weight.detach().clone() for weight in model.parameters()]
    calls = iter(range(100))

    def fails() -> None:
        step(model, torch.ones(4, 3, 32, 32))
        if next(calls) == 2:
            raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        bs.profile(fails, model, min_nbytes=1024)
    assert all(equal_bits(weight, each) for weight, each in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64])
def test_only_zeros_of_trained_weights_are_replaced(dtype: torch.dtype) -> None:
    model = nn.Module()
    model.weight = nn.Parameter(torch.tensor([0.0, 1.0, -0.0, 2.0]).to(dtype))
    model.frozen = nn.Parameter(torch.zeros(3, dtype=dtype), requires_grad=False)
    model.dense = nn.Parameter(torch.ones(3, dtype=dtype))
    model.register_buffer("mask", torch.zeros(3))
    state = State(model)
    found = without_initial_zeros(state)
    filled = found.contents[id(model.weight)][1]
    assert (filled != 0).all() and filled.dtype is dtype
    assert torch.equal(filled[[1, 3]], model.weight.detach()[[1, 3]])
    for other in (model.frozen, model.dense, model.mask):
        assert found.contents[id(other)][1] is state.contents[id(other)][1]
    assert (state.contents[id(model.weight)][1][[0, 2]] == 0).all()
    assert equal_bits(without_initial_zeros(state).contents[id(model.weight)][1], filled)


def test_codecs_whose_size_depends_on_numbers_have_a_reserve_and_others_none() -> None:
    layers = [nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.Dropout(0.5)]
    values = planner_of(nn.Sequential(*layers, nn.Conv2d(8, 3, 1))).profile.values
    reserves = {choice.name: choice.reserve_nbytes / value.nbytes for value in values for choice in value.choices}
    assert reserves["zvc"] == pytest.approx(RESERVE, rel=0.01)
    assert set(reserves) > {"keep", "zvc"} and not any(each for name, each in reserves.items() if name != "zvc")


def test_a_plan_leaves_its_reserve_free() -> None:
    layers = [layer for _ in range(4) for layer in (nn.Conv2d(8, 8, 3, padding=1), nn.ReLU())]
    model = nn.Sequential(nn.Conv2d(3, 8, 1), *layers, nn.Conv2d(8, 3, 1))
    planner = Planner(planner_of(model).profile, "lossless")
    plan = planner.plan(smallest(planner))
    most = sum(decision.reserve_nbytes for decision in plan.decisions)
    assert 0 < plan.reserve_nbytes <= most
    assert max(peaks(model, plan)) <= plan.peak_nbytes
    again = bs.Plan.from_json(plan.to_json())
    assert again.reserve_nbytes == plan.reserve_nbytes and again == plan
