"""Whatever is done to the text of a plan or a profile: it is refused by an error of ours, or it says what it said."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

import pytest
import torch
from test_plan import CONV, PLANNER, RELU
from test_problem import profile

from backstash import Session
from backstash.errors import BackstashError, PlanError
from backstash.planning.model.plan import Plan
from backstash.planning.model.problem import StepProfile
from backstash.planning.model.sealed import seal
from backstash.planning.model.trace import Buffer, Decode, Op, Trace
from backstash.planning.search.planner import Planner

Read = Callable[[str], Any]

TRACE = Trace("plain", (Buffer("y", "stashed", 100, 0, 4),), (Op("y", 0),), 2, 5, (Decode("y", 4, 3, 4, (0,)),))
DOCUMENTS: dict[str, tuple[Read, str]] = {
    "Plan": (Plan.from_json, PLANNER.plan("50%").to_json()),
    "StepProfile": (StepProfile.from_json, profile().to_json()),
    "Trace": (Trace.from_json, TRACE.to_json()),
}
WRONG: list[Any] = [
    *(None, True, 0, -1, 1 << 51, 10**400, -(10**400), 0.5, math.nan, math.inf, -math.inf, 1e308, "", "melt"),
    *("\ud800", "x\0y", "signed " * 2000 + "blockquant4", "szp+relnan", "blockquant" + "9" * 4000, [], {}),
    *([None], [[[]]], {"a": 1}, [1, 1], ["encode"]),
]


def refuses(read: Read, text: str) -> bool:
    """Whether a text is refused by an error of ours that says what to do. Any other error ends the test."""
    try:
        read(text)
    except BackstashError as error:
        said = str(error)
    else:
        return False
    assert len(said) < 2000 and said.endswith(".")
    return True


@pytest.mark.parametrize("kind", DOCUMENTS)
def test_a_text_that_was_cut_off_is_refused_wherever_that_is(kind: str) -> None:
    read, text = DOCUMENTS[kind]
    assert all(refuses(read, text[:end]) for end in range(len(text.rstrip())))


@pytest.mark.parametrize("kind", ["Plan", "StepProfile"])
def test_flipped_bits_are_refused_or_change_nothing(kind: str) -> None:
    read, text = DOCUMENTS[kind]
    original, drawn, refused = read(text), random.Random(0), 0
    for _ in range(1500):
        data = bytearray(text.encode())
        for _ in range(drawn.choice((1, 1, 1, 2, 8))):
            data[drawn.randrange(len(data))] ^= 1 << drawn.randrange(8)
        changed = data.decode("latin-1")
        if not refuses(read, changed):
            assert read(changed) == original
        else:
            refused += 1
    assert refused > 1000


@pytest.mark.parametrize("kind", DOCUMENTS)
@pytest.mark.parametrize(
    "text",
    [
        *("[" * 5000, '{"a":' * 5000, "[" * 900 + "]" * 900, "1" * 10_000, "NaN", '"\\ud800"', "\x00", ""),
        *("null", "true", "3", "[]", "{}", '{"content": {}}', '{"a": 1, "a": 1}'),
    ],
    ids=lambda text: text[:12],
)
def test_texts_that_are_no_document_are_refused(kind: str, text: str) -> None:
    assert refuses(DOCUMENTS[kind][0], text)


@pytest.mark.parametrize("kind", ["Plan", "StepProfile"])
@pytest.mark.parametrize("depth", [10, 200, 900, 980, 5000])
def test_a_document_that_is_nested_deeply_is_refused(kind: str, depth: int) -> None:
    read, text = DOCUMENTS[kind]
    document = json.loads(text)
    for name in document["content"]:
        inside = json.dumps(document["content"] | {name: "HERE"}).replace('"HERE"', "[" * depth + "]" * depth)
        assert refuses(read, f'{{"backstash": "{kind}", "version": 3, "checksum": "", "content": {inside}}}')
    deep: Any = []
    for _ in range(min(depth, 900)):
        deep = [deep]
    assert refuses(read, seal(kind, document["content"] | {"device": deep}))


def nodes(content: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of everything in plain data."""
    if path:
        yield path
    pairs = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    for name, inside in pairs:
        yield from nodes(inside, (*path, name))


def changed(content: Any, path: tuple[Any, ...], change: Callable[[Any, Any], object]) -> Any:
    """A copy in which ``change(parent, name)`` was made at a path."""
    found = parent = deepcopy(content)
    for name in path[:-1]:
        parent = parent[name]
    change(parent, path[-1])
    return found


def variants(content: Any) -> Iterator[Any]:
    """Plain data with something wrong at each of its nodes: another type, something missing, something twice."""
    for path in nodes(content):
        for wrong in WRONG:
            yield changed(content, path, lambda parent, name, wrong=wrong: parent.__setitem__(name, wrong))
        yield changed(content, path, lambda parent, name: parent.__delitem__(name))
        yield changed(
            content,
            path,
            lambda parent, name: (
                parent.append(parent[name]) if isinstance(parent, list) else parent.update({f"{name} ": parent[name]})
            ),
        )


def use_plan(plan: Plan) -> None:
    """Does with a plan whatever does not need its step."""
    for text in (repr(plan), plan.explain(), plan.notice(), plan.diff(plan), plan._repr_html_(), plan.fingerprint):
        assert isinstance(text, str)
    for saved in (RELU, CONV):
        plan.decide(saved)
        plan.action_for(saved)
    assert Plan.from_json(plan.to_json()) == plan
    assert all(each.error or not plan.error for each in plan.decisions) or plan.error_limit >= 0
    x = torch.ones(64, 64, requires_grad=True)
    with Session(plan, min_nbytes=0):
        loss = (torch.relu(x) * 2).sum()
    loss.backward()
    assert x.grad is not None and bool((x.grad == 2).all())


def use_profile(found: StepProfile) -> None:
    """Plans for it."""
    planner = Planner(found)
    for budget in ("100%", "60%", 1):
        try:
            assert Plan.from_json(planner.plan(budget).to_json()).budget > 0
        except PlanError:
            continue


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(("kind", "use"), [("Plan", use_plan), ("StepProfile", use_profile)])
def test_a_wrong_value_at_any_place_is_refused_or_does_no_harm(kind: str, use: Callable[[Any], None]) -> None:
    read, text = DOCUMENTS[kind]
    content = json.loads(text)["content"]
    if "proofs" in content:
        content["proofs"] = {"environment": "none", "answers": {"True": ["a"]}}
    if "decisions" in content:
        content["decisions"] = content["decisions"][:2]
    counts = [0, 0]
    for wrong in variants(content):
        text = seal(kind, wrong)
        is_refused = refuses(read, text)
        counts[is_refused] += 1
        if not is_refused:
            try:
                use(read(text))
            except BackstashError:
                continue
    assert counts[1] > 1000


def test_wrong_values_in_a_trace_are_refused_or_do_no_harm() -> None:
    for wrong in variants(json.loads(TRACE.to_json())):
        text = json.dumps(wrong)
        if not refuses(Trace.from_json, text):
            found = Trace.from_json(text)
            assert found.peak_nbytes >= 0 and found.at_peak() is not None and found.by_op() and found.by_definition()
