"""The text beside the code: links, paths, errors, examples."""

from __future__ import annotations

import ast
import doctest
import importlib
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from sources import MODULES, ROOT, SOURCE, nodes_of

import backstash
from backstash import errors

pytestmark = pytest.mark.cases(10_000)  # they take little, and each file has to keep the rules

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
WRITTEN = [page for page in PAGES if page.name not in ("CONTRIBUTING.md", "CHANGELOG.md")]  # those with figures
GENERATED = re.compile(r"<!-- (table|n|file): .*?<!-- (end|/n|/file) -->", re.DOTALL)
# Numbers that look measured: times, speeds, ratios. Sizes and shares are left out: most of them are settings.
MEASURED = re.compile(r"(?<![\w.])\d[\d,.]*\s(?:ms|s|seconds|GB/s)\b|(?<![\w.])\d+\.\d+(?:x\b|\stimes\b)")
SETTINGS = {"12.8 GB/s", "55 GB/s"}  # the simulated links
ABSOLUTE = re.compile(r"(?<![\w.:/])/(?:work|root|home|tmp|Users)/")
OPTIONAL = {  # modules that need what a plain install does not bring
    "backstash.cli.commands": "typer",
    "backstash.cli.comparison": "typer",
    "backstash.report.plot": "matplotlib",
    "backstash.integrations.lightning": "lightning",
    "backstash.integrations.huggingface": "transformers",
    "backstash.integrations.accelerate": "accelerate",
    "backstash.integrations.axolotl": "axolotl",
    "backstash.integrations.fastai": "fastai",
    "backstash.integrations.torchtitan": "torchtitan",
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


@pytest.mark.parametrize("page", [*PAGES, *MODULES], ids=page_name)
def test_no_path_of_one_machine(page: Path) -> None:
    assert not ABSOLUTE.findall(page.read_text())


def test_files_that_the_source_names_are_there() -> None:
    for path in MODULES:
        for name in re.findall(r"\b(?:docs|tests|bench|studies|native)/[\w/]+\.(?:md|py|cpp|h)\b", path.read_text()):
            assert (ROOT / name).exists(), f"{path.name} names {name}"


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_files_that_a_page_names_are_there(page: Path) -> None:
    for name in re.findall(
        r"\b(?:src/backstash|docs|tests|bench|studies|native)/[\w/]+\.(?:md|py|cpp|h|txt)\b", page.read_text()
    ):
        assert (ROOT / name).exists(), name


def test_the_table_of_rooms_names_every_file_of_the_package() -> None:
    text = (ROOT / "docs/understand/architecture.md").read_text()
    rows = re.search(r"<!-- The table of rooms.*?-->(.*?)<!-- End of the table of rooms", text, re.DOTALL)
    assert rows is not None
    named = set()
    for cell in (row.split("|")[2] for row in rows[1].splitlines() if row.count("|") > 3):
        folder = ""
        for name in re.findall(r"`([\w/.]+(?:\.py|/))`", cell):
            inside = folder + name if "/" not in name and (SOURCE / folder / name).exists() else name
            assert (SOURCE / inside).exists(), f"{inside} is in the table and not in the package"
            folder = inside[: inside.rindex("/") + 1] if "/" in inside else ""
            named.add(inside)
    files = {str(path.relative_to(SOURCE)) for path in MODULES if not path.name.startswith("__")}
    missing = {
        file
        for file in files
        if not any(file == name or (name.endswith("/") and file.startswith(name)) for name in named)
    }
    assert missing - {"arguments.py", "errors.py", "version.py"} == set()


def test_published_figures_are_those_of_the_results() -> None:
    command = [sys.executable, "-m", "studies.published", "--check"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, f"run `make figures`:\n{result.stdout}{result.stderr}"


@pytest.mark.parametrize("page", WRITTEN, ids=page_name)
def test_no_measured_figure_is_written_by_hand(page: Path) -> None:
    text = re.sub(r"[\s]+", " ", GENERATED.sub("", without_code(page.read_text())))
    assert {match[0] for match in MEASURED.finditer(text)} <= SETTINGS


def test_a_figure_that_is_written_by_hand_is_found() -> None:
    by_hand = ["takes 35 ms", "at 17 GB/s", "2.1 times as fast", "a step of 1.07x", "in 12.3 s"]
    assert all(MEASURED.search(text) for text in by_hand)
    assert not MEASURED.search("64 MiB, batch 32 at 224x224, 3 steps, 0.01, section 5.2")


def test_only_the_newest_results_of_each_kind_are_kept() -> None:
    names = (re.fullmatch(r"(.+?)-\d{4}-\d{2}-\d{2}(.*)", path.name) for path in (ROOT / "docs" / "results").iterdir())
    kinds = [match.groups() for match in names if match]
    assert sorted(kinds) == sorted(set(kinds))


def test_every_note_that_the_code_cites_is_there() -> None:
    notes = re.compile(r"Note: \[([^\]]+)\](\n {4}|\n\S)?")
    known = set(re.findall(r"^\*\*\[([^\]]+)\]\*\*", (ROOT / "docs/understand/hazards.md").read_text(), re.MULTILINE))
    cited: dict[str, str] = {}
    for path in [*MODULES, *(ROOT / "tests").rglob("*.py")]:
        for line in re.findall(r"^ *Note: \[([^\]]+)\]$", path.read_text(), re.MULTILINE):
            known.add(line)  # defined in the module itself
        text = re.sub(r"\n\s*#?\s*", " ", path.read_text())
        cited |= {name: path.name for name, _ in notes.findall(text)}
    assert {name: file for name, file in cited.items() if name not in known} == {}


def test_every_result_that_a_page_links_to_has_a_date() -> None:
    for page in PAGES:
        for link in re.findall(r"\]\(([^)\s]*results/[^)\s]+)\)", GENERATED.sub("", page.read_text())):
            assert link.endswith(".md"), f"{page_name(page)} links to {link} outside a generated region"


def raised() -> Iterator[str]:
    for path in MODULES:
        for node in nodes_of(path):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                yield ast.unparse(node.exc.func).rsplit(".", 1)[-1]


def test_every_error_is_raised_by_its_cause() -> None:
    classes = [value for _, value in inspect.getmembers(errors, inspect.isclass)]
    assert all(issubclass(error, errors.BackstashError) for error in classes)
    assert all(error.__doc__ for error in classes)
    assert {error.__name__ for error in classes} - {"BackstashError"} <= set(raised())


def modules() -> list[str]:
    paths = [path.relative_to(SOURCE.parent).with_suffix("") for path in MODULES]
    return sorted(".".join(path.parts).removesuffix(".__init__") for path in paths if path.name != "__main__")


@pytest.mark.parametrize("name", modules())
def test_examples_in_docstrings(name: str) -> None:
    needed = next((OPTIONAL[module] for module in OPTIONAL if f"{name}.".startswith(f"{module}.")), None)
    needed = "triton" if "triton" in name.split(".") else needed  # the files of that name in families of kernels
    if needed is not None and find_spec(needed) is None:
        pytest.skip(f"{name} needs {needed}, which is not installed")
    module = importlib.import_module(name)
    result = doctest.testmod(module, optionflags=doctest.ELLIPSIS)
    assert result.failed == 0


def listed(docstring: str) -> Iterator[str]:
    """The entries in the sections of a docstring that list names, up to where a description continues."""
    for section in re.findall(r"^(?:Args|Attributes|Raises):\n((?:[ ]{4}.*\n?|\n)+)", docstring, re.MULTILINE):
        yield from re.findall(r"^ {4}(\S.*(?<=,)\n {8}.*|\S.*)$", section, re.MULTILINE)


def test_every_argument_in_a_docstring_has_a_name() -> None:
    """The site is built from them, and stops at a line that continues a description and is not indented."""
    found = []
    for path in MODULES:
        for node in nodes_of(path):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                lines = listed(ast.get_docstring(node) or "")
                found += [
                    f"{path.relative_to(ROOT)}: {line}" for line in lines if not re.match(r"[\w*`.,\s()]+:( |$)", line)
                ]
    assert found == []


def test_the_docstring_of_a_module_names_what_is_there() -> None:
    """It begins with a noun: a question or a pronoun tells a newcomer nothing."""
    questions = re.compile(r"(?:What|Which|Who|Whose|How|Whether|Where|When|Why|It|They|This|Those)\b")
    found = []
    for folder in ("src", "tests", "bench", "studies"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
            if questions.match(docstring):
                found.append(str(path.relative_to(ROOT)))
    assert found == []


def test_every_codec_has_an_example() -> None:
    finder = doctest.DocTestFinder()
    for name in backstash.codecs.names():
        codec = type(backstash.codecs.get(name))
        examples = [test for test in finder.find(codec) if test.name == codec.__name__ and test.examples]
        assert examples, name
