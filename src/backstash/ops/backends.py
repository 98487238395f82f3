"""Which implementation serves an op on a device: ``reference``, ``native`` (C++ on CPU) or ``triton`` (CUDA)."""

from __future__ import annotations

import os
import warnings
from functools import cache
from types import ModuleType
from typing import Any

import torch

from backstash.ops import reference, schema

CHOICES = ("auto", "reference")


@cache
def choice() -> str:
    """The value of ``BACKSTASH_KERNELS``: ``auto`` (default) or ``reference``.

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
def implementation(device_type: str) -> ModuleType:
    """The module whose functions serve the ops on tensors of ``device_type`` (``"cpu"``, ``"cuda"``, ...)."""
    if choice() == "reference":
        return reference
    if device_type == "cpu":
        from backstash.ops import cpu

        if cpu.available():
            return cpu
        warnings.warn(
            "backstash: the native CPU kernels are not built (no C++ compiler at install time?), so the slow "
            "reference kernels serve. Install g++ and run 'pip install -e .' again; 'backstash doctor' tells more.",
            stacklevel=2,
        )
    elif device_type == "cuda":
        from backstash.ops import triton

        if triton.available():
            return triton
        warnings.warn(
            "backstash: Triton is not installed, so the slow reference kernels serve on CUDA. pip install triton.",
            stacklevel=2,
        )
    return reference


def name(device_type: str) -> str:
    """The name of the backend that serves ``device_type``."""
    return implementation(device_type).__name__.rsplit(".", 1)[-1].replace("cpu", "native")


def _dispatch(op: str, device_type: str) -> Any:
    def call(*args: Any) -> Any:
        for arg in args:
            if isinstance(arg, torch.Tensor):
                schema.check_flat(op, arg)
        return getattr(implementation(device_type), op)(*args)

    return call


for _op in schema.SCHEMAS:
    for _key, _device_type in (("CPU", "cpu"), ("CUDA", "cuda")):
        schema.LIBRARY.impl(_op, _dispatch(_op, _device_type), _key)


def advise_huge(x: torch.Tensor) -> None:
    """Ask for huge pages under fresh CPU memory: its first touch then costs a few faults instead of thousands."""
    native = implementation("cpu")
    if hasattr(native, "advise_huge"):
        native.advise_huge(x)


def look(x: torch.Tensor, runs: int, run: int, step: int) -> tuple[int, int]:
    """See :func:`backstash.ops.reference.look`; no op, because its result is for the host."""
    found: tuple[int, int] = getattr(implementation(x.device.type), "look", reference.look)(x, runs, run, step)
    return found
