"""Which parts of a range are free: of a file, or of a slab of memory."""

from __future__ import annotations

from bisect import bisect_left


class Space:
    """Hands out parts of ``[0, size)``, the first that fits, and joins what is given back.

    First fit keeps what is in use near the beginning, and so a file that grows with it short.

    Example:
        >>> space = Space(100)
        >>> space.take(60), space.take(60)
        (0, None)
    """

    def __init__(self, size: int) -> None:
        self._starts, self._ends = [0], [size]  # the free parts, in order, none touching the next

    def take(self, nbytes: int) -> int | None:
        """Where ``nbytes`` > 0 neighbours begin that were free; None where there are none."""
        for i, (start, end) in enumerate(zip(self._starts, self._ends, strict=True)):
            if end - start >= nbytes:
                self._starts[i] += nbytes
                if self._starts[i] == end:
                    del self._starts[i], self._ends[i]
                return start
        return None

    def give(self, start: int, nbytes: int) -> None:
        """Take back what :meth:`take` handed out."""
        end, i = start + nbytes, bisect_left(self._starts, start)
        if i < len(self._starts) and self._starts[i] == end:
            end = self._ends[i]
            del self._starts[i], self._ends[i]
        if i > 0 and self._ends[i - 1] == start:
            self._ends[i - 1] = end
        else:
            self._starts.insert(i, start)
            self._ends.insert(i, end)
