"""The page in a real browser, at the widths of a telephone and of a wide screen."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import replace
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from backstash.planning.model.plan import Plan
from backstash.planning.model.problem import StepProfile
from backstash.planning.search.planner import plan
from backstash.report.plan_page import plan_page
from bench.profiles import transformer

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

pytestmark = [pytest.mark.slow, pytest.mark.skipif(BROWSER is None, reason="needs Chromium")]

ASK = """
<pre id="answer"></pre><script>
const rows=name=>[...document.getElementById(name).tBodies[0].rows];
const heads=[...document.getElementById('modules').tHead.rows[0].cells];
const saved=()=>rows('modules').map(row=>Number(row.cells[2].dataset.v));
const answer={width:innerWidth,wide:document.documentElement.scrollWidth,before:saved()};
const button=heads[2].querySelector('button');
button.click();answer.descending=saved();answer.sort=heads[2].getAttribute('aria-sort');
button.click();answer.ascending=saved();button.click();answer.again=saved();
const input=document.querySelector('[data-table=modules]');
input.value='MLP act';input.dispatchEvent(new Event('input'));
answer.found=rows('modules').filter(row=>!row.hidden).map(row=>row.cells[0].textContent);
answer.count=input.parentElement.querySelector('output').textContent;
const plot=document.querySelector('#memory .plot'),box=plot.getBoundingClientRect();
plot.dispatchEvent(new PointerEvent('pointermove',{clientX:box.left+box.width/2,clientY:box.top+5}));
answer.tip=plot.querySelector('.tip').textContent;
plot.focus();plot.dispatchEvent(new KeyboardEvent('keydown',{key:'Home'}));
answer.home=plot.querySelector('.tip').textContent;
plot.dispatchEvent(new KeyboardEvent('keydown',{key:'ArrowRight'}));
answer.next=plot.querySelector('.tip').textContent;
const texts=[...document.querySelectorAll('.plot b,.y span,.x span')];
answer.outside=texts.filter(one=>{const b=one.getBoundingClientRect();return b.left<0||b.right>innerWidth+1})
 .map(one=>one.textContent);
answer.failed=performance.getEntriesByType('resource').map(one=>one.name);
document.getElementById('answer').textContent=JSON.stringify(answer)</script></body>
"""


@pytest.fixture(scope="module")
def step() -> StepProfile:
    return transformer(3, width=64, tokens=256, words=256)


@pytest.fixture(scope="module")
def half(step: StepProfile) -> Plan:
    return plan(step, "50%")


def answers(page: str, folder: Path, width: int) -> Any:
    path = folder / "page.html"
    path.write_text(page.replace("</body>", ASK))
    command = [str(BROWSER), "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'browser'}"]
    command += [f"--window-size={width},900", "--dump-dom", path.as_uri()]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
    (text,) = re.findall(r'<pre id="answer">(.*?)</pre>', shown, re.DOTALL)
    return json.loads(unescape(text))


@pytest.mark.parametrize("width", [400, 1400])
def test_sorting_searching_and_pointing(step: StepProfile, half: Plan, tmp_path: Path, width: int) -> None:
    found = answers(plan_page(step, half, "train.py"), tmp_path, width)
    assert found["width"] <= width + 100, "a browser may have a least width"
    assert found["wide"] <= found["width"], "nothing has to be scrolled sideways"
    assert found["outside"] == [], "no label of a chart is cut off"
    assert found["descending"] == sorted(found["before"], reverse=True) and found["sort"] == "descending"
    assert found["ascending"] == sorted(found["before"])
    assert found["again"] == found["before"]
    assert len(found["found"]) == 1 and found["found"][0].startswith("h.*.mlp.act (3)")
    assert found["count"] == f"1 of {len(found['before'])}"
    assert re.match(r"(forward|backward) \d+: .*\nplain .*, planned .*", found["tip"])
    assert re.match(r"(forward|backward) \d+: ", found["home"]), "arrow keys read the points"
    assert found["next"] not in (found["home"], found["tip"])
    assert found["failed"] == [], "nothing is fetched"


def test_long_names_do_not_make_a_narrow_page_wider(step: StepProfile, half: Plan, tmp_path: Path) -> None:
    """A path of two hundred letters without a point is broken, not scrolled to."""
    decisions = [replace(half.decisions[0], module="m" * 200, reason="r" * 200), *half.decisions[1:]]
    found = answers(plan_page(step, replace(half, decisions=tuple(decisions)), "t" * 200), tmp_path, 400)
    assert found["wide"] <= found["width"]
