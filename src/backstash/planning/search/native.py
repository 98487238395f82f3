"""The search of changes.py and moves.py in C++ (``native/search.cpp``): a plan takes some hundred thousand changes."""

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
from backstash.planning.model.peak import Bytes, PeakModel
from backstash.planning.search.changes import ReferenceSearch, Search
from backstash.planning.search.moves import Moves, alike, block_starts


@cache
def _library() -> Any:
    """The library, loaded when a plan is made first."""
    return library.functions(
        bs_search_new="p(pp)",
        bs_search_free="(p)",
        bs_search_set="l(pll)",
        bs_search_load="(pp)",
        bs_search_set_all="(ppplp)",
        bs_search_lower="l(pldlp)",
        bs_search_relax="(plp)",
    )


_VALUES = ("rank", "born", "first_read", "last_read", "read_starts", "reads")
_ROWS = ("parent_starts", "parents", "fetch_starts", "fetches", "remakes", "has_error", "held", "at_start", "decode")
_TIMES = ("decode_seconds", "own_seconds", "errors")
_MOVES = ("first", "value_of", "nbytes", "alike")


class _Step(ctypes.Structure):
    """``bs::Step``."""

    _fields_ = (
        ("values", c_int64),
        *((name, c_void_p) for name in (*_VALUES, *_ROWS, *_TIMES)),
        ("positions", c_int64),
        ("rows", c_int64),
        *((name, c_void_p) for name in _MOVES),
        ("blocks", c_int64),
        ("block_starts", c_void_p),
    )


class _Effort(ctypes.Structure):
    """``bs::Effort``."""

    _fields_ = tuple((name, c_double) for name in ("work", "end", "limit", "price"))


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
        self._moves = [model.first, model.value_of, model.nbytes, alike(model), block_starts(model)]
        *rows, blocks = (array.ctypes.data for array in self._moves)
        counts = len(model.base), len(model.value_of)
        addresses = (array.ctypes.data for array in self._arrays)
        self._step = _Step(len(model.nbytes), *addresses, *counts, *rows, len(self._moves[-1]) - 1, blocks)
        state = (array.ctypes.data for array in (self.rows, self.live, self.makes, self.last))
        self._solution = _Solution(*state, self.seconds, self.error, self.conflicts)
        self._native = _library()
        self._search = self._native.bs_search_new(ctypes.addressof(self._step), ctypes.addressof(self._solution))
        weakref.finalize(self, self._native.bs_search_free, self._search)

    def set(self, value: int, row: int) -> int:
        """Changes how a value is held (see :class:`backstash.planning.search.changes.Search`)."""
        return int(self.call("bs_search_set", value, row))

    def load(self, rows: Bytes) -> None:
        """Changes whatever differs from the given rows."""
        wanted = np.ascontiguousarray(rows, np.int64)
        self.call("bs_search_load", wanted.ctypes.data)

    def call(self, name: str, *arguments: Any) -> Any:
        """Calls a function of the library that changes the solution."""
        answer, found = getattr(self._native, name)(self._search, *arguments), self._solution
        self.seconds, self.error, self.conflicts = found.seconds, found.error, found.conflicts
        return answer


class NativeMoves(Moves):
    """The moves in C++."""

    search: NativeSearch

    def set_all(self, values: Sequence[int] | Bytes, rows: Sequence[int] | Bytes) -> None:
        """As Moves.set_all."""
        values, rows = np.ascontiguousarray(values, np.int64), np.ascontiguousarray(rows, np.int64)
        self._call("bs_search_set_all", values.ctypes.data, rows.ctypes.data, len(values))

    def lower(self, level: int, tau: float, batch: int) -> bool:
        """As Moves.lower."""
        return bool(self._call("bs_search_lower", level, tau, batch))

    def relax(self, level: int) -> None:
        """As Moves.relax."""
        self._call("bs_search_relax", level)

    def _call(self, name: str, *arguments: Any) -> Any:
        """Calls a function of the library with what it may take, and notes what it has taken and changed."""
        effort = _Effort(self.work, self.end, self.limit, self.price)
        found = self.search.call(name, *arguments, ctypes.addressof(effort))
        self.work = effort.work
        return found


def search_from_kept(model: PeakModel) -> Search:
    """A search that begins with all values kept: in C++ where there is the library."""
    return NativeSearch(model) if library.available() else ReferenceSearch(model)


def moves_from_kept(model: PeakModel, limit: float) -> Moves:
    """Moves of a search that begins with all values kept: in C++ where there is the library."""
    search = search_from_kept(model)
    return NativeMoves(search, limit) if isinstance(search, NativeSearch) else Moves(search, limit)


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
