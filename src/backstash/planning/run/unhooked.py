"""A Session that does nothing: a step under it is plain PyTorch's, and takes as long."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from torch import nn

from backstash.session import Session
from backstash.torch_internals import saved_tensor_hooks

if TYPE_CHECKING:
    from backstash.stash.ledger import Report


class Unhooked(Session):
    """In the place of a Session, where a plain step is wanted. It installs nothing, and reports nothing."""

    def __enter__(self) -> Unhooked:
        return self

    def __exit__(self, *raised: object) -> None:
        """Leaves nothing, because nothing was entered."""

    def begin_step(self) -> None:
        """Counts a step."""
        self._steps += 1

    def report(self) -> Report:
        """A report without notes: nothing was looked at, so nothing is known of what was saved."""
        return replace(super().report(), notes=())

    @property
    def is_innermost(self) -> bool:
        """Whether no hooks of autograd were installed since it was entered."""
        return saved_tensor_hooks(True) is None

    def enter_module(self, module: nn.Module) -> None:
        """Takes no notice of a module."""
