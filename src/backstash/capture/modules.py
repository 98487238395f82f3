"""Which module is running, in which Session: two global module hooks, the same ones for all Sessions.

torch.compile looks at the global hooks of a module that it compiles, and compiles anew whenever there are others. So
they are two functions that never change; they ask which Session is active when they run.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn


class Listener(Protocol):
    """Whoever wants to know which module is running."""

    def enter_module(self, module: nn.Module) -> None:
        """The module's forward is about to run on the listener's thread."""

    def leave_module(self) -> None:
        """It has returned or raised."""

    def ran_elsewhere(self) -> None:
        """A module's forward runs with grad mode on another thread, on which no Session listens."""


_active = threading.local()  # .listener
_listeners: weakref.WeakSet[Any] = weakref.WeakSet()
_lock = threading.Lock()


def active() -> Any:
    """The listener of this thread, or None."""
    return getattr(_active, "listener", None)


def listen(listener: Listener) -> Callable[[], None]:
    """Tell the listener about modules that run on this thread; returns what ends that."""
    before = nn.modules.module.register_module_forward_pre_hook(_enter)
    after = nn.modules.module.register_module_forward_hook(_leave, always_call=True)
    _active.listener = listener
    thread = _active.__dict__
    with _lock:
        _listeners.add(listener)

    def stop() -> None:
        before.remove()
        after.remove()
        thread.pop("listener", None)
        with _lock:
            _listeners.discard(listener)

    return stop


def _enter(module: nn.Module, args: Any) -> None:
    if torch.compiler.is_compiling():
        return
    listener = active()
    if listener is not None:
        listener.enter_module(module)
    elif torch.is_grad_enabled():
        with _lock:
            listeners = list(_listeners)
        for other in listeners:
            other.ran_elsewhere()


def _leave(module: nn.Module, args: Any, output: Any) -> None:
    if torch.compiler.is_compiling():
        return
    listener = active()
    if listener is not None:
        listener.leave_module()
