"""What was found out by comparing bits on first use, kept in one bounded cache for the whole process.

Several shortcuts of this package are right only where a library happens to round the same way twice: a recipe that
computes a value again, a product that is computed in slices, a norm's gradient that is computed row by row. No library
documents that. So each shortcut runs once beside the long way, the bits are compared, and the answer is kept here.

Note: [what a proof depends on]
    An answer holds for the operation, its arguments and layouts, the type of the device, the number of threads, and
    torch's settings of precision and determinism. The caller names the first three; :meth:`Proofs.ask` adds the rest
    by itself. A program that changes a setting in the middle of a run is answered by a new proof.
"""

from __future__ import annotations

import threading
import zlib
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import TypeVar

from backstash.torch_internals import numeric_settings

Answer = TypeVar("Answer", bool, str)

CAPACITY = 4096
"""How many answers are kept. One takes about half a kilobyte, and a network of 1,000 layers asks for fewer."""


@dataclass(slots=True)
class Counts:
    """How often something was proven.

    Attributes:
        proven: questions that were answered by a proof for the first time.
        repeated: questions whose proof was run once more.
    """

    proven: int = 0
    repeated: int = 0


class _Known:
    """An answer, and how often it was asked for; ``phase`` spreads the repetitions of different questions."""

    __slots__ = ("answer", "phase", "uses")

    def __init__(self, answer: bool | str, phase: int) -> None:
        self.answer, self.phase, self.uses = answer, phase, 1


class Proofs:
    """Answers to questions of the form "does this shortcut give the same bits?", the latest used ones.

    Any thread may ask. A proof runs without the lock, so two threads that ask the same question at the same time may
    both prove it.

    Args:
        capacity: how many answers are kept; the one that was asked for longest ago is forgotten first.
    """

    def __init__(self, capacity: int = CAPACITY) -> None:
        self.capacity = capacity
        self.counts = Counts()
        self._known: OrderedDict[Hashable, _Known] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._known)

    def ask(
        self,
        operation: str,
        facts: tuple[Hashable, ...],
        prove: Callable[[], Answer],
        *,
        device_type: str = "cpu",
        again: bool = False,
        repeat_every: int = 0,
        counts: Counts | None = None,
    ) -> Answer:
        """Returns the known answer, or the one that ``prove`` gives now.

        Args:
            operation: what is asked about. Every caller uses a name of its own.
            facts: the arguments, shapes, strides and dtypes on which the answer depends.
            prove: runs the shortcut beside the long way and compares their bits. The false answer (False or ``""``)
                means that the shortcut must not be used.
            device_type: of the tensors, ``"cpu"`` or ``"cuda"``: its settings become part of the question.
            again: runs the proof in any case.
            repeat_every: runs the proof of a true answer again at every so many of its uses; 0 for never. Different
                questions are repeated at different uses, so that a step does not repeat all of them.
            counts: counts what this caller proves, beside the process-wide ``Proofs.counts``.

        Returns:
            What ``prove`` returned last for this question.
        """
        key = (operation, facts, device_type, numeric_settings(device_type))
        with self._lock:
            known = self._known.get(key)
            if known is not None:
                self._known.move_to_end(key)
                known.uses += 1
                due = repeat_every and known.answer and (known.uses + known.phase) % repeat_every == 0
                if not due and not again:
                    return known.answer  # type: ignore[return-value]
        answer = prove()
        with self._lock:
            for each in (self.counts, counts) if counts is not None else (self.counts,):
                if known is None:
                    each.proven += 1
                else:
                    each.repeated += 1
            if known is not None:
                known.answer = answer
            else:
                self._known[key] = _Known(answer, zlib.crc32(repr((operation, facts)).encode()))
                if len(self._known) > self.capacity:
                    self._known.popitem(last=False)
        return answer

    def forget(self) -> None:
        """Forgets every answer, so that each is proven again."""
        with self._lock:
            self._known.clear()


proofs = Proofs()
"""The answers of this process."""
