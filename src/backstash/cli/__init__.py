"""The command line. This file is the entry point of the command ``backstash``; ``commands`` has the commands.

This file imports nothing but the standard library, so that it can say which package is missing.
"""

from __future__ import annotations

import sys

CLOSED_PIPE = 141
"""The exit code of a command whose reader has closed the pipe, as a shell has it of one that SIGPIPE has ended."""


def main() -> None:
    """Runs the command line, or exits with the command that installs a missing package."""
    try:
        from backstash.cli.commands import app
    except ModuleNotFoundError as missing:
        if (missing.name or "").partition(".")[0] not in ("typer", "rich"):
            raise
        sys.exit(
            f"backstash: the command line was asked for, but {missing.name} is not installed. "
            f"Run: pip install 'backstash[cli]'"
        )
    try:
        app()
    except SystemExit as ended:
        # click and rich tell of a closed pipe in such words alone. SIGPIPE itself would end scripts that `run` runs.
        if isinstance(ended.__context__, BrokenPipeError):
            sys.exit(CLOSED_PIPE)
        raise
