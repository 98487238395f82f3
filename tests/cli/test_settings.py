"""The source of an option's value, and the command line's tables and helps."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from backstash import __version__, codecs, policies
from backstash.cli import benching
from backstash.cli.commands import app
from backstash.cli.options import complete_allocator, complete_policies, complete_policy
from backstash.codecs.base import Codec

Invoke = Callable[..., Any]


def settings(text: str) -> None:
    Path("pyproject.toml").write_text(text)


def test_a_flag_comes_before_the_environment_the_project_and_the_default(
    script: str, monkeypatch: pytest.MonkeyPatch, invoke: Invoke
) -> None:
    assert "under Lossless(" in invoke("run", script).stdout
    settings('[tool.backstash]\npolicy = "keep"\n')
    assert "under KeepAll(" in invoke("run", script).stdout
    monkeypatch.setenv("BACKSTASH_POLICY", "offload")
    assert "under Offload(" in invoke("run", script).stdout
    assert "under Gist(" in invoke("run", "--policy", "gist_lossless", script).stdout


def test_a_command_may_have_a_table_of_its_own(script: str, invoke: Invoke) -> None:
    settings('[tool.backstash]\npolicy = "keep"\n[tool.backstash.run]\npolicy = "offload"\nmin-nbytes = "64KiB"\n')
    Path("below").mkdir()
    assert "under Offload(" in invoke("run", script).stdout


def test_settings_are_found_above_the_current_folder(
    script: str, monkeypatch: pytest.MonkeyPatch, invoke: Invoke
) -> None:
    settings("[tool.backstash]\nquiet = true\n")
    Path("below").mkdir()
    monkeypatch.chdir("below")
    assert invoke("run", script).stdout == "arguments []\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[tool.backstash]\npolicie = "keep"\n', "asks for 'policie', but there are"),
        ('[tool.backstash]\npolicie = "keep"\n', "Did you mean 'polic"),
        ("[tool.backstash.run]\nrepeats = 3\n", "asks for 'repeats', but there are"),
        ("[tool.backstash]\npolicy = {name = 3}\n", "but an option is a text, a number or a switch"),
        ("[tool]\nbackstash = 3\n", "but that is a table of options"),
        ("not toml", "it cannot be read"),
    ],
)
def test_a_wrong_setting_is_refused(text: str, message: str, script: str, invoke: Invoke) -> None:
    settings(text)
    result = invoke("run", script)
    assert result.exit_code == 2
    assert message in result.stderr and "arguments" not in result.stdout


def test_a_wrong_value_is_refused(script: str, invoke: Invoke) -> None:
    settings('[tool.backstash]\npolicy = "fastest"\n')
    result = invoke("run", script)
    assert result.exit_code == 2 and "policy 'fastest' was asked for" in result.stderr


@pytest.mark.parametrize(
    ("given", "script", "args", "repeats"),
    [
        ("train.py -m resnet --repeats 3 -q --help", "train.py", ["-m", "resnet", "-q", "--help"], 3),
        (
            "--repeats 2 train.py --lr=3 --repeats=4 -- --repeats 5 -- x",
            "train.py",
            ["--lr=3", "--repeats=4", *["--repeats", "5", "--", "x"]],
            2,
        ),
        ("-m --quiet pkg.train --module", "pkg.train", [], 1),
    ],
)
def test_long_options_may_stand_among_the_script_s(given: str, script: str, args: list[str], repeats: int) -> None:
    command = get_command(app).commands["compare"]  # type: ignore[attr-defined]
    found = command.make_context("compare", given.split()).params
    assert (found["script"], found["args"] or [], found["repeats"]) == (script, args, repeats)
    assert found["is_module"] == ("-m " in f"{given.partition('train')[0]}")


def test_an_option_before_the_script_must_be_the_command_s(script: str, invoke: Invoke) -> None:
    result = invoke("compare", "--depth", "3", script)
    assert result.exit_code == 2 and "No such option" in result.stderr


def test_the_version(invoke: Invoke) -> None:
    assert invoke("--version").stdout == f"backstash {__version__}\n"


def test_the_policies_in_a_table_and_as_json(invoke: Invoke) -> None:
    shown = invoke("policies").stdout
    listed = json.loads(invoke("policies", "--json").stdout)
    assert [one["name"] for one in listed] == [one.name for one in policies.descriptions()]
    for one in listed:
        assert one["name"] in shown and policies.describe(one["name"]).does == one["does"]
    assert max(map(len, shown.splitlines())) <= 118


def test_help_and_completion_name_the_policies(invoke: Invoke) -> None:
    shown = invoke("run", "--help").stdout
    assert all(name in shown for name in ("lossless_stored", "gist_paper", "BACKSTASH_POLICY"))
    assert [name for name, _ in complete_policy("gist_fp")] == ["gist_fp16", "gist_fp10", "gist_fp8"]
    assert [name for name, _ in complete_policies("plain,los")] == ["plain,lossless", "plain,lossless_stored"]
    assert [name for name, _ in complete_allocator("t")] == ["tcmalloc"]
    assert "--install-completion" in invoke("--help").stdout


@pytest.mark.parametrize("name", list(benching.BENCHES))
def test_each_benchmark_is_in_the_repository(name: str) -> None:
    assert benching.clone_with(name) is not None


def test_benchmarks_are_offered_where_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, invoke: Invoke) -> None:
    assert benching.clone_with("run") is not None
    assert " bench " in invoke("--help").stdout
    monkeypatch.setattr(benching, "__file__", str(tmp_path / "site" / "backstash" / "cli" / "benching.py"))
    assert benching.clone_with("run") is None


def test_doctor_finds_everything_in_order(monkeypatch: pytest.MonkeyPatch, invoke: Invoke) -> None:
    monkeypatch.setattr(codecs, "names", lambda: ("zvc", "bitmask"))  # the codecs have tests of their own
    result = invoke("doctor")
    assert result.exit_code == 0, result.stdout
    for subject in ("versions", "kernels on cpu", "compiler", "huge pages", "allocator", "resident peak", "codec zvc"):
        assert f"ok    {subject}" in result.stdout


def test_doctor_finds_a_codec_that_loses_bits(monkeypatch: pytest.MonkeyPatch, invoke: Invoke) -> None:
    zvc: type[Codec] = type(codecs.get("zvc"))
    monkeypatch.setattr(zvc, "decode", lambda self, encoded, out=None: out.zero_() if out is not None else None)
    monkeypatch.setattr(codecs, "names", lambda: ("zvc",))
    result = invoke("doctor")
    assert result.exit_code == 1
    assert "WRONG codec zvc on cpu: " in result.stdout
