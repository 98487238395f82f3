"""The calls of functions by which the forward pass has made a value.

While the forward pass runs, every call of a function that can be repeated (repeatable.py) is noted: the function, its
arguments, and the *contents* of the storages that it read. A content is what a storage holds at one version; an
in-place op ends one content and begins another. From these notes recipes.py builds the tree of calls that makes a value
again.

Note: [other people's classes]
    A call is repeated below the classes of the program: nobody asks an argument's ``__torch_function__`` again, and
    what an object holds may be something else by then. So a call is noted only if each of its arguments is a plain
    tensor, a constant, or a list or tuple of these. Lists are copied, because the program may change them.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from backstash import repeatable
from backstash.errors import SavedTensorModifiedError
from backstash.interpreter import is_odd
from backstash.numerics import Settings, settings
from backstash.saved import PLAIN, TensorSpec
from backstash.stash import held
from backstash.stash.parameters import check_memory
from backstash.stash.value import Saved
from backstash.torch_internals import autocast_of

if TYPE_CHECKING:
    from backstash.remake.patterns import Pattern, Slot
    from backstash.stash.value import Value

Memory = Callable[[], Tensor]
"""Makes memory for a result."""


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


# The following are never changed after they were made, but for a version that becomes CHANGED. They are not frozen,
# because one or several of them are made for each torch function, and a frozen dataclass takes up to six times as long.


@dataclass(slots=True, unsafe_hash=True)
class View:
    """A tensor argument: how it looks at a content."""

    content: Content
    spec: TensorSpec
    offset: int


CHANGED = -1
"""The version of what was changed since, whatever the tensor's own version says; no tensor has it."""


@dataclass(slots=True, weakref_slot=True)
class Held:
    """A tensor argument that is held as it is: a parameter, or something small.

    Attributes:
        tensor: the tensor, or a copy of it.
        version: its version when it was read, or CHANGED.
        is_reference: whether it is the program's own memory, and no copy.
    """

    tensor: Tensor
    version: int
    is_reference: bool = False

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


@dataclass(slots=True, unsafe_hash=True)
class Leaf:
    """Where a recipe begins: a stored value, seen through a view."""

    value: Value
    spec: TensorSpec
    offset: int


class Group:
    """The values that one call of a function has saved inside, and its result: all are made by calling it once more.

    Attributes:
        values: those that are to be remade.
        made: what the call has made for them when it was repeated for one of them, by ``Call.saved``.
        proven: for which of the tensors saved inside the call has made the same bits; None before it was tried.
    """

    __slots__ = ("made", "proven", "values")

    def __init__(self) -> None:
        self.values: list[weakref.ref[Value]] = []
        self.proven: frozenset[int] | None = None
        self.made: dict[int, Tensor] = {}

    def wanted(self) -> dict[int, Value]:
        """The values that have yet to be made, by ``Call.saved``; a result is not among them."""
        found = {}
        for reference in self.values:
            value = reference()
            if (
                value is not None
                and value.state.recipe is not None
                and value.state.made is None
                and not value.reads.round
            ):
                number = value.state.recipe.call.saved
                if number is not None:
                    found[number] = value
        return found


class CallPlace:
    """Where in a model a function is called (Note: [calls that count] in noting.py).

    Attributes:
        is_used: whether a recipe has repeated the call in any pass.
        pattern: what the latest call was like (Note: [patterns of calls]); None where that is not known.
        proven: the same of one that was proven to repeat, where any call may be repeated.
        passes: in how many passes it was noted.
        latest: the number of the latest of these.
        casts: of a conversion inside of a function, which argument was compared and both dtypes, and whether the bits
            of its conversion were those that were saved.
        name: of the place, the same in every process.
    """

    __slots__ = ("casts", "is_used", "latest", "name", "passes", "pattern", "proven")

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_used, self.passes, self.latest = False, 0, -1
        self.pattern: Pattern | None = None
        self.proven: Pattern | None = None
        self.casts: dict[object, bool] | None = None


