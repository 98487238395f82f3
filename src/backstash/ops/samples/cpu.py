"""Counts of a sample in C++. Elements of other sizes than 2, 4 and 8 bytes go to the reference."""

from __future__ import annotations

from ctypes import byref, c_int64
from typing import Any

from torch import Tensor

from backstash.ops.cpu import library
from backstash.ops.samples import reference as reference

_lib: Any = library.functions(
    bs_look="(pilllpp)",
)


def sample_counts(x: Tensor, runs: int, run: int, step: int) -> tuple[int, int]:
    """See :func:`backstash.ops.samples.reference.sample_counts`."""
    if x.element_size() not in (2, 4, 8):
        return reference.sample_counts(x, runs, run, step)
    nonzeros, patterns = c_int64(), c_int64()
    _lib.bs_look(x.data_ptr(), x.element_size(), runs, run, step, byref(nonzeros), byref(patterns))
    return nonzeros.value, patterns.value
