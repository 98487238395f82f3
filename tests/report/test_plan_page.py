from __future__ import annotations

import json
import random
import re
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import pytest
import torch
from torch import nn

from backstash.errors import PlanError
from backstash.planning.measure.profiling import profile
from backstash.planning.model.peak import evaluate
from backstash.planning.model.plan import Plan
from backstash.planning.model.problem import Choice, PlannedValue, Position, StepProfile
from backstash.planning.search.planner import Planner, plan
from backstash.report.plan_charts import COLUMNS, Curve, byte_ticks, memory_chart
from backstash.report.plan_layers import layers, parts, total
from backstash.report.plan_page import POINTS, plan_page
from bench.profiles import random_network, transformer

EXACT = ("lossless", "recompute")
STEP = transformer(3, width=64, tokens=256, words=256)
PLANNER = Planner(STEP, EXACT)
HALF = PLANNER.plan("50%")
PAGE = plan_page(STEP, HALF, "train.py")


class Elements(HTMLParser):
    """Collects what a test wants to know of a page, and refuses elements that are closed in the wrong order."""

    VOID = frozenset({"meta", "input", "path", "br"})

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: Counter[str] = Counter()
        self.values: list[str] = []
        self.rows: dict[str, list[list[tuple[str, dict[str, str | None]]]]] = {}
        self._table, self._is_in_cell = "", False
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.tags[tag] += 1
        assert not {"src", "href", "srcset", "action"} & set(found), "nothing is fetched and nothing is linked"
        if tag == "data":
            self.values.append(str(found["value"]))
        if tag == "table":
            self._table = str(found["id"])
            self.rows[self._table] = []
        if tag == "tr":
            self.rows[self._table].append([])
        self._is_in_cell |= tag == "td" or found.get("scope") == "row"
        if tag == "td" or found.get("scope") == "row":
            self.rows[self._table][-1].append(("", found))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag
        self._is_in_cell &= tag not in ("td", "th")

    def handle_data(self, data: str) -> None:
        if self._is_in_cell:
            text, attrs = self.rows[self._table][-1][-1]
            self.rows[self._table][-1][-1] = text + data, attrs

    def cells(self, table: str) -> list[list[tuple[str, dict[str, str | None]]]]:
        """The rows of a table without its head."""
        return [row for row in self.rows[table] if row]


def column(page: Elements, table: str, label: str) -> list[str]:
    return [str(attrs["data-v"]) for row in page.cells(table) for _, attrs in row if attrs.get("data-l") == label]


@pytest.mark.parametrize("seed", range(8))
def test_the_layers_add_up_to_the_peak_model(seed: int) -> None:
    step, draw = random_network(seed), random.Random(seed)
    for _ in range(5):
        indices = [draw.randrange(len(value.choices)) for value in step.values]
        choices = [value.choices[index] for value, index in zip(step.values, indices, strict=True)]
        found = evaluate(step, indices)
        assert total(layers(step, choices), len(step.positions)) == found.live.tolist()
        at = found.live.tolist().index(found.peak_nbytes)
        alive = sum(part.nbytes for part in parts(step, choices) if part.start <= at <= part.last)
        assert alive + step.base_nbytes[at] == found.peak_nbytes


def test_the_figures_are_those_of_the_plan() -> None:
    page = Elements(PAGE)
    assert page.values[:5] == [
        str(HALF.plain_peak_nbytes),
        str(HALF.peak_nbytes),
        str(HALF.budget),
        repr(HALF.seconds),
        str(len(HALF.decisions)),
    ]
    course = Curve.of(STEP, HALF)
    assert max(course.planned) == HALF.peak_nbytes and max(course.plain) == HALF.plain_peak_nbytes
    assert page.values.count(str(HALF.peak_nbytes)) == 2, "the tile and the bar"
    assert column(page, "values", "saved") == [str(each.nbytes) for each in HALF.decisions]
    assert column(page, "values", "held") == [str(each.held_nbytes) for each in HALF.decisions]
    assert column(page, "values", "adds") == [repr(each.seconds) for each in HALF.decisions]
    for label, numbers in (
        ("values", [1] * len(HALF.decisions)),
        ("saved", [each.nbytes for each in HALF.decisions]),
        ("held", [each.held_nbytes for each in HALF.decisions]),
    ):
        assert sum(map(int, column(page, "modules", label))) == sum(numbers), label
    added = sum(map(float, column(page, "modules", "adds")))
    assert added == pytest.approx(sum(each.seconds for each in HALF.decisions))


