"""The search of changes.py in C++ (``native/search.cpp``): a plan takes hundreds of thousands of changes."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from ctypes import c_double, c_int64, c_void_p
from functools import cache
from itertools import chain
from typing import Any

import numpy as np

from backstash.ops.cpu import library
from backstash.planning.model.peak import PeakModel
from backstash.planning.search.changes import ReferenceSearch, Search


@cache
def _library() -> Any:
    """The library, loaded when a plan is made first."""
    return library.functions(
        {
            "bs_search_new": (c_void_p, [c_void_p, c_void_p]),
            "bs_search_free": (None, [c_void_p]),
            "bs_search_set": (c_int64, [c_void_p, c_int64, c_int64]),
        }
    )


_VALUES = ("rank", "born", "first_read", "last_read", "read_starts", "reads")
_ROWS = ("parent_starts", "parents", "fetch_starts", "fetches", "remakes", "has_error", "held", "at_start", "decode")
_TIMES = ("decode_seconds", "own_seconds", "errors")


class _Step(ctypes.Structure):
    """``bs::Step``."""

    _fields_ = (("values", c_int64), *((name, c_void_p) for name in (*_VALUES, *_ROWS, *_TIMES)))


class _Solution(ctypes.Structure):
    """``bs::Solution``."""

    _fields_ = (
        *((name, c_void_p) for name in ("rows", "live", "makes", "last")),
        ("seconds", c_double),
        ("error", c_double),
        ("conflicts", c_int64),
    )


class NativeSearch(Search):
    """The search in C++."""

    def __init__(self, model: PeakModel) -> None:
        super().__init__(model)
        self._arrays = _arrays(model)  # held here, because C++ has their addresses alone
        self._step = _Step(len(model.nbytes), *(array.ctypes.data for array in self._arrays))
        state = (array.ctypes.data for array in (self.rows, self.live, self.makes, self.last))
        self._solution = _Solution(*state, self.seconds, self.error, self.conflicts)
        self._native = _library()
        self._search = self._native.bs_search_new(ctypes.addressof(self._step), ctypes.addressof(self._solution))
        weakref.finalize(self, self._native.bs_search_free, self._search)

    def set(self, value: int, row: int) -> int:
        """Changes how a value is held (see :class:`backstash.planning.search.changes.Search`)."""
        touched: int = self._native.bs_search_set(self._search, value, row)
        found = self._solution
        self.seconds, self.error, self.conflicts = found.seconds, found.error, found.conflicts
        return touched


def search_from_kept(model: PeakModel) -> Search:
    """A search that begins with all values kept: in C++ where there is the library."""
    return NativeSearch(model) if library.available() else ReferenceSearch(model)


def _arrays(model: PeakModel) -> list[np.ndarray]:
    """The fields of ``bs::Step`` that are arrays, in their order."""
    rank = np.empty(len(model.nbytes), np.int64)
    rank[model.order] = np.arange(len(model.order))
    integers = [rank, model.born, model.first_read, model.last_read]
    integers += _lists([value.reads for value in model.profile.values])
    integers += _lists(model.parents)
    starts, flat = _lists(model.fetched)
    integers += [starts, flat.reshape(-1)]
    integers += [
        model.remakes,
        np.array(model.has_error, bool),
        model.held,
        model.encode + model.workspace,
        model.decode,
    ]
    times = [model.decode_seconds, model.own_seconds, model.errors]
    found = [np.ascontiguousarray(array, np.int64) for array in integers]
    return found + [np.ascontiguousarray(array, np.float64) for array in times]


def _lists(lists: Sequence[Sequence[Any]]) -> list[np.ndarray]:
    """Where each list begins and the last one ends, and all of them one after the other."""
    starts = np.cumsum([0, *map(len, lists)], dtype=np.int64)
    return [starts, np.array(list(chain.from_iterable(lists)), np.int64)]
