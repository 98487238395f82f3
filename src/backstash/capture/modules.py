"""The module that is running, in each Session: two global module hooks, the same ones for all Sessions.

torch.compile looks at the global hooks when it compiles a module, and compiles anew whenever there are others, or the
same ones under another number. So they are two functions that never change, registered under numbers that never change;
they ask which Session is active when they run.

Note: [fused layers]
    Torch's attention and transformer layers compute by one fused function where no gradient is asked for, but not where
    a function mode is active, as the one that observes is. The results differ in their last bits, and at padded places
    altogether. So inside such a layer, a teacher's for example, that mode is away: nothing is saved there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn

from backstash.interpreter import enter_module, is_traced, leave_module
from backstash.torch_internals import (
    compiler,
    count_function_modes,
    current_function_mode,
    hide_from_dynamo,
    ignore_global_hooks_of_compiled_modules,
    is_dynamo_compiling,
    pop_function_mode,
    push_function_mode,
)


class ModuleListener(Protocol):
    """Whoever wants to know which module is running."""

    def enter_module(self, module: nn.Module) -> None:
        """The module's forward is about to run on the listener's thread."""

    def leave_module(self) -> None:
        """It has returned or raised."""

    def ran_elsewhere(self) -> None:
        """A module's forward runs with grad mode on another thread, on which no Session listens."""


_active = threading.local()  # .enter and .leave, what a Session is told by
_listeners: dict[int, Any] = {}
_numbers: tuple[int, int] | None = None
"""Of the two hooks, once they were registered: of the one before a forward, and of the one after it."""

_kept: set[object] = set()
"""Who asks for the hooks although nobody listens."""

_lock = threading.Lock()


def is_active() -> bool:
    """Whether a Session is open on this thread."""
    return getattr(_active, "is_open", False)


Hook = Callable[[nn.Module, Any], None]


def comes_after(number: int) -> bool:
    """Whether a module's call in which the global hook of that number runs now is yet to be told to the listener.

    It is not if nobody listened when the call began: the hooks of a call are those that there were at its beginning.
    """
    order = list(nn.modules.module._global_forward_pre_hooks)
    return _numbers is not None and number in order and _numbers[0] in order[order.index(number) :]


def listen(listener: ModuleListener | None) -> None:
    """Tell the listener, if any, about modules that run on this thread."""
    _active.is_open = True
    if listener is None:
        return
    with _lock:
        _listeners[id(listener)] = listener
        _install()
    _active.enter, _active.leave = listener.enter_module, listener.leave_module


def unlisten(listener: ModuleListener | None, is_here: bool) -> None:
    """End that; nothing happens if nobody was told.

    Args:
        listener: who was told.
        is_here: whether this is the thread on which that was.
    """
    if is_here:
        for name in ("enter", "leave", "suspended", "is_open"):
            _active.__dict__.pop(name, None)
    with _lock:
        if _listeners.pop(id(listener), None) is None and listener is None:
            return
        if not _listeners and not _kept:
            _uninstall()


def add_pre_hook(hook: Hook) -> int:
    """Has a hook called before each module's forward, in this process. Returns its number."""
    ignore_global_hooks_of_compiled_modules()
    return nn.modules.module.register_module_forward_pre_hook(hook).id


def remove_pre_hook(hook: Hook) -> None:
    """Ends that; nothing happens if the hook is not there."""
    installed = nn.modules.module._global_forward_pre_hooks
    for number in [number for number, each in list(installed.items()) if each == hook]:
        installed.pop(number, None)


def are_installed() -> bool:
    """Whether modules call the hooks."""
    return bool(_listeners or _kept)


def keep(asking: object) -> None:
    """Have modules call the hooks even if nobody listens (Note: [recomputed alike]), until :func:`let_go`."""
    with _lock:
        _kept.add(asking)
        _install()


def let_go(asking: object) -> None:
    """End that; nothing happens if it was not asked for."""
    with _lock:
        _kept.discard(asking)
        if not _listeners and not _kept:
            _uninstall()


def _install() -> None:
    """Installs the hooks if they are not there."""
    global _numbers
    module = nn.modules.module
    if _numbers is not None and module._global_forward_hooks.get(_numbers[1]) is _leave:
        return
    ignore_global_hooks_of_compiled_modules()
    if _numbers is None:
        _uninstall()  # what an interrupted call has installed
        before = module.register_module_forward_pre_hook(_enter)
        after = module.register_module_forward_hook(_leave, always_call=True)
        _numbers = before.id, after.id
    module._global_forward_pre_hooks[_numbers[0]] = _enter
    module._global_forward_hooks_always_called[_numbers[1]] = True
    module._global_forward_hooks[_numbers[1]] = _leave


def _uninstall() -> None:
    module = nn.modules.module
    for installed, hook in ((module._global_forward_pre_hooks, _enter), (module._global_forward_hooks, _leave)):
        for number in [number for number, each in list(installed.items()) if each is hook]:
            installed.pop(number, None)
            module._global_forward_hooks_always_called.pop(number, None)


def _enter(module: nn.Module, args: Any) -> None:
    if is_dynamo_compiling() or compiler._is_compiling_flag or is_traced():
        return  # Note: [transforms] in transforms.py
    if isinstance(module, _FUSED) and not module.training:
        _suspend(module, args)
    if enter_module(module):
        return
    enter = getattr(_active, "enter", None)
    if enter is not None:
        enter(module)
    elif torch.is_grad_enabled():
        with _lock:
            listeners = list(_listeners.values())
        for other in listeners:
            other.ran_elsewhere()


def _leave(module: nn.Module, args: Any, output: Any) -> None:
    if is_dynamo_compiling() or compiler._is_compiling_flag or is_traced():
        return  # Note: [transforms] in transforms.py
    if not leave_module():
        leave = getattr(_active, "leave", None)
        if leave is not None:
            leave()
    if isinstance(module, _FUSED) and getattr(_active, "suspended", (None,))[0] is module:
        push_function_mode(_active.__dict__.pop("suspended")[1])


_FUSED = (nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.MultiheadAttention)


def _suspend(module: nn.Module, args: Any) -> None:
    """Takes the observer away until the module has returned, if no gradient is asked for in there."""
    mode = current_function_mode()
    if not getattr(mode, "only_observes", False) or count_function_modes() > 1:
        return
    if torch.is_grad_enabled():
        given = [each for each in args if isinstance(each, torch.Tensor)]
        if any(each.requires_grad for each in (*given, *module.parameters())):
            return
    _active.suspended = module, pop_function_mode()


for _function in (_enter, _leave):
    hide_from_dynamo(_function, and_all_below=True)
