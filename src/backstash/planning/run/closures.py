"""Loops of frameworks that run whole steps in a closure of their optimizer, and where they are between two steps.

Note: [steps in closures]
    Lightning hands forward and backward passes to its optimizer as a closure, so no pass ends where a profiler can be
    started (Note: [safe places] in recording.py). Its callback knows where one can, but an unchanged script has no
    callback. So if a measurement has waited in vain, and the loop of a framework is imported, that loop tells before
    each batch that it is between two steps. It does so until whoever wanted to be told is closed, or gone.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable
from typing import Any, Protocol

LOOPS = (
    ("lightning.pytorch.loops.training_epoch_loop", "_TrainingEpochLoop", "advance"),
    ("pytorch_lightning.loops.training_epoch_loop", "_TrainingEpochLoop", "advance"),
)
"""Modules of frameworks, with the class of a loop and its method that runs a batch."""


class Told(Protocol):
    """Who is told."""

    def between_steps(self) -> None:
        """As Following.between_steps."""


_told: weakref.WeakSet[Told] = weakref.WeakSet()
_originals: dict[type, Callable[..., Any]] = {}


def tell_between_steps(told: Told) -> None:
    """Has the loops of frameworks that are imported tell before each batch, on the thread that runs it."""
    _told.add(told)
    for module, name, method in LOOPS:
        loop = getattr(sys.modules.get(module), name, None)
        if loop is not None and loop not in _originals and hasattr(loop, method):
            _originals[loop] = getattr(loop, method)
            setattr(loop, method, _telling(_originals[loop]))


def tell_no_more(told: Told) -> None:
    """Nothing is told to it any more. The loops have their own methods again when nobody is left."""
    _told.discard(told)
    if _told:
        return
    for module, name, method in LOOPS:
        loop: Any = getattr(sys.modules.get(module), name, None)
        if loop in _originals:
            setattr(loop, method, _originals.pop(loop))


def _telling(advance: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(advance)
    def tells(*args: Any, **kwargs: Any) -> Any:
        for told in list(_told):
            told.between_steps()
        return advance(*args, **kwargs)

    return tells
