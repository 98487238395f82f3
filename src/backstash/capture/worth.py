"""The judgement that a Session's work on a model's steps is worth its time.

Note: [Sessions of no use]
    A Session counts what it holds and what plain PyTorch would hold in its place; it has lowered the difference.
    To that is added the largest value that it keeps for a kernel that frees it early or writes over a gradient, if the
    value is at least a twentieth of what a step saves: one kernel runs at the peak, which may be lowered by as much.
    Where both together are less than a fiftieth of what a step saves, four equal steps long, some steps run idle and
    some as before, in turns, from the beginning of one forward pass to that of the next. If the median of the latter is
    more than a twentieth above that of the former, the Session says so once and is idle. Where more is lowered, nothing
    is timed, so that what becomes of such a Session depends on counts alone. All steps have the same bits either way.

    What is counted are saved tensors. What else is alive at the peak of a step, as gradients and workspaces are, only a
    profiler sees. An idle Session still adds the gradients of large weights in slices.

    Steps that save others than before begin anew, and have to be equal for twice as long. In one of 64 idle steps the
    Session looks whether the same still holds. It is timed once more only if it had lowered more in between.
"""

from __future__ import annotations

import time
from statistics import median

from backstash.stash import seams
from backstash.stash.accounts import HELD, Step

SHARE = 50
"""A Session that lowers what a step saves by less than one in so many of its bytes is compared with an idle one."""

SLOWER = 1.05
"""How many times as long as an idle step a step may take for that."""

EARLY = 20
"""A value that may be freed early counts if it has at least one in so many of the bytes that a step saves."""

EQUAL_STEPS, MOST_EQUAL_STEPS = 4, 256
"""After how many equal steps the comparison begins, at first and at most."""

ROUNDS = 5
"""How many steps of each kind are timed."""

clock = time.perf_counter


def lowers_little(step: Step) -> bool:
    """Whether what a Session lowers, and what it may free early, is less than one in SHARE of what a step saves."""
    return SHARE * lowered_nbytes(step) < step.saved_nbytes


def lowered_nbytes(step: Step) -> int:
    """Bytes that a Session lowers, with what it may free early where the others are little."""
    freed = step.freed_nbytes
    return freed if SHARE * freed >= step.saved_nbytes else freed + _early_nbytes(step)


def _early_nbytes(step: Step) -> int:
    """Bytes of the largest value that backward may free earlier than without a Session, as it is, if that is much."""
    most = 0
    for account in step.accounts:
        nbytes = account.stash_nbytes
        if account.reason == HELD or EARLY * nbytes < step.saved_nbytes or nbytes <= most:
            continue
        readers = (account.facts, *(account.shared_by or ()))
        if any(seams.readers.frees_early(each.op, each.role, each.spec, account.saved_nbytes) for each in readers):
            most = nbytes
    return most


class Worth:
    """What is known of the worth of Sessions for one model under one policy.

    Attributes:
        is_idle: whether the next step is to run idle.
        notice: what is to be said about a Session of no use; empty where there is none.
    """

    __slots__ = (
        "_began",
        "_equal",
        "_is_compared",
        "_is_comparing",
        "_lowered",
        "_needed",
        "_times",
        "is_idle",
        "notice",
    )

    def __init__(self) -> None:
        self.is_idle = False
        self.notice = ""
        self._needed = EQUAL_STEPS
        self._begin_anew()

    def _begin_anew(self) -> None:
        self.is_idle, self.notice = False, ""
        self._equal, self._lowered = 0, 0.0
        self._is_comparing = self._is_compared = False
        self._times: tuple[list[float], list[float]] = [], []  # of steps as they are, and of idle ones
        self._began: tuple[float, bool] | None = None  # when the step in progress began, and whether it is idle

    def begin_step(self) -> bool:
        """A step begins, which ends the one before. Returns whether there is something to be said now."""
        if not self._is_comparing:
            return False
        now, before = clock(), self._began
        self._began = now, self.is_idle
        if before is not None:
            began, was_idle = before
            self._times[was_idle].append(now - began)
        own, idle = self._times
        if min(len(own), len(idle)) < ROUNDS:
            return False
        self._is_comparing, self._is_compared = False, True
        slower = median(own) / max(median(idle), 1e-9)
        self.is_idle = slower > SLOWER
        if self.is_idle:
            self.notice = (
                f"it lowers what a step saves by {self._lowered:.1%}, and a step takes {slower:.2f} times as long as "
                f"one in which nothing is done (medians of {ROUNDS} steps each), so from now on nothing is done. Pass "
                f"stop_if_useless=False to a Session that shall go on, or choose another policy"
            )
        return self.is_idle

    def is_open(self, step: Step) -> bool:
        """Whether such a step is to be compared with an idle one, or is being compared."""
        return not self._is_compared and lowers_little(step)

    def end_step(self, is_equal: bool, step: Step) -> None:
        """A step is over that was not idle.

        Args:
            is_equal: whether it has saved as many tensors and bytes as the step before.
            step: its accounts.
        """
        if not lowers_little(step):
            if self._is_comparing or self._is_compared:
                self._needed = min(2 * self._needed, MOST_EQUAL_STEPS)
            self._begin_anew()
        elif not is_equal:
            self.end_other_step()
        elif self._is_compared:
            self.is_idle = bool(self.notice)
        else:
            self._equal, self._lowered = self._equal + 1, step.freed_nbytes / step.saved_nbytes
            self._is_comparing = self._equal >= self._needed
            self.is_idle = self._is_comparing  # in turns

    def end_idle_step(self, looks_again: bool) -> None:
        """A step is over that was idle, and has saved as many tensors and bytes as the step before."""
        if self._is_comparing or looks_again:
            self.is_idle = False

    def end_other_step(self) -> None:
        """A step is over that has saved other tensors than the step before."""
        if self._equal:
            self._needed = min(2 * self._needed, MOST_EQUAL_STEPS)
        self._begin_anew()
