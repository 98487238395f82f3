"""Options among a script's arguments: the command's, unless they were given in front of the script."""

from __future__ import annotations

import pytest
import typer
from typer.testing import CliRunner

from backstash.cli.options import Arguments, Script, ScriptCommand

app = typer.Typer()


@app.command(cls=ScriptCommand)
def show(
    script: Script,
    args: Arguments = None,
    device: str = "none",
    steps: int = 1,
    quiet: bool = False,
) -> None:
    """Print everything."""
    print(script, *(args or []), "|", device, steps, quiet)


@app.command()
def another() -> None:
    """Make the first one a command with a name."""


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("train.py --device cpu", "train.py | cpu 1 False"),
        ("--device h100 train.py --device cpu", "train.py --device cpu | h100 1 False"),
        ("--device=h100 train.py --device=cpu --steps 3", "train.py --device=cpu | h100 3 False"),
        ("--quiet train.py --quiet -m x", "train.py --quiet -m x | none 1 True"),
        ("train.py --steps 3 --steps 5", "train.py | none 5 False"),
        ("train.py --steps 3 -- --steps 5 --device cpu", "train.py --steps 5 --device cpu | none 3 False"),
    ],
)
def test_whose_an_option_is(given: str, shown: str) -> None:
    done = CliRunner().invoke(app, ["show", *given.split()])
    assert done.output.strip() == shown
