"""The compiled functions, where there are any: what is called for every saved tensor, without the interpreter.

Note: [compiled functions]
    Between the kernels of a step the interpreter's caches are cold, so a function of a few lines takes a microsecond
    there, although it takes a fifth of that when it is called again and again. The functions that a step calls most
    often have a compiled twin (native/python, in the limited API of Python). What is written in Python is the
    reference: a compiled function does the common case, and calls the reference for every other one.
    ``BACKSTASH_KERNELS=reference`` takes the references.
"""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from backstash import numerics, saved, torch_internals
from backstash.ops import backends
from backstash.ops.cpu import library
from backstash.saved import Need, TensorSpec
from backstash.torch_internals import (
    count_dispatch_modes,
    count_function_modes,
    functorch_level,
    has_replacing_mode,
    has_tracing_mode,
    is_jit_tracing,
    no_torch_function,
    running_node,
    set_grad_mode,
    storage_use_count,
)


def _offsets(kind: type) -> dict[str, int]:
    """Where the slots of a class lie in its objects.

    Note: [slots]
        To find an attribute by its name takes longer than to read it, and of a saved tensor many are read. CPython puts
        the slots of a class in the same places in every object. Which these are is seen in an object of a class with
        the same slots and without a finalizer.

    Raises:
        ValueError: they do not lie there as references, or the class has more than its slots.
    """
    slots: tuple[str, ...] = vars(kind)["__slots__"]
    alike: Any = type(kind.__name__, (), {"__slots__": slots})
    if alike.__basicsize__ != kind.__basicsize__:
        raise ValueError(f"{kind.__name__} has more than its slots, so it is not known where these lie")
    probe, markers = alike(), {name: object() for name in slots if name != "__weakref__"}
    for name, marker in markers.items():
        setattr(probe, name, marker)
    size = ctypes.sizeof(ctypes.c_void_p)
    words = list((ctypes.c_void_p * (kind.__basicsize__ // size)).from_address(id(probe)))
    return {name: size * words.index(id(marker)) for name, marker in markers.items()}


def _replay() -> Any:
    """What was built against this torch, and reads its objects for the compiled functions; None where nothing was.

    Note: [torch's own objects]
        The compiled functions know torch by the attributes of its tensors, and so fit every torch. To ask an attribute
        takes some hundred instructions, and of each saved tensor dozens are asked. So where torch's headers are there
        when backstash is installed, a module is built that reads its objects where they lie (native/replay). It fits
        that one torch: with any other it is not used, and everything works as without it.
    """
    try:
        if backends.choice() != "auto":
            return None
        from backstash.stash import _replay  # type: ignore[attr-defined]
    except (ImportError, ValueError):  # it was not built, or for another torch or Python
        return None
    return _replay if torch.__version__.partition("+")[0] == _replay.TORCH else None


replay: Any = _replay()
"""What was built against this torch; None where it was not."""


def _functions() -> Any:
    """The compiled functions; None where there are none, or where the references were asked for."""
    try:
        if backends.choice() != "auto":
            return None
        from backstash.stash import _held  # type: ignore[attr-defined]

        _held.configure(
            tensor_type=Tensor,
            parameter_type=torch.nn.Parameter,
            storage_type=torch.UntypedStorage,
            strided=torch.strided,
            no_function=no_torch_function,
            count_modes=count_function_modes,
            running_node=running_node,
            functorch_level=functorch_level,
            is_jit_tracing=is_jit_tracing,
            count_dispatch_modes=count_dispatch_modes,
            has_tracing_mode=has_tracing_mode,
            has_replacing_mode=has_replacing_mode,
            is_grad_enabled=torch.is_grad_enabled,
            storage_use_count=storage_use_count,
            getrefcount=sys.getrefcount,
            settings_readers=numerics.READERS,
            set_grad_mode=set_grad_mode,
            perf_counter=time.perf_counter,
            empty=torch.empty,
            empty_strided=torch.empty_strided,
            get_num_threads=torch.get_num_threads,
            float32=torch.float32,
            need_shape=Need.SHAPE,
            need_sign=Need.SIGN,
            need_index=Need.INDEX,
            need_value=Need.VALUE,
        )
        _held.bind(library.address_of)
        if replay is not None:
            _held.configure(access=replay.table)
        _offsets(TensorSpec)
    except (ImportError, OSError, ValueError, TypeError):
        # Not compiled, a Python without the limited API or with slots elsewhere, a bad choice, or an older library, of
        # kernels too: the first one that is called says so.
        return None
    return _held


functions: Any = _functions()
"""The compiled functions; None where the references do everything."""

if functions is not None:
    numerics.agree_by(functions.agree)


_Kind = TypeVar("_Kind", bound=type)


def laid_out(kind: _Kind) -> _Kind:
    """A class of slots alone, of which the compiled functions are told where these lie in its objects."""
    if functions is not None:
        functions.lay_out(kind, _offsets(kind))
    return kind


laid_out(TensorSpec)


def pack_hook(forward: Any, reference: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    """The pack hook of a Session that looks at what is saved: as the reference, compiled where that is there."""
    return reference if functions is None else partial(functions.pack, forward)


def _looks_like(x: Tensor, spec: TensorSpec) -> bool:
    """Whether a tensor has that spec."""
    return x.dtype is spec.dtype and x.shape == spec.shape and x.stride() == spec.stride and x.device == spec.device


looks_like: Callable[[Tensor, TensorSpec], bool] = _looks_like if functions is None else functions.looks_like
"""Whether a tensor has that spec."""

is_traced: Callable[[], bool] = torch_internals.is_traced if functions is None else functions.is_traced
"""As :func:`backstash.torch_internals.is_traced`."""

is_odd: Callable[[Tensor], bool] = saved.is_odd if functions is None else functions.is_odd
"""As :func:`backstash.saved.is_odd`."""