def test_the_frontier_is_that_of_the_plan() -> None:
    assert 2 < len(HALF.frontier) <= POINTS
    page = Elements(PAGE)
    peaks, steps = (column(page, "points-of-frontier", label) for label in ("peak", "step"))
    assert list(zip(map(int, peaks), map(float, steps), strict=True)) == list(HALF.frontier)
    marked = [row[0][1]["data-v"] for row in page.cells("points-of-frontier") if row[2][0] == "this plan"]
    assert marked == [str(HALF.peak_nbytes)]


def test_a_long_frontier_is_thinned_and_keeps_the_plan_itself() -> None:
    frontier = tuple((1000 + number, 2.0 - number / 1000) for number in range(1000))
    for number in (0, 333, 334, 335, 999):
        peak, seconds = frontier[number]
        found = replace(HALF, frontier=frontier, peak_nbytes=peak, seconds=seconds)
        page = Elements(plan_page(STEP, found))
        peaks = [int(peak) for peak in column(page, "points-of-frontier", "peak")]
        assert len(peaks) <= POINTS + 1 and peaks == sorted(set(peaks))
        assert {peaks[0], peaks[-1], peak} <= {1000, 1999, *peaks}
        assert [row[2][0] for row in page.cells("points-of-frontier")].count("this plan") == 1


def test_the_peak_of_a_trial_step_stands_beside_that_of_the_model() -> None:
    assert "The lines are the peak model's" not in PAGE
    tried = replace(HALF, peak_nbytes=HALF.peak_nbytes - (1 << 20))
    text = plan_page(STEP, tried)
    assert re.search(r"The lines are the peak model's: at most .* plain, .* planned\.", text)
    page = Elements(text)
    assert page.values[1] == str(tried.peak_nbytes) and str(HALF.peak_nbytes) in page.values
    marked = [row[0][1]["data-v"] for row in page.cells("points-of-frontier") if row[2][0] == "this plan"]
    assert marked == [str(HALF.peak_nbytes)], "the frontier is the model's"


def test_repeated_blocks_share_a_row() -> None:
    names = [row[0][0] for row in Elements(PAGE).cells("modules")]
    assert names[1].startswith("h.*.ln_1 (3)h.0.ln_1: ") and "h.2.ln_1: " in names[1]
    assert len(names) < len({decision.module for decision in HALF.decisions})


def test_blocks_that_hold_other_values_do_not_share_a_row() -> None:
    values = []
    for number, op in enumerate(("Relu", "Tanh", "Relu")):
        keep = (Choice.keep(100),)
        values.append(PlannedValue(f"{number}/{op}#0:result", str(number), op, "float32 [25]", 100, 0, (1,), keep))
    positions = Position("relu", "", False, 0.1), Position("ReluBackward0", "", True, 0.1)
    step = StepProfile(positions, (0, 0), tuple(values), 300)
    names = [row[0][0] for row in Elements(plan_page(step, plan(step, 300))).cells("modules")]
    assert names == ["* (2)0: 100 bytes to 100 bytes (keep)2: 100 bytes to 100 bytes (keep)", "1"]


def test_nothing_is_fetched() -> None:
    assert not re.search(r"https?:|//[a-z]|@import|url\(", PAGE)
    assert "default-src 'none'" in PAGE
    tags = Elements(PAGE).tags
    assert not {"link", "img", "iframe", "object", "form", "a"} & set(tags)
    assert tags["script"] == 2


