"""A Session's messages about its memory while a step runs, for anybody who wants to record it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from backstash.codecs.base import Encoded

if TYPE_CHECKING:
    from backstash.remake.recipes import Recipe
    from backstash.stash.value import Value


class Watcher(Protocol):
    """Is told what a Session stores, where it decodes, and what backward reads, at the moment when it happens.

    A watcher must not keep a tensor or planes that it is given, nor write to them: a reference changes when memory is
    free. Calls arrive on the thread that saves or reads the tensor, most of them under the Session's lock. A Session
    without a watcher pays one attribute look-up for each of these events.
    """

    def storing(self, encoded: Encoded) -> None:
        """These planes are about to be given to a store."""

    def fetched(self, encoded: Encoded) -> None:
        """These planes are about to be decoded or read; their store has brought them, now or for an earlier reader."""

    def taken(self, memory: Tensor) -> None:
        """A value is about to be decoded or remade into this memory."""

    def released(self, memory: Tensor) -> None:
        """The reader of what was decoded into this memory is done with it, before its node has ended."""

    def decided(self, value: Value, whole: Tensor, find_recipe: Callable[[], Recipe | str]) -> None:
        """Nobody but autograd holds a value any more, and it is about to be treated as the policy says.

        Args:
            value: the value, with its key and facts.
            whole: its data.
            find_recipe: returns how it could be made again whatever made it, or why it cannot be.
        """

    def read(self, tensor: Tensor, is_stored: bool, key: str) -> None:
        """Autograd was given this tensor.

        Args:
            tensor: what backward reads. It may be a claim, which has no memory.
            is_stored: whether the value is decoded or remade, and not held as it is.
            key: the key that its value was decided on with; empty if it was not.
        """

    def dropped(self, keys: Iterable[str]) -> None:
        """A pass begins in the place of one that is gone without a backward pass: places are counted from 0 again.

        Args:
            keys: of what that has saved.
        """
