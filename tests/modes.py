"""A function mode that a program may have beside a Session."""

from __future__ import annotations

from typing import Any

from torch.overrides import TorchFunctionMode


class Seeing(TorchFunctionMode):
    """Notes which functions it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func)
        return func(*args, **(kwargs or {}))
