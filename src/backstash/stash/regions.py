"""Compiled regions inside a Session: which of a region's saved tensors holds which value of its graph.

A compiled graph hands its saved tensors to autograd in one go, some of them past all hooks, and what they hold has
another form already. So the graph says itself what it saves: right before it returns it announces its account, a row
per value. The Session then knows what the tensors are that autograd saves next, and its report shows the graph's rows.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from backstash.stash.accounts import Entry


@dataclass(frozen=True)
class GraphOutput:
    """A tensor that a graph hands to autograd.

    Attributes:
        dtype: its dtype.
        shape: its sizes; None for those that change.
        row: the number of the row of the value that it holds, or a part of it; None for an input of the graph.
    """

    dtype: torch.dtype
    shape: tuple[int | None, ...]
    row: int | None

    def looks_like(self, x: Tensor) -> bool:
        """Whether ``x`` can be it."""
        return x.dtype == self.dtype and len(x.shape) == len(self.shape) and all(map(_fits, self.shape, x.shape))


def _fits(expected: int | None, size: int) -> bool:
    return expected is None or expected == size


@dataclass(frozen=True)
class Region:
    """What a compiled graph says of what it saves.

    Attributes:
        name: of the graph. Graphs that were compiled with different options may have the same: see distinct_names.
        rows: one Entry per value; keys are the graph's name, the path of the module and the node, joined by ``/``.
        saved: the tensors that hooks see, in the order of saving.
        note: how many values are held in another form, and why the others are not.
    """

    name: str
    rows: tuple[Entry, ...]
    saved: tuple[GraphOutput, ...]
    note: str


class HasRow(Protocol):
    """What a Session holds for one storage: stash.accounts.Account."""

    def row(self) -> Entry:
        """As a report shows it."""


@dataclass
class RegionCall:
    """One call of a region in a step.

    Attributes:
        region: the region.
        place: how many accounts the step had before.
        path: of the module that called it, which is known when autograd saves: the graph itself runs as a module.
    """

    region: Region
    place: int = 0
    path: str = ""
    _next: int = 0
    _held: dict[int, list[HasRow]] = field(default_factory=dict)

    def next_row(self, x: Tensor, path: str) -> int | None:
        """The row of the tensor that autograd saves next; None for an input, and for a tensor of somebody else.

        Args:
            x: the tensor.
            path: of the module in progress.
        """
        expected = self.region.saved[self._next] if self._next < len(self.region.saved) else None
        if expected is None or not expected.looks_like(x):
            self._next = len(self.region.saved)
            return None
        self._next += 1
        self.path = path
        return expected.row

    @property
    def is_over(self) -> bool:
        """Whether autograd has saved all of it."""
        return self._next >= len(self.region.saved)

    def holds(self, row: int, account: HasRow) -> None:
        """An account is of a tensor that belongs to this row."""
        self._held.setdefault(row, []).append(account)

    def rows(self, name: str) -> list[Entry]:
        """The graph's rows, less what the Session saves of the tensors that it has encoded once more.

        Args:
            name: the graph's name in their keys.
        """
        return [self._row(name, entry, self._held.get(number, ())) for number, entry in enumerate(self.region.rows)]

    def _row(self, name: str, entry: Entry, held: Sequence[HasRow]) -> Entry:
        _, path, node = entry.key.split("/", 2)
        key = f"{'.'.join(filter(None, (self.path, path)))}/{name}/{node}"
        found = [account.row() for account in held]
        again = [row for row in found if row.codec != "kept"]
        codecs = dict.fromkeys([*([entry.codec] if entry.codec != "kept" else []), *(row.codec for row in again)])
        stores = {row.store for row in again}
        return replace(
            entry,
            key=key,
            stash_nbytes=entry.stash_nbytes - sum(row.saved_nbytes - row.stash_nbytes for row in found),
            codec=", then ".join(codecs) or "kept",
            reason="" if again else entry.reason,
            shared_by=[*entry.shared_by, *(other for row in found for other in row.shared_by)],
            encode_seconds=sum(row.encode_seconds for row in found),
            decode_seconds=sum(row.decode_seconds for row in found),
            decodes=max((row.decodes for row in found), default=0),
            store=stores.pop() if len(stores) == 1 else entry.store,
            stall_seconds=sum(row.stall_seconds for row in found),
        )


def distinct_names(names: Iterable[str]) -> list[str]:
    """The same names, but for a number behind each that others before it have too: ``graph 0``, ``graph 0 (2)``."""
    counts, found = Counter[str](), []
    for name in names:
        counts[name] += 1
        found.append(name if counts[name] == 1 else f"{name} ({counts[name]})")
    return found


def region_names(calls: Iterable[RegionCall]) -> dict[int, str]:
    """A name for each region that was called, by its id."""
    regions = {id(call.region): call.region.name for call in calls}
    return dict(zip(regions, distinct_names(regions.values()), strict=True))


OnRegion = Callable[[Region], None]


class _Listening(threading.local):
    listener: OnRegion | None = None


_listening = _Listening()


def listen(listener: OnRegion | None) -> None:
    """From now on the listener is told of regions that run on this thread."""
    _listening.listener = listener


def unlisten(listener: OnRegion | None) -> None:
    """The listener is told no more, if it was."""
    if _listening.listener == listener:
        _listening.listener = None


def is_listened_to() -> bool:
    """Whether a Session wants to know of regions on this thread."""
    return _listening.listener is not None


def announce(region: Region) -> None:
    """A region has run: what autograd saves next is the region's."""
    if _listening.listener is not None:
        _listening.listener(region)
