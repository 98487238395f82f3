"""The module that is running, in each Session: two global module hooks, the same ones for all Sessions.

torch.compile looks at the global hooks when it compiles a module, and compiles anew whenever there are others, or the
same ones under another number. So they are two functions that never change, registered under numbers that never change;
they ask which Session is active, and who else wants to know of calls, when they run.

Note: [fused layers]
    Torch's attention and transformer layers compute by one fused function where no gradient is asked for, but not where
    a function mode is active, as the one that observes is. The results differ in their last bits, and at padded places
    altogether. So inside such a layer, a teacher's for example, that mode is away: nothing is saved there.

Note: [no hooks in known passes]
    A module that finds a hook takes a longer way through its call, and the two hooks take as long again. In a pass that
    is known nobody asks for names, so the hooks are away (``rest``) until the outermost module has returned. They come
    back early (``wake``) when the pass goes on the long way, and before a fused layer in evaluation. Which calls are in
    progress then is seen in Python's stack (``calls_in_progress``). The outermost module tells of its end by a hook of
    its own, which is registered for that call. Nobody rests if anything was compiled or there are several Sessions.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from backstash import accelerator
from backstash.interpreter import is_traced
from backstash.torch_internals import (
    CODE_OF_CALL,
    compiler,
    count_function_modes,
    current_function_mode,
    has_compiled,
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

    def leave_module(self, module: nn.Module) -> None:
        """It has returned or raised."""

    def ran_elsewhere(self) -> None:
        """A module's forward runs with grad mode on another thread, on which no Session listens."""


_active = threading.local()  # .enter and .leave, what a Session is told by
_listeners: dict[int, Any] = {}
_numbers: tuple[int, int] | None = None
"""Of the two hooks, once they were registered: of the one before a forward, and of the one after it."""

MOST_TENSORS = 64
"""How many tensors among the inputs of a call are looked at."""

AUTOCAST = "autocast"
"""What stands in a signature, with the dtype, where autocast is on."""

Signature = tuple[tuple[tuple[int, ...], str], ...]
"""Shape and dtype of each tensor among the inputs of a call."""

Hook = Callable[[nn.Module, Any], None]

_kept: set[object] = set()
"""Who asks for the hooks although nobody listens."""

_hearing: list[Hook] = []
"""Who hears of calls before a listener is told, the latest one first."""

_resting: nn.Module | None = None
"""Until whose call ends no hooks are called."""

_hooked: nn.Module | None = None
"""Which module has a hook of its own that tells of that end."""

_lock = threading.Lock()


def is_active() -> bool:
    """Whether a Session is open on this thread."""
    return getattr(_active, "is_open", False)


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
    wake()
    with _lock:
        _unhook()
        if _listeners.pop(id(listener), None) is None and listener is None:
            return
        if not _listeners and not _kept:
            _uninstall()


def hear_calls(hook: Hook) -> None:
    """Has ``hook`` called before each module's forward, also on other threads, before all other hooks and listeners.

    A listener that begins to listen in it is told of that call as well.
    """
    keep(hook)
    assert _numbers is not None
    hooks: Any = nn.modules.module._global_forward_pre_hooks  # an OrderedDict, which torch calls a dict
    with _lock:
        hooks.move_to_end(_numbers[0], last=False)
        if hook not in _hearing:
            _hearing.insert(0, hook)


def ignore_calls(hook: Hook) -> None:
    """Ends that; nothing happens if the hook does not hear of calls."""
    with _lock:
        if hook in _hearing:
            _hearing.remove(hook)
    let_go(hook)


def are_installed() -> bool:
    """Whether modules call the hooks."""
    return _numbers is not None and nn.modules.module._global_forward_hooks.get(_numbers[1]) is _leave


def rest(root: nn.Module) -> None:
    """No hooks are called until ``root``, whose call has just begun, returns (Note: [no hooks in known passes])."""
    global _resting, _hooked
    if not root._modules or isinstance(root, (torch.jit.ScriptModule, *_FUSED)):
        return
    with _lock:
        if _kept or len(_listeners) != 1 or _resting is not None or _numbers is None or has_compiled():
            return
        _unhook()
        _resting = _hooked = root  # first: if this is interrupted, all of it is undone
        root._forward_hooks_always_called[_numbers[1]] = True
        root._forward_hooks[_numbers[1]] = _end_rest
        _uninstall()
        for kind in _FUSED:
            kind.__call__ = _call_fused  # type: ignore[method-assign]


def wake() -> None:
    """The hooks are called again; nothing happens if they are."""
    global _resting
    if _resting is None:
        return
    with _lock:
        for kind in _FUSED:
            if "__call__" in vars(kind):
                del kind.__call__
        if _listeners or _kept:
            _install()
        if sys.exc_info()[0] is None:  # else torch may be going through the module's hooks
            _unhook()
        _resting = None  # last: what is interrupted before that is done again


def _unhook() -> None:
    global _hooked
    if _hooked is not None and _numbers is not None:
        _hooked._forward_hooks.pop(_numbers[1], None)
        _hooked._forward_hooks_always_called.pop(_numbers[1], None)
    _hooked = None


def _end_rest(module: nn.Module, args: Any, output: Any) -> None:
    if module is _resting:
        is_told = are_installed()  # by somebody else
        wake()
        if not is_told:
            _leave(module, args, output)


def _call_fused(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Calls a fused layer: in evaluation the observer has to be away (Note: [fused layers])."""
    if not module.training:
        wake()
    return nn.Module.__call__(module, *args, **kwargs)


def calls_in_progress(thread: int) -> list[tuple[nn.Module, int]]:
    """The modules whose calls are in progress on a thread, the outermost first, each with a number of that call."""
    found: list[tuple[nn.Module, int]] = []
    frame = sys._current_frames().get(thread)
    while frame is not None:
        if frame.f_code is CODE_OF_CALL:
            found.append((frame.f_locals["self"], id(frame)))
        frame = frame.f_back
    return found[::-1]


def signature_of(inputs: Any) -> Signature:
    """Shapes and dtypes of the tensors in nested lists, tuples and mappings; empty if there are none."""
    found: list[tuple[tuple[int, ...], str]] = []
    waiting = [inputs]
    while waiting and len(found) < MOST_TENSORS:
        item = waiting.pop()
        if isinstance(item, Tensor):
            sizes = (item.numel(),) if item.is_nested else tuple(map(int, item.shape))  # those of a nested one are none
            found.append((sizes, str(item.dtype).removeprefix("torch.")))
        elif isinstance(item, (Mapping, list, tuple)):
            waiting += reversed(_parts_of(item))
    for device in ("cpu", accelerator.kind()):
        if found and device is not None and torch.is_autocast_enabled(device):
            found.append(((), f"{AUTOCAST} {torch.get_autocast_dtype(device)}"))
    return tuple(found)


def _parts_of(item: Mapping[Any, Any] | list[Any] | tuple[Any, ...]) -> list[Any]:
    """What is in a container; nothing where it is of a class of the program's that is not to be read like that."""
    try:
        return list(item.values() if isinstance(item, Mapping) else item)
    except Exception:
        return []


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
    if is_dynamo_compiling() or compiler._is_compiling_flag:
        return
    for hook in tuple(_hearing):
        hook(module, args)
    if is_traced():
        return  # Note: [transforms] in transforms.py
    if isinstance(module, _FUSED) and not module.training:
        _suspend(module, args)
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
    leave = getattr(_active, "leave", None)
    if leave is not None:
        leave(module)
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


for _function in (_enter, _leave, _end_rest):
    hide_from_dynamo(_function, and_all_below=True)
