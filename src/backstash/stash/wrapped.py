"""Tensor subclasses that wrap one plain tensor, such as DTensor: the plain tensor is encoded, the wrapper made again.

What autograd saves under tensor parallelism are DTensors. A DTensor has no memory of its own; it wraps the local tensor
of its rank, and says how the local tensors of all ranks are parts of one. So the local tensor is stored as any other
saved tensor is, and backward is given a new wrapper around what was decoded. That holds for every subclass that follows
torch's protocol for traceable wrappers (``__tensor_flatten__`` and ``__tensor_unflatten__``) and has exactly one inner
tensor, which is plain. Every other subclass is kept as it is.

Note: [versions of a wrapper]
    An in-place op on a wrapper raises the wrapper's version, and not that of its inner tensor, because the op on the
    inner tensor runs below autograd. So both versions are compared at unpack. What shares a wrapper's version is its
    detached alias. The alias is kept for that, with a stand-in without memory as its inner tensor. For the same reason
    the inner tensor of a wrapper that was changed is not made again by the calls that are known to have made it.

Note: [needs of a wrapper]
    The needs table says what a formula reads of the wrapper's elements. The inner tensor may be reduced to the same
    need only if its elements are elements of the wrapper. They are in a DTensor that is sharded or replicated, but the
    sign of a sum over ranks is not known from the sign of a summand, and of another subclass nothing is known. Those
    need their value. So does what is read by an operator that DTensor leaves to a function of its own: inside
    ``loss_parallel`` the backward of a loss is one with that of its softmax, and computes with logits of which aten's
    reads the sizes alone.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from backstash import codecs, formulas
from backstash.errors import SavedTensorModifiedError
from backstash.saved import PLAIN, Need, TensorSpec, is_odd, is_tensor
from backstash.torch_internals import has_own_handler, is_traceable_wrapper_subclass, without_gradients


def inner_tensor(x: Tensor) -> Tensor | None:
    """The plain tensor that ``x`` wraps, ``x`` itself where it is plain, None where it wraps none or several."""
    if type(x) in PLAIN:
        return x
    name = _inner_name(x)
    return None if name is None else _ready(getattr(x, name))


def memories(x: Any) -> list[Tensor] | None:
    """The tensors whose memory is that of ``x``, a tensor of any class or an object that torch functions take for one.

    Returns:
        None where that is not known: of an object that is no tensor, and of a subclass that runs operations itself and
        does not say what it wraps.
    """
    if type(x) in PLAIN:
        return [x]
    if not is_tensor(x):
        return None
    wrapper: Any = x
    if is_traceable_wrapper_subclass(x):
        names, _ = wrapper.__tensor_flatten__()
        found: list[Tensor] = []
        for inner in (memories(_ready(getattr(x, name))) for name in names):
            if inner is None:
                return None
            found += inner
        return found
    runs_operations = type(x).__torch_dispatch__ is not Tensor.__torch_dispatch__
    return None if runs_operations else [x]


class Wrapping:
    """Everything about a wrapper but its inner tensor.

    Args:
        x: the wrapper, of which :func:`inner_tensor` has found the inner tensor, ``inner``.
        inner: the inner tensor.
    """

    __slots__ = ("_context", "_dtype", "_guard", "_is_elementwise", "_name", "_others", "_type", "_version")

    def __init__(self, x: Tensor, inner: Tensor) -> None:
        name = _inner_name(x)
        assert name is not None
        guard: Any = x.detach()
        names, self._context = guard.__tensor_flatten__()
        self._others = {other: getattr(guard, other) for other in names if other != name}
        setattr(guard, name, codecs.shape.stand_in(TensorSpec.of(inner)))  # Note: [versions of a wrapper]
        self._guard, self._version, self._name = guard, x._version, name
        self._type: Any = type(x)
        self._dtype = inner.dtype
        self._is_elementwise = _is_elementwise(x)

    def reading(self, reading: formulas.Requirement, op: str, role: str) -> formulas.Requirement:
        """What backward reads of the inner tensor if it reads ``reading`` of the wrapper.

        Note: [needs of a wrapper] says why that may be more.

        Args:
            reading: of the wrapper.
            op: of the node that has saved it, as in the needs table.
            role: the node's name for it.
        """
        if not self._is_elementwise:
            return formulas.VALUE
        formula = formulas.FORMULAS.get((op, role))
        if formula is None or has_own_handler(operator for operator, _ in formula.operators):
            return formulas.VALUE
        return replace(reading, window=None) if reading.need is Need.INDEX else reading

    @property
    def was_changed(self) -> bool:
        """Whether an in-place op had changed the wrapper before autograd saved it."""
        return self._version != 0

    def check_version(self) -> None:
        """Compares the wrapper's version with the one that it had when autograd saved it.

        Raises:
            SavedTensorModifiedError: the wrapper was changed in place since.
        """
        if self._guard._version != self._version:
            raise SavedTensorModifiedError(
                f"one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"[{TensorSpec.of(self._guard)}], a {self._type.__name__}, is at version {self._guard._version}; "
                f"expected version {self._version} instead. Hint: do not change a tensor in place after an operation "
                f"has saved it, or change a clone of it."
            )

    def wrap(self, inner: Tensor) -> Tensor:
        """A wrapper like the original around ``inner``."""
        if inner.dtype is not self._dtype:  # a mask that was decoded to bool
            inner = inner.to(self._dtype)
        parts = {**self._others, self._name: inner}
        shape, stride = self._guard.shape, self._guard.stride()
        unflatten: Callable[..., Tensor] = self._type.__tensor_unflatten__
        return without_gradients(lambda: unflatten(parts, self._context, shape, stride))


def _inner_name(x: Any) -> str | None:
    """The attribute that holds the only tensor that ``x`` wraps; None where ``x`` does not fit."""
    is_wrapper: bool = is_traceable_wrapper_subclass(x)
    if not is_wrapper or x.layout is not torch.strided or is_odd(x) or x.storage_offset() != 0:
        return None
    names, _ = x.__tensor_flatten__()
    tensors = [name for name in names if isinstance(getattr(x, name), Tensor)]
    if len(tensors) != 1:
        return None
    inner = _ready(getattr(x, tensors[0]))
    return tensors[0] if type(inner) in PLAIN and inner.layout is torch.strided and not is_odd(inner) else None


def _ready(inner: Any) -> Any:
    """``inner``, or what a collective that runs in the background has written, once it has."""
    asynchronous = _class("torch.distributed._functional_collectives", "AsyncCollectiveTensor")
    return inner.trigger_wait() if asynchronous is not None and isinstance(inner, asynchronous) else inner


def _is_elementwise(x: Any) -> bool:
    """Whether each element of the inner tensor is an element of ``x``."""
    distributed = _class("torch.distributed.tensor", "DTensor")
    if distributed is None or not isinstance(x, distributed):
        return False
    return not any(placement.is_partial() for placement in x.placements)


def _class(module: str, name: str) -> Any:
    """A class of a module that nobody needs to import for us: where it is not imported there is no such tensor."""
    imported = sys.modules.get(module)
    return None if imported is None else getattr(imported, name, None)
