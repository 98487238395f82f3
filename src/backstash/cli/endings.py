"""The message and the exit code of each kind of error that ends a command."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer

from backstash.errors import AllocatorError, BackstashError, ScriptError, SettingError, UnknownNameError
from backstash.integrations.launcher import INTERRUPTED

WRONG_ARGUMENT = 2
"""The exit code of a command that was given an option or an argument that there is not, as click has it."""

_WRONG_ARGUMENTS = (AllocatorError, ScriptError, SettingError, UnknownNameError)


@contextmanager
def exits(otherwise: int = 1) -> Iterator[None]:
    """Turns an error of backstash into its message and an exit code.

    Args:
        otherwise: the exit code of an error whose class does not say that an argument is wrong, which has the code 2.
            Before the script starts, errors are of arguments alone.
    """
    try:
        yield
    except BackstashError as error:
        typer.echo(f"backstash: {error}", err=True)
        raise typer.Exit(WRONG_ARGUMENT if isinstance(error, _WRONG_ARGUMENTS) else otherwise) from None
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
