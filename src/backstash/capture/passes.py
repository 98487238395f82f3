"""The begin and the end of each backward pass: wrappers of ``torch.autograd.backward`` and ``grad`` for all listeners.

``loss.backward()`` looks ``torch.autograd.backward`` up whenever it is called, so these functions are replaced as long
as anybody listens. A pass within a pass is none of its own: a checkpoint goes backward within backward, and under a
Session torch calls the function a second time within the first. Nor is a pass that a compiler writes down: it goes
backward through tensors without numbers, in the middle of the forward pass that compiles.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch

from backstash.torch_internals import hide_from_dynamo, in_backward, is_traced


class PassListener(Protocol):
    """Whoever wants to know of backward passes."""

    def begin_backward(self, tensors: Any) -> None:
        """A backward pass is about to begin from these tensors, or this tensor."""

    def end_backward(self) -> None:
        """It has ended."""

    def fail_backward(self) -> None:
        """It has raised."""


_listeners: list[tuple[weakref.ref[PassListener], bool]] = []  # and whether it hears of torch.autograd.grad
_installed: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {}  # by name: ours, and what was there before
_lock = threading.Lock()
_inside = threading.local()


def listen(listener: PassListener, of_grad: bool = False) -> Callable[[], None]:
    """Tells the listener of all backward passes, as long as somebody else holds it. Returns what ends that.

    Args:
        listener: who is told, once for each pass, however many times it asks.
        of_grad: whether ``torch.autograd.grad`` is a backward pass as well, where it makes no graph of its own.
    """
    reference = weakref.ref(listener, lambda dead: _forget(dead))
    with _lock:
        if all(each() is not listener for each, _ in _listeners):
            _listeners.append((reference, of_grad))
            for told in (type(listener).begin_backward, type(listener).end_backward, type(listener).fail_backward):
                hide_from_dynamo(told, and_all_below=True)
        for name in ("backward", "grad"):
            if name not in _installed:
                original = getattr(torch.autograd, name)
                _installed[name] = _telling(original, name == "grad"), original
            if getattr(torch.autograd, name) is _installed[name][1]:
                setattr(torch.autograd, name, _installed[name][0])
    return lambda: unlisten(listener)


def unlisten(listener: PassListener) -> None:
    """The listener is told no more, if it was."""
    for reference, _ in list(_listeners):
        if reference() is listener:
            _forget(reference)


def _forget(reference: weakref.ref[PassListener]) -> None:
    with _lock:
        _listeners[:] = [each for each in _listeners if each[0] is not reference]
        if _listeners:
            return
        for name, (ours, before) in list(_installed.items()):
            if getattr(torch.autograd, name) is ours:  # else another library has wrapped it since, and calls it
                setattr(torch.autograd, name, before)
                del _installed[name]


def _telling(original: Callable[..., Any], is_grad: bool) -> Callable[..., Any]:
    @functools.wraps(original)
    def backward(*args: Any, **kwargs: Any) -> Any:
        listening = [reference() for reference, of_grad in list(_listeners) if of_grad or not is_grad]
        told = [listener for listener in listening if listener is not None]
        if (
            not told
            or getattr(_inside, "is_inside", False)
            or in_backward()
            or is_traced()
            or (is_grad and _makes_graph(args, kwargs))
        ):
            return original(*args, **kwargs)
        _inside.is_inside = True
        try:
            for listener in told:
                listener.begin_backward(args[0] if args else kwargs.get("outputs" if is_grad else "tensors"))
            made = original(*args, **kwargs)
            _inside.is_inside = False
            for listener in told:
                listener.end_backward()
        except BaseException:
            for listener in told:
                listener.fail_backward()
            raise
        finally:
            _inside.is_inside = False
        return made

    hide_from_dynamo(backward)  # and not what the program's own hooks are below it
    return backward


def _makes_graph(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether ``torch.autograd.grad`` is asked for gradients with a graph: a part of a forward pass."""
    return bool(kwargs.get("create_graph", args[4] if len(args) > 4 else False))
