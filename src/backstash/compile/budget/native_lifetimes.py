"""The estimates of lifetimes.py in C++ (``native/lifetimes.cpp``): a search makes thousands of them."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping
from ctypes import c_int64, c_void_p
from functools import cache
from typing import Any

import numpy as np

from backstash.compile.budget.joint import Joint
from backstash.compile.graph.repeated import LEAST_NBYTES
from backstash.ops.cpu import library


@cache
def _library() -> Any:
    """The library, loaded when a budget is searched first."""
    return library.functions(
        bs_lifetimes="(ppppp)",
    )


_FLAGS = ("is_gradient", "is_forward", "is_input", "fuses", "reads_fused", "is_shared", "is_image", "is_heavy")
"""The lists of a joint graph that are the bits of a fact, the lowest first; more follow (`_facts`)."""


class _Graph(ctypes.Structure):
    """``bs::Graph``."""

    _fields_ = (
        ("count", c_int64),
        *((name, c_void_p) for name in ("starts", "reads", "facts", "nbytes", "scratch", "in_rows", "copied")),
        *((name, c_void_p) for name in ("takes_over", "rounded", "tests")),
        *((name, c_int64) for name in ("compiler_fuses", "counts_on_it", "saves_copies", "is_on_cpu")),
        *((name, c_int64) for name in ("least_nbytes", "most_reads")),
    )


class NativeLifetimes:
    """A joint graph in the form that C++ reads.

    Args:
        most_reads: values that an elementwise result of several readers is computed from without being stored.
    """

    def __init__(self, joint: Joint, rounded: Mapping[int, int], tests: Mapping[int, int], most_reads: int) -> None:
        count = len(joint.nodes)
        self._joint, self._count = joint, count
        reads = [read for each in joint.reads for read in each]
        ends = np.cumsum([0, *(len(each) for each in joint.reads)])
        self._arrays = {  # held here, because C++ has their addresses alone
            "starts": ends.astype(np.int64),
            "reads": np.array(reads, np.int64),
            "facts": _facts(joint),
            "nbytes": np.array(joint.nbytes, np.int64),
            "scratch": np.array(joint.scratch, np.int64),
            "in_rows": _by_number(count, joint.in_rows),
            "copied": _by_number(count, joint.copied),
            "takes_over": _by_number(count, joint.takes_over),
            "rounded": _by_number(count, rounded),
            "tests": _by_number(count, tests),
        }
        self._graph = _Graph(
            count=count,
            compiler_fuses=joint.compiler_fuses,
            counts_on_it=joint.counts_on_it,
            is_on_cpu=joint.is_on_cpu,
            least_nbytes=LEAST_NBYTES,
            most_reads=most_reads,
            **{name: array.ctypes.data for name, array in self._arrays.items()},
        )
        self._peaks = np.empty(6 * count + 8)
        self._numbers = np.empty(2 * count, np.int64)
        self._sizes = np.empty(4, np.int64)

    def passes(self, saved: Mapping[int, int]) -> tuple[np.ndarray, np.ndarray, list[int], list[int]]:
        """Bytes at the operators of forward and of backward, what is read of ``saved``, and what is computed again."""
        held = _by_number(self._count, saved)
        self._graph.saves_copies = self._joint.saves_copies
        arrays = held, self._peaks, self._numbers, self._sizes
        _library().bs_lifetimes(ctypes.addressof(self._graph), *(array.ctypes.data for array in arrays))
        forward, backward, used, again = self._sizes.tolist()
        peaks = self._peaks[: forward + backward].copy()
        numbers = self._numbers[: used + again].tolist()
        return peaks[:forward], peaks[forward:], numbers[:used], numbers[used:]


def _facts(joint: Joint) -> np.ndarray:
    """The bits of each value, as ``bs::Fact`` has them."""
    count = range(len(joint.nodes))
    lists: list[Iterable[bool]] = [
        *(getattr(joint, name) for name in _FLAGS),
        joint.is_light,
        joint.is_part,
        (number in joint.stored for number in count),
        (joint.must_be_saved(number) for number in count),
        (number in joint.results for number in count),
        (number in joint.gradients for number in count),
    ]
    facts = np.zeros(len(joint.nodes), np.uint32)
    for bit, each in enumerate(lists):
        facts |= np.fromiter(each, bool, len(joint.nodes)).astype(np.uint32) << np.uint32(bit)
    return facts


def _by_number(count: int, found: Mapping[int, int]) -> np.ndarray:
    """What is there of each number, -1 for the others."""
    values = np.full(count, -1, np.int64)
    if found:
        values[np.fromiter(found.keys(), np.int64, len(found))] = np.fromiter(found.values(), np.int64, len(found))
    return values
