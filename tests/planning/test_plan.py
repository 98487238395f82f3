"""Plans: from a profile and a budget to actions, through JSON, and into a Session."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from step_problems import drawn_profile

from backstash.codecs import Binary, Bitmask, Exponents, Raw, Zvc
from backstash.errors import BackstashError, BudgetError, PlanError
from backstash.planning.model.budget import parse_budget, restrict
from backstash.planning.model.decision import Decision
from backstash.planning.model.peak import evaluate
from backstash.planning.model.plan import Plan
from backstash.planning.model.problem import Choice, PlannedValue, Position, StepProfile
from backstash.planning.model.sealed import seal
from backstash.planning.search.planner import Planner, plan
from backstash.policies import Keep, Recompute, Stash
from backstash.saved import Mask, Need, SavedTensor, TensorSpec, Test
from bench.profiles import resnet

MIB = 1 << 20


def block(number: int, *choices: Choice, nbytes: int = 10 * MIB) -> PlannedValue:
    module = f"layers.{number}.act"
    key = f"{module}/Relu#0:result"
    return PlannedValue(
        key, module, "Relu", "float32 [4]", nbytes, number, (9 - number,), (Choice.keep(nbytes), *choices)
    )


ZVC = Choice("zvc", "encode", 2 * MIB, 10 * MIB, 10 * MIB, 0.01, 0.01, reason="20% of its bytes")
REMAKE = Choice("recompute", "recompute", 0, seconds=0.05, reason="relu")
MOVE = Choice("offload", "offload", 0, 0, 10 * MIB, 0.03, 0.03)
ROUGH = Choice("blockquant", "encode", MIB, 10 * MIB, 10 * MIB, 0.001, 0.001, error=0.004)


def network() -> StepProfile:
    """Five equal blocks, of 10 MiB each, and a base of 5 MiB; a plain step takes a second."""
    positions = tuple(Position(f"op{n}", "", n >= 5, 0.1) for n in range(10))
    values = tuple(block(n, ZVC, REMAKE, MOVE, ROUGH) for n in range(5))
    return StepProfile(positions, (5 * MIB,) * 10, values, 55 * MIB, versions={"torch": "2"})


NETWORK = network()
PLANNER = Planner(NETWORK)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("2GiB", 2 << 30),
        ("512 MiB", 512 << 20),
        (" 1.5 kib ", 1536),
        ("60%", 600),
        ("2 GB", 2 * 10**9),
        ("7b", 7),
        (9, 9),
        ("9" * 5_000 + "B", 1 << 62),
    ],
)
def test_budgets_are_understood(text: int | str, nbytes: int) -> None:
    assert parse_budget(text, 1000) == nbytes


@pytest.mark.parametrize(
    "budget",
    [
        *("6 gigs", "", " ", "GiB", "-1 GiB", "0%", "0 MiB", "1e3 MiB", "1e400", "nan", "-0", "1_000", "1_000 B"),
        *("\u0663GiB", "\uff11GiB", "\u00b2 B", "1\u212aiB", 0, -5, 1.5, float("nan"), None, True, [1]),
    ],
)
def test_a_budget_that_means_nothing_is_refused(budget: Any) -> None:
    with pytest.raises(
        PlanError, match=r"a plan was asked for with the budget .*, but .*\. Pass a number of bytes above 0"
    ):
        plan(NETWORK, budget)


@pytest.mark.parametrize("allow", ["gzip", ("lossless", "melt"), ("Lossless",), ("",)])
def test_a_family_that_is_not_there_is_refused(allow: Any) -> None:
    with pytest.raises(
        PlanError, match=r"allow=.* is neither a family of choices nor a codec\..* Pass any of lossless, rec"
    ):
        plan(NETWORK, "50%", allow=allow)


def test_words_with_commas_are_to_be_a_tuple() -> None:
    with pytest.raises(PlanError, match=r"Several words are a tuple: allow=\('lossless', 'recompute'\)\. Pass any of"):
        plan(NETWORK, "50%", allow="lossless, recompute")


@pytest.mark.parametrize(
    ("word", "meant"),
    [("blockquant16", "blockquant1"), ("zcv", "zvc"), ("lossles", "lossless"), ("offlaod", "offload")],
)
def test_a_word_that_was_mistyped_is_named(word: str, meant: str) -> None:
    with pytest.raises(PlanError, match=f"Did you mean '{meant}'"):
        plan(NETWORK, "50%", allow=("recompute", word))


@pytest.mark.parametrize("limit", [-0.1, 0, 0.0, float("nan"), float("inf"), "much", True])
def test_a_limit_that_is_none_is_refused(limit: Any) -> None:
    with pytest.raises(PlanError, match=r"error_limit=.* relative to their length. Pass a number above 0"):
        plan(NETWORK, "50%", allow=("bounded",), error_limit=limit)


def test_a_limit_without_anything_that_has_an_error_is_refused() -> None:
    with pytest.raises(PlanError, match=r"error_limit=0.1, but .* gradients are exact. Add 'bounded' or"):
        plan(NETWORK, "50%", error_limit=0.1)
    assert plan(NETWORK, "70%", allow=("blockquant", "recompute"), error_limit=0.1).error <= 0.1


def test_something_else_than_a_profile_is_refused() -> None:
    with pytest.raises(PlanError, match=r"that is no StepProfile. Pass what backstash.profile\(step\)"):
        plan(lambda: None, "50%")  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="solver 'best', but there are 'greedy' and 'exact'"):
        plan(NETWORK, "50%", solver="best")  # type: ignore[arg-type]


def kinds(profile: StepProfile) -> set[str]:
    return {choice.name for value in profile.values for choice in value.choices}


def test_only_what_is_allowed_is_chosen_from() -> None:
    assert kinds(restrict(NETWORK, ())) == {"keep"}
    assert kinds(restrict(NETWORK, ("lossless",))) == {"keep", "zvc"}
    assert kinds(restrict(NETWORK, "recompute")) == {"keep", "recompute"}
    assert kinds(restrict(NETWORK, ("bounded", "offload"))) == {"keep", "blockquant", "offload"}
    assert kinds(restrict(NETWORK, ("blockquant",))) == {"keep", "blockquant"}
    assert kinds(restrict(NETWORK, ("lossless", "narrow"))) == {"keep", "zvc"}
    both = replace(MOVE, name="rough", error=0.1)
    moved = replace(NETWORK, values=(block(0, both),))
    assert (kinds(restrict(moved, "offload")), kinds(restrict(moved, ("offload", "bounded")))) == (
        {"keep"},
        {"keep", "rough"},
    )


@pytest.mark.parametrize("share", [95, 70, 50, 30])
def test_a_plan_keeps_its_budget(share: int) -> None:
    found = PLANNER.plan(f"{share}%")
    assert found.budget == int(share / 100 * 55 * MIB) and not found.is_empty
    by_name = [[choice.name for choice in value.choices] for value in NETWORK.values]
    chosen = [names.index(decision.choice) for names, decision in zip(by_name, found.decisions, strict=True)]
    said = evaluate(NETWORK, chosen)
    assert (found.peak_nbytes, found.seconds) == (said.peak_nbytes, pytest.approx(said.seconds))
    assert found.peak_nbytes <= found.budget
    assert {decision.choice for decision in found.decisions} <= {"keep", "zvc", "recompute"}


def test_when_everything_fits_nothing_is_done() -> None:
    for budget in ("100%", "1 GiB", 55 * MIB):
        found = plan(NETWORK, budget)
        assert found.is_empty and {decision.choice for decision in found.decisions} == {"keep"}
        assert (found.peak_nbytes, found.seconds) == (55 * MIB, pytest.approx(1.0))
        assert "nothing is done" in repr(found)
        assert (found.recomputes, found.remakes_anything) == (False, False)


def test_a_budget_that_nothing_fits_into_has_the_smallest_one_and_its_plan() -> None:
    with pytest.raises(BudgetError, match=r"within 1.00 MiB .* the smallest budget that fits is \d+ bytes") as caught:
        PLANNER.plan("1 MiB")
    error = caught.value
    assert isinstance(error.plan, Plan) and isinstance(error, BackstashError)
    assert error.plan.peak_nbytes == error.smallest_nbytes == PLANNER.solutions[0].peak_nbytes
    assert error.seconds == error.plan.seconds > 1.0
    assert "5.00 MiB of it is there whatever is done" in str(error)
    assert "to allow more does not help" in str(error)
    assert PLANNER.plan(error.smallest_nbytes).decisions == error.plan.decisions
    with pytest.raises(BudgetError, match="allowing nothing"):
        plan(NETWORK, "50%", allow=())


@pytest.mark.parametrize(
    ("at", "said"),
    [
        (3, "results and what operations take, most while op3 runs in the forward pass"),
        (7, "gradients and what operations take, most while op7 of layers.2.act runs in the backward pass"),
    ],
)
def test_what_does_not_fit_is_told_where_it_is_no_saved_tensor(at: int, said: str) -> None:
    base = tuple(40 * MIB if number == at else MIB for number in range(10))
    positions = tuple(replace(each, module="layers.2.act" if each.is_backward else "") for each in NETWORK.positions)
    profile = replace(NETWORK, positions=positions, base_nbytes=base, plain_peak_nbytes=80 * MIB)
    with pytest.raises(BudgetError, match=f"40.00 MiB of it is there whatever is done with saved tensors: {said}"):
        plan(profile, 30 * MIB)
    with pytest.raises(
        BudgetError, match="that fits is [^;]* Pass that budget, allow more, or train on smaller batches"
    ):
        plan(profile, 41 * MIB, allow=())


def test_errors_of_bounded_values_have_a_limit() -> None:
    loose = plan(NETWORK, "70%", allow=("bounded",), error_limit=1.0)
    count = sum(decision.choice == "blockquant" for decision in loose.decisions)
    assert loose.error == pytest.approx(0.004 * count**0.5) and count >= 2
    some = plan(NETWORK, "70%", allow=("bounded", "lossless"), error_limit=0.006)
    assert 0 < some.error <= 0.006 == some.error_limit
    assert loose.seconds <= some.seconds < plan(NETWORK, "70%").seconds
    assert plan(NETWORK, "70%", allow=("bounded", "lossless"), error_limit=1e-6).error == 0.0
    assert plan(NETWORK, "70%").error_limit == 0.0
    assert plan(NETWORK, "70%", allow=("bounded", "lossless")).error_limit == 0.01
    with pytest.raises(BudgetError):
        plan(NETWORK, "50%", allow=("bounded",), error_limit=0.006)


def test_the_exact_solver_is_never_slower() -> None:
    pytest.importorskip("scipy")
    for share in ("80%", "50%", "30%"):
        best = PLANNER.plan(share, solver="exact")
        assert best.seconds <= PLANNER.plan(share).seconds and best.peak_nbytes <= best.budget


def test_a_larger_budget_is_never_slower() -> None:
    planner = Planner(drawn_profile(8))
    assert all(a[0] < b[0] and a[1] > b[1] for a, b in pairwise(planner.plan(10**6).frontier))


def test_the_measured_peak_of_the_plain_step_counts() -> None:
    """The model may say more than a plain step takes. Then the plain step fits where the model says otherwise."""
    over = replace(NETWORK, plain_peak_nbytes=50 * MIB)
    assert plan(over, 50 * MIB).is_empty and not plan(over, 50 * MIB - 1).is_empty
    under = replace(NETWORK, plain_peak_nbytes=60 * MIB)
    assert plan(under, 60 * MIB).is_empty and not plan(under, 60 * MIB - 1).is_empty


def test_a_plan_comes_back_from_json() -> None:
    found = PLANNER.plan("50%")
    again = Plan.from_json(found.to_json())
    assert again == found and again.fingerprint == found.fingerprint and again.to_json() == found.to_json()
    assert len({PLANNER.plan(share).fingerprint for share in ("50%", "40%", "100%")}) == 3


def test_a_plan_that_was_edited_or_damaged_is_refused() -> None:
    text = PLANNER.plan("50%").to_json()
    for changed in (text.replace("zvc", "keep", 1), text[:-30], "", "null", NETWORK.to_json()):
        with pytest.raises(PlanError, match="a Plan was asked for from a JSON text, but .*[.]$"):
            Plan.from_json(changed)
    content = json.loads(text)["content"]
    content["decisions"][0] |= {"choice": "melt", "kind": "encode"}
    with pytest.raises(PlanError, match="by 'melt', but there is no such codec"):
        Plan.from_json(seal("Plan", content))


RELU = SavedTensor(
    "a/Relu#0:result",
    "Relu",
    "result",
    "a",
    TensorSpec.of(torch.empty(4)),
    Need.SIGN,
    Mask(Test.NOT_LE),
)
CONV = replace(RELU, key="b/Convolution#0:input", op="Convolution", role="input", need=Need.VALUE, mask=None)


SHAPE = replace(CONV, key="d/MaxPool2DWithIndices#0:self", need=Need.SHAPE)


def one(saved: SavedTensor, choice: str, kind: Any, **changes: Any) -> Plan:
    """A plan that does something with one value, and something with another one, so that it is not empty."""
    decision = Decision(saved.key, "a", saved.op, str(saved.spec), 16, choice, kind, 1, 0.0, 0.0, "")
    other = replace(decision, key="c/Relu#0:result", choice="recompute", kind="recompute")
    return replace(PLANNER.plan("50%"), decisions=(decision, other), **{"peak_nbytes": 1024, **changes})


def test_decisions_become_actions() -> None:
    stored = Stash((Binary(), Zvc(0.02)))
    mask = Stash(Bitmask(Mask(Test.NOT_LE)))
    assert one(RELU, "bitmask", "encode").decide(RELU) == mask
    assert one(CONV, "zvc", "encode").decide(CONV) == stored
    assert one(CONV, "blockquant", "encode", error_limit=0.01).decide(CONV) == Stash(
        ("blockquant", Binary(), Zvc(0.02))
    )
    assert one(CONV, "recompute", "recompute").decide(CONV) == Recompute(stored, any_producer=True)
    assert one(CONV, "offload", "offload").decide(CONV) == Stash((*stored.codecs, Raw()), "host")
    shorter = one(CONV, "offload exponents", "offload")
    assert shorter.decide(CONV) == Stash((Exponents(), *stored.codecs, Raw()), "host")
    with pytest.raises(PlanError, match="there is no 'offload szp'"):
        one(CONV, "offload szp", "offload")
    assert isinstance(one(CONV, "keep", "keep").decide(CONV), Keep)
    assert one(CONV, "keep", "keep").remakes_anything and one(CONV, "keep", "keep").recomputes


def test_what_a_plan_does_not_know_is_lossless_and_said_once() -> None:
    found = one(RELU, "keep", "keep")
    assert found.notice() == ""
    found.decide(RELU)
    with pytest.warns(UserWarning, match=r"asked for 'b/Convolution#0:input' .* knows no such value.*replan="):
        action = found.decide(CONV)
    assert action == Recompute(Stash((Binary(), Zvc(0.02))))
    other = replace(RELU, spec=TensorSpec.of(torch.empty(5)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert found.decide(other) == Stash(Bitmask(Mask(Test.NOT_LE)))
    assert found.unknown == (CONV.key, RELU.key)
    assert "2 of them are not those of its profile" in found.notice()


def test_what_was_decided_serves_a_value_of_another_shape() -> None:
    smaller, larger = (replace(CONV, spec=TensorSpec.of(torch.empty(n))) for n in (3, 500))
    other_dtype = replace(CONV, spec=TensorSpec.of(torch.empty(4, dtype=torch.bfloat16)))
    lossless = Recompute(Stash((Binary(), Zvc(0.02))))
    with pytest.warns(UserWarning, match="is done if it can be, else what the policy lossless says"):
        assert isinstance(one(CONV, "keep", "keep").decide(smaller), Keep)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert one(CONV, "keep", "keep").decide(larger) == lossless
        assert one(CONV, "zvc", "encode").decide(larger) == Stash((Binary(), Zvc(0.02)))
        remade = one(CONV, "recompute", "recompute")
        assert remade.decide(larger) == Recompute(Stash((Binary(), Zvc(0.02))), any_producer=True)
        assert remade.decide(other_dtype) == one(CONV, "keep", "keep").decide(other_dtype)
        rounded = one(CONV, "zvc", "encode")
        rounded = replace(rounded, decisions=(replace(rounded.decisions[0], error=0.1), *rounded.decisions[1:]))
        assert rounded.decide(smaller) == lossless
    assert remade.unknown == (CONV.key,)


def test_a_plan_for_another_model_says_so() -> None:
    found = one(RELU, "zvc", "encode")
    with pytest.warns(UserWarning, match="knows no such value"):
        found.decide(CONV)
    assert "it was made for another model. They are treated by the policy lossless" in found.notice()


def test_of_trifles_that_a_plan_does_not_know_nothing_is_said() -> None:
    found = one(RELU, "zvc", "encode", peak_nbytes=200 * 2 * CONV.spec.nbytes)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for number in range(2):
            found.decide(replace(CONV, key=f"b/Convolution#{number}:input"))
            found.decide(replace(CONV, key=f"b/Convolution#{number}:input"))
    assert len(found.unknown) == 2
    with pytest.warns(UserWarning, match="knows no such value"):  # all of them together are more
        found.decide(replace(CONV, key="b/Convolution#2:input"))


def test_an_empty_plan_keeps_what_it_does_not_know() -> None:
    found = plan(NETWORK, "100%")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert isinstance(found.decide(CONV), Keep) and isinstance(found.decide(SHAPE), Keep)
    assert (found.unknown, found.notice()) == ((), "")


def test_what_the_program_holds_itself_is_no_surprise() -> None:
    found = one(RELU, "zvc", "encode", others=(CONV.key,))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found.decide(CONV)
    assert found.unknown == ()


def test_what_is_read_for_its_shape_alone_is_let_go_of_and_is_no_surprise() -> None:
    found = one(RELU, "keep", "keep")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert found.decide(SHAPE) == Stash("shape")
    assert found.unknown == ()


def test_small_tensors_are_looked_at_where_the_plan_needs_it() -> None:
    found = PLANNER.plan("50%")
    assert found.min_nbytes == 16 << 10
    assert one(RELU, "bitmask", "encode").min_nbytes == 16


def test_the_explanation_has_every_value_and_folds_blocks() -> None:
    found = PLANNER.plan("60%")
    text = found.explain()
    assert all(value.key in text for value in NETWORK.values)
    assert "20% of its bytes" in text and "10.00 MiB" in text and "budget 33.00 MiB: predicted peak" in text
    assert any(line.startswith("layers.*.act (") for line in text.splitlines())
    assert "layers.*.act" in found._repr_html_() and "<table>" in found._repr_html_()
    assert found.fingerprint in repr(found)


def test_the_difference_of_two_plans() -> None:
    a, b = PLANNER.plan("90%"), PLANNER.plan("30%")
    assert a.diff(a) == ""
    text = a.diff(b)
    changed = [x.key for x, y in zip(a.decisions, b.decisions, strict=True) if x.choice != y.choice]
    assert changed and all(key in text for key in changed) and text.startswith("peak ")
    fewer = replace(a, decisions=a.decisions[1:])
    assert "-> not there" in a.diff(fewer) and "not there ->" in fewer.diff(a)


@pytest.mark.slow
def test_equal_profiles_have_equal_plans() -> None:
    """Also where the search draws random numbers, and whatever happens between two plans."""
    profile = restrict(resnet((1, 0, 0, 0), 16, 2, 32), ("recompute", "lossless"))
    first = Planner(profile).plan("70%")
    torch.rand(3)
    assert Planner(StepProfile.from_json(profile.to_json())).plan("70%") == first
    assert first.peak_nbytes <= 0.7 * profile.plain_peak_nbytes


def rehearsing(profile: StepProfile, off: int) -> StepProfile:
    """The profile of a step that is there, in which each plan reaches so many bytes more than the model says."""

    def rehearse(tried: Any) -> tuple[int, ...]:
        names = {decision.key: decision.choice for decision in tried.decisions}
        choices = [[c.name for c in value.choices].index(names[value.key]) for value in profile.values]
        return (evaluate(profile, choices).peak_nbytes + off,)

    object.__setattr__(profile, "rehearse", rehearse)
    return profile


@pytest.mark.parametrize("off", [-3 * MIB, 0, 3 * MIB])
def test_the_smallest_budget_is_one_that_was_reached(off: int) -> None:
    planner = Planner(rehearsing(network(), off))
    with pytest.raises(BudgetError) as refused:
        planner.plan(1)
    smallest = refused.value.smallest_nbytes
    by_model = planner.solutions[0].peak_nbytes + off
    assert by_model <= smallest <= by_model + (64 << 10)
    assert isinstance(refused.value.plan, Plan)
    assert refused.value.plan.peak_nbytes == smallest
    assert planner.plan(smallest).peak_nbytes <= smallest
    assert Planner(rehearsing(network(), off)).plan(smallest).peak_nbytes <= smallest


def shapes(share: float) -> StepProfile:
    """A step that takes that share of the plain one where all is kept, as tensors read for their shape are let go."""
    values = tuple(block(number) for number in range(5))
    return replace(network(), values=values, plain_peak_nbytes=int(55 * MIB / share))


@pytest.mark.parametrize("is_there", [False, True])
def test_to_keep_all_but_what_is_read_for_its_shape_is_a_plan(is_there: bool) -> None:
    profile = rehearsing(shapes(0.9), 0) if is_there else shapes(0.9)
    planner = Planner(profile)
    found = planner.plan("95%")
    assert not found.is_empty and found.recomputes and all(each.kind == "keep" for each in found.decisions)
    assert 55 * MIB <= found.peak_nbytes <= 56 * MIB
    assert "the shape of alone is let go" in str(found) and "nothing is done" not in str(found)
    assert Plan.from_json(found.to_json()) == found and not Plan.from_json(found.to_json()).is_empty
    with pytest.raises(BudgetError) as refused:
        Planner(profile).plan("80%")
    assert 55 * MIB <= refused.value.smallest_nbytes <= 56 * MIB
    empty = planner.plan(profile.plain_peak_nbytes)
    assert empty.is_empty and not empty.recomputes and "nothing is done" in str(empty)


def test_to_let_go_of_little_is_no_plan() -> None:
    profile = shapes(0.999)
    with pytest.raises(BudgetError) as refused:
        Planner(profile).plan(profile.plain_peak_nbytes - 1)
    assert refused.value.smallest_nbytes == profile.plain_peak_nbytes


def test_the_smallest_budget_does_not_depend_on_what_was_asked_for() -> None:
    """What lossless does may reach less than the model says, and less than all that the search has found."""

    def rehearsed() -> Planner:
        profile = network()
        planner = Planner(profile, ("lossless", "recompute"))
        usual = planner._usual
        assert usual is not None and usual not in planner.solutions

        def rehearse(tried: Any) -> tuple[int, ...]:
            names = {decision.key: decision.choice for decision in tried.decisions}
            choices = [[c.name for c in value.choices].index(names[value.key]) for value in profile.values]
            return (MIB if tuple(choices) == usual.choices else evaluate(profile, choices).peak_nbytes,)

        object.__setattr__(profile, "rehearse", rehearse)
        return Planner(profile, ("lossless", "recompute"))

    named = set()
    for budget in (1, MIB // 2, 3 * MIB // 4):
        with pytest.raises(BudgetError) as refused:
            rehearsed().plan(budget)
        named.add(refused.value.smallest_nbytes)
    assert len(named) == 1 and named.pop() <= MIB + (64 << 10)
