"""Finds and loads ``libbackstash_native.so``, and declares its C interface."""

from __future__ import annotations

import ctypes
import os
from ctypes import c_char_p, c_double, c_float, c_int, c_int64, c_uint32, c_uint64, c_void_p
from functools import cache
from pathlib import Path

import torch  # noqa: F401  its libgomp must be loaded first, so that our kernels run on the same threads

PATH = Path(__file__).with_name("libbackstash_native.so")
"""Where ``setup.py`` puts the library."""

ISAS = ("scalar", "avx2", "avx512")
"""Instruction sets by their codes (``native/isa.h``)."""

_SIZED = [c_void_p, c_int64]

# The C interface: result, arguments.
_SIGNATURES = {
    "bs_isa": (c_int, []),
    "bs_set_isa": (c_int, [c_int]),
    "bs_compiler": (c_char_p, []),
    "bs_has_openmp": (c_int, []),
    "bs_advise_huge": (c_int, [c_void_p, c_int64]),
    "bs_look": (None, [c_void_p, c_int, c_int64, c_int64, c_int64, c_void_p, c_void_p]),
    "bs_affine": (None, [c_void_p] * 7 + [c_int64] * 3 + [c_int, c_void_p, c_int]),
    "bs_batch_norm_channels": (c_int64, [c_void_p] * 5 + [c_int64] * 3 + [c_void_p] * 3 + [c_int]),
    "bs_batch_norm_pixels": (None, [c_void_p] * 7 + [c_int64] * 2 + [c_void_p, c_int]),
    "bs_bitmask_encode": (None, [c_void_p, c_int64, c_int, c_int, c_double, c_double, c_void_p, c_int]),
    "bs_binary_encode": (c_int64, [c_void_p, c_int64, c_int, c_uint64, c_uint64, c_void_p, c_int]),
    "bs_mask_decode": (None, [c_void_p, c_void_p, c_int64, c_int, c_uint64, c_uint64, c_int]),
    "bs_mask_select": (None, [c_void_p, c_void_p, c_int64, c_int, c_void_p, c_int]),
    "bs_zvc_mark": (c_int64, [c_void_p, c_int64, c_int, c_void_p, c_void_p, c_int]),
    "bs_zvc_gather": (None, [c_void_p, c_int64, c_int, c_void_p, c_void_p, c_void_p, c_int64, c_int]),
    "bs_zvc_decode": (c_int, [c_void_p, c_void_p, c_void_p, c_int64, c_void_p, c_int64, c_int, c_int]),
    "bs_rle_count": (c_int64, [c_void_p, c_int64, c_void_p, c_int]),
    "bs_rle_write": (None, [c_void_p, c_int64, c_void_p, c_void_p, c_int]),
    "bs_rle_mask": (c_int, [c_void_p, c_int64, c_void_p, c_int64, c_void_p, c_int]),
    "bs_csr_count": (c_int64, [c_void_p, c_int64, c_int, c_void_p, c_int]),
    "bs_csr_gather": (None, [c_void_p, c_int64, c_int, c_void_p, c_void_p, c_void_p, c_int64, c_int]),
    "bs_csr_decode": (c_int, [c_void_p, c_void_p, c_void_p, c_int64, c_void_p, c_int64, c_int, c_int]),
    "bs_fewbit_encode": (c_int64, [c_void_p, c_int64, c_int, c_int, c_int, c_void_p, c_void_p, c_int]),
    "bs_fewbit_decode": (None, [c_void_p, c_int, c_void_p, c_void_p, c_int64, c_int, c_int]),
    "bs_scale_by_codes": (None, [c_void_p, c_void_p, c_int, c_void_p, c_void_p, c_int64, c_int, c_int]),
    "bs_minifloat_encode": (None, [c_void_p, c_int64, c_int, c_int, c_int, c_void_p, c_int]),
    "bs_minifloat_decode": (None, [c_void_p, c_int, c_void_p, c_int64, c_int, c_int]),
    "bs_minifloat_scaled_encode": (None, [c_void_p, c_int64, c_int, c_int, c_int64, c_void_p, c_void_p, c_int]),
    "bs_minifloat_scaled_decode": (None, [c_void_p, c_void_p, c_int, c_int64, c_void_p, c_int64, c_int, c_int]),
    "bs_zvc_minifloat_encode": (
        c_int64,
        [c_void_p, c_int64, c_int, c_int, c_void_p, c_void_p, c_void_p, c_int64, c_void_p, c_int],
    ),
    "bs_zvc_minifloat_place": (None, [c_void_p, c_int64, c_int, c_int, *[c_void_p] * 5, c_int64, c_int]),
    "bs_zvc_minifloat_decode": (
        c_int,
        [c_void_p, c_void_p, c_void_p, c_int64, c_int, c_void_p, c_int64, c_int, c_int],
    ),
    "bs_szp_range": (None, [c_void_p, c_int64, c_int, c_void_p, c_void_p, c_int]),
    "bs_szp_measure": (c_int64, [c_void_p, c_int64, c_int, c_void_p, c_void_p, c_void_p, c_int]),
    "bs_szp_write": (None, [c_void_p, c_int64, c_int, *[c_void_p] * 4, c_int64, c_int]),
    "bs_szp_decode": (c_int, [*[c_void_p] * 3, c_int64, c_float, c_void_p, c_int64, c_int, c_int]),
    "bs_blockquant_encode": (
        c_int64,
        [c_void_p, c_int64, c_int, c_int, c_int64, c_int, c_uint32, c_void_p, c_void_p, c_int],
    ),
    "bs_blockquant_decode": (None, [c_void_p, c_void_p, c_int, c_int64, c_void_p, c_int64, c_int, c_int]),
    "bs_dct_transform": (c_int64, [c_void_p, c_int, *[c_int64] * 4, *[c_void_p] * 7, c_int]),
    "bs_dct_gather": (None, [c_void_p, c_void_p, c_void_p, c_int64, c_void_p, c_int]),
    "bs_dct_decode": (
        c_int,
        [*[c_void_p] * 3, c_int64, c_void_p, *[c_int64] * 4, *[c_void_p] * 3, c_int, c_int],
    ),
    "bs_narrow_encode": (None, [c_void_p, c_int64, c_int, c_int, c_int64, c_void_p, c_int]),
    "bs_narrow_decode": (None, [c_void_p, c_int, c_int64, c_void_p, c_int64, c_int, c_int]),
    "bs_sz_range": (None, [c_void_p, c_int64, c_int, c_void_p, c_int]),
    "bs_sz_survey": (
        None,
        [c_void_p, c_int64, c_int, *[c_double] * 3, c_int, c_void_p, c_int64, c_int64, c_void_p],
    ),
    "bs_sz_encode": (
        c_void_p,
        [c_void_p, c_int64, c_int, c_void_p, c_int64, *[c_double] * 3, c_int64, *[c_int] * 2, *[c_void_p] * 2, c_int],
    ),
    "bs_sz_free": (None, [c_void_p]),
    "bs_sz_collect": (None, [c_void_p] * 5 + [c_int]),
    "bs_sz_decode": (
        c_int,
        [*_SIZED * 2, c_void_p, *_SIZED * 2, *[c_double] * 2, c_int64, c_int, c_int, c_void_p, *_SIZED, c_int, c_int],
    ),
    "bs_window_encode": (c_int64, [c_void_p, c_int64, c_int64, c_void_p, c_int, c_void_p, c_int]),
    "bs_window_scatter": (None, [c_void_p, c_int64, c_void_p, c_int, c_void_p, c_int64, c_int, c_void_p, c_int]),
    "bs_window_decode": (None, [c_void_p, c_int64, c_void_p, c_int, c_void_p, c_int64, c_int]),
}


