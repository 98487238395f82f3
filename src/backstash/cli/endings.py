"""The message and the exit code of each kind of error that ends a command."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer

from backstash.errors import AllocatorError, BackstashError, ScriptError, SettingError, UnknownNameError
from backstash.integrations.launcher import INTERRUPTED

_WRONG_ARGUMENTS = (AllocatorError, ScriptError, SettingError, UnknownNameError)


@contextmanager
def exits() -> Iterator[None]:
    """Turns an error of backstash into its message and an exit code: 2 for a wrong argument, 1 for any other error."""
    try:
        yield
    except BackstashError as error:
        typer.echo(f"backstash: {error}", err=True)
        raise typer.Exit(2 if isinstance(error, _WRONG_ARGUMENTS) else 1) from None
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
