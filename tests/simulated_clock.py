"""A clock that moves only when something sleeps."""

from __future__ import annotations


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
