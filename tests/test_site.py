"""The site's pages: what their hooks make of the HTML of docstrings."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HOOKS = ROOT / ".ci" / "site_hooks.py"
PACKAGES = ("codecs", "policies", "stores")


def page(html: str) -> str:
    """The HTML of a page that describes a Plan and two functions named ``load``."""
    spec = importlib.util.spec_from_file_location("site_hooks", HOOKS)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    ids = ("planning.Plan", "planning.Plan.saved", "planning.load", "stores.load")
    headings = "".join(f'<h2 id="backstash.{name}" class="doc">..</h2>' for name in ids)
    made: str = module.on_page_content(headings + html, page=None, config=None, files=None)
    assert made.startswith(headings)
    return made.removeprefix(headings)


@pytest.mark.parametrize(
    ("html", "expected"),
    [
        (":class:<code>Plan</code>", '<a href="#backstash.planning.Plan"><code>Plan</code></a>'),
        (":meth:<code>Plan.saved</code>", '<a href="#backstash.planning.Plan.saved"><code>Plan.saved</code></a>'),
        (":class:<code>~backstash.planning.Plan</code>", '<a href="#backstash.planning.Plan"><code>Plan</code></a>'),
        (":func:<code>load</code>", "<code>load</code>"),
        (":func:<code>~backstash.errors.other</code>", "<code>other</code>"),
        (":mod:<code>backstash.errors</code>", "<code>backstash.errors</code>"),
        ("<code>Plan</code>", "<code>Plan</code>"),
        ("<code>run --fix a--b</code>", '<code>run <span class="option">--fix</span> a--b</code>'),
        ("<pre><code><span>run --fix</span></code></pre>", "<pre><code><span>run --fix</span></code></pre>"),
    ],
)
def test_a_role_is_a_link_where_the_page_describes_what_it_names_and_an_option_stays_whole(
    html: str, expected: str
) -> None:
    assert page(html) == expected


def test_the_hooks_know_every_role_of_the_docstrings() -> None:
    known = set(re.findall(r"\w+", re.search(r"\(\?:([\w|]+)\)", HOOKS.read_text())[1]))  # type: ignore[index]
    used = {
        role
        for path in (ROOT / "src").rglob("*.py")
        for role in re.findall(r"(?<![\w:`]):([a-z:]+):`[~\w]", path.read_text())
    }
    assert used <= known
    assert f"hooks: [{HOOKS.relative_to(ROOT)}]" in (ROOT / "mkdocs.yml").read_text()


@pytest.mark.parametrize("package", PACKAGES)
def test_what_a_package_exports_is_described_once(package: str) -> None:
    """The page of the contract leaves out the names that the package's own part has."""
    text = (ROOT / "docs" / "reference" / f"{package}.md").read_text()
    left_out = re.search(rf"::: backstash\.{package}\.base\n.*?!\^\(([\w|]+)\)\$", text, re.DOTALL)
    assert left_out is not None and f"::: backstash.{package}\n" in text
    exported = set(importlib.import_module(f"backstash.{package}").__all__)
    base = (ROOT / "src" / "backstash" / package / "base.py").read_text()
    described = {*re.findall(r"^(?:class|def) (\w+)", base, re.MULTILINE)}
    assert exported & described <= set(left_out[1].split("|")) <= exported
