"""The interpreter of scripts that was built against this torch, and small questions that it answers for others.

Note: [interpreter]
    A settled pass is run in C++ against torch's own classes (native/replay, and backstash/replay, which writes its
    scripts). So a library fits one torch and one Python, and another one is not loaded. Between the kernels of a step
    the interpreter of Python finds its caches cold, and takes a microsecond for a function of a few lines. So what an
    idle Session does, and what is asked of every saved tensor, is there as well. Everything works without
    the library, slower; ``backstash doctor`` says whether there is one. ``BACKSTASH_KERNELS=reference`` does without.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from backstash import saved, torch_internals
from backstash.ops.cpu import library


def _load() -> Any:
    try:
        if library.choice() != "auto":
            return None
        from backstash.interpreter import _replay  # type: ignore[attr-defined]
    except (ImportError, ValueError):  # it was not built, or for another torch or Python; or the choice is a wrong one
        return None
    return _replay if torch.__version__.partition("+")[0] == _replay.TORCH else None


module: Any = _load()
"""The library; None where there is none for this torch."""

is_traced: Callable[[], bool] = torch_internals.is_traced if module is None else module.is_traced
"""As :func:`backstash.torch_internals.is_traced`."""

is_odd: Callable[[Tensor], bool] = saved.is_odd if module is None else module.is_odd
"""As :func:`backstash.saved.is_odd`."""

owns_memory: Callable[[Tensor], bool] = saved.owns_memory if module is None else module.owns_memory
"""As :func:`backstash.saved.owns_memory`, without Python's object of the storage."""

Lock: Callable[[], Any] = threading.RLock if module is None else module.Lock
"""A lock that a thread may take again: a context manager."""

Holder: Any = None if module is None else module.Holder
"""The pack hook of an idle Session (Note: [held in C++] in stash/held.py)."""
