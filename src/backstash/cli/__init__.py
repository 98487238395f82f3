"""The command line. This file is the entry point of the command ``backstash``; ``commands`` has the commands.

This file imports nothing but the standard library, so that it can say which package is missing.
"""

from __future__ import annotations

import sys


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
    app()
