"""The choice of a kernel's implementation on a device: ``reference``, ``native`` (C++ on CPU) or ``triton`` (CUDA).

There is one way to call a kernel: ``serving(device_type).name(...)``, which ``torch.ops.backstash.name(...)`` calls
too. Codecs call the ops, so that torch.compile can trace them. What runs once per saved tensor and in eager mode alone
(``backward/``, ``stash/``) calls ``serving`` itself: that takes 0.1 us, torch's dispatcher takes 2 us.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import warnings
from ctypes import ArgumentError
from functools import cache
from typing import Any

from torch import Tensor

from backstash.ops import reference, triton
from backstash.ops.cpu import library
from backstash.ops.table import LIBRARY, TABLE, Kernel

CHOICES = ("auto", "reference")
FOLDERS = {"reference": "reference", "native": "cpu", "triton": "triton"}
"""The folders of the backends, by their names."""

for _module in pkgutil.iter_modules(reference.__path__, f"{reference.__name__}."):
    importlib.import_module(_module.name)  # fills the table


class Kernels:
    """The kernels of one backend: an attribute for every row of the table.

    Where the backend lacks a kernel, the attribute is the reference implementation.

    Attributes:
        backend: the name of the backend.
        own: the names of the kernels that the backend itself has.
    """

    def __init__(self, backend: str) -> None:
        self.backend = backend
        self.own = {name for name, row in TABLE.items() if backend not in row.without}
        for name, row in TABLE.items():
            setattr(self, name, _function(row, backend) if name in self.own else row.reference)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"no kernel is called {name!r}")  # also tells type checkers that others are


def _function(row: Kernel, backend: str) -> Any:
    module = importlib.import_module(f"backstash.ops.{FOLDERS[backend]}.{row.family}")
    return getattr(module, row.name)


@cache
def kernels(backend: str) -> Kernels:
    """Returns the kernels of the backend ``reference``, ``native`` or ``triton``, whatever the variables ask for."""
    return Kernels(backend)


@cache
def choice() -> str:
    """Returns the value of ``BACKSTASH_KERNELS``: ``auto`` (default) or ``reference``.

    Raises:
        ValueError: the variable has another value.
    """
    asked = os.environ.get("BACKSTASH_KERNELS", "auto")
    if asked not in CHOICES:
        raise ValueError(
            f"BACKSTASH_KERNELS asked for {asked!r}, but the choices are {', '.join(CHOICES)}. "
            f"Unset it or set it to one of these."
        )
    return asked


@cache
def serving(device_type: str) -> Kernels:
    """Returns the kernels that serve tensors of ``device_type`` (``"cpu"``, ``"cuda"``, ...)."""
    if choice() == "reference":
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
    return served.backend != "reference" and kernel in served.own


def advise_huge(x: Tensor) -> None:
    """Asks the system for huge pages behind fresh CPU memory, so that its first touch costs fewer page faults."""
    library.advise_huge(x)


def _op(row: Kernel) -> Any:
    def call(*args: Any) -> Any:
        row.check(row.name, args)
        try:
            device_type = next(arg.device.type for arg in args if isinstance(arg, Tensor))
            return getattr(serving(device_type), row.name)(*args)
        except ArgumentError as error:  # by which ctypes replaces whatever is raised while it takes an argument
            for kind in (RecursionError, MemoryError):
                if kind.__name__ in str(error):
                    raise kind(str(error)) from error
            raise

    return call


for _row in TABLE.values():
    if _row.schema is not None:
        LIBRARY.impl(_row.name, _op(_row), "CompositeExplicitAutograd")  # for every kind of device
