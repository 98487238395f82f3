"""Training under bounds that follow the gradients: how values are stored, what is measured, and what goes wrong."""

from __future__ import annotations

import gc
import math
import warnings
import weakref
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from comet_networks import batches, convolutions, network, sgd, train
from thinning import star
from torch import Tensor, nn

from backstash import Session
from backstash.codecs import Sz
from backstash.errors import UnknownNameError
from backstash.papers.comet import Comet, Record, comet
from backstash.policies import Keep, Recompute, Rules, Stash


@pytest.mark.slow
@pytest.mark.parametrize(("layers", "codec"), star(["conv+linear", "conv"], ["sz", "szp"]))
def test_training_reaches_the_same_loss(layers: str, codec: str) -> None:
    model = network()
    plain, _ = train(model, sgd(model), "keep", 250)
    model = network()
    optimizer = sgd(model)
    policy = comet(layers, every=10, codec=codec, optimizer=optimizer, samples=4)
    bounded, session = train(model, optimizer, policy, 250)
    assert bounded[:10] == plain[:10]  # exact at first
    assert bounded[-1] != plain[-1]
    assert sum(bounded[-20:]) / 20 == pytest.approx(sum(plain[-20:]) / 20, abs=0.05)
    assert plain[0] > 2.0 and sum(plain[-20:]) / 20 < 0.1
    expected = {f"{number}/Convolution#0:input" for number in (0, 2, 5)}
    if "linear" in layers:
        expected |= {f"{number}/Addmm#0:mat1" for number in (8, 10)}
    assert set(policy.bounds) == expected
    assert session.report().ratio > 2


def test_the_measured_deviation_is_the_predicted_deviation() -> None:
    model = network()
    optimizer = sgd(model)
    policy = comet("conv+linear", every=10, optimizer=optimizer, samples=5)
    train(model, optimizer, policy, 100)
    measured = [record for record in policy.history if record.measured]
    assert len({record.key for record in measured}) >= 4
    ratios = [record.measured / record.predicted for record in measured if record.measured and record.predicted]
    ratios.sort()
    assert 0.8 < ratios[len(ratios) // 2] < 1.2
    assert all(record.cosine is not None and record.cosine > 0.99 for record in measured)


@pytest.mark.parametrize("layers", ["conv", "linear", "norm", "conv+linear+norm"])
def test_what_is_in_double_precision_is_exact_beside_what_is_not(layers: str) -> None:
    class Both(nn.Module):
        """A network in single precision with a head in double precision."""

        def __init__(self, body: nn.Module, head: nn.Module) -> None:
            super().__init__()
            self.body, self.head = body, head

        def forward(self, x: Tensor) -> Tensor:
            """Images to classes."""
            return self.head(self.body(x).double())

    def run(policy: Any, body: nn.Module) -> list[Tensor]:
        torch.manual_seed(1)
        head = nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.BatchNorm1d(64), nn.Linear(64, 10))
        model = Both(body, head.double())
        session = Session(policy, model=model, min_nbytes=0)
        for x, target in batches(12):
            model.zero_grad()
            with session:
                loss = F.cross_entropy(model(x.to(next(body.parameters()).dtype)), target)
            loss.backward()
        return [parameter.grad for parameter in model.parameters()]

    policy = comet(layers, every=2)
    run(policy, network())
    assert bool(policy.bounds) == (layers != "norm")  # of which the body has none
    assert not any(key.startswith("head") for key in policy.bounds)
    policy = comet(layers, every=2)
    exact, found = run("keep", network().double()), run(policy, network().double())
    assert not policy.bounds and all(map(torch.equal, exact, found))


def test_bounds_over_time_are_on_record() -> None:
    model = network()
    policy = comet(every=8)
    train(model, sgd(model), policy, 60)
    steps = sorted({record.step for record in policy.history})
    assert steps[:2] == [8, 9]  # the last exact step, and the first step with bounds
    assert all(4 <= later - earlier <= 8 for earlier, later in pairwise(steps[1:]))
    for key, bound in policy.bounds.items():
        record = [record for record in policy.history if record.key == key][-1]
        assert isinstance(record, Record)
        assert (record.bound, record.target > 0) == (bound, True)


def test_no_hook_outside_of_collecting_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    from backstash.papers.comet import controller

    calls = []
    original = controller.collector
    monkeypatch.setattr(controller, "collector", lambda *given: calls.append(policy._step) or original(*given))
    model = network()
    policy = comet(every=20)
    train(model, sgd(model), policy, 39)
    assert set(calls) == {20, 21}


