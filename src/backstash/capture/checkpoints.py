"""What torch.compile finds installed while a checkpoint runs its function again.

Note: [recomputed alike]
    Dynamo takes a compiled graph again only where it finds the global module hooks and the function modes with which it
    has traced the graph. A checkpoint inside a Session runs its function again in the backward pass, when the Session
    was left: a compiled module in there would be compiled a second time, and the second graph may take its inputs in
    another order, which the checkpoint refuses. So a checkpoint that was made inside a Session finds the same two
    module hooks and an observer when it runs its function again. They have nobody to tell. Programs that compile
    nothing are spared that, because hooks cost each call of a module some microseconds.

Note: [kept by checkpoints]
    What a selective checkpoint keeps, it keeps itself, past all saved-tensor hooks. From torch 2.15 on it asks whether
    that is to go through the hooks around it, and it warns, and later raises an error, where nobody has said so. The
    hooks are the Session's and not the program's, which was never asked. So a Session answers in its place that all
    stays as it is without a Session. A program that says True is not overruled, and where hooks of its own lie between,
    torch asks it as ever.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache, wraps
from typing import Any

from backstash.capture import modules
from backstash.capture.observer import Observer
from backstash.torch_internals import (
    ASKS_FOR_HOOKS,
    asking_generators,
    checkpoint_hooks,
    current_function_mode,
    has_compiled,
    hide_from_dynamo,
    hooks_around_checkpoints,
    replace_checkpoint_generators,
    replace_checkpoint_hooks,
)

_lock = threading.Lock()
_open = 0
_original: Any = None
"""Torch's class, as long as a Session is open on any thread."""

_generators: dict[str, Any] = {}
"""Torch's functions that ask whether hooks are to be respected, as long as a Session is open on any thread."""

_packs: list[Any] = []
"""The pack hooks of all open Sessions."""


def admit(pack: Callable[..., Any]) -> Callable[[], None]:
    """Have checkpoints that are made on this thread run again as they ran here, and ask nothing because of our hooks.

    Args:
        pack: the Session's pack hook.

    Returns:
        What ends that.
    """
    global _open, _original, _generators
    with _lock:
        _packs.append(pack)
        _open += 1
        if _open == 1:
            _original = checkpoint_hooks()
            if _original is not None:
                replace_checkpoint_hooks(_remembering(_original))
            _generators = asking_generators()
            replace_checkpoint_generators({name: _answering(each) for name, each in _generators.items()})

    def stop() -> None:
        global _open
        with _lock:
            _packs[:] = [each for each in _packs if each is not pack]
            _open -= 1
            if _open == 0:
                if _original is not None:
                    replace_checkpoint_hooks(_original)
                replace_checkpoint_generators(_generators)

    return stop


@cache
def _answering(original: Any) -> Any:
    """Runs a checkpoint, which is told to keep what it keeps by itself (Note: [kept by checkpoints])."""
    signature = inspect.signature(original)

    @wraps(original)
    def generate(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        hooks = hooks_around_checkpoints()
        if given.arguments.get(ASKS_FOR_HOOKS) is None and _is_ours(hooks):
            given.arguments[ASKS_FOR_HOOKS] = False
        return original(*given.args, **given.kwargs)

    hide_from_dynamo(generate)
    return generate


def _is_ours(hooks: Any) -> bool:
    return hooks is not None and any(hooks[0] is pack for pack in _packs)


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
        with ExitStack() as installed:
            if has_hooks:
                installed.callback(modules.keep())
            if is_observed and not _is_observed():
                installed.enter_context(Observer(None))
            return function(*args)

    hide_from_dynamo(run)
    return run


def _is_observed() -> bool:
    return type(current_function_mode()) is Observer
