"""The report, the verdict and the plan are pages of one design that a keyboard and a screen reader can use."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import backstash as bs
from backstash.planning.search.planner import plan
from backstash.report.plan_page import plan_page
from backstash.stash.html import PAGE_STYLE, TABLE_SCRIPT
from backstash.verifying.verdict import verification_page
from bench.profiles import transformer


def report_page() -> str:
    session = bs.Session("lossless", min_nbytes=0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    with session:
        loss = model(torch.ones(512, 64)).sum()
    loss.backward()
    return session.report().to_html()


def verdict_page() -> str:
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))

    def step() -> None:
        x = torch.ones(8, 8, requires_grad=True)
        checkpoint(model, x, use_reentrant=False, preserve_rng_state=False).sum().backward()

    return verification_page(bs.verify(step, model))


def planned_page() -> str:
    step = transformer(2, width=64, tokens=256, words=256)
    return plan_page(step, plan(step, "50%"), "train.py")


PAGES = {"report": report_page, "verdict": verdict_page, "plan": planned_page}


class Read(HTMLParser):
    """A page's elements with their attributes, in order, and which headings it has."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.found.append((tag, dict(attrs)))

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.found if name == tag]


@pytest.fixture(scope="module", params=PAGES)
def page(request: pytest.FixtureRequest) -> str:
    return PAGES[request.param]()


def test_it_has_a_language_a_title_one_heading_and_a_main_part(page: str) -> None:
    read = Read(page)
    assert read.all("html")[0]["lang"] == "en" and re.search(r"<title>[^<]+</title>", page)
    assert len(read.all("h1")) == len(read.all("main")) == 1
    levels = [int(tag[1]) for tag, _ in read.found if re.fullmatch(r"h[1-6]", tag)]
    assert levels[0] == 1 and all(after - before <= 1 for before, after in pairwise(levels))


def test_its_style_is_that_of_all_pages(page: str) -> None:
    assert (
        PAGE_STYLE in page
        and "default-src 'none'" in page
        and "prefers-color-scheme:dark" in page
        and ":focus-visible" in page
    )


def test_every_heading_of_a_table_says_what_it_heads(page: str) -> None:
    heads = Read(page).all("th")
    assert heads and {head.get("scope") for head in heads} == {"col", "row"}


def test_everything_that_acts_has_a_name_and_takes_the_keyboard(page: str) -> None:
    read = Read(page)
    assert all(field.get("aria-label") for field in read.all("input"))
    assert all(drawing.get("aria-label") for drawing in read.all("svg"))
    ids = {attributes["id"] for _, attributes in read.found if attributes.get("id")}
    for _, attributes in read.found:
        assert "onclick" not in attributes
        assert attributes.get("aria-controls") in {None, *ids}
        if attributes.get("tabindex"):
            assert attributes["tabindex"] == "0" and attributes.get("role") and attributes.get("aria-label")


def test_tables_are_sorted_by_buttons_and_say_their_order() -> None:
    assert "createElement('button')" in TABLE_SCRIPT and "aria-sort" in TABLE_SCRIPT


def test_points_of_a_chart_are_read_by_arrow_keys() -> None:
    text = planned_page()
    for key in ("ArrowLeft", "ArrowRight", "Home", "End"):
        assert key in text
    assert len([each for each in Read(text).all("div") if each.get("class") == "tip"]) == 2
    assert text.count('role="status"') == 2
