"""The state that torch.compile finds installed while a checkpoint runs its function again.

Note: [recomputed alike]
    Dynamo takes a compiled graph again only where it finds the global module hooks and the function modes with which it
    has traced the graph. A checkpoint inside a Session runs its function again in the backward pass, when the Session
    was left: a compiled module in there would be compiled a second time, and the second graph may take its inputs in
    another order, which the checkpoint refuses. So a checkpoint that was made inside a Session finds the same two
    module hooks and an observer when it runs its function again. They have nobody to tell. Programs that compile
    nothing are spared that, because hooks cost each call of a module some microseconds.

Note: [kept by checkpoints]
    What a selective checkpoint keeps, it keeps itself, past all saved-tensor hooks. From torch 2.14 on it asks whether
    that is to go through the hooks around it, and it warns, and later raises an error, where nobody has said so. The
    hooks are the Session's and not the program's, which was never asked. So a Session answers in its place that all
    stays as it is without a Session. A program that says True is not overruled, and where hooks of its own lie between,
    torch asks it as ever.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from functools import cache, wraps
from typing import Any

from backstash.capture import modules
from backstash.capture.leaving import to_the_end
from backstash.capture.observer import Observer
from backstash.torch_internals import (
    ASKS_FOR_HOOKS,
    asking_runners,
    checkpoint_hooks,
    current_function_mode,
    has_compiled,
    hide_from_dynamo,
    hooks_around_checkpoints,
    push_function_mode,
    remove_function_mode,
    replace_checkpoint_hooks,
    replace_checkpoint_runners,
)

_lock = threading.Lock()
_open: dict[object, Callable[..., Any]] = {}
"""The pack hooks of all open Sessions, by who has asked."""

_original: Any = None
"""Torch's class, as long as a Session is open on any thread."""

_runners: dict[str, Any] = {}
"""Torch's functions that ask whether hooks are to be respected, by name."""


def admit(hooks: object, pack: Callable[..., Any]) -> None:
    """Have checkpoints that are made on this thread run again as they ran here, and ask nothing because of our hooks.

    Args:
        hooks: who asks for that, for :func:`dismiss`.
        pack: the Session's pack hook.
    """
    global _original
    with _lock:
        _open[hooks] = pack
        found = checkpoint_hooks()
        if found is not None and not _is_remembering(found):
            _original = found
            replace_checkpoint_hooks(_remembering(found))
        for name, runner in asking_runners().items():
            if runner is not _answering(_runners.setdefault(name, runner)):
                _runners[name] = runner
                replace_checkpoint_runners({name: _answering(runner)})


def dismiss(hooks: object) -> None:
    """End that; nothing happens if nobody has asked."""
    with _lock:
        _open.pop(hooks, None)
        if _open:
            return
        if _is_remembering(checkpoint_hooks()):
            replace_checkpoint_hooks(_original)
        for name, now in asking_runners().items():
            if name in _runners and now is _answering(_runners[name]):
                replace_checkpoint_runners({name: _runners[name]})


def _is_remembering(hooks: Any) -> bool:
    return _original is not None and hooks is _remembering(_original)


@cache
def _answering(original: Any) -> Any:
    """Runs a checkpoint, which is told to keep what it keeps by itself (Note: [kept by checkpoints])."""
    signature = inspect.signature(original)
    may_be_reentrant = "use_reentrant" in signature.parameters  # and then torch takes no answer

    @wraps(original)
    def run(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        is_asked = given.arguments.get(ASKS_FOR_HOOKS) is None
        if may_be_reentrant and given.arguments.get("use_reentrant") is not False:
            is_asked = False
        if is_asked and _is_ours(hooks_around_checkpoints()):
            given.arguments[ASKS_FOR_HOOKS] = False
        return original(*given.args, **given.kwargs)

    hide_from_dynamo(run)
    return run


def _is_ours(hooks: Any) -> bool:
    return hooks is not None and any(hooks[0] is pack for pack in list(_open.values()))


@cache
def _remembering(original: Any) -> Any:
    class CheckpointHooks(original):  # type: ignore[misc]
        """Torch's hooks around a checkpointed function, which note at its end what was installed."""

        def __init__(self, frame: Any) -> None:
            super().__init__(frame)
            self._frame = frame

        def __exit__(self, *error: object) -> Any:
            # At the end, because a Session may learn of the first module inside that there is nothing to observe.
            frame = self.__dict__.pop("_frame", None)  # which is not to be held any longer
            if frame is not None and error[0] is None and modules.is_active() and has_compiled():
                frame.recompute_fn = _run_alike(frame.recompute_fn)
            return super().__exit__(*error)

    return CheckpointHooks


def _run_alike(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that runs with the hooks and the observer that are installed now (Note: [recomputed alike])."""
    has_hooks, is_observed = modules.are_installed(), _is_observed()
    if not has_hooks and not is_observed:
        return function

    def run(*args: Any) -> Any:
        kept, observer = object(), Observer(None)

        def undo() -> None:
            remove_function_mode(observer)
            modules.let_go(kept)

        try:
            if has_hooks:
                modules.keep(kept)
            if is_observed and not _is_observed():
                push_function_mode(observer)
            return function(*args)
        finally:
            to_the_end(undo)

    hide_from_dynamo(run)
    return run


def _is_observed() -> bool:
    return type(current_function_mode()) is Observer
