"""The end of a Session, noticed also where leaving was interrupted.

Note: [interrupted leaving]
    Ctrl-C raises between any two calls of Python code, also before the first line of ``__exit__`` has run, and after
    the last one of ``__enter__``. So neither can be relied on to undo what was installed. But a ``with`` statement
    looks ``__exit__`` up before it enters, and holds what it has found for as long as it is inside. Here that is an
    object of its own for each ``with``. When it dies and the Session was not left by then, nobody will leave it any
    more: it is left at once. Where even that is interrupted, or there is no frame left to do it in, whoever enters a
    Session on that thread next does it first. What is undone is noted before it is installed, and may be undone again
    and again. ``Thread.is_alive`` is not asked: where Ctrl-C interrupts it, CPython 3.11 takes the thread, which runs,
    for one that has ended, and whatever is entered on it for abandoned from then on.

Note: [leaving in backward]
    Autograd's engine gives back to a thread, after each node, the hooks and modes that there were before, and a torch
    function that a mode has intercepted puts that mode back when it returns. So what a hook takes away in a backward
    pass would be there again afterwards. A Session that is left in there is left when the function of torch returns
    that was called outermost: its keyword arguments are given one more, which dies with them.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Any, Protocol, cast

from backstash.errors import SessionError
from backstash.torch_internals import functions_that_restore, graph_task, hide_from_dynamo, in_backward


class Entered(Protocol):
    """Whatever is entered and left: a Session, or what opens one."""

    def _leave(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leaves it, also if leaving it was interrupted before; does nothing if it was left already."""


class _Here(threading.local):
    """What is entered on this thread.

    Attributes:
        entries: those that were not left, the innermost last.
        begun: what the ``with`` statement holds that has begun last, if it was not entered yet.
    """

    def __init__(self) -> None:
        self.entries: list[Entrance] = []
        self.begun: weakref.ref[Leave] | None = None


_here = _Here()
_TRIES = 3


class Entrance:
    """One time that something was entered.

    Attributes:
        is_over: whether it was left, or is to be.
    """

    __slots__ = ("_leave", "_owner", "_task", "_thread", "is_over")

    def __init__(self, owner: Entered) -> None:
        """Has to be made before anything is installed."""
        begun, _here.begun = _here.begun, None
        leave = None if begun is None else begun()
        self._owner, self._thread, self._task = owner, threading.current_thread(), graph_task()
        self._leave: weakref.ref[Leave] | None = None  # None: it was entered by hand
        self.is_over = False
        if leave is not None and leave.owner in (None, owner):
            self._leave = weakref.ref(leave, self._abandoned)
        _here.entries.append(self)

    @property
    def is_here(self) -> bool:
        """Whether it was entered on this thread."""
        return self._thread is threading.current_thread()

    @property
    def _may_go_on(self) -> bool:
        """Whether the thread on which it was entered has not ended (Note: [interrupted leaving])."""
        return self.is_here or self._thread in threading.enumerate()

    @property
    def is_abandoned(self) -> bool:
        """Whether nobody will leave it any more, although it was not left."""
        return self.is_over or not self._may_go_on or (self._leave is not None and self._leave() is None)

    @property
    def is_inside_torch(self) -> bool:
        """Whether a function of torch runs that would put back what is taken away (Note: [leaving in backward])."""
        return in_backward() and graph_task() != self._task

    def may_end_here(self) -> bool:
        """Whether the Session can be left now. If it cannot, it will be left as soon as it can.

        Raises:
            SessionError: it was entered on another thread, which still runs.
        """
        if not self.is_here and self._may_go_on:
            self.is_over = True
            if in_backward():
                return False
            raise SessionError(
                f"a Session was left on the thread {threading.current_thread().name!r}, but it was entered on "
                f"{self._thread.name!r}, and a thread's hooks cannot be taken away on another one. It will be left "
                f"when {self._thread.name!r} enters a Session next, or leaves this one. Leave a Session where you "
                f"entered it."
            )
        if not self.is_inside_torch:
            return True
        self.is_over = True
        at_end_of_torch(partial(self.leave, None))
        return False

    def leave(self, error: BaseException | None) -> None:
        """Leaves it, unless that was done already or cannot be done here."""
        if self in _here.entries and not self.is_inside_torch:
            self.is_over = True
            self._owner._leave(None if error is None else type(error), error, None)

    def _abandoned(self, dead: weakref.ref[Leave]) -> None:
        with suppress(RecursionError, MemoryError):  # then leave_abandoned() does it
            self.leave(KeyboardInterrupt())

    def end(self) -> None:
        """Nothing is installed any more."""
        self._leave = None  # so that nothing is called when it dies
        for entry in list(_here.entries):
            if entry is self:
                _here.entries.remove(entry)


def leave_abandoned() -> None:
    """Leaves whatever is still open on this thread although nobody will leave it (Note: [interrupted leaving])."""
    for entry in reversed(_here.entries):  # a reversed list may shrink
        if entry.is_abandoned:
            entry.leave(KeyboardInterrupt())


def enter_instead(outer: Entered, inner: Entered) -> None:
    """The ``with`` statement that has begun with one of them enters the other, and leaves it."""
    leave = None if _here.begun is None else _here.begun()
    if leave is not None and leave.owner is outer:
        leave.owner = inner


def to_the_end(function: Callable[[], None]) -> None:
    """Calls a function that may be called again until it has run to its end; raises then what has interrupted it."""
    interrupted: BaseException | None = None
    for _ in range(_TRIES):
        try:
            function()
        except BaseException as error:  # Ctrl-C, for example
            interrupted = interrupted or error
        else:
            break
    if interrupted is not None:
        try:
            raise interrupted
        finally:
            del interrupted  # its traceback holds this frame, and so whatever is left, until the collector runs


class Leave:
    """What a ``with`` statement holds as long as it is inside, and calls when it leaves.

    Attributes:
        owner: what is left; None where ``__exit__`` was looked up in the class, whose caller names it.
    """

    __slots__ = ("__weakref__", "owner")

    def __init__(self, owner: Entered | None) -> None:
        self.owner = owner

    def __call__(self, *given: Any) -> None:
        """Leaves it; takes what ``__exit__`` takes."""
        owner, kind, error, trace = given if self.owner is None else (self.owner, *given)
        owner._leave(kind, error, trace)


class Exit:
    """The method ``__exit__`` of what is entered and left."""

    def __get__(self, owner: Any, kind: type) -> Callable[..., None]:
        leave = Leave(owner)
        _here.begun = weakref.ref(leave)
        return leave


class _AtEnd:
    """Calls a function when it dies."""

    def __init__(self, function: Callable[[], None]) -> None:
        self._function = function

    def __del__(self) -> None:
        self._function()


def at_end_of_torch(function: Callable[[], None]) -> bool:
    """Has a function called when torch's outermost function returns to the program (Note: [leaving in backward]).

    Returns:
        Whether a function of torch runs, so that it will be called.
    """
    codes = functions_that_restore()
    outermost, frame = None, sys._getframe()
    while frame is not None:
        if frame.f_code in codes:
            outermost = frame
        frame = cast("Any", frame.f_back)
    if outermost is None:
        return False
    keywords = outermost.f_locals["kwargs"]
    keywords[f"backstash {len(keywords)}"] = _AtEnd(function)  # beside others
    return True


for _function in (Leave.__call__, Exit.__get__, Entrance.__init__, leave_abandoned):
    hide_from_dynamo(_function, and_all_below=True)