@dataclass(slots=True, unsafe_hash=True)
class Call:
    """One call of a function that filled a whole storage.

    Attributes:
        name: of the function.
        function: what to call to do it again.
        args, kwargs: arguments, with INPUT in the places of tensors.
        inputs: the tensors, in order.
        spec: of the result, which fills its storage.
        in_place: whether the first argument's memory became the result's.
        autocast: device type, dtype and cache setting where autocast was on.
        settings: of the process, under which it ran (Note: [settings] in numerics.py).
        random_state: of the device's generator before the call, where the function draws from it.
        statistics: a norm's saved means and inverse standard deviations: of a batch norm [C] each.
        output: which of several results it is; None where the function returns a single tensor.
        group: what the same call has saved inside of the function; None where nothing was saved there.
        saved: which of the tensors that were saved inside it is, by their order; None for a result.
        needs_grad: for each input whether autograd followed it (Note: [as called] in repeating.py); empty where
            it followed none, for calls in place, and for cheap functions that have saved nothing inside.
        is_cheap: whether any recomputing policy may repeat it (repeatable.py).
        is_proven: whether it was repeated on the spot and has made the same bits.
        place: where in the model it is; None where all calls are noted.
        pattern: what it is like; None where that is not known.
    """

    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: tuple[View | Held, ...]
    spec: TensorSpec
    in_place: bool
    settings: Settings
    autocast: tuple[str, torch.dtype] | None = None
    random_state: Tensor | None = None
    statistics: tuple[Held, Held] | None = None
    output: int | None = None
    group: Group | None = None
    saved: int | None = None
    needs_grad: tuple[bool, ...] = ()
    is_cheap: bool = True
    is_proven: bool = False
    place: CallPlace | None = None
    pattern: Pattern | None = None

    def without_inputs(self) -> Call:
        """The same call without what it reads and where it is, for calls that are like it."""
        return replace(self, inputs=(), statistics=None, place=None)

    def again(
        self,
        inputs: tuple[View | Held, ...],
        statistics: tuple[Held, Held] | None,
        place: CallPlace,
        pattern: Pattern | None,
    ) -> Call:
        """A call that is like this one, and reads these."""
        return Call(
            self.name,
            self.function,
            self.args,
            self.kwargs,
            inputs,
            self.spec,
            self.in_place,
            self.settings,
            self.autocast,
            statistics=statistics,
            output=self.output,
            is_cheap=self.is_cheap,
            place=place,
            pattern=pattern,
            is_proven=self.is_proven,
            needs_grad=self.needs_grad,
        )

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


def call_of(
    function: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    result: Tensor,
    storage: torch.UntypedStorage,
    view: Callable[[Tensor, torch.UntypedStorage, Slot | None], View | Held | None],
    before: Tensor | None,
    output: int | None = None,
) -> tuple[Call, list[Tensor]] | None:
    """The call that made ``result`` and the tensors that it has read; None where its arguments do not tell the result.

    Args:
        function, args, kwargs, result: what was called with what, and what it returned.
        storage: of the result.
        view: makes View or Held of a tensor argument of the call that filled ``storage``; None where a call that reads
            it cannot be repeated.
        before: what :func:`backstash.repeatable.random_state` returned.
        output: which of the function's results ``result`` is; None where it returns a single tensor.
    """
    if result.storage_offset() != 0 or result.nbytes != storage.nbytes():
        return None
    if not all(map(_can_be_repeated, (*args, *kwargs.values()))):
        return None  # Note: [other people's classes]
    name, in_place = repeatable.function_name(function), function in repeatable.IN_PLACE
    if kwargs:
        if kwargs.get("inplace"):
            in_place, kwargs = True, {**kwargs, "inplace": False}
        if kwargs.get("out") is not None or kwargs.get("generator") is not None:
            return None
    aliases, tensors = 0, tensors_in(args, kwargs)
    for x in tensors:
        if x.layout is not torch.strided or is_odd(x):
            return None
        if x.untyped_storage() is storage:
            aliases += 1
            if not args or x is not args[0]:
                return None
    if before is None and repeatable.draws(function, args, kwargs):
        return None
    if aliases != in_place:
        return None  # a view, a conversion that had nothing to do, or a positional inplace=True
    statistics = None
    if name == "batch_norm":
        args, kwargs = _batch_norm(args, kwargs)
        statistics = statistics_of(kwargs, result)
        tensors = tensors_in(args, kwargs)
    elif name in ROW_NORMS:
        statistics = row_statistics_of(result)
    inputs: list[View | Held] = []
    for x in tensors:
        given = view(x, storage, None)
        if given is None:
            return None
        inputs.append(given)
    spec = TensorSpec.of(result)
    device = spec.device.type
    call = Call(
        name,
        getattr(Tensor, name) if function in repeatable.IN_PLACE else function,
        tuple([_without_tensors(arg) for arg in args]),
        {key: _without_tensors(arg) for key, arg in kwargs.items()},
        tuple(inputs),
        spec,
        in_place,
        settings(device),
        autocast_of(device),
        before,
        statistics,
        output,
        is_cheap=function in repeatable.CHEAP,
    )
    return call, tensors


