"""Every command that the pages for users show is run, and every option, policy and setting that they name is there."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.main import get_command

from backstash import codecs, policies
from backstash.cli import settings
from backstash.cli.commands import app

ROOT = Path(__file__).parents[2]
USE = ROOT / "docs" / "use"
PAGES = [USE / name for name in ("quick-start.md", "choosing.md", "commands.md", "troubleshooting.md")]
ELSEWHERE = {
    "examples.md": "studies/test_examples.py",
    "fit.md": "forecast/test_forecasts.py",
    "switches.md": "integrations/test_switches.py",
    "verify.md": "cli/test_verify_command.py",
}
"""Pages with commands of their own kind, and the tests that run them."""
MODULES = {"torchrun": "torch.distributed.run", "accelerate": "accelerate.commands.accelerate_cli"}

DISTRIBUTED = """
import os
import torch
import torch.distributed as dist

rank = int(os.environ.get("RANK", "0"))
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU())
if "RANK" in os.environ:
    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(model)
for _ in range(2):
    model(torch.randn(512 * (1 + rank), 64)).sum().backward()
if "RANK" in os.environ:
    dist.destroy_process_group()
"""

Invoke = Callable[..., Any]


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\b.*?\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)


def commands() -> list[Any]:
    found: dict[str, None] = {}
    for page in PAGES:
        for block in blocks(page, "console"):
            for line in re.findall(r"^\$ (.*)$", block, re.MULTILINE):
                found[re.sub(r"\s+# .*", "", line).strip()] = None
    slow = ("compare", "choose", "demo", "torchrun", "accelerate", "bench", "doctor")
    return [
        pytest.param(one, marks=[pytest.mark.slow] if any(word in one.split() for word in slow) else [], id=one)
        for one in found
    ]


def test_the_commands_of_every_page_are_run() -> None:
    pages = {page.name for page in (ROOT / "docs").rglob("*.md") if re.search(r"^\$ ", page.read_text(), re.MULTILINE)}
    assert pages == {page.name for page in PAGES if page.name in pages} | set(ELSEWHERE)
    assert all((ROOT / "tests" / file).exists() for file in ELSEWHERE.values())


@pytest.fixture
def project(script: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with the files that the commands name."""
    text = Path(script).read_text()
    for name in ("pkg", "pkg.train"):
        monkeypatch.delitem(sys.modules, name, raising=False)  # of another test's folder
    Path("train.py").write_text(text)
    Path("ddp.py").write_text(DISTRIBUTED)
    Path("pkg").mkdir()
    Path("pkg/__init__.py").touch()
    Path("pkg/train.py").write_text(text)
    return Path.cwd()


@pytest.mark.parametrize("command", commands())
@pytest.mark.usefixtures("in_this_process", "project")
def test_a_command_that_is_shown_works(command: str, invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    program, *args = shlex.split(command)
    if program == "pip":
        assert command.startswith("pip install '.[")
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        assert set(re.findall(r"\[(.*)\]", command)[0].split(",")) <= set(extras)
    elif program in MODULES:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        command_line = [sys.executable, "-m", MODULES[program], *args]
        done = subprocess.run(command_line, capture_output=True, text=True, check=False, env=environment)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("activations") == 1  # one rank speaks
        if program == "torchrun":
            assert re.search(r"largest stash of 2 ranks: .* on rank 1; smallest .* on rank 0", done.stdout)
            first, second = (json.loads(Path(name).read_text()) for name in ("report.json", "report.rank1.json"))
            assert second["saved_nbytes"] > first["saved_nbytes"]
    else:
        assert program == "backstash"
        if "doctor" in args:
            monkeypatch.setattr(codecs, "names", lambda: ("zvc", "bitmask"))  # it would check all of them
        result = invoke(*args)
        assert result.exit_code == 0, result.output
        for option, kind in (("--report-json", "{"), ("--report-html", "<!doctype html>")):
            if option in args:
                assert Path(args[args.index(option) + 1]).read_text().startswith(kind)


def shape(text: str) -> list[str]:
    """Lines without what depends on the machine: numbers, the widths of columns and lines about page faults."""
    text = re.sub(r"[\d.,]*\d (?:MiB|KiB|ms|bytes)", "N", text)
    lines = [
        re.sub(r"-{3,}", "-", re.sub(r" +", " ", re.sub(r"\b\d[\d.]*\b", "N", line))) for line in text.splitlines()
    ]
    return [line.strip() for line in lines]


@pytest.mark.slow
def test_the_report_that_the_quick_start_shows_is_the_report(invoke: Invoke) -> None:
    (text, *_) = blocks(USE / "quick-start.md", "python")
    Path("train.py").write_text(text)
    (shown, *_) = [block for block in blocks(USE / "quick-start.md", "console") if "activations" in block]
    expected = shown.partition("\n")[2]
    assert shape(invoke("run", "train.py").stdout) == shape(expected)


def test_the_loop_of_the_quick_start_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (loop,) = [block for block in blocks(USE / "quick-start.md", "python") if "import backstash" in block]
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU())
    namespace = {
        "model": model,
        "loader": [(torch.randn(512, 64), torch.randn(512, 64))] * 2,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "criterion": nn.MSELoss(),
    }
    exec(loop, namespace)
    assert capsys.readouterr().out.startswith("activations ")


def test_the_table_of_policies_is_that_of_the_registry() -> None:
    text = (USE / "choosing.md").read_text()
    rows = [f"| `{one.name}` | {one.gradients} | {one.does} | {one.use_when} |" for one in policies.descriptions()]
    table = re.findall(r"^\| `\w+` \|.*\|$", text[text.index("## The policies") :], re.MULTILINE)
    assert table == rows


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_options_and_variables_that_a_page_names_are_there(page: Path) -> None:
    parameters = [p for command in get_command(app).commands.values() for p in command.params]  # type: ignore[attr-defined]
    options = {option for parameter in parameters for option in parameter.opts} | {"--help", "--version"}
    options |= {"--install-completion", "--nproc-per-node", "--epochs", "--output", "--resume"}
    variables = {parameter.envvar for parameter in parameters if getattr(parameter, "envvar", None)}
    text = page.read_text()
    assert set(re.findall(r"(?<![\w-])--[a-z][\w-]+", text)) <= options
    others = {"BACKSTASH_KERNELS", "BACKSTASH_ISA"}
    assert set(re.findall(r"\bBACKSTASH_[A-Z_]+\b", text)) <= variables | others


def test_the_settings_that_are_shown_are_taken() -> None:
    (text,) = blocks(USE / "commands.md", "toml")
    Path("pyproject.toml").write_text(text)
    found = settings.defaults(get_command(app).commands)  # type: ignore[attr-defined]
    assert found["run"] == {"policy": "lossless", "min_nbytes": "64KiB"}
    assert found["compare"] == {"min_nbytes": "64KiB", "policies": "plain,lossless,offload", "repeats": 3}
    assert json.dumps(found["choose"]) == '{"min_nbytes": "64KiB"}'
