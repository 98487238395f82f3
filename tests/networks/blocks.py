"""Blocks of transformers, for tests that draw networks of their own: they map rows [N, width] to rows."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

TOKENS = 8
"""So many rows in a row are a sequence, within which is attended."""


class Residual(nn.Module):
    """Two linear layers after a norm, added to the input."""

    def __init__(
        self,
        width: int,
        norm: nn.Module | None = None,
        act: Callable[[Tensor], Tensor] = torch.relu,
        drop: float = 0.0,
    ) -> None:
        super().__init__()
        self.norm, self.act, self.drop = norm or nn.LayerNorm(width), act, nn.Dropout(drop)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """The rows, and what the layers add."""
        result: Tensor = x + self.drop(self.down(self.act(self.up(self.norm(x)))))
        return result


class Attention(nn.Module):
    """Attention of one head after a norm, added to the input; of functions that all have second derivatives."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width, self.norm, self.qkv = width, nn.LayerNorm(width), nn.Linear(width, 3 * width)

    def forward(self, x: Tensor) -> Tensor:
        """The rows, and what was attended to."""
        query, key, value = self.qkv(self.norm(x)).view(-1, TOKENS, 3 * self.width).chunk(3, -1)
        weights = torch.softmax(query @ key.transpose(-1, -2) / self.width**0.5, -1)
        result: Tensor = x + (weights @ value).reshape(-1, self.width)
        return result
