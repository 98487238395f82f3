"""The boundary between two steps of a training loop, in a loop that nobody has written for us.

A step ends with the last optimizer step before the next training forward pass. So a loop that accumulates gradients, or
whose optimizers step one after the other, or within the backward pass, has one step where its author sees one. If
several optimizers take turns, as those of a GAN do, a step lasts until each of them has stepped. A loop that changes
its parameters by hand has a step for each backward pass.
"""

from __future__ import annotations

from collections.abc import Callable

from torch.optim import Optimizer

PATIENCE = 32
"""For how many updates a step waits for an optimizer that has stepped before. Some GANs train one half often."""


class Steps:
    """Follows a training loop by what it is told of it.

    Args:
        updated: is called when an optimizer has stepped, or a backward pass of a loop without optimizers is over. Its
            argument tells whether the step may end here: whether each optimizer has stepped.
        ended: is called when it has turned out that a step has ended with the last update.
        restarted: is called when it has turned out that what were taken for steps were none, or were warming up: an
            optimizer has stepped for the first time.

    Attributes:
        count: the steps that have ended since the last restart. The first of them warms up: the optimizers' state is
            allocated in it.
        optimizers: the optimizers that have stepped, in the order of their first steps.
    """

    def __init__(
        self, updated: Callable[[bool], None], ended: Callable[[], None], restarted: Callable[[], None]
    ) -> None:
        self._updated, self._ended, self._restarted = updated, ended, restarted
        self.count = 0
        self.optimizers: list[Optimizer] = []
        self._required: set[int] = set()  # ids of the optimizers that a step waits for
        self._stepped: set[int] = set()
        self._is_by_hand = True
        self._is_pending = False  # an update has come, and neither a forward nor a backward pass since
        self._updates = 0  # in this step

    def forward(self) -> None:
        """A training forward pass begins, or a backward pass that no forward pass came before."""
        if self._is_pending:
            self._is_pending = False
            self._end_update()

    def optimized(self, optimizer: Optimizer) -> None:
        """An optimizer has stepped."""
        known = id(optimizer) in self._required
        if not known:
            if not any(optimizer is one for one in self.optimizers):
                self.optimizers.append(optimizer)  # held, so that no other optimizer gets the same id
            self._required.add(id(optimizer))
            self._restart()
        self._is_by_hand = False
        self._update(id(optimizer))

    def went_backward(self) -> None:
        """A backward pass is over."""
        if self._is_by_hand:
            self._update(None)

    def finish(self) -> None:
        """The program is over."""
        self.forward()

    @property
    def is_complete(self) -> bool:
        """Whether each optimizer has stepped in this step."""
        return self._stepped >= self._required

    def _update(self, optimizer: int | None) -> None:
        if optimizer is not None:
            self._stepped.add(optimizer)
        self._is_pending = True
        self._updated(self.is_complete)

    def _end_update(self) -> None:
        self._updates += 1
        if self.is_complete:
            self._stepped.clear()
            self._updates = 0
            self.count += 1
            self._ended()
        elif self._updates >= PATIENCE:  # an optimizer that the program has no use for any more
            self._required = set(self._stepped)
            self._restart()

    def _restart(self) -> None:
        """What follows is measured anew. The step in progress warms up, whatever the other optimizers did in it."""
        self.count = self._updates = 0
        self._stepped = set(self._required)
        self._restarted()
