"""The text beside the code: links, paths, errors, examples."""

from __future__ import annotations

import ast
import doctest
import importlib
import inspect
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

import backstash
from backstash import errors

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
SOURCE = ROOT / "src" / "backstash"
ABSOLUTE = re.compile(r"(?<![\w.:/])/(?:work|root|home|tmp|Users)/")
OPTIONAL = {  # modules that need what a plain install does not bring
    "backstash.cli.commands": "typer",
    "backstash.cli.comparison": "typer",
    "backstash.ops.triton": "triton",
    "backstash.report.plot": "matplotlib",
    "backstash.integrations.lightning": "lightning",
    "backstash.integrations.huggingface": "transformers",
}


def page_name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def without_code(text: str) -> str:
    return re.sub(r"`[^`\n]*`", "", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL))


def test_there_is_a_readme() -> None:
    assert (ROOT / "README.md").exists()


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", without_code(page.read_text())):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("page", [*PAGES, *sorted(SOURCE.rglob("*.py"))], ids=page_name)
def test_no_path_of_one_machine(page: Path) -> None:
    assert not ABSOLUTE.findall(page.read_text())


def test_files_that_the_source_names_are_there() -> None:
    for path in SOURCE.rglob("*.py"):
        for name in re.findall(r"\b(?:docs|tests|benchmarks|native)/[\w/]+\.(?:md|py|cpp|h)\b", path.read_text()):
            assert (ROOT / name).exists(), f"{path.name} names {name}"


def raised() -> Iterator[str]:
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                yield ast.unparse(node.exc.func).rsplit(".", 1)[-1]


def test_every_error_is_raised_by_its_cause() -> None:
    classes = [value for _, value in inspect.getmembers(errors, inspect.isclass)]
    assert all(issubclass(error, errors.BackstashError) for error in classes)
    assert all(error.__doc__ for error in classes)
    assert {error.__name__ for error in classes} - {"BackstashError"} <= set(raised())


def modules() -> list[str]:
    paths = [path.relative_to(SOURCE.parent).with_suffix("") for path in SOURCE.rglob("*.py")]
    return sorted(".".join(path.parts).removesuffix(".__init__") for path in paths if path.name != "__main__")


@pytest.mark.parametrize("name", modules())
def test_examples_in_docstrings(name: str) -> None:
    needed = next((OPTIONAL[module] for module in OPTIONAL if f"{name}.".startswith(f"{module}.")), None)
    if needed is not None and find_spec(needed) is None:
        pytest.skip(f"{name} needs {needed}, which is not installed")
    module = importlib.import_module(name)
    result = doctest.testmod(module, optionflags=doctest.ELLIPSIS)
    assert result.failed == 0


def test_every_codec_has_an_example() -> None:
    finder = doctest.DocTestFinder()
    for name in backstash.codecs.names():
        codec = type(backstash.codecs.get(name))
        examples = [test for test in finder.find(codec) if test.name == codec.__name__ and test.examples]
        assert examples, name
