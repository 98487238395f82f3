"""Finds and loads ``libbackstash_native.so``. Every binding beside this file declares the C functions that it calls."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from ctypes import c_char_p, c_double, c_float, c_int, c_int64, c_uint32, c_uint64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

import torch  # noqa: F401  its libgomp must be loaded first, so that our kernels run on the same threads
from torch import Tensor

PATH = Path(__file__).with_name("libbackstash_native.so")
"""Where ``setup.py`` puts the library."""

ISAS = ("scalar", "avx2", "avx512")
"""Instruction sets by their codes (``native/isa.h``)."""

CHOICES = ("auto", "reference")
"""Values of ``BACKSTASH_KERNELS``."""

INTERFACE = 3
"""The number of the interface that the bindings beside this file expect (``native/isa.cpp``).

A library that was built before a signature has changed has every function, and would read arguments in wrong places;
and one may lack a function of which the interpreter of scripts asks the address.
"""

HUGE_FROM = 4 << 20
"""Bytes from which huge pages are asked for: below, the memory comes from a heap that has been touched already."""

TYPES: dict[str, Any] = {
    **{"i": c_int, "l": c_int64, "u": c_uint32, "w": c_uint64},
    **{"f": c_float, "d": c_double, "p": c_void_p, "s": c_char_p, "": None},
}
"""Types of C by the letters of a signature: ``"l(pi)"`` returns an int64, and takes a pointer and an int."""

_OWN = {
    "bs_interface": "i()",
    "bs_isa": "i()",
    "bs_set_isa": "i(i)",
    "bs_compiler": "s()",
    "bs_has_openmp": "i()",
    "bs_advise_huge": "i(pl)",
}


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
def load() -> ctypes.CDLL | None:
    """Returns the library, or None if it was not built or ``BACKSTASH_KERNELS=reference`` asks for other kernels.

    Raises:
        ValueError: ``BACKSTASH_ISA`` has an unknown value.
        OSError: the library is there but does not load, or was built from another version of the sources.
    """
    asked = os.environ.get("BACKSTASH_ISA")
    if asked is not None and asked not in ISAS:
        raise ValueError(
            f"BACKSTASH_ISA asked for {asked!r}, but the choices are {', '.join(ISAS)}. Unset it or set it to one of "
            f"these."
        )
    if os.environ.get("BACKSTASH_KERNELS") == "reference" or not PATH.exists():
        return None
    lib = ctypes.CDLL(str(PATH))
    _declare(lib, _OWN)
    if lib.bs_interface() != INTERFACE:
        raise OSError(
            f"asked {PATH} for interface {INTERFACE}, but it has {lib.bs_interface()}: it was built from another "
            f"version of backstash. Build it again: 'pip install' from the package's sources, or 'python setup.py "
            f"build_native' in a clone."
        )
    return lib


def _declare(lib: ctypes.CDLL, signatures: Mapping[str, str]) -> None:
    missing = [name for name in signatures if not hasattr(lib, name)]
    if missing:
        raise OSError(
            f"asked {PATH} for the function {missing[0]}, but it has none of that name ({len(missing)} of "
            f"{len(signatures)} are missing): it was built from another version of backstash. Build it again: "
            f"'pip install' from the package's sources, or 'python setup.py build_native' in a clone."
        )
    for name, signature in signatures.items():
        function, (result, arguments) = getattr(lib, name), signature.rstrip(")").split("(")
        function.restype, function.argtypes = TYPES[result], [TYPES[letter] for letter in arguments]


def functions(**signatures: str) -> ctypes.CDLL | None:
    """Declares C functions and returns the library, which has them as attributes, or None if it may not be used.

    Args:
        signatures: the functions' types, in the letters of TYPES.

    Raises:
        OSError: as :func:`load`.
    """
    lib = load()
    if lib is not None:
        _declare(lib, signatures)
    return lib


def address_of(name: str) -> int | None:
    """Where the function of that name begins, for compiled code that calls it itself; None where it is not there."""
    lib = load()
    function = getattr(lib, name, None)
    return None if function is None else ctypes.cast(function, c_void_p).value


def advise_huge(x: Tensor) -> None:
    """Asks the system for huge pages behind ``x``, which nobody has written yet: a page fault per 2 MiB, not 4 KiB.

    Does nothing below 4 MiB, off Linux, and where the system declines or the library is not there.
    """
    if x.nbytes >= HUGE_FROM:
        lib = load()
        if lib is not None:
            lib.bs_advise_huge(x.data_ptr(), x.nbytes)


def available() -> bool:
    """Whether the library was built at install time, and may be used."""
    return load() is not None


def _loaded() -> ctypes.CDLL:
    lib = load()
    if lib is None:
        raise RuntimeError(
            f"asked for the native kernels, but {PATH} was not built, or BACKSTASH_KERNELS=reference is set. Run "
            f"'python setup.py build_native', or unset the variable."
        )
    return lib


def isa() -> str:
    """Returns the instruction set that the kernels use: ``"avx512"``, ``"avx2"`` or ``"scalar"``."""
    return ISAS[_loaded().bs_isa()]


def set_isa(cap: str) -> str:
    """Caps the instruction set, for tests and not while a kernel runs. Returns the one that kernels use from now on."""
    return ISAS[_loaded().bs_set_isa(ISAS.index(cap))]


def build_info() -> dict[str, str | bool]:
    """Returns facts for ``backstash doctor``: path, compiler, OpenMP, instruction set."""
    lib = _loaded()
    return {
        "path": str(PATH),
        "compiler": lib.bs_compiler().decode(),
        "openmp": bool(lib.bs_has_openmp()),
        "isa": isa(),
    }
