"""SECURITY.md is true of the source: no network, nothing unpickled, files that nobody else can read."""

from __future__ import annotations

import ast
import json
import os
import re
import stat
from functools import cache
from pathlib import Path

import pytest
from fresh import run_fresh
from sources import MODULES, ROOT, SOURCE, nodes_of

from backstash import BackstashError, Plan
from backstash.planning.model.sealed import VERSION
from backstash.stores.file import UnnamedFile

NETWORK = {
    *("socket", "socketserver", "ssl", "select", "selectors", "asyncio", "urllib", "http", "ftplib", "smtplib"),
    *("poplib", "imaplib", "nntplib", "telnetlib", "xmlrpc", "webbrowser", "wsgiref", "cgi"),
    *("requests", "urllib3", "httpx", "aiohttp", "websockets", "paramiko", "grpc", "zmq", "huggingface_hub", "wandb"),
    *("sentry_sdk", "boto3", "fsspec", "mlflow"),
}
"""Modules by which a program reaches another machine."""

IMPORTING = ("import_module", "__import__")

UNPICKLING = {"compile/inductor/options.py", "report/verified.py"}
"""Where something is unpickled: what Inductor takes from its own cache, and gradients, by torch's loader of tensors."""

EVALUATING = {"testing/codec.py", "integrations/launcher.py"}
"""Where a text is run as Python: the repr of a codec under test, and the user's training script."""

STARTING = {
    "cli/benching.py",
    "cli/running.py",
    "integrations/allocator.py",
    "report/compare.py",
    "report/doctor.py",
    "report/machine.py",
}
"""Where other programs are started; SECURITY.md names them."""


@cache
def imported(path: Path) -> frozenset[str]:
    """The first names of all modules that a file imports, inside functions and by name as well."""
    found: list[str] = []
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found.append(node.module or "")
        elif isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in IMPORTING:
            found += [str(word.value) for word in node.args[:1] if isinstance(word, ast.Constant)]
    return frozenset(name.split(".")[0] for name in found)


@cache
def called(path: Path) -> set[str]:
    """The functions that a file calls, as they are written."""
    return {ast.unparse(node.func) for node in nodes_of(path) if isinstance(node, ast.Call)}


def relative(path: Path) -> str:
    return path.relative_to(SOURCE).as_posix()


def where(*functions: str) -> set[str]:
    """The files that call one of these functions."""
    return {relative(path) for path in MODULES if called(path) & set(functions)}


def test_no_module_imports_one_for_the_network() -> None:
    found = {relative(path): imported(path) & NETWORK for path in MODULES}
    assert len(found) > 200
    assert {path: names for path, names in found.items() if names} == {}


def test_an_import_of_one_for_the_network_would_be_found(tmp_path: Path) -> None:
    lines = ["import socket", "from urllib.request import urlopen", "def f(): import requests", "import http.client"]
    lines.append("importlib.import_module('httpx')")
    for number, line in enumerate(lines):
        file = tmp_path / f"module{number}.py"
        file.write_text(line)
        assert imported(file) & NETWORK, line


def test_training_opens_no_connection() -> None:
    """An import, a step, a report and a plan, in a process in which every socket is an error, torch's own included."""
    program = """
import sys
def refuse(event, arguments):
    if event.startswith(("socket.connect", "socket.bind", "socket.getaddrinfo", "urllib.")):
        raise RuntimeError(event)
import torch
sys.addaudithook(refuse)
import backstash as bs
from torch import nn
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
x = torch.randn(256, 64)
def step():
    with session:
        loss = model(x).square().mean()
    loss.backward()
for session in (bs.Session("lossless", min_nbytes=0), bs.Session("offload", min_nbytes=0)):
    step(); step()
    str(session.report()), session.report().to_html(), session.report().to_json()
profile = bs.profile(lambda: model(x).square().mean().backward(), model)
print(len(bs.plan(profile, "4MiB").to_json()))
"""
    done = run_fresh(program)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 0


def test_nothing_is_unpickled_but_what_inductor_or_a_process_of_our_own_has_written() -> None:
    loads = (
        "pickle.loads",
        "pickle.load",
        "pickle.Unpickler",
        "torch.load",
        "marshal.loads",
        "shelve.open",
        "dill.loads",
    )
    assert where(*loads) == UNPICKLING
    assert "torch.load(kept, weights_only=True)" in (SOURCE / "report" / "verified.py").read_text()
    assert not any({"marshal", "shelve", "dill", "cloudpickle", "joblib"} & imported(path) for path in MODULES)


def test_text_is_run_in_two_places_only() -> None:
    assert where("eval", "exec") == EVALUATING


def test_other_programs_are_started_where_the_page_says() -> None:
    starts = ("subprocess.run", "subprocess.Popen", "subprocess.check_output", "os.system", "os.popen", "os.execve")
    found = where(*starts)
    assert found == STARTING
    assert not any(keyword for path in MODULES for keyword in re.findall(r"shell=True", path.read_text()))
    row = next(line for line in (ROOT / "SECURITY.md").read_text().splitlines() if line.startswith("| other programs"))
    for file in found:
        assert file in row or f"src/backstash/{file.split('/')[0]}/`" in row, file


def test_a_plan_that_somebody_edited_is_refused() -> None:
    code = {"backstash": "Plan", "version": VERSION, "checksum": "sha256:0", "content": {"__reduce__": "os.system"}}
    with pytest.raises(BackstashError, match="checksum"):
        Plan.from_json(json.dumps(code))


@pytest.mark.parametrize("has_unnamed_files", [True, False])
def test_the_file_of_a_disk_store_is_nobody_else_s(
    has_unnamed_files: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_unnamed_files:
        monkeypatch.delattr(os, "O_TMPFILE", raising=False)
    before = os.umask(0)  # a umask of nothing hides nothing
    try:
        file = UnnamedFile(tmp_path)
    finally:
        os.umask(before)
    found = os.fstat(file._descriptor)
    assert stat.S_IMODE(found.st_mode) == 0o600 and found.st_nlink == 0
    assert list(tmp_path.iterdir()) == []
    file.close()
