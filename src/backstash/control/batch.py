"""The batch size that the memory has room for."""

from __future__ import annotations

import math
from dataclasses import dataclass

from backstash.report.meter import Measurement
from backstash.session import Session


@dataclass(frozen=True)
class BatchSize:
    """The largest power of two that fits, from what one batch was measured to take.

    What a step holds grows in proportion to the batch, but for what is ``fixed``.

    Args:
        limit: bytes of memory.
        maximum: the largest batch that training wants.
        fixed: bytes beside the measured ones that do not grow with the batch: parameters, the optimizer's state.
        free: the share of the limit that stays free.

    Raises:
        ValueError: a number is out of its range, or ``fixed`` leaves no room.

    Source: COMET (PVLDB 15(4), 2022), which chooses it after the first period.

    Example:
        >>> BatchSize(limit=1000, maximum=4096).after(100, batch=32)
        256
    """

    limit: int
    maximum: int
    fixed: int = 0
    free: float = 0.05

    def __post_init__(self) -> None:
        if not (self.maximum >= 1 and 0.0 <= self.free < 1.0 and 0 <= self.fixed < self.room):
            raise ValueError(
                f"{self} was asked for, but it takes a maximum of 1 or more, a share from 0 to below 1 that stays "
                f"free, and a limit with room for more than what is fixed."
            )

    @property
    def room(self) -> float:
        """Bytes that may be used."""
        return self.limit * (1.0 - self.free)

    def after(self, measured: Session | Measurement | float, batch: int) -> int:
        """The batch for the steps that follow.

        Args:
            measured: what a step with ``batch`` samples took: a Measurement, whose counted peak is everything that a
                step allocates; a Session, whose last step counts, but of it only what was stashed; or bytes.
            batch: samples of that step.

        Raises:
            ValueError: nothing was measured, or not even a batch of one fits.
        """
        if isinstance(measured, Session):
            nbytes: float = measured.report().stash_nbytes
        else:
            nbytes = measured.peak_nbytes if isinstance(measured, Measurement) else measured
        if batch < 1 or not 0.0 < nbytes < math.inf:
            raise ValueError(
                f"{self} was given {nbytes} bytes for a batch of {batch}, which tell nothing of a sample's. Pass what "
                f"a whole step with one sample or more took."
            )
        fits = min(self.maximum, math.floor((self.room - self.fixed) * batch / nbytes))
        if fits < 1:
            raise ValueError(
                f"{self} was asked for a batch where a sample takes {nbytes / batch:.0f} bytes, but only "
                f"{self.room - self.fixed:.0f} are left. Raise the limit, or store smaller."
            )
        return int(1 << (fits.bit_length() - 1))