def test_names_are_escaped() -> None:
    evil = "</script><script>alert(1)</script>&\"'"
    keep, mask = Choice.keep(100), Choice("bitmask", "encode", 4, encode_seconds=0.1, reason=evil)
    value = PlannedValue(f"{evil}/Relu#0:result", evil, "Relu", evil, 100, 0, (1,), (keep, mask))
    positions = Position(evil, evil, False, 0.1), Position(evil, evil, True, 0.1)
    step = replace(StepProfile(positions, (0, 0), (value,), 100), machine=evil, versions={evil: evil})
    page = plan_page(step, plan(step, 50), evil)
    assert "alert(1)</script>" not in page
    found = Elements(page)
    assert found.tags["script"] == 2
    assert found.cells("values")[0][0][0] == f"{evil}/Relu#0:result"
    (data,) = re.findall(r'id="points">(.*?)</script>', page, re.DOTALL)
    assert evil in json.loads(data)["memory"][0][1]


def test_an_empty_plan() -> None:
    empty = PLANNER.plan("100%")
    assert empty.is_empty
    page = plan_page(STEP, empty)
    assert "nothing is done" in page and 'id="frontier"' not in page
    Elements(page)


def test_a_budget_far_above_is_not_drawn() -> None:
    chart, _ = memory_chart(Curve.of(STEP, HALF), replace(HALF, budget=1 << 50))
    assert "budget" not in chart
    chart, _ = memory_chart(Curve.of(STEP, HALF), HALF)
    assert chart.count('class="budget"') == 2


def test_a_plan_with_errors_says_how_large_they_may_be() -> None:
    assert "error of gradients" not in PAGE
    assert "4.0e-03" in plan_page(STEP, replace(HALF, error=0.004))


def test_a_step_of_many_positions_keeps_its_peak() -> None:
    count = 5000
    positions = tuple(Position(f"op{number}", "", number >= 3000, 0.1) for number in range(count))
    base = tuple(1000 if number == 4321 else number % 7 for number in range(count))
    step = StepProfile(positions, base, (), 1000)
    chart, under = memory_chart(Curve.of(step, plan(step, 2000)), plan(step, 2000))
    assert len(under) <= COLUMNS + 2 and len(chart) < 60_000
    (peak,) = [text for _, text in under if "op4321" in text]
    assert "plain 1000 bytes" in peak and peak.startswith("backward")
    assert all((text.startswith("backward")) == (place > 0.6) for place, text in under)


def test_the_plan_of_another_profile_is_refused() -> None:
    other = transformer(2, width=32, tokens=32)
    with pytest.raises(PlanError, match=r"was asked for.*but they do not belong together.*Pass the profile"):
        plan_page(other, HALF)


@pytest.mark.parametrize(("least", "most"), [(0, 1), (0, 999), (0, 140 << 20), (5 << 30, 7 << 30), (7, 7)])
def test_ticks_are_round_and_few(least: int, most: int) -> None:
    found = byte_ticks(least, most)
    assert 1 <= len(found) <= 7 and all(least <= tick <= most for tick in found)


def test_a_plan_that_was_read_from_json_makes_the_same_page() -> None:
    again = plan_page(StepProfile.from_json(STEP.to_json()), Plan.from_json(HALF.to_json()), "train.py")
    assert again == PAGE


@pytest.mark.slow
def test_a_step_on_this_machine() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.ReLU()) for _ in range(2)), nn.Linear(32, 1))
    x = torch.ones(64, 32)
    step = StepProfile.from_json(profile(lambda: model(x).sum().backward(), model, min_nbytes=0).to_json())
    found: Any = Planner(step).solutions[0]
    page = plan_page(step, plan(step, found.peak_nbytes))
    assert Elements(page).values[1] == str(found.peak_nbytes)


def test_a_plan_with_more_choices_than_its_profile_has_a_page() -> None:
    torch.manual_seed(0)
    model, steps = nn.Sequential(nn.Linear(64, 256), nn.SiLU(), nn.Linear(256, 8)), [0]
    x = torch.randn(512, 64)

    def step() -> None:
        steps[0] += 1
        model(x).square().mean().backward()

    taken = profile(step, model, min_nbytes=0)
    found = plan(taken, "90%", ("lossless", "recompute", "bounded"), error_limit=0.1)
    before = steps[0]
    assert "Memory over the step" in plan_page(taken, found)
    assert steps[0] == before  # what was tried for the plan is known
