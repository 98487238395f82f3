"""The seam behind which values are made again: what the encoder asks, of which it knows nothing else."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from torch import Tensor

if TYPE_CHECKING:
    from backstash.policies.base import Recompute
    from backstash.remake.recipes import Recipe
    from backstash.stash.value import Remade, Saved, Value


class Producer(Protocol):
    """Knows how values were made, and makes them again."""

    def forget(self, value: Value, strongest: Saved, whole: Tensor, action: Recompute) -> Remade | str:
        """Returns the state of a value that is about to be forgotten; or the reason why it cannot be made again.

        Args:
            value: nobody but autograd holds it.
            strongest: of its saved tensors the one that needs most of it.
            whole: all of it, dense.
            action: what the policy allows.
        """

    def find(self, value: Value, strongest: Saved) -> Recipe | str:
        """How a value could be made again, whatever that costs; or the reason why it cannot be. Nothing is done."""

    def sources(self, value: Value, strongest: Saved) -> dict[str, Tensor] | None:
        """From which stored values a value could be made, and by how much errors of theirs are multiplied."""

    def is_stored_exactly(self, value: Value, nbytes: int) -> bool:
        """Whether a value that is about to be stored with an error is stored as it is, in ``nbytes``, for others."""

    def stored(self, value: Value, strongest: Saved, nbytes: int) -> None:
        """A value was stored with an error in so many bytes."""
