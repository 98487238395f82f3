"""The report, the verdict and the plan in Chromium: by keyboard, as a screen reader hears them, in light and dark."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.report.test_pages_for_everybody import PAGES
from tests.report.webdriver import BROWSER, DRIVER, Browser, browser

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None or DRIVER is None, reason="needs Chromium and its driver"),
]

VISIBLE = "const shown=e=>e.checkVisibility()&&e.getClientRects().length>0;"

ACTS = (
    VISIBLE
    + "return [...document.querySelectorAll('a[href],button,input,summary,[tabindex=\"0\"]')].filter(shown).length"
)

FOCUSED = """
const e=document.activeElement;if(e===document.body||e===document.documentElement)return null;
const style=getComputedStyle(e);
return {element:e,outline:style.outlineStyle==='none'?0:parseFloat(style.outlineWidth),tag:e.tagName}
"""

CONTRAST = (
    VISIBLE
    + """
const canvas=document.createElement('canvas').getContext('2d',{willReadFrequently:true});
const rgba=text=>{canvas.clearRect(0,0,1,1);canvas.fillStyle=text;canvas.fillRect(0,0,1,1);
 return [...canvas.getImageData(0,0,1,1).data]};
const light=([r,g,b])=>[r,g,b].map(v=>v/255).map(v=>v<=.04045?v/12.92:((v+.055)/1.055)**2.4)
 .reduce((sum,v,i)=>sum+v*[.2126,.7152,.0722][i],0);
const ground=e=>{for(;e;e=e.parentElement){const c=rgba(getComputedStyle(e).backgroundColor);if(c[3]>200)return c}
 return [255,255,255,255]};
const found=[];
const walker=document.createTreeWalker(document.body,NodeFilter.SHOW_TEXT);
while(walker.nextNode()){
 const e=walker.currentNode.parentElement;
 if(!walker.currentNode.textContent.trim()||!shown(e)||['SCRIPT','STYLE'].includes(e.tagName))continue;
 const a=light(rgba(getComputedStyle(e).color)),b=light(ground(e));
 const ratio=(Math.max(a,b)+.05)/(Math.min(a,b)+.05);
 if(ratio<4.5)found.push([e.tagName+'.'+e.className,walker.currentNode.textContent.trim().slice(0,40),ratio.toFixed(2)])}
return found
"""
)


@pytest.fixture(scope="module")
def window(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("browser")) as opened:
        yield opened


@pytest.fixture(scope="module", params=PAGES)
def page(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("page") / f"{request.param}.html"
    file.write_text(PAGES[request.param]())
    return file


def test_the_tab_key_reaches_everything_that_acts_and_shows_where_it_is(window: Browser, page: Path) -> None:
    window.open(page)
    acts, reached = window.run(ACTS), []
    for _ in range(acts + 5):
        window.press("Tab")
        focused = window.run(FOCUSED)
        if focused is None:
            break
        role, name = window.heard(focused["element"])
        assert role not in ("generic", "none", "") and name, (role, name, focused["tag"])
        assert focused["outline"] >= 1, f"no outline shows that {name!r} has the focus"
        reached.append((role, name))
    assert len(reached) == acts, reached


@pytest.mark.parametrize("width", [400, 1200])
def test_a_screen_reader_hears_tables_with_their_headings(window: Browser, page: Path, width: int) -> None:
    window.open(page, width)
    tables: list[Any] = window.run(VISIBLE + "return [...document.querySelectorAll('table')].filter(shown)")
    assert tables
    for table in tables:
        assert window.heard(table)[0] == "table"
        first = (
            VISIBLE
            + "const t=arguments[0],r=t.tBodies[0].rows[0];return [t.rows[0].cells[0],r,...[...r.cells].filter(shown)]"
        )
        head, row, name, *rest = window.run(first, table)
        assert window.heard(head)[0] in ("columnheader", "rowheader")
        assert window.heard(row)[0] == "row"
        assert window.heard(name)[0] == "rowheader", "the name is read before each cell of its row"
        assert all(window.heard(cell)[0] == "cell" for cell in rest)


@pytest.mark.parametrize("is_dark", [False, True], ids=["light", "dark"])
def test_all_text_stands_out_from_its_ground(window: Browser, page: Path, is_dark: bool) -> None:
    window.open(page, is_dark=is_dark)
    window.run("for(const e of document.querySelectorAll('details'))e.open=true")
    assert window.run(CONTRAST) == []


@pytest.mark.parametrize("width", [320, 1200])
def test_it_is_as_wide_as_its_window_and_asks_for_nothing(window: Browser, page: Path, width: int) -> None:
    window.open(page, width)
    window.run("for(const e of document.querySelectorAll('details'))e.open=true")
    assert window.run("return document.documentElement.scrollWidth") <= width
    assert window.run("return performance.getEntriesByType('resource').map(e=>e.name)") == []
    assert window.complaints() == []
    facts = "[...document.querySelectorAll('.scroll')].filter(e=>!e.querySelector('thead'))"
    assert window.run(f"return {facts}.filter(e=>e.scrollWidth>e.clientWidth)") == [], "nothing of a fact is cut off"


def test_words_are_not_broken_where_there_is_room(window: Browser, page: Path) -> None:
    """A short word of a cell has one line on a wide screen."""
    window.open(page, 1200)
    broken = (
        VISIBLE
        + """
    const found=[];const range=document.createRange();
    const walker=document.createTreeWalker(document.querySelector('main'),NodeFilter.SHOW_TEXT);
    while(walker.nextNode())for(const word of walker.currentNode.textContent.matchAll(/[^\\s-]{1,12}/g)){
     const node=walker.currentNode;if(!shown(node.parentElement))continue;
     range.setStart(node,word.index);range.setEnd(node,word.index+word[0].length);
     if(word[0].length<12&&new Set([...range.getClientRects()].map(r=>Math.round(r.top))).size>1)found.push(word[0])}
    return found"""
    )
    assert window.run(broken) == []


def test_a_table_is_sorted_and_searched_by_keys(window: Browser, tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    file.write_text(PAGES["report"]())
    window.open(file)
    window.run("document.querySelector('#values th.n button').focus()")
    for order in ("descending", "ascending", None):
        window.press("Enter")
        assert window.run("return document.activeElement.closest('th').getAttribute('aria-sort')") == order
    window.run("document.querySelector('input').focus()")
    for letter in "nothing of this name":
        window.press(letter)
    status, output = window.heard(window.run("return document.querySelector('output')"))[0], "0 of 2"
    assert status == "status" and window.run("return document.querySelector('output').textContent") == output


def test_arrow_keys_read_the_points_of_a_chart_aloud(window: Browser, tmp_path: Path) -> None:
    file = tmp_path / "plan.html"
    file.write_text(PAGES["plan"]())
    window.open(file)
    window.run("document.querySelector('#memory .plot').focus()")
    said = []
    for key in ("Home", "ArrowRight", "ArrowRight", "ArrowLeft"):
        window.press(key)
        said.append(window.run("return document.querySelector('#memory .tip').textContent"))
    assert len(set(said)) == 3 and said[1] == said[3]
    assert window.heard(window.run("return document.querySelector('#memory .tip')"))[0] == "status"
