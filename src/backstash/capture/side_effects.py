"""The effect of a torch function on its arguments' memory: none, a change, or an alias that may change it unseen."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from backstash.saved import is_tensor
from backstash.torch_internals import operator, operator_packet, overloads_of, writes_unseen


class SideEffect(Enum):
    """What happens to the memory of a function's tensor arguments."""

    NONE = 0
    """Nothing."""
    CHANGES = 1
    """One of them, or of what they list, is changed in place."""
    CHANGES_SELF = 3
    """The first one is changed in place, and no other."""
    CHANGES_STATISTICS = 2
    """Others than the first one are changed without a new version: running statistics of norms and observers."""
    ESCAPES = 4
    """Somebody may change it from now on without a new version of the tensor: the function itself, or an alias."""


_ESCAPES: frozenset[Any] = frozenset(
    {
        Tensor.data.__get__,  # type: ignore[attr-defined]
        Tensor.data.__set__,  # type: ignore[attr-defined]
        Tensor.numpy,
        Tensor.__array__,
        Tensor.data_ptr,
        Tensor.untyped_storage,
        Tensor.storage,
        Tensor.__dlpack__,
        Tensor.share_memory_,
        Tensor.apply_,
        Tensor.map_,
        Tensor.map2_,
        Tensor.resize_,
        Tensor.set_,
    }
)
_ESCAPES_BY_NAME = frozenset({"_typed_storage", "to_dlpack", "__cuda_array_interface__", "mutable_data_ptr"})
_NORMS = frozenset({F.batch_norm, F.instance_norm})
_NORMS_BY_NAME = frozenset(
    {
        *("batch_norm", "instance_norm", "native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm"),
        *("_batch_norm_impl_index", "batch_norm_update_stats"),
        *("batch_norm_gather_stats", "batch_norm_gather_stats_with_counts"),
    }
)
"""Functions that update running statistics, of which their schemas say nothing."""
_USES_BATCH = 5
"""The number of the argument that tells whether a norm does."""
_HARMLESS = frozenset({"requires_grad_", "retain_grad", "record_stream"})
"""Functions that change a tensor, as their schemas say, but not its memory."""

_side_effects: dict[Any, SideEffect] = {}
_inplace_at: dict[Any, int] = {}
"""For functions with a parameter ``inplace``, its position."""


def side_effect_of(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> SideEffect:
    """What a call does to its arguments' memory."""
    try:
        known = _side_effects.get(function)
    except TypeError:  # it cannot be hashed, and so is none of torch's
        return SideEffect.NONE
    if known is None:
        known = _find_side_effect(function)
        if len(_side_effects) < 4096:
            _side_effects[function] = known
    if known is SideEffect.NONE:
        if kwargs and (kwargs.get("out") is not None or _is_set(kwargs.get("inplace"))):
            return SideEffect.CHANGES
        position = _inplace_at.get(function)
        if position is not None and len(args) > position and _is_set(args[position]):
            return SideEffect.CHANGES
    return known


def _is_set(flag: object) -> bool:
    """Whether a function may take an argument for True: an object of the program is not asked whether it is."""
    return flag is not None and flag is not False


def inplace_position(function: Callable[..., Any]) -> int | None:
    """Where a function, of which the effect was asked before, has a parameter ``inplace``; None where it has none."""
    return _inplace_at.get(function)


def _find_side_effect(function: Callable[..., Any]) -> SideEffect:
    if function in _ESCAPES:
        return SideEffect.ESCAPES
    overloads = overloads_of(function)
    if any(overload.namespace not in ("aten", "prims", "backstash") for overload in overloads):
        return SideEffect.ESCAPES
    name = overloads[0]._schema.name.partition("::")[2] if overloads else getattr(function, "__name__", "")
    if name in _HARMLESS:
        return SideEffect.NONE
    if function in _NORMS or (overloads and name in _NORMS_BY_NAME):
        return SideEffect.CHANGES_STATISTICS
    if any(writes_unseen(overload) for overload in overloads):
        return SideEffect.ESCAPES if name.endswith("_") else SideEffect.CHANGES_STATISTICS
    if isinstance(function, (operator, operator_packet)):
        return SideEffect.CHANGES if any(overload._schema.is_mutable for overload in overloads) else SideEffect.NONE
    if name in _ESCAPES_BY_NAME:
        return SideEffect.ESCAPES
    is_dunder = name.startswith("__") and name.endswith("__")
    in_place_operator = is_dunder and name.startswith("__i") and name not in ("__int__", "__index__", "__invert__")
    if name == "__setitem__" or in_place_operator or (name.endswith("_") and not is_dunder):
        return SideEffect.CHANGES_SELF if getattr(Tensor, name, None) is function else SideEffect.CHANGES
    if getattr(function, "__module__", "") == "torch.nn.functional":
        parameters = list(inspect.signature(function).parameters)
        if "inplace" in parameters:
            _inplace_at[function] = parameters.index("inplace")
    return SideEffect.NONE


def affected(effect: SideEffect, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Any]:
    """The tensors among the arguments that a side effect may concern, and objects of other classes that stand for some.

    Looks one level deep into lists.
    """
    if effect is SideEffect.CHANGES_SELF and args:
        yield args[0]
        return
    if effect is SideEffect.CHANGES_STATISTICS:
        yield from _statistics(args, kwargs)
        return
    for arg in (*args, *kwargs.values()):
        if hasattr(type(arg), "__torch_function__"):
            yield arg
        elif isinstance(arg, (list, tuple)):
            yield from (item for item in arg if hasattr(type(item), "__torch_function__"))


def _statistics(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Any]:
    """The running statistics that a function updates: what stands beside its input and is no weight."""
    uses_batch = args[_USES_BATCH] if len(args) > _USES_BATCH else kwargs.get("training", kwargs.get("use_input_stats"))
    if uses_batch is False:
        return
    for arg in (*args[1:], *(given for name, given in kwargs.items() if name not in ("input", "self"))):
        if not hasattr(type(arg), "__torch_function__"):
            continue
        if not (is_tensor(arg) and (arg.requires_grad or isinstance(arg, nn.Parameter))):
            yield arg
