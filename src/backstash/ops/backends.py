"""The choice of a kernel's implementation on a device: ``reference``, ``native`` (C++ on CPU) or ``triton`` (CUDA).

There is one way to call a kernel: ``serving(device_type).name(...)``, which ``torch.ops.backstash.name(...)`` calls
too. Codecs call the ops, so that torch.compile can trace them. What runs once per saved tensor and in eager mode alone
(``redeem/``, ``stash/``) calls ``serving`` itself: that takes 0.1 us, torch's dispatcher takes 2 us.
"""

from __future__ import annotations

import importlib.util
import warnings
from functools import cache
from typing import Any

from torch import Tensor

from backstash.ops.cpu import library
from backstash.ops.table import TABLE, Kernel

FILES = {"reference": "reference", "native": "cpu", "triton": "triton"}
"""The modules of a family's package that have a backend's functions, by the backend's name."""


class Kernels:
    """The kernels of one backend: an attribute for every row of the table.

    Where the backend lacks a kernel, the attribute is the reference implementation. A kernel that enters the table
    later is looked up when it is asked for first.

    Attributes:
        backend: the name of the backend.
    """

    def __init__(self, backend: str) -> None:
        self.backend = backend
        for name in TABLE:
            getattr(self, name)

    def __getattr__(self, name: str) -> Any:
        if name not in TABLE:
            raise AttributeError(f"no kernel is called {name!r}")
        setattr(self, name, self.function(TABLE[name]))  # found at once from now on
        return vars(self)[name]

    def has(self, name: str) -> bool:
        """Returns whether the backend itself has the kernel of that name."""
        row = TABLE[name]
        return self.backend not in row.without or self._in_cuda(row) is not None

    def function(self, row: Kernel) -> Any:
        """Returns the function that serves as the kernel of that row."""
        if not self.has(row.name):
            return row.reference
        in_cuda = self._in_cuda(row)
        if in_cuda is not None:
            return getattr(in_cuda, row.name)
        return getattr(importlib.import_module(f"{row.package}.{FILES[self.backend]}"), row.name)

    def _in_cuda(self, row: Kernel) -> Any | None:
        """The module in CUDA C++ that has the kernel, where it was built and this GPU runs it; else None."""
        if self.backend != "triton" or importlib.util.find_spec(f"{row.package}.cuda") is None:
            return None
        module = importlib.import_module(f"{row.package}.cuda")
        return module if hasattr(module, row.name) and module.available() else None


@cache
def kernels(backend: str) -> Kernels:
    """Returns the kernels of the backend ``reference``, ``native`` or ``triton``, whatever the variables ask for."""
    return Kernels(backend)


@cache
def serving(device_type: str) -> Kernels:
    """Returns the kernels that serve tensors of ``device_type`` (``"cpu"``, ``"cuda"``, ...)."""
    if library.choice() == "reference":
        return kernels("reference")
    if device_type == "cpu":
        if library.available():
            return kernels("native")
        warnings.warn(
            "backstash: the native CPU kernels are not built (no C++ compiler at install time?), so the slow "
            "reference kernels serve. Install g++ and run 'pip install -e .' again; 'backstash doctor' tells more.",
            stacklevel=2,
        )
    elif device_type == "cuda":
        from backstash.ops import triton  # of which a process without such a device knows nothing

        if triton.available():
            return kernels("triton")
        warnings.warn(
            "backstash: Triton is not installed, so the slow reference kernels serve on CUDA. pip install triton.",
            stacklevel=2,
        )
    return _SERVED.get(device_type) or kernels("reference")


def serve(device_type: str, served: Kernels) -> None:
    """Lets ``served`` be the kernels for tensors of ``device_type``, which has none of its own here."""
    _SERVED[device_type] = served
    serving.cache_clear()


_SERVED: dict[str, Kernels] = {}


def name(device_type: str) -> str:
    """Returns the name of the backend that serves ``device_type``."""
    return serving(device_type).backend


def has_own_kernel(kernel: str, device_type: str) -> bool:
    """Whether the kernel is more than its reference on ``device_type``: what a row's ``fallback`` is decided by."""
    served = serving(device_type)
    return served.backend != "reference" and served.has(kernel)


def advise_huge(x: Tensor) -> None:
    """Asks the system for huge pages behind fresh CPU memory, so that its first touch costs fewer page faults."""
    library.advise_huge(x)
