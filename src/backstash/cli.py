"""The entry point of the command ``backstash``; the commands themselves are in ``backstash.commands``.

This file needs nothing but backstash, so that it can say what is missing.
"""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line, or tell how to install what it needs."""
    try:
        from backstash.commands import app
    except ModuleNotFoundError as missing:
        if (missing.name or "").partition(".")[0] not in ("typer", "rich"):
            raise
        sys.exit(
            f"backstash: the command line was asked for, but {missing.name} is not installed. "
            f"Run: pip install 'backstash[cli]'"
        )
    app()
