"""The landing page leads to three doors, and what each shows runs: its page, its command and its notebook."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from typer.main import get_command

from backstash.cli.commands import app

ROOT = Path(__file__).parents[1]
INDEX = (ROOT / "docs" / "index.md").read_text()
DOORS = re.findall(r"^\| \*\*(.+?)\*\* \| (.+?) \| `(.+?)` \| `(.+?)` \|$", INDEX, re.MULTILINE)
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def cells(notebook: Path, kind: str) -> list[str]:
    """The texts of a notebook's cells of one kind."""
    return ["".join(cell["source"]) for cell in json.loads(notebook.read_text())["cells"] if cell["cell_type"] == kind]


def first_block(page: str) -> str:
    found = re.search(r"^```python\n(.*?)^```$", (ROOT / "docs" / "use" / page).read_text(), re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[1]


def test_there_are_three_doors_with_a_notebook_each() -> None:
    assert [door for door, *_ in DOORS] == ["I am out of memory", "My loss differs", "I want to add a codec"]
    assert sorted(ROOT / notebook for *_, notebook in DOORS) == NOTEBOOKS
    for door, *_, notebook in DOORS:
        assert cells(ROOT / notebook, "markdown")[0].startswith(f"# {door}")


@pytest.mark.parametrize("command", [command for *_, command, _ in DOORS])
def test_the_command_of_a_door_is_there_with_its_options(command: str) -> None:
    program, name, *words = shlex.split(command)
    assert program == "backstash"
    known = get_command(app).commands[name]  # type: ignore[attr-defined]
    options = {option for parameter in known.params for option in parameter.opts}
    assert {word for word in words if word.startswith("--")} <= options


def test_the_picture_is_the_first_thing_that_is_seen() -> None:
    (picture,) = re.findall(r"!\[.*?\]\((.+?)\)", INDEX)
    assert (ROOT / "docs" / picture).is_file()
    assert INDEX.index("![") < INDEX.index("## ")


def test_the_site_can_be_searched_and_names_every_page() -> None:
    settings = (ROOT / "mkdocs.yml").read_text()
    assert re.search(r"^  - search$", settings, re.MULTILINE)
    named = set(re.findall(r"[\w/-]+\.md", settings))
    pages = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    assert pages == named


@pytest.fixture
def shell() -> Iterator[Any]:
    interactive = pytest.importorskip("IPython.core.interactiveshell", reason="needs IPython")
    made = interactive.InteractiveShell(history_length=0)
    yield made
    made.history_manager.end_session()
    interactive.InteractiveShell.clear_instance()


EXPECTED = {
    "out_of_memory": ["same bits: True", "activations"],
    "loss_differs": ["the first value that differs", "preserve_rng_state=True", "equal"],
    "own_codec": ["CodecCheck(encoded=", "constant"],
}


@pytest.mark.slow
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_from_its_first_cell_to_its_last(
    notebook: Path, shell: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("IPython.display.display", lambda *shown: print(*shown))
    for text in cells(notebook, "code"):
        shell.run_cell(text).raise_error()
    shown = capsys.readouterr().out
    assert [part for part in EXPECTED[notebook.stem] if part not in shown] == []


def test_a_notebook_is_written_without_what_it_has_printed() -> None:
    for notebook in NOTEBOOKS:
        for cell in json.loads(notebook.read_text())["cells"]:
            assert cell.get("outputs", []) == [] and cell.get("execution_count") is None


def test_the_page_about_codecs_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    module = ModuleType("own_codec")
    monkeypatch.setitem(sys.modules, "own_codec", module)  # where a dataclass and check_codec look for its names
    exec(compile(first_block("own-codec.md"), "own-codec.md", "exec", dont_inherit=True), module.__dict__)
    shown = capsys.readouterr().out
    assert re.search(r"^CodecCheck\(encoded=[1-9]", shown, re.MULTILINE)
    assert re.search(r"2/Addmm#0:mat1 .* constant\b", shown)


def test_the_notebook_about_codecs_has_the_code_of_the_page() -> None:
    page = "".join(first_block("own-codec.md").split())
    assert "".join("".join(cells(ROOT / "notebooks" / "own_codec.ipynb", "code")).split()) == page
