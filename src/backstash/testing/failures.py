"""The errors of a check: what was asked, what was got, and what to do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn


def fail(asked: str, got: str, advice: str) -> NoReturn:
    """Raises the AssertionError of a check."""
    raise AssertionError(f"{asked}, got {got}. {advice}.")


@contextmanager
def only(where: str, method: str, *expected: type[Exception]) -> Iterator[None]:
    """Turns an exception of somebody else's ``method`` into an AssertionError that names the method and the input.

    Any type of exception is caught, because the method that is checked may raise any.

    Args:
        where: the input that the method was called with.
        method: the method's name.
        expected: types of exceptions that the caller handles inside the context; the message advises to raise them.
    """
    try:
        yield
    except AssertionError:
        raise
    except Exception as error:
        names = " or ".join(kind.__name__ for kind in expected)
        advice = f"Raise {names} for what it cannot do" if names else "It must not raise here"
        got = f"{type(error).__name__}: {error}"
        raise AssertionError(f"{where}: {method} was asked for, got {got} {advice}.") from error
