"""Tells a Session when torch functions begin and end. It changes nothing (Note: [observe only])."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from backstash.capture.side_effects import SideEffect, side_effect_of
from backstash.stash import calls
from backstash.torch_internals import hide_from_dynamo, no_torch_function


class Listener(Protocol):
    """Whoever wants to know."""

    recomputes: bool
    """Whether it wants to know how results were made (``made``) and what may change them (``before_side_effect``)."""

    depth: int
    """How many torch functions are in progress."""

    def before_function(self) -> None:
        """A torch function is about to run."""

    def before_side_effect(self, effect: SideEffect, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A torch function is about to change its arguments, or to hand their memory on."""

    def assign_data(self, x: Tensor, assign: Callable[[], Any]) -> Any:
        """``x.data`` is about to be assigned; returns what ``assign``, which does it, returns."""

    def before_backward(self) -> None:
        """The backward pass is about to begin."""

    def after_function(self, result: Any) -> None:
        """A torch function that autograd recorded has returned, or raised (then the result is None)."""

    def made(
        self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor, random_state: Tensor | None
    ) -> None:
        """A cheap function has returned a tensor; the generator had that state before."""


_BACKWARD = frozenset({Tensor.backward})
_TOLD_APART = _BACKWARD | {Tensor.data.__set__}  # type: ignore[attr-defined]


class Observer(TorchFunctionMode):
    """Calls a listener around every torch function of its thread.

    Note: [observe only]
        Replacing ops here would break non-reentrant checkpoint, whose recomputation does not see the mode.
    """

    def __init__(self, listener: Listener) -> None:
        super().__init__()
        self.listener = listener

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if torch.compiler.is_compiling():  # traced: the compiled function saves its tensors in one op of its own
            return func(*args, **(kwargs or {}))
        listener = self.listener
        listener.before_function()
        if listener.recomputes:
            effect = side_effect_of(func, args, kwargs or {})
            if effect is not SideEffect.NONE:
                with no_torch_function():
                    listener.before_side_effect(effect, args, kwargs or {})
        if func in _TOLD_APART:
            if func in _BACKWARD:
                listener.before_backward()
            else:
                return listener.assign_data(args[0], lambda: func(*args, **(kwargs or {})))
        if not torch.is_grad_enabled():
            return func(*args, **(kwargs or {}))
        cheap = listener.depth == 0 and listener.recomputes and func in calls.CHEAP
        before = calls.random_state(func, args) if cheap else None
        listener.depth += 1
        result = None
        try:
            result = func(*args, **(kwargs or {}))
        finally:
            listener.depth -= 1
            listener.after_function(result)
        if cheap and type(result) is Tensor:
            with no_torch_function():
                listener.made(func, args, kwargs or {}, result, before)
        return result


hide_from_dynamo(Observer.__torch_function__)
