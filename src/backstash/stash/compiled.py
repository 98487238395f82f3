"""The compiled functions, where there are any: what is called for every saved tensor, without the interpreter.

Note: [compiled functions]
    Between the kernels of a step the interpreter's caches are cold, so a function of a few lines takes a microsecond
    there, although it takes a fifth of that when it is called again and again. The functions that a step calls most
    often have a compiled twin (native/python, in the limited API of Python). What is written in Python is the
    reference: a compiled function does the common case, and calls the reference for every other one.
    ``BACKSTASH_KERNELS=reference`` takes the references.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from backstash import saved
from backstash.ops import backends
from backstash.saved import TensorSpec
from backstash.torch_internals import (
    count_dispatch_modes,
    count_function_modes,
    functorch_level,
    has_replacing_mode,
    has_tracing_mode,
    is_jit_tracing,
    no_torch_function,
    running_node,
    storage_use_count,
)


def _functions() -> Any:
    """The compiled functions; None where there are none, or where the references were asked for."""
    try:
        if backends.choice() != "auto":
            return None
        from backstash.stash import _held  # type: ignore[attr-defined]

        _held.configure(
            tensor_type=Tensor,
            parameter_type=torch.nn.Parameter,
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
        )
    except (ImportError, ValueError, TypeError):
        return None  # not compiled, a Python without the limited API, a bad choice, or a library of an older version
    return _held


functions: Any = _functions()
"""The compiled functions; None where the references do everything."""


def pack_hook(forward: Any, reference: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    """The pack hook of a Session that looks at what is saved: as the reference, compiled where that is there."""
    return reference if functions is None else partial(functions.pack, forward)


def _looks_like(x: Tensor, spec: TensorSpec) -> bool:
    """Whether a tensor has that spec."""
    return x.dtype is spec.dtype and x.shape == spec.shape and x.stride() == spec.stride and x.device == spec.device


looks_like: Callable[[Tensor, TensorSpec], bool] = _looks_like if functions is None else functions.looks_like
"""Whether a tensor has that spec."""

is_odd: Callable[[Tensor], bool] = saved.is_odd if functions is None else functions.is_odd
"""As :func:`backstash.saved.is_odd`."""
