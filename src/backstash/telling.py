"""Long work says what it does, to whoever listens. By default nobody does, and nothing is shown.

A command listens while it works, and shows a line on a terminal. A program may do the same:

    with telling.heard_by(lambda what, done, total: print(what, done)):
        plan = backstash.plan(backstash.profile(step, model), "60%")
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

Listener = Callable[[str, int, int | None], None]
"""A function that is called with what is being done, how much of it is done, and how much there is; None if unknown."""

_listeners: list[Listener] = []


def note_progress(what: str, done: int = 0, total: int | None = None) -> None:
    """Tells all listeners what is being done now.

    Args:
        what: in words, such as ``"timing steps"``. Work of the same name goes on; another name begins another piece.
        done: how much of it is done.
        total: how much there is to do; None if that is not known.
    """
    for listener in tuple(_listeners):
        listener(what, done, total)


@contextmanager
def heard_by(listener: Listener) -> Iterator[None]:
    """Inside the ``with``, the function hears what is being done, on whatever thread.

    Example:
        >>> heard = []
        >>> with heard_by(lambda what, done, total: heard.append((what, done, total))):
        ...     note_progress("timing steps", 1, 3)
        >>> note_progress("timing steps", 2, 3)
        >>> heard
        [('timing steps', 1, 3)]
    """
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)