def test_each_codec_stores_the_values_that_it_can() -> None:
    """Sz does not keep which elements are zero, as a relu reads. Only the convolution reads a pooling's result."""
    for codec, expected in (("szp", "szp"), ("sz", "sz")):
        model = network()
        policy = comet(every=4, codec=codec, recompute=False)
        _, session = train(model, sgd(model), policy, 12)
        found = convolutions(session)
        assert set(found) == {"0", "2", "5"}
        assert found["2"].split("+")[0] == {"szp": "szp", "sz": "signed sz"}[codec]
        assert found["5"].split("+")[0] == expected


def test_tables_are_made_when_bounds_change_and_seldom_else(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    original = Sz._model
    monkeypatch.setattr(Sz, "_model", lambda self, *given: made.append(policy._step) or original(self, *given))
    model = network()
    policy = comet(every=6, codec="sz", recompute=False, samples=0)
    train(model, sgd(model), policy, 30)
    encoded = 30 - 6
    assert 0 < len(made) < encoded  # of three layers, once in each step


def test_other_readers_get_every_bit() -> None:
    class Squared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(4, 4, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            y = torch.tanh(x * 1.5)
            return self.conv(y).sum() + (y * y).sum()

    torch.manual_seed(0)
    model, x = Squared(), torch.randn(8, 4, 16, 16, requires_grad=True)
    (expected,) = torch.autograd.grad(model(x), [x])
    policy = comet(every=1)
    session = Session(policy, model=model, min_nbytes=0)
    for _ in range(4):
        with session:
            loss = model(x)
        loss.backward()
    assert policy.bounds
    got, x.grad = x.grad, None
    assert got is not None and torch.equal(got, expected * 4)
    assert not [row for row in session.report().rows if row.codec.startswith("sz")]


def test_layers_that_share_an_input_share_the_smaller_bound() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.loud, self.quiet = nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3)

        def forward(self, x: Tensor) -> Tensor:
            y = (x.sort(-1).values * 1.0).contiguous()
            return (self.loud(y) ** 2).mean() * 100 + self.quiet(y).sin().mean()

    torch.manual_seed(0)
    model, x = Two(), torch.randn(8, 4, 16, 16, requires_grad=True)
    policy = comet(every=1, recompute=False)
    session = Session(policy, model=model, min_nbytes=0)
    for _ in range(3):
        with session:
            loss = model(x)
        bounds = policy.bounds
        loss.backward()
    saved = next(row for row in session.report().rows if row.shared_by and row.key.startswith("loud/"))
    assert saved.codec == "szp"
    assert len(bounds) == 2
    held = policy.decide_together(*_asked(bounds))
    assert isinstance(held, Stash)
    assert held.codecs[0].error == min(bounds.values())  # type: ignore[attr-defined]


def _asked(bounds: dict[str, float]) -> tuple[Any, Any]:
    from backstash.saved import Need, SavedTensor, TensorSpec

    spec = TensorSpec.of(torch.empty(2, 3))
    readers = [SavedTensor(key, "Convolution", "input", "", spec, Need.VALUE) for key in bounds]
    return readers[0], readers


@pytest.mark.parametrize("kind", ["functional", "matmul", "frozen"])
def test_a_weight_that_is_computed_from_a_parameter_stays_exact(kind: str) -> None:
    """The error in the weight's gradient would go on to the parameter."""
    torch.manual_seed(0)
    raw = torch.randn(4, 4, 3, 3, requires_grad=kind != "frozen")
    x = torch.randn(8, 4, 16, 16, requires_grad=True)
    policy = comet("conv+linear", every=1)
    session = Session(policy, min_nbytes=0)
    for _ in range(3):
        with session:
            if kind == "matmul":
                loss = ((x.flatten(1) * 2.0) @ (raw.flatten()[:4].repeat(1024, 8) * 2.0)).sum()
            else:
                loss = F.conv2d(x * 2.0, raw * 2.0).square().sum()
        loss.backward()
    assert policy.bounds == {}
    assert all(row.codec != "szp" for row in session.report().rows)


def test_a_bad_direction_halves_the_bound_and_warns_once() -> None:
    model = network()
    policy = comet(sigma=2.0, every=4, samples=5, cosine=0.999)
    with pytest.warns(UserWarning, match=r"cosine of .* below 0.999; its bound is halved") as said:
        train(model, sgd(model), policy, 40)
    assert len(said) == 1
    doubted = [record for record in policy.history if "halved" in record.note]
    assert len(doubted) > 1
    by_key = [record for record in policy.history if record.key == doubted[0].key]
    after = by_key[by_key.index(doubted[0]) + 1]
    assert after.step == doubted[0].step + 1
    last = [record.cosine for record in policy.history if record.cosine is not None][-3:]
    assert min(last) > 0.99


def test_layers_of_one_name_are_stored_exactly() -> None:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 4, 3, padding=1)]  # each of them is called outermost
    alone = nn.Linear(64, 64)
    policy = comet("conv+linear", every=2)
    session = Session(policy, min_nbytes=0)
    for _ in range(8):
        x = torch.rand(4, 3, 8, 8)
        with session:
            for layer in layers:
                x = layer(x).relu()
            loss = alone(x.flatten(2).tanh()).square().mean()
        loss.backward()
    assert {record.key for record in policy.history} == {"/Addmm#0:mat1"}


