"""The whole scripts on the pages of frameworks run as they stand there."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs" / "use"
NEEDED = {
    "frameworks-accelerate": "accelerate",
    "frameworks-huggingface": "transformers",
    "frameworks-lightning": "lightning",
    "frameworks-loops": "torch",
}
"""The pages, and what their scripts import."""


def script(page: str) -> str:
    """The first block of code of a page."""
    found = re.search(r"^```python\n(.*?)^```$", (DOCS / f"{page}.md").read_text(), re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[1]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*(pin_memory|num_workers|treespec|log_every_n_steps).*")
@pytest.mark.parametrize("page", NEEDED)
def test_the_script_of_a_page_runs(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip(NEEDED[page])
    monkeypatch.chdir(tmp_path)
    try:
        exec(compile(script(page), f"{page}.md", "exec", dont_inherit=True), {"__name__": "__main__"})
    finally:
        if "accelerate" in sys.modules:  # it keeps its settings for the whole process
            from accelerate.state import AcceleratorState, GradientState

            AcceleratorState._reset_state(reset_partial_state=True)
            GradientState._reset_state()
    assert re.search(r"[KM]iB", capsys.readouterr().out)


@pytest.mark.parametrize("page", NEEDED)
def test_a_page_shows_the_line(page: str) -> None:
    assert len([line for line in script(page).splitlines() if "# <- this is all" in line]) == 1


def test_every_page_of_a_framework_is_linked_from_the_overview() -> None:
    overview = (DOCS / "frameworks.md").read_text()
    pages = {path.stem for path in DOCS.glob("frameworks-*.md")}
    assert pages == set(NEEDED)
    assert all(f"({page}.md" in overview for page in pages)
