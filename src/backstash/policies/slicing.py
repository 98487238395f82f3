"""A policy that lowers the peak of backward: the largest convolutions run their backward in slices of the batch."""

from __future__ import annotations

from backstash.arguments import check_count, check_number
from backstash.codecs import Binary, Zvc
from backstash.codecs.base import FLOATS
from backstash.policies.base import Action, Policy, Slice
from backstash.policies.exact import Lossless
from backstash.saved import Need, SavedTensor


class SlicedPeak(Policy):
    """As Lossless, but the convolutions that set the peak run their backward in slices of the batch. Not bit-equal.

    A convolution is sliced if its input has at least the share ``share`` of the bytes of the largest tensor that was
    saved so far. The policy learns that size in the first step.

    Args:
        parts: how many slices.
        share: of the bytes of the largest tensor.

    Raises:
        ValueError: fewer than two parts, or a share that is not above 0 and at most 1.
    """

    def __init__(self, parts: int = 4, share: float = 0.5) -> None:
        check_number(share, "share", "SlicedPeak", 0.5)
        check_count(parts, "parts", "parts", "SlicedPeak")
        if not 0 < share <= 1:
            raise ValueError(f"SlicedPeak was asked for a share of {share}, but it takes one above 0 and at most 1.")
        self.action = Slice(parts, (Binary(), Zvc()))
        self.share = share
        self._largest = 0

    def __repr__(self) -> str:
        return f"SlicedPeak(parts={self.action.parts}, share={self.share})"

    def decide(self, saved: SavedTensor) -> Action:
        """Returns Slice for the largest inputs of convolutions, and the action of Lossless for every other tensor."""
        self._largest = max(self._largest, saved.spec.nbytes)
        convolved = saved.need is Need.VALUE and (saved.op, saved.role) == ("Convolution", "input")
        if convolved and saved.spec.dtype in FLOATS and saved.spec.nbytes >= self.share * self._largest:
            return self.action
        return Lossless().decide(saved)


def sliced(parts: int = 4, share: float = 0.5) -> SlicedPeak:
    """Returns the policy :class:`SlicedPeak`."""
    return SlicedPeak(parts, share)
