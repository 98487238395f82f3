"""The largest batch size for which the memory has room."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol, runtime_checkable


@runtime_checkable
class Reporting(Protocol):
    """What BatchSize needs of a Session."""

    def report(self) -> Stashing:
        """Returns the accounts of the last step."""


class Stashing(Protocol):
    """What BatchSize needs of a Session's report."""

    @property
    def stash_nbytes(self) -> int:
        """Bytes that were held for saved tensors."""


@runtime_checkable
class Peaking(Protocol):
    """What BatchSize needs of a Measurement."""

    @property
    def peak_nbytes(self) -> int:
        """The most bytes that a step holds at once."""


@dataclass(frozen=True)
class BatchSize:
    """The largest power of two that fits, computed from the memory that a step with one batch size took.

    The memory of a step is taken to grow in proportion to the batch, apart from the bytes in ``fixed``.

    Args:
        maximum: the largest batch that training wants.
        fixed: bytes that the measurement does not contain and that do not grow with the batch: parameters, the
            optimizer's state.
        free: the share of the limit that stays free.

    Raises:
        ValueError: a number is out of its range, or ``fixed`` leaves no room.

    Source: COMET (PVLDB 15(4), 2022), which chooses the batch size after the first period.

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

    def after(self, measured: Reporting | Peaking | float, batch: int) -> int:
        """Returns the batch size for the steps that follow.

        Args:
            measured: the memory that a step with ``batch`` samples took. A Measurement, whose counted peak contains
                everything that a step allocates; or a Session, of whose last step only the stash is counted; or bytes.

        Raises:
            ValueError: nothing was measured, or not even a batch of one sample fits.
        """
        if isinstance(measured, Reporting):
            nbytes: float = measured.report().stash_nbytes
        else:
            nbytes = measured.peak_nbytes if isinstance(measured, Peaking) else measured
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
