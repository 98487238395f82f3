"""The compiled functions, where there are any: what is called for every saved tensor, without the interpreter.

Note: [compiled functions]
    Between the kernels of a step the interpreter's caches are cold, so a function of a few lines takes a microsecond
    there, although it takes a fifth of that when it is called again and again. The functions that a step calls most
    often have a compiled twin (native/python, in the limited API of Python). What is written in Python is the reference:
    a compiled function does the common case, and calls the reference for every other one. ``BACKSTASH_KERNELS=reference``
    takes the references.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from backstash.ops import backends
from backstash.torch_internals import count_function_modes, functorch_level, no_torch_function, running_node


def _functions() -> Any:
    """The compiled functions; None where there are none, or where the references were asked for."""
    try:
        if backends.choice() != "auto":
            return None
        from backstash.stash import _held  # type: ignore[attr-defined]
    except (ImportError, ValueError):  # not compiled, a Python without the limited API, or the first kernel will say it
        return None
    _held.configure(
        tensor_type=Tensor,
        parameter_type=torch.nn.Parameter,
        strided=torch.strided,
        no_function=no_torch_function,
        count_modes=count_function_modes,
        running_node=running_node,
        functorch_level=functorch_level,
        is_grad_enabled=torch.is_grad_enabled,
    )
    return _held


functions: Any = _functions()
"""The compiled functions; None where the references do everything."""
