"""How a value was made: the calls of cheap functions that the forward pass has made, and how a call is repeated.

While the forward pass runs, every call of a cheap function (:data:`CHEAP`) is noted: the function, its arguments, and
the *contents* of the storages that it read. A content is what a storage holds at one version; an in-place op ends one
content and begins another. From these notes recipes.py builds the tree of calls that makes a value again.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from backstash.errors import SavedTensorModifiedError
from backstash.saved import PLAIN, TensorSpec, is_odd
from backstash.stash.parameters import check_memory

if TYPE_CHECKING:
    from backstash.stash.value import Value

Memory = Callable[[], Tensor]
"""Makes memory for a result."""

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
"""Functions whose result costs no more than a few passes over memory, with their names."""

_IN_PLACE = frozenset(getattr(Tensor, name) for name in _IN_PLACE_METHODS) | {torch.relu_}
_RANDOM = frozenset(name for name in _FUNCTIONAL if "dropout" in name)


class Content:
    """What a storage held at one version.

    Attributes:
        storage: the storage.
        version: the version.
        call: how it was made; None where that is not known or not cheap.
        value: the stored value that holds it, once one does.
        before: the content that an in-place op may have read to make this one.
        escaped: whether something may change it without a new version: a pointer was taken, or its ``.data``.
    """

    __slots__ = ("before", "call", "escaped", "storage", "value", "version")

    def __init__(self, storage: weakref.ref[torch.UntypedStorage], version: int, before: Content | None = None) -> None:
        self.storage, self.version = storage, version
        self.before = before
        if before is not None:
            before.before = None
        self.escaped: bool = before is not None and before.escaped
        self.call: Call | None = None
        self.value: weakref.ref[Value] | None = None


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
class Leaf:
    """Where a recipe begins: a stored value, seen through a view."""

    value: Value
    spec: TensorSpec
    offset: int


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a cheap function that filled a whole storage.

    Attributes:
        name: of the function.
        function: what to call to do it again.
        args, kwargs: arguments, with INPUT in the places of tensors.
        inputs: the tensors, in order.
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
    inputs: tuple[View | Held, ...]
    spec: TensorSpec
    in_place: bool
    autocast: tuple[str, torch.dtype] | None = None
    random_state: Tensor | None = None
    statistics: tuple[Held, Held] | None = None

    def named_input(self, name: str) -> View | Held | None:
        """The tensor that was given as the keyword argument ``name``; None where none was, or not by its name."""
        if self.kwargs.get(name) is not INPUT:
            return None
        before = sum(1 for arg in self.args if arg is INPUT)
        for key, arg in self.kwargs.items():
            if key == name:
                return self.inputs[before]
            before += arg is INPUT
        return None


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
    storage: torch.UntypedStorage,
    view: Callable[[Tensor, torch.UntypedStorage], View | Held | None],
    before: Tensor | None,
) -> Call | None:
    """The call that made ``result``, or None where it cannot be repeated from its arguments.

    Args:
        function, args, kwargs, result: what was called with what, and what it returned.
        storage: of the result.
        view: makes View or Held of a tensor argument of the call that filled ``storage``; None where a call that reads
            it cannot be repeated.
        before: what :func:`random_state` returned.
    """
    if result.storage_offset() != 0 or result.nbytes != storage.nbytes():
        return None
    name, in_place = CHEAP[function], function in _IN_PLACE
    if kwargs:
        if kwargs.get("inplace"):
            in_place, kwargs = True, {**kwargs, "inplace": False}
        if kwargs.get("out") is not None or kwargs.get("generator") is not None:
            return None
    aliases = 0
    for x in _tensors_in(args, kwargs):
        if type(x) not in PLAIN or x.layout is not torch.strided or is_odd(x):
            return None
        if x.untyped_storage() is storage:
            aliases += 1
            if not args or x is not args[0]:
                return None
    if aliases != in_place:
        return None  # a view, a conversion that had nothing to do, or a positional inplace=True
    statistics = None
    if name == "batch_norm":
        args, kwargs, statistics = _batch_norm(args, kwargs, result)
    inputs: list[View | Held] = []
    for x in _tensors_in(args, kwargs):
        given = view(x, storage)
        if given is None:
            return None
        inputs.append(given)
    spec = TensorSpec.of(result)
    device = spec.device.type
    autocast = (device, torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else None
    return Call(
        name,
        getattr(Tensor, name) if function in _IN_PLACE else function,
        tuple([_without_tensors(arg) for arg in args]),
        {key: _without_tensors(arg) for key, arg in kwargs.items()},
        tuple(inputs),
        spec,
        in_place,
        autocast,
        before,
        statistics,
    )


class _Input:
    """Stands in a call's arguments where a tensor was."""

    def __repr__(self) -> str:
        return "input"


