"""Every example runs, gives the same bits with backstash and without, and shows the line that adds it."""

from __future__ import annotations

import ast
import dataclasses
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from studies import examples
from studies.examples import EXAMPLES, FOLDER

ROOT = Path(__file__).parents[2]


def observe(name: str, arguments: Sequence[str]) -> Any:
    """Runs an example in this process, without the settings that accelerate keeps for a whole process."""
    found = examples.observe(name, arguments)
    if "accelerate" in sys.modules:
        from accelerate.state import AcceleratorState, GradientState

        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.filterwarnings("ignore::FutureWarning")  # peft asks transformers by a name that is going away
@pytest.mark.filterwarnings("ignore:.*(pin_memory|num_workers|val_dataloader|treespec|log_every_n_steps).*")
def test_an_example_gives_the_same_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    needed = {"train_gpt2": "transformers", "classify_lightning": "lightning", "finetune_lora": "peft"}
    pytest.importorskip(needed.get(name, "torch"))
    row = examples.compare(name, tiny=True, run=observe)
    assert row.losses_equal and row.weights_equal
    assert row.ratio >= 1


@pytest.mark.slow
def test_an_example_runs_as_the_page_says() -> None:
    command = [sys.executable, "examples/segment_volumes.py", "--steps", "2", *EXAMPLES["segment_volumes"].tiny]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "overlap with the balls" in done.stdout
    assert re.search(r"[KM]iB", done.stdout)


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_line_that_adds_backstash_is_in_the_example(name: str) -> None:
    text = (FOLDER / f"{name}.py").read_text()
    assert len([line for line in text.splitlines() if "# <- this is all" in line]) == 1
    shown = EXAMPLES[name].line
    assert shown in text or "BackstashCallback()" in text
    assert ast.get_docstring(ast.parse(text))


def test_every_example_is_on_the_page_and_in_the_table() -> None:
    page = (FOLDER / "README.md").read_text()
    files = {path.stem for path in FOLDER.glob("*.py")}
    assert files - {"train_images", "within_a_budget"} == set(EXAMPLES)
    assert all(f"`{name}.py`" in page for name in files)


def test_a_difference_is_an_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    row = examples.Row("segment_volumes", "", "", (), 2, 1, 2.0, 2, 1, True, True)
    monkeypatch.setattr(examples, "compare", lambda *_: row)
    assert examples.main(["--only", "segment_volumes"]) == 0
    row = dataclasses.replace(row, weights_equal=False)
    assert examples.main(["--only", "segment_volumes"]) == 1


@pytest.mark.slow
def test_a_failing_example_says_so() -> None:
    with pytest.raises(RuntimeError, match="the example segment_volumes failed"):
        examples._run("segment_volumes", ["--no-such-option"])
