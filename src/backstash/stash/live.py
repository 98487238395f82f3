"""The bytes and the saved tensors that are alive now."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from backstash import interpreter
from backstash.stash.buffers import Buffers
from backstash.stash.comparing import Comparisons
from backstash.stash.prefetch import Prefetcher

if TYPE_CHECKING:
    from torch import Tensor

    from backstash.gradient_error import Monitor
    from backstash.stash.value import Value
    from backstash.stash.watcher import Watcher


class Live:
    """The running totals of a Session, shared with its values, so that either may die first.

    Note: [totals and finalizers]
        A value dies wherever its last reference goes: on any thread, also while another one adds to a total, or inside
        the lock. So a finalizer changes no total. It leaves a note (appending to a deque is atomic), and the notes are
        added up under the lock whenever a total is read.

    Attributes:
        min_nbytes: smaller tensors are kept.
        lock: held by whoever changes anything here but a finalizer.
        overwrites: whether backward kernels may write over gradients that nobody else holds.
        stashed_nbytes: bytes on the device when backward began.
        peak_nbytes: the most bytes on the device so far.
        saved_ever: how many tensors were saved so far.
        unpacked: whether backward has begun.
        monitor: measures the gradient's error in the first steps, where that was asked for.
        watcher: is told of what happens to memory; None when nobody asked for that.
        distrusted: keys of values whose recipes have failed after they had been proven, and these recipes as text; None
            for all recipes.
        comparisons: of samples, at the ends of backward passes.
        remake: returns the whole of a value that was forgotten, and whether that is the beginning of something else is
            told it; None where nothing is made again.
        beside: how many bytes a Session holds beside its values, and the most that it has held with these; None where
            there are none.
        read_with_graph: is told of a dense value that a backward pass with a graph has read, and of its data, as long
            as the Session is open; else None.
    """

    __slots__ = (
        "_losses",
        "_nbytes",
        "_remade_nbytes",
        "_saved",
        "beside",
        "buffers",
        "comparisons",
        "distrusted",
        "lock",
        "min_nbytes",
        "monitor",
        "overwrites",
        "peak_nbytes",
        "prefetcher",
        "read_with_graph",
        "remake",
        "saved_ever",
        "stashed_nbytes",
        "unpacked",
        "watcher",
    )

    def __init__(self, ahead: int | None = None, overwrites: bool = True, min_nbytes: int = 0) -> None:
        self.min_nbytes = min_nbytes
        self.buffers = Buffers()
        self.prefetcher = Prefetcher(ahead)
        self.lock = interpreter.Lock()
        self.overwrites = overwrites
        self.stashed_nbytes = 0
        self.peak_nbytes = 0
        self.unpacked = False
        self.monitor: Monitor | None = None
        self.watcher: Watcher | None = None
        self.distrusted: set[tuple[str, str | None]] = set()
        self.comparisons = Comparisons()
        self.read_with_graph: Callable[[Value, Tensor], None] | None = None
        self.beside: Callable[[], tuple[int, int]] | None = None
        self.remake: Callable[[Value, bool], Tensor] | None = None
        self._saved = self._nbytes = self._remade_nbytes = 0
        self.saved_ever = 0
        self._losses: deque[tuple[int, int, int]] = deque()

    def _add_up(self) -> None:
        with self.lock:
            losses = self._losses
            while losses:
                saved, nbytes, remade = losses.popleft()
                self._saved -= saved
                self._nbytes -= nbytes
                self._remade_nbytes -= remade

    @property
    def saved(self) -> int:
        """How many saved tensors autograd holds."""
        if self._losses:
            self._add_up()
        return self._saved

    @property
    def nbytes(self) -> int:
        """Bytes that values take on the device."""
        if self._losses:
            self._add_up()
        return self._nbytes

    @property
    def remade_nbytes(self) -> int:
        """Bytes of values that were remade and are held for their next reader."""
        if self._losses:
            self._add_up()
        return self._remade_nbytes

    @property
    def below_peak(self) -> int:
        """How many bytes less are held than at the peak."""
        nbytes, peak_nbytes = (0, 0) if self.beside is None else self.beside()
        return max(self.peak_nbytes, peak_nbytes) - self.nbytes - nbytes

    def has_room(self, nbytes: int) -> bool:
        """Whether so many more remade bytes would still take no more than backward has freed."""
        return self.nbytes + self._remade_nbytes + nbytes <= self.stashed_nbytes

    def add_saved(self) -> None:
        """One more saved tensor."""
        self._saved += 1
        self.saved_ever += 1

    def add(self, nbytes: int) -> None:
        """So many more bytes on the device; a negative number for fewer."""
        self._nbytes += nbytes
        if nbytes > 0:
            held = self.nbytes
            if held > self.peak_nbytes:
                self.peak_nbytes = held

    def add_remade(self, nbytes: int) -> None:
        """So many more bytes of remade values; a negative number for fewer."""
        self._remade_nbytes += nbytes

    def lose(self, saved: int = 0, nbytes: int = 0, remade_nbytes: int = 0) -> None:
        """A finalizer's note of what died (Note: [totals and finalizers])."""
        self._losses.append((saved, nbytes, remade_nbytes))
        if saved and len(self._losses) >= self._saved:  # else some of them are certainly alive
            self._free_buffers()

    def _free_buffers(self) -> None:
        """Give the decode buffers back if the last saved tensor is gone."""
        taken: list[bool] = []
        try:
            taken.extend(map(self.lock.acquire, (False,)))  # one call, so that Ctrl-C comes before or after it
            # Who holds it on another thread saves or reads a tensor right now.
            if taken[0] and self.saved == 0:
                self.buffers.clear()
        finally:
            if taken and taken[0]:
                self.lock.release()
