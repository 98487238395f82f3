"""What torch.compile finds installed while a checkpoint runs its function again.

Note: [recomputed alike]
    Dynamo takes a compiled graph again only where it finds the global module hooks and the function modes with which it
    has traced the graph. A checkpoint inside a Session runs its function again in the backward pass, when the Session
    was left: a compiled module in there would be compiled a second time, and the second graph may take its inputs in
    another order, which the checkpoint refuses. So a checkpoint that was made inside a Session finds the same two
    module hooks and an observer when it runs its function again. They have nobody to tell. Programs that compile
    nothing are spared that, because hooks cost each call of a module some microseconds.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache
from typing import Any

from backstash.capture import modules
from backstash.capture.observer import Observer
from backstash.torch_internals import (
    checkpoint_hooks,
    current_function_mode,
    has_compiled,
    hide_from_dynamo,
    replace_checkpoint_hooks,
)

_lock = threading.Lock()
_open = 0
_original: Any = None
"""Torch's class, as long as a Session is open on any thread."""


def admit() -> Callable[[], None]:
    """Have checkpoints that are made on this thread run again as they ran here; returns what ends that."""
    global _open, _original
    with _lock:
        _open += 1
        if _open == 1:
            _original = checkpoint_hooks()
            if _original is not None:
                replace_checkpoint_hooks(_remembering(_original))

    def stop() -> None:
        global _open
        with _lock:
            _open -= 1
            if _open == 0 and _original is not None:
                replace_checkpoint_hooks(_original)

    return stop


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
