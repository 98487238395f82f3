"""Numbers of a device that go to the host while the host goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


class Numbers:
    """Numbers of a device, [n], on their way to the host."""

    __slots__ = ("_arrived", "_found", "_numbers")

    def __init__(self, numbers: Tensor) -> None:
        self._numbers = numbers.to("cpu", non_blocking=True)
        self._found: list[Any] | None = None
        self._arrived: torch.Event | None = None
        if not numbers.is_cpu:
            self._arrived = torch.accelerator.current_stream(numbers.device).record_event()

    def have_arrived(self) -> bool:
        """Whether the host need not wait for them."""
        return self._arrived is None or bool(self._arrived.query())

    def get(self) -> list[Any]:
        """Returns them, after a wait if they have not arrived."""
        if self._found is None:
            if not self.have_arrived():
                assert self._arrived is not None
                self._arrived.synchronize()
            self._found = self._numbers.tolist()
        return self._found


Later = Callable[[Tensor, str], None]
"""Takes numbers of a device, of which none may differ from 0, and the message of the error if one does."""

_deferring = threading.local()


@contextmanager
def deferring(later: Later) -> Iterator[None]:
    """Inside, what decoders of this thread find out about damage is given to ``later``; else they wait for it."""
    before, _deferring.later = deferred_to(), later
    try:
        yield
    finally:
        _deferring.later = before


def deferred_to() -> Later | None:
    """Who is given what a decoder finds out; None if the decoder has to wait for it."""
    later: Later | None = getattr(_deferring, "later", None)
    return later


class Scalars:
    """Numbers of several tensors, of which each dtype goes to the host at once."""

    def __init__(self) -> None:
        self._tensors: dict[Hashable, list[Tensor]] = {}
        self._found: dict[Hashable, Numbers] = {}

    def add(self, number: Tensor | float) -> tuple[Hashable, int] | float:
        """Takes a number in. Returns what :meth:`get` is given to have it back."""
        if not isinstance(number, Tensor):
            return number
        kind = number.device, number.dtype
        tensors = self._tensors.setdefault(kind, [])
        tensors.append(number.reshape(1))
        return kind, len(tensors) - 1

    @property
    def is_on_cpu(self) -> bool:
        """Whether the host has them all."""
        return all(tensors[0].is_cpu for tensors in self._tensors.values())

    def send(self) -> None:
        """Has all that was taken in go to the host."""
        self._found = {kind: Numbers(torch.cat(tensors)) for kind, tensors in self._tensors.items()}
        self._tensors = {}

    def get(self, key: tuple[Hashable, int] | float) -> float:
        """Returns a number. The host waits if it has not arrived."""
        if not isinstance(key, tuple):
            return key
        kind, at = key
        number: float = self._found[kind].get()[at]
        return number
