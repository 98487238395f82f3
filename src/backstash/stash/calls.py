"""How a value was made, so that it can be made again, bit for bit, instead of being stored.

While the forward pass runs, every call of a cheap function (:data:`CHEAP`) is noted: which function, with which
arguments, on the *contents* of which storages. A content is what a storage held at one version; an in-place op ends one
and begins another. When a saved value is to be recomputed, its content's call is followed back until every input is
something that is held anyway: another saved value, a parameter, or a small tensor. That tree is the :class:`Recipe`.

A recipe is proven before it is trusted: the first time a value is recomputed rather than stored, the recipe runs at
once and its bits are compared with the value (Note: [proven recipes] in session.py). A recipe may also begin from
values that are stored within a bound: :func:`gains` tells what it does to their errors.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from backstash.errors import SavedTensorModifiedError
from backstash.ops import backends
from backstash.saved import PLAIN, TensorSpec, is_odd
from backstash.stash.parameters import check_memory

Memory = Callable[[], Tensor]
"""Makes memory for a result."""

MAX_CALLS = 12
"""Calls that one recipe makes at most."""

# fmt: off
_METHODS = (
    "add", "sub", "mul", "div", "neg", "pow", "square", "sqrt", "rsqrt", "exp", "tanh", "sigmoid", "relu", "softmax",
    "clamp", "where", "to", "float", "half", "bfloat16", "double", "type_as", "contiguous", "clone", "__rsub__",
)
_IN_PLACE_METHODS = ("add_", "sub_", "mul_", "div_", "neg_", "tanh_", "sigmoid_", "relu_", "clamp_", "masked_fill_")
_TORCH = (
    "add", "sub", "mul", "div", "neg", "pow", "square", "sqrt", "rsqrt", "exp", "tanh", "sigmoid", "relu", "relu_",
    "softmax", "clamp", "where", "cat", "stack", "rms_norm", "layer_norm", "group_norm",
)
_FUNCTIONAL = (
    "batch_norm", "layer_norm", "rms_norm", "group_norm", "relu", "relu6", "hardtanh", "leaky_relu", "elu", "selu",
    "celu", "gelu", "silu", "mish", "softplus", "hardswish", "hardsigmoid", "softmax", "tanh", "sigmoid", "dropout",
    "dropout1d", "dropout2d", "dropout3d", "alpha_dropout",
)
# fmt: on


def _functions() -> Iterator[tuple[Any, str]]:
    for space, names in ((Tensor, (*_METHODS, *_IN_PLACE_METHODS)), (torch, _TORCH), (F, _FUNCTIONAL)):
        for name in names:
            yield getattr(space, name), name.strip("_")


CHEAP: dict[Any, str] = dict(_functions())
"""Functions whose result costs no more than a few passes over memory, and their names."""

_IN_PLACE = frozenset(getattr(Tensor, name) for name in _IN_PLACE_METHODS) | {torch.relu_}
_RANDOM = frozenset(name for name in _FUNCTIONAL if "dropout" in name)


class Content:
    """What a storage held at one version.

    Attributes:
        version: the version.
        call: how it was made; None where that is not known or not cheap.
        value: the stored value that holds it, once one does.
        before: the content that an in-place op may have read to make this one.
        escaped: whether something may change it without a new version: a pointer was taken, or its ``.data``.
    """

    __slots__ = ("before", "call", "escaped", "value", "version")

    def __init__(self, version: int, before: Content | None = None) -> None:
        self.version = version
        self.before = before
        if before is not None:
            before.before = None
        self.escaped: bool = before is not None and before.escaped
        self.call: Call | None = None
        self.value: weakref.ref[Any] | None = None


@dataclass(frozen=True, slots=True)
class View:
    """A tensor argument: how it looks at a content."""

    content: Content
    spec: TensorSpec
    offset: int


@dataclass(frozen=True, slots=True)
class Held:
    """A tensor argument that is held as it is: a parameter, or something small."""

    tensor: Tensor
    version: int

    def get(self) -> Tensor:
        """The tensor.

        Raises:
            SavedTensorModifiedError: it was changed since.
            SavedTensorFreedError: its memory was freed since.
        """
        if self.tensor._version != self.version:
            raise SavedTensorModifiedError(
                f"a value that backward needs was to be computed again, but one of its inputs, "
                f"{TensorSpec.of(self.tensor)}, was modified by an inplace operation: it is at version "
                f"{self.tensor._version}; expected version {self.version} instead. Run backward before changing "
                f"parameters, or use a policy without recomputation, such as lossless(recompute=False)."
            )
        check_memory(self.tensor, self.tensor.nbytes)
        return self.tensor


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a cheap function that filled a whole storage.

    Attributes:
        name: of the function.
        function: what to call to do it again.
        args, kwargs: arguments; tensors as View or Held.
        spec: of the result, which fills its storage.
        in_place: whether the first argument's memory became the result's.
        autocast: device type, dtype and cache setting where autocast was on.
        random_state: of the device's generator before the call, where the function draws from it.
        statistics: batch norm's saved mean and inverse standard deviation, [C] each.
    """

    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    spec: TensorSpec
    in_place: bool
    autocast: tuple[str, torch.dtype] | None = None
    random_state: Tensor | None = None
    statistics: tuple[Held, Held] | None = None

    def inputs(self) -> Iterator[View | Held]:
        """All tensor arguments, in order."""
        for arg in (*self.args, *self.kwargs.values()):
            yield from (one for one in (arg if isinstance(arg, list) else (arg,)) if isinstance(one, (View, Held)))


