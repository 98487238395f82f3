"""Tells a Session when torch functions begin and end. It changes nothing (Note: [observe only])."""

from __future__ import annotations

import gc
import inspect
import os
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from itertools import chain
from types import (
    BuiltinFunctionType,
    CodeType,
    FrameType,
    FunctionType,
    MethodDescriptorType,
    MethodWrapperType,
    WrapperDescriptorType,
)
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from backstash import repeatable
from backstash.capture.side_effects import SideEffect, inplace_position, side_effect_of
from backstash.stash.regions import Region
from backstash.torch_internals import (
    TorchDispatchMode,
    any_autocast,
    compiled_method,
    compiler,
    dispatch_to_modes,
    has_replacing_mode,
    hide_from_dynamo,
    is_dynamo_compiling,
    is_traced,
    no_torch_function,
    seen_inside,
)


class CallListener(Protocol):
    """Whoever wants to know."""

    recomputes: bool
    """Whether it wants to know how results were made (``made``) and what may change them (``before_side_effect``)."""

    is_timing: bool
    """Whether it wants to know how long functions take that can be repeated (``took``)."""

    remakes_anything: bool
    """Whether it also wants to know of results that cost more than a few passes over memory."""

    @property
    def names_operations(self) -> bool:
        """Whether it also wants to know of the operations of a backward pass with a graph of its own."""

    depth: int
    """How many torch functions are in progress."""

    unnamed: list[Any]
    """What was saved and has no name yet."""

    def before_function(self) -> None:
        """A torch function is about to run."""

    def before_side_effect(self, effect: SideEffect, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A torch function is about to change its arguments, or to hand their memory on."""

    def took(self, result: Tensor, seconds: float, is_change: bool) -> None:
        """A function that can be repeated has made a tensor, or changed one, in that time."""

    def assign_data(self, x: Tensor, assign: Callable[[], Any]) -> Any:
        """``x.data`` is about to be assigned; returns what ``assign``, which does it, returns."""

    def ran(self, region: Region) -> None:
        """A compiled region has run, and autograd is about to save its tensors."""

    def before_backward(self) -> None:
        """The backward pass is about to begin."""

    def after_function(self, result: Any) -> None:
        """A torch function that autograd recorded has returned, or raised (then the result is None)."""

    def cast_inside(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> object:
        """A function under autocast is about to return, and has saved tensors (Note: [casts inside])."""

    def counts(self, function: Any) -> bool:
        """Whether it wants to know of a call that is about to run."""

    def made(
        self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, random_state: Tensor | None
    ) -> None:
        """A function that can be repeated has returned something; the generator had that state before."""

    recorder: Any
    """Whoever writes down which functions run; None for nobody."""

    replaying: Any
    """Whoever watches functions in passes that are known; None for nobody."""

    differentiates: bool
    """Whether a backward pass with a graph of its own is in progress, of whose operations it is told."""

    def before_operation(self, results: Sequence[Tensor]) -> None:
        """An operation of such a pass is about to run, after one that has returned these."""

    def after_operation(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """An operation of such a pass has returned something, and can be repeated."""


_COMPILED = frozenset({BuiltinFunctionType, MethodDescriptorType, MethodWrapperType, WrapperDescriptorType})
_BACKWARD = frozenset({Tensor.backward})
_GRADIENTS: tuple[Callable[..., Any], ...] = (Tensor.backward, torch.autograd.backward, torch.autograd.grad)
_DIFFERENTIATE = frozenset(inspect.unwrap(function) for function in _GRADIENTS)
_ASSIGN_DATA = Tensor.data.__set__  # type: ignore[attr-defined]


class Observer(TorchFunctionMode):
    """Calls a listener around every torch function of its thread.

    Note: [observe only]
        Replacing ops here would break non-reentrant checkpoint, whose recomputation does not see the mode.

    Note: [patched functions]
        A function of torch offers itself to modes by the name that it has in its module, and a program may have put a
        wrapper there, as profilers and quantizers do. The wrapper runs already, and has called torch's own: to call it
        again would do twice what it does. So torch's own function is called in its place, and it is what is noted.
    """

    only_observes = True

    def __init__(self, listener: CallListener | None) -> None:
        """Begins with whom it tells; with nobody, it is what a compiler finds installed (Note: [recomputed alike])."""
        super().__init__()
        self.is_over = False
        self._watch = _pass_on if listener is None else _to_the_long_way
        if listener is None:
            return
        self.listener = listener
        if listener.replaying is not None:
            self._watch = listener.replaying.watch(self._watch)

    def end(self) -> None:
        """Nobody listens from now on."""
        self.is_over, self._watch = True, _pass_on

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if is_dynamo_compiling() or compiler._is_compiling_flag:
            # It is traced: the compiled function saves its tensors in one op of its own.
            if func is Tensor.unflatten:  # it calls the method of its base class, in which no compiler follows it
                func = torch.unflatten
            return func(*args, **(kwargs or {}))
        try:
            if func not in _of_torch and not _is_of_torch(func):
                func = _original_of(func, sys._getframe(1))
        except TypeError:  # it cannot be hashed
            func = _original_of(func, sys._getframe(1))
        done = self._watch(func, args, kwargs)
        if done is not LONG_WAY:
            return done
        if is_traced():  # Note: [transforms] in transforms.py
            return func(*args, **(kwargs or {}))
        listener = self.listener
        listener.before_function()
        try:
            kind = _kinds[func]
        except (KeyError, TypeError):  # a function that cannot be hashed is looked at each time
            kind = _kind_of(func)
        if kwargs is None:
            kwargs = {}
        recomputes = listener.recomputes
        if recomputes and (kwargs or kind.effect is not SideEffect.NONE or kind.has_inplace):
            effect = side_effect_of(func, args, kwargs)
            if effect is not SideEffect.NONE:
                with no_torch_function():
                    listener.before_side_effect(effect, args, kwargs)
        if kind.is_backward:
            listener.before_backward()
        elif kind.assigns_data:
            return listener.assign_data(args[0], lambda: func(*args, **kwargs))
        if not torch.is_grad_enabled():
            return func(*args, **kwargs)
        noted = recomputes and listener.depth == 0 and (kind.is_cheap or listener.remakes_anything)
        if noted and not kind.is_cheap:
            if kind.inside is not None and all(each is Tensor for each in types):
                with self:  # what happens inside is seen as if the program had called it
                    return kind.inside(*args, **kwargs)
            noted = kind.is_repeatable and not repeatable.may_change_state(func, args, kwargs)
        noted = noted and not has_replacing_mode() and listener.counts(func)  # Note: [modes that replace]
        before = repeatable.random_state(func, args, kwargs) if noted else None
        result, depth = None, listener.depth
        recorder = listener.recorder if depth == 0 else None
        if recorder is not None:
            recorder.begin_call(func)
        is_timed = listener.is_timing and depth == 0 and (kind.is_cheap or kind.is_repeatable)
        try:
            listener.depth = depth + 1
            started = time.perf_counter() if is_timed else 0.0
            if kind.differentiates and listener.names_operations and kwargs.get("create_graph"):
                result = _differentiated(listener, func, args, kwargs)
            else:
                result = func(*args, **kwargs)
            if is_timed and type(result) is Tensor:
                with no_torch_function():
                    listener.took(result, time.perf_counter() - started, func in repeatable.IN_PLACE)
        finally:
            listener.depth = depth
            if listener.unnamed and depth == 0:
                if recomputes and any_autocast():
                    listener.cast_inside(func, args, kwargs, result)
                listener.after_function(result)
        if noted and (type(result) is Tensor or isinstance(result, (tuple, list))):  # those of torch may have names
            with no_torch_function():
                listener.made(func, args, kwargs, result, before)
        if recorder is not None:
            with no_torch_function():
                recorder.end_call(result)
        return result


def _differentiated(
    listener: CallListener, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Runs a backward pass with a graph, of whose operations the listener is told."""
    if has_replacing_mode():  # Note: [modes that replace]
        return func(*args, **kwargs)
    listener.differentiates = True
    try:
        with _Operations(listener):
            return func(*args, **kwargs)
    finally:
        listener.differentiates = False


class _Operations(TorchDispatchMode):
    """Tells a listener of the operations of a backward pass with a graph of its own.

    Note: [operations of backward]
        A node of such a pass calls operations that no function mode sees, and autograd records them: gradients and
        products of gradients are saved as feature maps are. So a dispatch mode, which only looks on, tells which
        operation has made what. It runs below autograd: what an operation has saved is known when the next one begins.
    """

    def __init__(self, listener: CallListener) -> None:
        super().__init__()
        self._listener = listener
        self._results: list[weakref.ref[Tensor]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not torch.is_grad_enabled() or is_traced():  # what is decoded or made again
            return func(*args, **kwargs)
        self._listener.before_operation([x for result in self._results if (x := result()) is not None])
        result = func(*args, **kwargs)
        made = [result] if type(result) is Tensor else result if type(result) in (tuple, list) else ()
        self._results = [weakref.ref(x) for x in made if type(x) is Tensor]
        if self._results and repeatable.is_repeatable_operation(func):
            self._listener.after_operation(func, args, kwargs, result)
        return result


_of_torch: set[Callable[..., Any]] = set()
_FILES_OF_TORCH = os.path.join(os.path.dirname(torch.__file__), "")
_by_code: dict[CodeType, Callable[..., Any]] = {
    each.__code__: each
    for owner in (F, torch.functional, torch.autograd, torch.nn.init, Tensor)
    for each in vars(owner).values()
    if isinstance(each, FunctionType)
}
_MOST_KNOWN = 4096


def _is_of_torch(func: Callable[..., Any]) -> bool:
    """Whether torch has defined a function."""
    if isinstance(func, FunctionType):
        is_own = func.__code__.co_filename.startswith(_FILES_OF_TORCH)
    else:
        is_own = type(func) in _COMPILED or type(func).__module__.partition(".")[0] == "torch"
    if is_own and len(_of_torch) < _MOST_KNOWN:
        _of_torch.add(func)
    return is_own


def _original_of(func: Callable[..., Any], frame: FrameType) -> Callable[..., Any]:
    """The function of torch that runs where a mode is asked about the program's ``func`` (Note: [patched functions]).

    Args:
        func: what torch has found by the name.
        frame: which has called the mode.
    """
    if frame.f_code is dispatch_to_modes.__code__ and frame.f_back is not None:
        code = frame.f_back.f_code
        if not code.co_filename.startswith(_FILES_OF_TORCH):
            return func  # a function of the program that offers itself
        if code not in _by_code:  # it was wrapped before this module was imported, or is in a module of few such
            _by_code[code] = _within(func, code) or func
        return _by_code[code]
    name = next((name for name, each in vars(Tensor).items() if each is func), "")
    return compiled_method(name) or func


def _within(wrapper: Callable[..., Any], code: CodeType) -> Callable[..., Any] | None:
    """The function of that code that a wrapper refers to, wherever it has it from; None where it is not found."""
    cells = getattr(wrapper, "__closure__", None) or ()
    names = {**getattr(wrapper, "__globals__", {}), **getattr(wrapper, "__dict__", {})}
    found = [*chain.from_iterable(map(gc.get_referents, cells)), *names.values(), *gc.get_referrers(code)]
    return next((each for each in found if getattr(each, "__code__", None) is code), None)


class _Kind:
    """What there is to do about calls of one function.

    Attributes:
        effect: what it does to its arguments' memory, whatever they are.
        has_inplace: whether it has an argument that has it work in place.
        is_cheap: whether any policy that recomputes may make its result again.
        is_repeatable: whether its result can be made again, whatever that costs.
        inside: runs it in such a way that the functions it calls are seen; None for a function that is one operation.
        is_backward: whether it begins a backward pass.
        differentiates: whether it may begin one that has a graph of its own.
        assigns_data: whether it assigns a tensor's ``.data``.
    """

    __slots__ = (
        "assigns_data",
        "differentiates",
        "effect",
        "has_inplace",
        "inside",
        "is_backward",
        "is_cheap",
        "is_repeatable",
    )

    def __init__(self, func: Callable[..., Any]) -> None:
        self.effect = side_effect_of(func, (), {})
        self.has_inplace = inplace_position(func) is not None
        self.is_cheap = func in repeatable.CHEAP
        is_harmless = self.effect in (SideEffect.NONE, SideEffect.CHANGES_STATISTICS)
        self.is_repeatable = is_harmless and repeatable.is_repeatable(func)
        self.inside = _inside_attention if func is _ATTENTION else None
        self.is_backward = func in _BACKWARD
        self.differentiates = inspect.unwrap(func) in _DIFFERENTIATE
        self.assigns_data = func == _ASSIGN_DATA

    @property
    def ends_pass(self) -> bool:
        """Whether it takes gradients, so that a forward pass ends before it."""
        return self.is_backward or self.differentiates


_ATTENTION = F.multi_head_attention_forward  # a program may put a wrapper in its place later, which calls this one
_inside_attention = seen_inside(_ATTENTION)

_kinds: dict[Callable[..., Any], _Kind] = {}
LONG_WAY = object()
"""What is returned for a call that belongs to no pass that is known (Note: [settled passes])."""


def _to_the_long_way(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
    """Leaves a call to the observer."""
    return LONG_WAY


def _pass_on(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
    """Calls a function of which nobody is told."""
    return func(*args, **(kwargs or {}))


_MOST_KINDS = 4096


def _kind_of(func: Callable[..., Any]) -> _Kind:
    try:
        kind = _Kind(func)
        if len(_kinds) < _MOST_KINDS:
            _kinds[func] = kind
    except TypeError:  # it cannot be hashed
        kind = object.__new__(_Kind)
        kind.effect, kind.has_inplace = side_effect_of(func, (), {}), False
        kind.is_cheap = kind.is_repeatable = kind.is_backward = kind.assigns_data = kind.differentiates = False
        kind.inside = None
    return kind


def ends_pass(func: Callable[..., Any]) -> bool:
    """Whether a function takes gradients, so that a forward pass ends before it."""
    try:
        return _kinds[func].ends_pass
    except (KeyError, TypeError):
        return _kind_of(func).ends_pass


for _function in (Observer.__torch_function__, _pass_on):
    hide_from_dynamo(_function)
for _helper in (
    _is_of_torch,
    _kind_of,
    _original_of,
    _to_the_long_way,
    side_effect_of,
    repeatable.may_change_state,
    repeatable.random_state,
    _Operations.__torch_dispatch__,
):
    hide_from_dynamo(_helper, and_all_below=True)
