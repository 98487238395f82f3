"""A range of bytes, of a file or of a slab of memory, and which parts of it are free."""

from __future__ import annotations

from bisect import bisect_left


class Space:
    """Hands out parts of the range ``[0, size)``, and joins the parts that are given back.

    It hands out the first free part that is large enough. So the parts in use stay near the beginning, and a file that
    grows as far as they reach stays short.

    Example:
        >>> space = Space(100)
        >>> space.take(60), space.take(60)
        (0, None)
    """

    def __init__(self, size: int) -> None:
        self._starts, self._ends = [0], [size]  # of the free parts, in order; no part touches the next

    def take(self, nbytes: int) -> int | None:
        """Returns the beginning of ``nbytes`` > 0 bytes that were free, or None if no free part is so large."""
        for i, (start, end) in enumerate(zip(self._starts, self._ends, strict=True)):
            if end - start >= nbytes:
                self._starts[i] += nbytes
                if self._starts[i] == end:
                    del self._starts[i], self._ends[i]
                return start
        return None

    def give(self, start: int, nbytes: int) -> None:
        """Takes back a part that :meth:`take` handed out."""
        end, i = start + nbytes, bisect_left(self._starts, start)
        if i < len(self._starts) and self._starts[i] == end:
            end = self._ends[i]
            del self._starts[i], self._ends[i]
        if i > 0 and self._ends[i - 1] == start:
            self._ends[i - 1] = end
        else:
            self._starts.insert(i, start)
            self._ends.insert(i, end)
