"""Profiles a step of a running program, and ends it."""

from __future__ import annotations

import os
from collections.abc import Sequence

from backstash.planning.model.problem import StepProfile
from backstash.planning.run.budgeted import Budgeted


class ProfiledRun(Budgeted):
    """Inside the ``with``, a step of this thread's training is profiled, and SystemExit ends the program.

    Args:
        min_nbytes: smaller tensors are kept; 16 KiB by default.

    Attributes:
        profile: the profile of a step; None as long as there is none.
    """

    def __init__(
        self,
        min_nbytes: int | None = None,
        allow: str | Sequence[str] = ("lossless", "recompute"),
        offload_to: str | os.PathLike[str] | None = None,
    ) -> None:
        super().__init__("100%", allow, min_nbytes=min_nbytes, offload_to=offload_to)
        self.profile: StepProfile | None = None
        self.is_hurried = True

    def profiled(self, profile: StepProfile) -> None:
        """Ends the program."""
        self.profile = profile
        raise SystemExit(0)
