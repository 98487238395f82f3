"""When a backward pass begins and ends: one wrapper of ``torch.autograd.backward`` for all who want to know.

``loss.backward()`` looks ``torch.autograd.backward`` up whenever it is called, so this function is replaced as long as
anybody listens. A pass within a pass is none of its own: a checkpoint goes backward within backward, and under a
Session torch calls the function a second time within the first.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch

from backstash.torch_internals import in_backward


class Listener(Protocol):
    """Whoever wants to know of backward passes."""

    def begin_backward(self, tensors: Any) -> None:
        """A backward pass is about to begin from these tensors, or this tensor."""

    def end_backward(self) -> None:
        """It has ended."""

    def fail_backward(self) -> None:
        """It has raised."""


_listeners: list[weakref.ref[Listener]] = []
_installed: tuple[Callable[..., Any], Callable[..., Any]] | None = None  # ours, and what was there before
_lock = threading.Lock()
_inside = threading.local()


def listen(listener: Listener) -> Callable[[], None]:
    """Tells the listener of all backward passes, as long as somebody else holds it. Returns what ends that."""
    global _installed
    reference = weakref.ref(listener, lambda dead: _forget(dead))
    with _lock:
        _listeners.append(reference)
        if _installed is None:
            original = torch.autograd.backward
            _installed = _telling(original), original
            torch.autograd.backward = _installed[0]
    return lambda: _forget(reference)


def _forget(reference: weakref.ref[Listener]) -> None:
    global _installed
    with _lock:
        if reference in _listeners:
            _listeners.remove(reference)
        if not _listeners and _installed is not None and torch.autograd.backward is _installed[0]:
            torch.autograd.backward = _installed[1]
            _installed = None  # else another library has wrapped it since, and calls it


def _telling(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
        told = [listener for reference in list(_listeners) if (listener := reference()) is not None]
        if not told or getattr(_inside, "is_inside", False) or in_backward():
            original(tensors, *args, **kwargs)
            return
        _inside.is_inside = True
        try:
            for listener in told:
                listener.begin_backward(tensors)
            original(tensors, *args, **kwargs)
        except BaseException:
            for listener in told:
                listener.fail_backward()
            raise
        finally:
            _inside.is_inside = False
        for listener in told:
            listener.end_backward()

    return backward