def random_state(function: Any, args: Sequence[Any]) -> Tensor | None:
    """What has to be noted before ``function`` runs: the generator's state, where it will draw from it."""
    if CHEAP[function] not in _RANDOM or not (args and isinstance(args[0], Tensor)):
        return None
    device = args[0].device
    return torch.get_rng_state() if device.type == "cpu" else torch.cuda.get_rng_state(device)


def call_of(
    function: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    result: Tensor,
    view: Callable[[Tensor], View | Held | None],
    before: Tensor | None,
) -> Call | None:
    """The call that made ``result``, or None where it cannot be repeated from its arguments.

    Args:
        function, args, kwargs, result: what was called with what, and what it returned.
        view: makes View or Held of a tensor argument; None where a call that reads it cannot be repeated.
        before: what :func:`random_state` returned.
    """
    spec = TensorSpec.of(result)
    storage = result.untyped_storage()
    if result.storage_offset() != 0 or spec.nbytes != storage.nbytes():
        return None
    name, in_place = CHEAP[function], function in _IN_PLACE
    if kwargs.get("inplace"):
        in_place, kwargs = True, {**kwargs, "inplace": False}
    if kwargs.get("out") is not None or kwargs.get("generator") is not None:
        return None
    tensors = _tensors_in((*args, *kwargs.values()))
    if not all(type(one) in PLAIN and one.layout is torch.strided and not is_odd(one) for one in tensors):
        return None
    aliased = [one for one in tensors if one.untyped_storage()._cdata == storage._cdata]
    if len(aliased) != in_place or (in_place and aliased[0] is not args[0]):
        return None  # a view, a conversion that had nothing to do, or a positional inplace=True
    statistics = None
    if name == "batch_norm":
        args, kwargs, statistics = _batch_norm(args, kwargs, result)
    device = spec.device.type
    autocast = (device, torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else None
    call = Call(
        name,
        getattr(Tensor, name) if function in _IN_PLACE else function,
        tuple(_each_tensor(arg, view) for arg in args),
        {key: _each_tensor(arg, view) for key, arg in kwargs.items()},
        spec,
        in_place,
        autocast,
        before,
        statistics,
    )
    return call if sum(1 for _ in call.inputs()) == len(_tensors_in((*args, *kwargs.values()))) else None


def _tensors_in(given: Sequence[Any]) -> list[Tensor]:
    flat = [one for arg in given for one in (arg if isinstance(arg, (list, tuple)) else (arg,))]
    return [one for one in flat if isinstance(one, Tensor)]


def _each_tensor(arg: Any, change: Callable[[Any], Any]) -> Any:
    """``arg`` with ``change`` made to every Tensor, View and Held in it.

    No closure that calls itself: that would be a cycle, which holds on to tensors until the garbage collector comes.
    """
    if isinstance(arg, (Tensor, View, Held)):
        return change(arg)
    if isinstance(arg, (list, tuple)) and any(isinstance(one, (Tensor, View, Held)) for one in arg):
        return [_each_tensor(one, change) for one in arg]
    return arg


def _batch_norm(
    args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor
) -> tuple[tuple[Any, ...], dict[str, Any], tuple[Held, Held] | None]:
    """Batch norm's arguments without the running statistics that training updates, and the statistics it used."""
    names = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
    given = dict(zip(names, args, strict=False)) | kwargs
    given = {name: given[name] for name in names if name in given}
    if not given.get("training"):
        return (), given, None
    given["running_mean"] = given["running_var"] = None
    node = result.grad_fn
    if type(node).__name__ not in ("NativeBatchNormBackward0", "CudnnBatchNormBackward0"):
        return (), given, None
    mean, scale = (_statistic(getattr(node, f"_raw_saved_{role}").data) for role in ("result1", "result2"))
    return (), given, None if mean is None or scale is None else (mean, scale)


def _statistic(packed: Any) -> Held | None:
    """What a Session has packed, held as it is for being small, or a copy of what it has yet to store."""
    if isinstance(packed, tuple):
        return Held(*packed)
    dense: Tensor | None = getattr(packed, "dense", None)
    if dense is None:
        return None
    copy = dense.clone()
    return Held(copy, copy._version)


# -- recipes -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Leaf:
    """Where a recipe begins: a stored value, seen through a view."""

    value: Any
    spec: TensorSpec
    offset: int


@dataclass(frozen=True)
class Recipe:
    """A tree of calls that makes one value.

    Attributes:
        call: the last call.
        inputs: for each tensor argument in the order of ``call.inputs()``: a Leaf, what is Held, or the recipe of what
            the argument is a view of, with that view.
        fused: whether batch norm, add and relu may run as one kernel.
        settled: whether batch norm takes the statistics that it saved, and not those of what it is given now.
    """

    call: Call
    inputs: tuple[Leaf | Held | tuple[Recipe, View], ...]
    fused: bool = True
    settled: bool = False

    def __str__(self) -> str:
        inner = [str(one[0]) for one in self.inputs if isinstance(one, tuple)]
        return f"{self.call.name}({', '.join(inner)})" if inner else self.call.name

    def leaves(self) -> Iterator[Any]:
        """The stored values that it begins from."""
        for one in self.inputs:
            if isinstance(one, Leaf):
                yield one.value
            elif isinstance(one, tuple):
                yield from one[0].leaves()

    def run(self, fetch: Callable[[Leaf], Tensor], out: Memory | None = None) -> Tensor:
        """Make the value.

        Args:
            fetch: returns the tensor that a leaf stands for, which the recipe does not change.
            out: makes the memory for the result, asked only where the recipe can use it.

        Returns:
            The value, laid out like the original; in ``out`` or in fresh memory.
        """
        if self.fused:
            made = _affine(self, fetch, out)
            if made is not None:
                return made
        tensors = [self._input(index, fetch, out) for index in range(len(self.inputs))]
        if self.settled and self.call.statistics is not None:
            return _settled_norm(self.call, tensors)
        first, call = self.inputs[0] if self.inputs else None, self.call
        temporary = isinstance(first, tuple) and tensors[0].shape == call.spec.shape
        if temporary and tensors[0].dtype == call.spec.dtype and call.name in _OVERWRITE:
            return _replay(call, _OVERWRITE[call.name], tensors)
        return _replay(call, call.function, tensors)

    def unfused(self) -> Recipe:
        """The same calls, each on its own."""
        inputs = tuple((one[0].unfused(), one[1]) if isinstance(one, tuple) else one for one in self.inputs)
        return replace(self, inputs=inputs, fused=False)

    def settle(self) -> Recipe:
        """The same calls, for inputs that are off: batch norm's statistics are exact nevertheless."""
        inputs = tuple((one[0].settle(), one[1]) if isinstance(one, tuple) else one for one in self.inputs)
        return replace(self, inputs=inputs, settled=True)

    def _input(self, index: int, fetch: Callable[[Leaf], Tensor], out: Memory | None) -> Tensor:
        one = self.inputs[index]
        if isinstance(one, Held):
            return one.get()
        if isinstance(one, Leaf):
            return fetch(one)
        recipe, view = one
        made = recipe.run(fetch, out if index == 0 else None)
        if made.shape == view.spec.shape and made.stride() == view.spec.stride and view.offset == 0:
            return made
        return made.as_strided(view.spec.shape, view.spec.stride, view.offset)


_OVERWRITE: dict[str, Callable[..., Any]] = {
    "relu": lambda x, *args, **kwargs: torch.relu_(x),
    "add": Tensor.add_,
    "mul": Tensor.mul_,
}
"""What writes over its first argument, for where that is a temporary of the recipe."""


def _replay(call: Call, function: Callable[..., Any], tensors: list[Tensor]) -> Tensor:
    given = iter(tensors)

    args = tuple(_each_tensor(arg, lambda _: next(given)) for arg in call.args)
    kwargs = {key: _each_tensor(arg, lambda _: next(given)) for key, arg in call.kwargs.items()}
    if call.autocast is None:
        device = call.spec.device.type
        cast = torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()
    else:
        cast = torch.autocast(call.autocast[0], call.autocast[1], cache_enabled=False)
    with cast, _Generator(call):
        made: Tensor = function(*args, **kwargs)
    return made


def _settled_norm(call: Call, tensors: list[Tensor]) -> Tensor:
    assert call.statistics is not None
    given = dict(
        zip((name for name, arg in call.kwargs.items() if isinstance(arg, (View, Held))), tensors, strict=True)
    )
    mean, invstd = (one.get() for one in call.statistics)
    eps = call.kwargs.get("eps", 1e-5)
    variance = (invstd.double().pow(-2) - eps).clamp_(min=0.0).to(invstd.dtype)
    return F.batch_norm(given["input"], mean, variance, given.get("weight"), given.get("bias"), eps=eps)


class _Generator:
    """Runs with the generator as it was at the call, and puts it back."""

    def __init__(self, call: Call) -> None:
        self.state, self.device = call.random_state, call.spec.device

    def __enter__(self) -> None:
        if self.state is None:
            return
        self.now = torch.get_rng_state() if self.device.type == "cpu" else torch.cuda.get_rng_state(self.device)
        self._set(self.state)

    def __exit__(self, *error: object) -> None:
        if self.state is not None:
            self._set(self.now)

    def _set(self, state: Tensor) -> None:
        if self.device.type == "cpu":
            torch.set_rng_state(state)
        else:
            torch.cuda.set_rng_state(state, self.device)


def build(content: Content, leaf: Callable[[View], Leaf | str | None], budget: int = MAX_CALLS) -> Recipe | str:
    """The recipe that makes ``content``, or the reason why there is none.

    Args:
        content: what is to be made.
        leaf: a Leaf where a stored value holds what a view looks at; None where none does, or why it may not be used.
        budget: calls that it may make at most.
    """
    call = content.call
    if call is None:
        return "what made it is not known, or costs too much to do again"
    if budget < 1:
        return f"it would take more than {MAX_CALLS} calls to make it again"
    budget -= 1
    inputs: list[Leaf | Held | tuple[Recipe, View]] = []
    for one in call.inputs():
        if isinstance(one, Held):
            if one.tensor._version != one.version:
                return f"an input of the {call.name} that made it was changed since"
            inputs.append(one)
            continue
        found = leaf(one)
        if isinstance(found, str):
            return found
        if found is None:
            made = build(one.content, leaf, budget)
            if isinstance(made, Recipe) and made.call.spec.dtype is not one.spec.dtype:
                return "its storage is seen as different types"
            if isinstance(made, str):
                return f"{made} (input of {call.name})" if one.content.call is None else made
            budget -= _calls(made)
            inputs.append((made, one))
        else:
            inputs.append(found)
    return Recipe(call, tuple(inputs))


def _calls(recipe: Recipe) -> int:
    return 1 + sum(_calls(one[0]) for one in recipe.inputs if isinstance(one, tuple))


# -- what becomes of errors --------------------------------------------------------------------------------------------


def gains(recipe: Recipe) -> dict[Any, Tensor] | None:
    """By how much an error in each value that the recipe begins from is multiplied, by channel: [C] or [1].

    Errors of several add up. None where that is not known: it is of batch norm with the batch's statistics, which are
    stored apart, of relu, of sums, and of what is put together by channels.
    """
    call, inputs = recipe.call, recipe.inputs
    if call.name == "relu" and len(inputs) == 1:
        return _gains_of(recipe, 0)
    if call.name == "batch_norm" and call.statistics is not None:
        factor = call.statistics[1].get()
        weight = call.kwargs.get("weight")
        if isinstance(weight, Held):
            factor = factor * weight.get().detach().to(factor.dtype)
        return _scaled(_gains_of(recipe, 0), factor.abs())
    if call.name == "add" and len(inputs) == 2 == len(call.args) and not call.kwargs:
        first, second = _gains_of(recipe, 0), _gains_of(recipe, 1)
        if first is None or second is None:
            return None
        for one, gain in second.items():
            first[one] = first[one] + gain if one in first else gain
        return first
    if call.name == "cat" and (call.args[1:] == (1,) or call.kwargs == {"dim": 1}):
        return _gains_of_parts(recipe)
    return None


def _gains_of_parts(recipe: Recipe) -> dict[Any, Tensor] | None:
    """Of a cat: each part's in its own channels."""
    total: dict[Any, Tensor] = {}
    begin, spec = 0, recipe.call.spec
    for index, one in enumerate(recipe.inputs):
        part = _gains_of(recipe, index, but=1)
        if part is None or isinstance(one, Held):
            return None
        end = begin + (one.spec if isinstance(one, Leaf) else one[1].spec).shape[1]
        for value, gain in part.items():
            channels = total.setdefault(value, torch.zeros(spec.shape[1], device=spec.device))
            channels[begin:end] += gain
        begin = end
    return total


def _gains_of(recipe: Recipe, index: int, but: int | None = None) -> dict[Any, Tensor] | None:
    """Those of one input, where it has the shape of the result, ``but`` for one dimension."""
    one, spec = recipe.inputs[index], recipe.call.spec
    if isinstance(one, Held):
        return None
    given = (one if isinstance(one, Leaf) else one[1]).spec
    if len(given.shape) != len(spec.shape):
        return None
    if any(a != b for dim, (a, b) in enumerate(zip(given.shape, spec.shape, strict=True)) if dim != but):
        return None
    if isinstance(one, Leaf):
        return {one.value: torch.ones(1, device=spec.device)}
    return gains(one[0]) if _fills(one) else None


def _scaled(given: dict[Any, Tensor] | None, factor: Tensor) -> dict[Any, Tensor] | None:
    return None if given is None else {value: gain * factor for value, gain in given.items()}


# -- batch norm, add and relu in one pass ------------------------------------------------------------------------------


def _affine(recipe: Recipe, fetch: Callable[[Leaf], Tensor], out: Memory | None) -> Tensor | None:
    """``[relu](batch_norm(x) [+ y])`` in one pass, from the statistics that batch norm saved; None where it is not."""
    relu = recipe.call.name == "relu"
    inner = _only(recipe, 0) if relu else recipe
    if inner is None:
        return None
    residual: Leaf | tuple[Recipe, View] | None = None
    norm = inner
    if inner.call.name == "add" and len(inner.inputs) == 2 and not inner.call.kwargs and len(inner.call.args) == 2:
        first, second = inner.inputs
        if _is_norm(first):
            norm, residual = first[0], second  # type: ignore[index,assignment]
        elif _is_norm(second):
            norm, residual = second[0], first  # type: ignore[index,assignment]
    if norm.call.statistics is None or isinstance(residual, Held) or not hasattr(_kernels(norm), "affine"):
        return None
    given, spec = norm.call.kwargs, recipe.call.spec
    source = norm.inputs[0]
    if spec.dtype is not torch.float32 or norm.call.autocast is not None or recipe.call.autocast is not None:
        return None
    if not isinstance(source, Leaf):
        return None
    y = None  # fetched before x: it may be made of others, and these would lie beside x
    if residual is not None:
        y = fetch(residual) if isinstance(residual, Leaf) else residual[0].run(fetch)
        if y.dtype is not torch.float32 or y.stride() != spec.stride or y.shape != spec.shape:
            return None
    x = fetch(source)
    if x.dtype is not torch.float32 or x.stride() != spec.stride or x.shape != spec.shape:
        return None
    mean, invstd = (one.get() for one in norm.call.statistics)
    weight, bias = (one.get() if isinstance(one, Held) else None for one in (given.get("weight"), given.get("bias")))
    made = out() if out is not None else None
    if made is None or TensorSpec.of(made) != spec:  # memory for what a later call converts it to
        made = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=spec.device)
    done = _kernels(norm).affine(x, mean, invstd, weight, bias, y, relu, made)
    return made if done else None


def _kernels(recipe: Recipe) -> Any:
    return backends.implementation(recipe.call.spec.device.type)


def _is_norm(one: object) -> bool:
    return isinstance(one, tuple) and one[0].call.name == "batch_norm" and _fills(one)


def _only(recipe: Recipe, index: int) -> Recipe | None:
    one = recipe.inputs[index] if len(recipe.inputs) == 1 else None
    return one[0] if isinstance(one, tuple) and _fills(one) else None


def _fills(one: tuple[Recipe, View]) -> bool:
    """Whether the view is all of what its recipe makes."""
    return one[1].offset == 0 and one[1].spec == one[0].call.spec
