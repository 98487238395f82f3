"""``backstash verify`` runs unchanged scripts as they are and without savers, and says what differs."""

from __future__ import annotations

import io
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
from verify.faults import FAULTS

from backstash.report import verified
from backstash.report.verified import VerifyRequest

Invoke = Callable[..., Any]

SCRIPT = """
import sys
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

print("arguments", sys.argv[1:])


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin, self.drop = nn.Linear(16, 16), nn.Dropout(0.5)

    def forward(self, x):
        return self.drop(self.lin(x)).tanh()


model = nn.ModuleList([Block(), Block()])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(5):
    optimizer.zero_grad()
    x = torch.randn(8, 16)
    for block in model:
        x = checkpoint(block, x, use_reentrant=False, preserve_rng_state={preserves})
    x.sum().backward()
    optimizer.step()
    print("step", step)
"""


@pytest.fixture
def orders(monkeypatch: pytest.MonkeyPatch) -> list[VerifyRequest]:
    """Runs are made in the process of the tests, because a new one takes seconds. Returns what was asked for."""
    asked = []

    def carry_out(
        module: str, order: VerifyRequest, environment: Mapping[str, str], printed: Callable[[str], None]
    ) -> tuple[int, str]:
        asked.append(order)
        output, errors = io.StringIO(), io.StringIO()
        with redirect_stdout(output), redirect_stderr(errors):
            exit_code = verified.carry_out_verification(order)
        for line in output.getvalue().splitlines():
            printed(line)
        return exit_code, errors.getvalue()

    monkeypatch.setattr(verified, "run_in_child", carry_out)
    return asked


def written(folder: Path, preserves: bool, more: str = "") -> str:
    path = folder / "train.py"
    path.write_text(SCRIPT.replace("{preserves}", str(preserves)) + more)
    return str(path)


def test_a_right_script_is_equal(tmp_path: Path, invoke: Invoke, orders: list[VerifyRequest]) -> None:
    result = invoke("verify", written(tmp_path, True), "--epochs", "3")
    assert result.exit_code == 0, result.output
    assert "equal: " in result.stdout and "in 2 backward passes, 4 recomputed regions" in result.stdout
    assert [order.is_reference for order in orders] == [False, True]
    assert orders[0].args == ["--epochs", "3"]


def test_a_wrong_script_is_found(tmp_path: Path, invoke: Invoke, orders: list[VerifyRequest]) -> None:
    out = tmp_path / "page.html"
    result = invoke("verify", "--fix", "--steps", "3", "--out", str(out), written(tmp_path, False))
    assert result.exit_code == 1, result.output
    assert "the first value that differs" in result.stdout
    assert "pass preserve_rng_state=True to checkpoint" in result.stdout
    assert "Block.lin.weight" in result.stdout  # the gradients
    assert len(orders) == 4 and orders[2].kept and orders[2].traced and orders[2].keep_pass == 0
    page = out.read_text()
    assert page.startswith("<!doctype html>") and "preserve_rng_state=True" in page


def test_the_result_as_json(tmp_path: Path, invoke: Invoke, orders: list[VerifyRequest]) -> None:
    out = tmp_path / "found.json"
    result = invoke("verify", "--json", "--quiet", "--out", str(out), written(tmp_path, False))
    assert result.exit_code == 1
    data = json.loads(result.stdout)
    assert data == json.loads(out.read_text())
    assert (data["verdict"], data["findings"][0]["cause"]["kind"]) == ("differs", "generator")


def test_without_fix_it_is_said_that_there_is_one(tmp_path: Path, invoke: Invoke, orders: list[VerifyRequest]) -> None:
    result = invoke("verify", written(tmp_path, False))
    assert "preserve_rng_state=True to" not in result.stdout
    assert "backstash verify --fix says what to change" in result.stdout


def test_a_script_that_hides_a_change_in_place_is_compared_with_copies(
    tmp_path: Path, invoke: Invoke, orders: list[VerifyRequest]
) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\n"
        "x = torch.ones(4, requires_grad=True)\n"
        "with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach(), lambda t: t):\n"
        "    y = x.sigmoid().mul_(2)\n"
        "y.sum().backward()\n"
    )
    result = invoke("verify", str(script))
    assert result.exit_code == 1, result.output
    assert "changed in place" in result.stdout
    assert [order.copies for order in orders if order.is_reference] == [False, True, False, True]


def test_a_script_that_fails_or_trains_nothing_is_an_error(
    tmp_path: Path, invoke: Invoke, orders: list[VerifyRequest]
) -> None:
    path = tmp_path / "train.py"
    path.write_text("raise ValueError('early')\n")
    result = invoke("verify", str(path))
    assert result.exit_code == 1 and "ValueError: early" in result.stderr
    path.write_text("print('nothing')\n")
    result = invoke("verify", str(path))
    assert result.exit_code == 1 and "no backward pass" in result.stderr
    result = invoke("verify", str(tmp_path / "absent.py"))
    assert result.exit_code == 2
    result = invoke("verify", "--out", str(tmp_path / "absent" / "page.html"), str(path))
    assert result.exit_code == 2


def test_a_module_is_verified(
    tmp_path: Path, invoke: Invoke, orders: list[VerifyRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    written(tmp_path, True)
    (tmp_path / "train.py").rename(tmp_path / "train_module_of_verify.py")
    monkeypatch.chdir(tmp_path)
    result = invoke("verify", "-m", "train_module_of_verify")
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("-m train_module_of_verify: equal")


@pytest.mark.slow
def test_runs_are_processes_of_their_own(tmp_path: Path) -> None:
    script = written(tmp_path, False)
    command = [sys.executable, "-m", "backstash", "verify", "--quiet", "--json", script]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert json.loads(done.stdout)["findings"][0]["cause"]["kind"] == "generator"


PAGE = Path(__file__).parents[2] / "docs" / "use" / "verify.md"


def _shape(text: str) -> list[str]:
    """Lines without numbers and widths, which depend on the machine's kernels."""
    return [re.sub(r"[ ]+", " ", re.sub(r"-?\d[\d.,]*(e[+-]\d+)?", "N", line)).strip() for line in text.splitlines()]


def _first_lines(text: str) -> list[str]:
    """What the report begins with, without the number of saved tensors, which is another one in each torch."""
    return [re.sub(r"\d+ saved values", "N saved values", line) for line in text.splitlines()[:4]]


def test_the_page_shows_the_real_output(
    invoke: Invoke, orders: list[VerifyRequest], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    text = PAGE.read_text()
    script = re.search(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    shown = re.search(r"^```console\n\$ (backstash .*?)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert script is not None and shown is not None
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(script[1])
    result = invoke(*shlex.split(shown[1])[1:])
    assert sorted(_shape(result.stdout)) == sorted(_shape(shown[2]))
    assert _first_lines(result.stdout) == _first_lines(shown[2])


def test_the_page_names_every_kind_of_cause_and_option() -> None:
    text = PAGE.read_text()
    kinds = {kind for kind, _ in FAULTS.values()}
    assert {kind for kind in kinds if f"`{kind}`" not in text} == set()
    for option in ("--fix", "--steps", "--out", "--json", "--tolerance", "--seed"):
        assert option in text