@cache
def load() -> ctypes.CDLL | None:
    """The library; None where it was not built, or ``BACKSTASH_KERNELS=reference`` asks for other kernels.

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
    missing = [name for name in _SIGNATURES if not hasattr(lib, name)]
    if missing:
        raise OSError(
            f"asked {PATH} for the function {missing[0]}, but it has none of that name ({len(missing)} of "
            f"{len(_SIGNATURES)} are missing): it was built from another version of backstash. Build it again: "
            f"'pip install' from the package's sources, or 'python setup.py build_native' in a clone."
        )
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(lib, name)
        function.restype = result
        function.argtypes = arguments
    return lib


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
    """The instruction set that the kernels use: ``"avx512"``, ``"avx2"`` or ``"scalar"``."""
    return ISAS[_loaded().bs_isa()]


def set_isa(cap: str) -> str:
    """Use no more than this instruction set (for tests; not while a kernel runs). Returns the one used from now on."""
    return ISAS[_loaded().bs_set_isa(ISAS.index(cap))]


def build_info() -> dict[str, str | bool]:
    """Facts for ``backstash doctor``: path, compiler, OpenMP, instruction set."""
    lib = _loaded()
    return {
        "path": str(PATH),
        "compiler": lib.bs_compiler().decode(),
        "openmp": bool(lib.bs_has_openmp()),
        "isa": isa(),
    }