INPUT = _Input()


def _tensors_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """All tensors among the arguments, and one level deep in lists, in order."""
    found: list[Tensor] = []
    for arg in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(arg, Tensor):
            found.append(arg)
        elif isinstance(arg, (list, tuple)):
            found += [item for item in arg if isinstance(item, Tensor)]
    return found


def _without_tensors(arg: Any) -> Any:
    if isinstance(arg, Tensor):
        return INPUT
    if isinstance(arg, (list, tuple)) and any(isinstance(item, Tensor) for item in arg):
        return [INPUT if isinstance(item, Tensor) else item for item in arg]
    return arg


def _with_tensors(arg: Any, tensors: Iterator[Tensor]) -> Any:
    """``arg`` with the next tensors in the places of inputs."""
    if arg is INPUT:
        return next(tensors)
    if isinstance(arg, list):
        return [next(tensors) if item is INPUT else item for item in arg]
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
    """A saved statistic: a small one is held as it is; one that is going to be stored is copied."""
    if isinstance(packed, tuple):
        return Held(packed[0], packed[1])
    dense: Tensor | None = getattr(packed, "dense", None)
    if dense is None:
        return None
    copy = dense.clone()
    return Held(copy, copy._version)


# -- repeating a call -------------------------------------------------------------------------------------------------

OVERWRITES: dict[str, Callable[..., Any]] = {
    "relu": lambda x, *args, **kwargs: torch.relu_(x),
    "relu6": lambda x, *args, **kwargs: F.hardtanh_(x, 0.0, 6.0),
    "hardtanh": lambda x, min_val=-1.0, max_val=1.0, *args, **kwargs: F.hardtanh_(x, min_val, max_val),
    "leaky_relu": lambda x, negative_slope=0.01, *args, **kwargs: F.leaky_relu_(x, negative_slope),
    "sigmoid": lambda x, *args, **kwargs: torch.sigmoid_(x),
    "tanh": lambda x, *args, **kwargs: torch.tanh_(x),
    "add": Tensor.add_,
    "mul": Tensor.mul_,
}
"""Functions that write over their first argument, for where that is a temporary of the recipe."""


def repeat(call: Call, function: Callable[..., Any], tensors: list[Tensor]) -> Tensor:
    """Runs a function with the arguments of a call, in whose tensors' places come others."""
    given = iter(tensors)

    args = [_with_tensors(arg, given) for arg in call.args]
    kwargs = {key: _with_tensors(arg, given) for key, arg in call.kwargs.items()}
    if call.autocast is None:
        device = call.spec.device.type
        cast = torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()
    else:
        cast = torch.autocast(call.autocast[0], call.autocast[1], cache_enabled=False)
    with cast, _Generator(call):
        made: Tensor = function(*args, **kwargs)
    return made


def norm_from_statistics(call: Call, tensors: list[Tensor]) -> Tensor:
    """Batch norm of an input that has errors, with the statistics that were saved of the exact input."""
    assert call.statistics is not None
    given = dict(zip((name for name, arg in call.kwargs.items() if arg is INPUT), tensors, strict=True))
    mean, invstd = (held.get() for held in call.statistics)
    eps = call.kwargs.get("eps", 1e-5)
    variance = (invstd.double().pow(-2) - eps).clamp_(min=0.0).to(invstd.dtype)
    return F.batch_norm(given["input"], mean, variance, given.get("weight"), given.get("bias"), eps=eps)


class _Generator:
    """Inside, the generator is in the state that it had at the call; afterwards it is in its present state again."""

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
