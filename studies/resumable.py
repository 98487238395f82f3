"""Trainings that take hours: their states are kept in a folder, so that a run that was stopped goes on where it was."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

Batch = tuple[Tensor, ...]


@dataclass(frozen=True)
class States:
    """Files of training states in a folder, one for each training by name.

    Args:
        folder: where they are; None keeps nothing.
    """

    folder: Path | None

    def _path(self, name: str) -> Path:
        assert self.folder is not None
        return self.folder / f"{name}.pt"

    def load(self, name: str) -> dict[str, Any] | None:
        """Returns the state that was saved last, or None."""
        if self.folder is None or not self._path(name).exists():
            return None
        state: dict[str, Any] = torch.load(self._path(name), weights_only=True)
        return state

    def save(self, name: str, state: dict[str, Any]) -> None:
        """Puts a state in the place of the last one. A run that is killed meanwhile leaves the last one whole."""
        if self.folder is None:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        unfinished = self._path(name).with_suffix(".unfinished")
        torch.save(state, unfinished)
        os.replace(unfinished, self._path(name))


@dataclass
class Training:
    """A model on its way.

    Attributes:
        name: of its state.
        model, optimizer: what is trained.
        steps: how many steps there will be.
        losses: of the steps so far.
        resumed: the steps after which it was stopped and went on.
        notes: anything else that has to be known after it was resumed, as lists and numbers.
    """

    name: str
    model: nn.Module
    optimizer: torch.optim.Optimizer
    steps: int
    losses: list[float] = field(default_factory=list)
    resumed: list[int] = field(default_factory=list)
    notes: dict[str, Any] = field(default_factory=dict)

    @property
    def done(self) -> int:
        """Steps so far."""
        return len(self.losses)

    def resume(self, states: States) -> None:
        """Goes on from the state that was saved last, if there is one.

        Raises:
            SystemExit: that state is of a longer training.
        """
        state = states.load(self.name)
        if state is None:
            return
        if len(state["losses"]) > self.steps:
            raise SystemExit(
                f"{self.name} was to be trained for {self.steps} steps, but its saved state has "
                f"{len(state['losses'])}. Ask for as many or more, or remove the state."
            )
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.losses, self.notes = state["losses"], state["notes"]
        self.resumed = [*state["resumed"], self.done]

    def save(self, states: States) -> None:
        """Saves all that :meth:`resume` needs."""
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "losses": self.losses,
            "notes": self.notes,
            "resumed": self.resumed,
        }
        states.save(self.name, state)

    def run(
        self,
        batches: Iterator[Batch],
        step: Callable[[Batch, int], Tensor],
        states: States,
        every: int,
        rate: float,
        between: Callable[[int], None] = lambda done: None,
    ) -> None:
        """Trains to the end. The learning rate falls to zero in a straight line.

        Args:
            batches: of every step, also of those that are done already.
            step: computes the loss of a batch, forward and backward; it gets the step's number.
            states: where the state is kept.
            every: steps between two saves.
            rate: learning rate of the first step.
            between: is called before the first step and after each save, with the number of steps done.
        """
        if self.done == 0:
            between(0)
        for number, batch in enumerate(batches):
            if number < self.done:
                continue
            for group in self.optimizer.param_groups:
                group["lr"] = rate * (1 - number / self.steps)
            self.optimizer.zero_grad(set_to_none=False)
            loss = step(batch, number)
            nn.utils.clip_grad_norm_(self.model.parameters(), 5.0)
            self.optimizer.step()
            self.losses.append(float(loss.detach()))
            if self.done % every == 0 or self.done == self.steps:
                between(self.done)
                self.save(states)
