"""Numbers of a device that go to the host while the host goes on."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Numbers:
    """Numbers of a device, [n], on their way to the host."""

    __slots__ = ("_arrived", "_numbers")

    def __init__(self, numbers: Tensor) -> None:
        self._numbers = numbers.to("cpu", non_blocking=True)
        self._arrived: torch.Event | None = None
        if not numbers.is_cpu:
            self._arrived = torch.accelerator.current_stream(numbers.device).record_event()

    def have_arrived(self) -> bool:
        """Whether the host need not wait for them."""
        return self._arrived is None or bool(self._arrived.query())

    def get(self) -> list[Any]:
        """Returns them, after a wait if they have not arrived."""
        if self._arrived is not None and not self._arrived.query():
            self._arrived.synchronize()
        found: list[Any] = self._numbers.tolist()
        return found
