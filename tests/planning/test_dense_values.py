"""Plans store dense values with shorter exponents where that is the cheapest way to fit: exactly, and as predicted."""

from __future__ import annotations

import torch
from step_problems import gradients_of
from torch import Tensor, nn

import backstash as bs
from backstash.planning.measure.profiling import profile
from backstash.planning.model.decision import Decision, action_of
from backstash.planning.search.planner import Planner
from backstash.policies import Stash
from backstash.saved import Need, SavedTensor, TensorSpec

KIB = 1 << 10


def network(dtype: torch.dtype) -> nn.Sequential:
    """Layers of which backward reads dense values: inputs of products, of gelus and of norms."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.LayerNorm(128), nn.Linear(128, 128), nn.GELU()) for _ in range(4)]
    return nn.Sequential(*layers, nn.Linear(128, 16)).to(dtype)


def test_a_plan_that_may_not_remake_stores_dense_values_with_shorter_exponents() -> None:
    model, x = network(torch.bfloat16), torch.randn(1024, 128).bfloat16()
    plain = gradients_of(model, x)
    planner = Planner(profile(lambda: model(x).square().sum().backward(), model), allow=("lossless",))
    low, high = planner.solutions[0].peak_nbytes, planner.profile.plain_peak_nbytes
    assert low < 0.9 * high
    plan = planner.plan((2 * low + high) // 3)
    stored = [decision for decision in plan.decisions if decision.choice == "exponents"]
    assert stored
    session = bs.Session(plan, model=model)
    for _ in range(2):
        assert all(torch.equal(a, b) for a, b in zip(gradients_of(model, x, session), plain, strict=True))
    assert plan.notice() == ""
    rows = {row.key: row for row in session.report().rows}
    for decision in stored:
        assert rows[decision.key].codec == "exponents"
        assert rows[decision.key].stash_nbytes <= 0.78 * rows[decision.key].saved_nbytes

    def step() -> None:
        with session:
            loss = model(x).square().sum()
        loss.backward()

    assert bs.measure(step).peak_nbytes <= 1.005 * plan.budget + 256 * KIB


class Norm(nn.Module):
    """A norm that computes in float32, as those of Llamas do: it saves its input as float32."""

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def test_a_plan_stores_copies_in_float32_of_bfloat16_numbers_as_these() -> None:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(128, 128), Norm()) for _ in range(4)]
    model, x = nn.Sequential(*layers, nn.Linear(128, 16)).bfloat16(), torch.randn(1024, 128).bfloat16()
    plain = gradients_of(model, x)
    found = profile(lambda: model(x).square().sum().backward(), model)
    copies = [value for value in found.values if value.op == "Pow" and value.spec.startswith("float32 [1024, 128]")]
    assert len(copies) == 4
    for value in copies:
        held = {choice.name: choice.held_nbytes / value.nbytes for choice in value.choices}
        assert held["upcast"] == 0.5 and held["upcast exponents"] < 0.38
    planner = Planner(found, allow=("lossless",))
    plan = planner.plan(planner.solutions[0].peak_nbytes + 64 * KIB)
    stored = {decision.key for decision in plan.decisions if decision.choice.startswith("upcast")}
    assert stored
    session = bs.Session(bs.Plan.from_json(plan.to_json()), model=model)
    for _ in range(2):
        assert all(torch.equal(a, b) for a, b in zip(gradients_of(model, x, session), plain, strict=True))
    rows = {row.key: row for row in session.report().rows}
    assert all(rows[key].codec.startswith("upcast") for key in stored)


def test_a_value_that_shorter_exponents_do_not_take_may_be_stored_without_its_zeros() -> None:
    spec = TensorSpec.of(torch.empty(64, 256, dtype=torch.bfloat16))
    saved = SavedTensor("0/Mm#0:self", "Mm", "self", "0", spec, Need.VALUE)
    held = 3 * spec.nbytes // 4
    decision = Decision(saved.key, "0", "Mm", str(spec), spec.nbytes, "exponents", "encode", held, 0.0, 0.0, "")
    action = action_of(decision, saved, "host", False)
    assert isinstance(action, Stash)
    assert [codec.id for codec in action.codecs] == ["exponents", "binary", "zvc"]


def test_what_is_random_in_every_bit_has_no_such_choice() -> None:
    """Exponents that are spread over their whole range are as long in any code."""
    model = nn.Sequential(nn.Linear(256, 16, bias=False)).bfloat16()
    noise = torch.randint(-(1 << 15), 1 << 15, (1024, 256), dtype=torch.int16).view(torch.bfloat16)
    given = torch.where(noise.isfinite(), noise, torch.ones_like(noise)).requires_grad_()

    def step() -> Tensor:
        loss: Tensor = model(given * 1).sum()
        loss.backward()
        return loss

    found = profile(step, model)
    assert "exponents" not in {choice.name for value in found.values for choice in value.choices}