def test_gradients_that_are_zero_have_no_direction_to_doubt() -> None:
    model = network()
    policy = comet(every=2, samples=5)
    session = Session(policy, model=model, min_nbytes=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for scale in (1.0, 1.0, 1.0, 0.0, 0.0, 1.0):  # as of an empty batch, or of an expert that was given nothing
            with session:
                loss = model(torch.rand(4, 1, 8, 8)).square().sum() + model(torch.rand(4, 1, 8, 8)).sum() * scale
            loss.backward()
    assert any(record.cosine for record in policy.history)
    assert not any("halved" in record.note for record in policy.history)


def test_a_step_that_overflows_leaves_the_bounds_alone() -> None:
    model = network()
    optimizer = sgd(model)
    policy = comet(every=4, optimizer=optimizer)
    train(model, optimizer, policy, 6)
    bounds = policy.bounds
    session = Session(policy, model=model, min_nbytes=0)
    for _ in range(10):
        with session:
            loss = model(torch.full((4, 1, 8, 8), 0.5)).sum() * math.nan
        loss.backward()
    assert {record.note for record in list(policy.history)[-3:]} == {"its gradients are not finite: the bound stays"}
    assert policy.bounds.keys() == bounds.keys()
    assert all(math.isfinite(bound) for bound in policy.bounds.values())


def test_no_gradient_is_stored_exactly() -> None:
    model = network()
    policy = comet(every=2)
    session = Session(policy, model=model, min_nbytes=0)
    for x, _ in batches(8):
        with session:
            loss = (model(x) * 0.0).sum()
        loss.backward()
    assert policy.bounds == {}
    assert all(record.note.startswith("no gradient") for record in policy.history)


def test_a_step_without_backward_is_replaced_by_the_next() -> None:
    model = network()
    policy = comet(every=3)
    session = Session(policy, model=model, min_nbytes=0)
    for number, (x, y) in enumerate(batches(8), 1):
        with session:
            loss = F.cross_entropy(model(x), y)
        if number != 3:
            loss.backward()
        del loss
    assert policy.history[0].step == 4


def test_a_module_that_runs_twice_adds_up() -> None:
    torch.manual_seed(0)
    conv, x = nn.Conv2d(8, 8, 3, padding=1), torch.randn(16, 8, 12, 12)
    policy = comet("conv", sigma=0.001, every=1, samples=1, recompute=False)
    session = Session(policy, model=conv, min_nbytes=0)
    for _ in range(8):
        conv.zero_grad()
        with session:
            loss = sum((conv(part.sort(-1).values) ** 2).mean() for part in (x, x * 2, x * 3))
        loss.backward()
    measured = [record for record in policy.history if record.measured]
    assert measured
    assert all(record.measured == pytest.approx(record.predicted, rel=0.25) for record in measured)


def test_low_precision_and_autocast() -> None:
    model = network()
    policy = comet("conv+linear", every=2, samples=5)
    session = Session(policy, model=model, min_nbytes=0)
    for x, y in batches(8):
        with session, torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        loss.backward()
    assert len(policy.bounds) == 5
    assert [record for record in policy.history if record.measured]


def test_adam() -> None:
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    policy = comet(every=5, optimizer=optimizer)
    train(model, optimizer, policy, 10)
    record = next(record for record in policy.history if record.step == 5)
    assert record.target > 0 and len(policy.bounds) == 3


def test_sigma_is_a_share_of_the_momentum() -> None:
    model = network()
    optimizer = sgd(model)
    policy = comet(sigma=0.03, every=4, optimizer=optimizer)
    train(model, optimizer, policy, 4)
    momentum = optimizer.state[model[2].weight]["momentum_buffer"].abs().mean().item()
    policy.begin_step()
    record = next(record for record in policy.history if record.key.startswith("2/"))
    assert record.target == pytest.approx(0.03 * momentum)


def test_a_bound_is_never_coarser_than_half_of_the_values() -> None:
    """With the bound for a huge sigma, every element would be rounded to the same step."""
    model = network()
    policy = comet(sigma=1e6, every=2, samples=0, recompute=False)
    session = Session(policy, model=model, min_nbytes=0)
    inputs: dict[str, float] = {}
    for name in ("0", "2", "5"):
        layer = model.get_submodule(name)
        layer.register_forward_pre_hook(lambda _, x, name=name: inputs.__setitem__(name, _root_mean_square(x[0])))
    for x, y in batches(2):
        with session:
            loss = F.cross_entropy(model(x), y)
        loss.backward()
    policy.begin_step()
    got = {key.split("/")[0]: bound for key, bound in policy.bounds.items()}
    assert got == pytest.approx({name: 0.5 * value for name, value in inputs.items()}, rel=1e-4)


def _root_mean_square(x: Tensor) -> float:
    return float(x.detach()[x != 0].square().mean().sqrt())


def test_gradients_of_gradients_are_collected_too() -> None:
    torch.manual_seed(0)
    conv, x = nn.Conv2d(4, 4, 3), torch.randn(4, 4, 12, 12, requires_grad=True)
    policy = comet(every=1, samples=1, recompute=False)
    session = Session(policy, model=conv, min_nbytes=0)
    for _ in range(4):
        conv.zero_grad()
        with session:
            loss = (conv(x * 1.0) ** 3).sum()
        (grad,) = torch.autograd.grad(loss, [x], create_graph=True)
        grad.square().sum().backward()
    assert policy.history


def test_copies_for_comparison_die_with_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    from backstash.papers.comet import controller

    copies: list[weakref.ref[Tensor]] = []
    original = controller.collector

    def collector(*given: Any) -> Any:
        if given[-1] is not None:
            copies.append(weakref.ref(given[-1]))
        return original(*given)

    monkeypatch.setattr(controller, "collector", collector)
    model = network()
    policy = comet(every=2, samples=3)
    train(model, sgd(model), policy, 8)
    gc.collect()
    assert copies and not any(copy() is not None for copy in copies)


def test_rules_pass_everything_on() -> None:
    model = network()
    policy = comet(every=2)
    rules = Rules((("2/Convolution*", Keep("by hand")),), policy)
    with warnings.catch_warnings():
        _, session = train(model, sgd(model), rules, 6)
    assert len(policy.bounds) == 3
    assert convolutions(session)["2"] == "kept"
    assert convolutions(session)["5"] == "szp"


def test_a_value_that_can_be_remade_is_not_stored() -> None:
    model = network()
    policy = comet(every=2)
    train(model, sgd(model), policy, 4)
    saved, readers = _asked(policy.bounds)
    action = policy.decide_together(saved, readers)
    assert isinstance(action, Recompute) and isinstance(action.otherwise, Stash)
    assert [codec.id for codec in action.otherwise.codecs] == ["szp", "binary", "zvc"]


@pytest.mark.parametrize("wrong", [{"layers": "convs"}, {"layers": ""}, {"layers": "conv,linear"}, {"codec": "zvc"}])
def test_an_unknown_name_lists_the_names(wrong: dict[str, Any]) -> None:
    with pytest.raises(UnknownNameError, match=r"comet was asked for .* but there are"):
        comet(**wrong)


@pytest.mark.parametrize("sigma", [0.0, -0.01, math.nan, math.inf])
def test_a_sigma_that_is_not_above_zero_is_refused(sigma: float) -> None:
    with pytest.raises(ValueError, match=r"comet was asked for sigma=.* Use the policy 'lossless'"):
        Comet(sigma=sigma)


@pytest.mark.parametrize("wrong", [{"every": 0}, {"samples": -1}, {"cosine": 1.5}])
def test_other_wrong_numbers_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"comet was asked for every="):
        comet(**wrong)


def test_a_policy_is_asked_again_only_when_its_revision_changes() -> None:
    model = network()
    optimizer = sgd(model)
    policy = comet(every=16, optimizer=optimizer)
    asked: list[tuple[bool, object | None]] = []
    decide_together = policy.decide_together
    policy.decide_together = lambda *facts: (
        asked.append((policy._collecting, policy.revision)),
        decide_together(*facts),
    )[1]  # type: ignore[assignment, func-returns-value]
    train(model, optimizer, policy, 60)
    outside = [revision for collecting, revision in asked if not collecting]
    assert outside and None not in outside
    most = max(sum(other is revision for other in outside) for revision in outside)
    assert most <= 12  # once for each value, though there are many steps between two collections
    assert len({id(revision) for revision in outside}) > 1
    applied = {round(record.bound, 9) for record in policy.history if record.bound is not None}
    assert len(applied) > 3  # the bounds have changed meanwhile, and were used