_CONSTANTS = frozenset(
    {
        type(None),
        type(...),
        bool,
        int,
        float,
        complex,
        str,
        torch.dtype,
        torch.layout,
        torch.device,
        torch.memory_format,
        torch.Size,
    }
)
"""Types of arguments that never change."""


def _can_be_repeated(arg: Any, depth: int = 0) -> bool:
    """Whether an argument is the same when its call is repeated (Note: [other people's classes])."""
    kind = type(arg)
    if kind in _CONSTANTS:
        return True
    if kind in PLAIN:
        return depth < 2  # as deep as tensors_in looks
    if kind is list or kind is tuple:
        return all(_can_be_repeated(item, depth + 1) for item in arg)
    if kind is slice:
        return all(type(bound) in _CONSTANTS for bound in (arg.start, arg.stop, arg.step))
    if kind is type:
        return arg in (bool, int, float, complex)
    return kind.__module__ == "numpy" and isinstance(arg, sys.modules["numpy"].generic)


class _Input:
    """Stands in a call's arguments where a tensor was."""

    def __repr__(self) -> str:
        return "input"


INPUT = _Input()


def tensors_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """All plain tensors among the arguments, and one level deep in lists, in order."""
    found: list[Tensor] = []
    for arg in (*args, *kwargs.values()) if kwargs else args:
        if type(arg) in PLAIN:
            found.append(arg)
        elif type(arg) in (list, tuple):
            found += [item for item in arg if type(item) in PLAIN]
    return found


def _without_tensors(arg: Any) -> Any:
    if type(arg) in PLAIN:
        return INPUT
    return type(arg)([_without_tensors(item) for item in arg]) if type(arg) in (list, tuple) else arg


def _batch_norm(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Batch norm's arguments by their names, without the running statistics that training updates."""
    names = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
    given = dict(zip(names, args, strict=False)) | kwargs
    given = {name: given[name] for name in names if name in given}
    if given.get("training"):
        given["running_mean"] = given["running_var"] = None
    return (), given


def statistics_of(kwargs: Mapping[str, Any], result: Tensor) -> tuple[Held, Held] | None:
    """The mean and the inverse standard deviation that a batch norm in training has saved of its input."""
    if not kwargs.get("training"):
        return None
    node = result.grad_fn
    if type(node).__name__ not in ("NativeBatchNormBackward0", "CudnnBatchNormBackward0"):
        return None
    mean, scale = (_statistic(getattr(node, f"_raw_saved_{role}").data) for role in ("result1", "result2"))
    return None if mean is None or scale is None else (mean, scale)


ROW_NORMS = frozenset({"layer_norm", "group_norm"})
"""Norms whose statistics are one pair for each row or group."""


def row_statistics_of(result: Tensor) -> tuple[Held, Held] | None:
    """The means and the inverse standard deviations that a norm of :data:`ROW_NORMS` has saved, if they are float32.

    Of 16-bit inputs and weights a CPU saves statistics of 16 bits, which are not those that it has used.
    """
    node = result.grad_fn
    if type(node).__name__ not in ("NativeLayerNormBackward0", "NativeGroupNormBackward0"):
        return None
    mean, scale = (_statistic(getattr(node, f"_raw_saved_{role}").data) for role in ("result1", "result2"))
    if mean is None or scale is None or scale.tensor.dtype is not torch.float32:
        return None
    return mean, scale


def _statistic(packed: Any) -> Held | None:
    """A saved statistic, held as it is: it is a vector that nobody but autograd knows of.

    None for what hooks of the program have packed.
    """
    if held.is_as_it_is(packed):
        return Held(packed[0], packed[1])
    dense = packed.dense if type(packed) is Saved else None
    # An alias is a use of the memory, so what is pending is not encoded beside it.
    return None if dense is None else Held(dense.detach(), dense._version)
