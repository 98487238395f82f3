"""Ready-made policies, by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from backstash.codecs import Binary, Bitmask, Narrow, Shape, Zvc
from backstash.codecs.bitmask import FLOATS
from backstash.codecs.narrow import INTEGERS
from backstash.errors import UnknownNameError
from backstash.policy import Action, Keep, Outcome, Policy, Stash
from backstash.saved import Need, SavedTensor


@dataclass(frozen=True)
class Lossless:
    """Exact: gradients are bit-identical.

    A formula that reads a shape gets a shape, one that reads a sign a bit per element, indices and bools are stored in
    the fewest bits, and values are compressed where a sample says that they hold zeros or only two different numbers.

    Args:
        min_saving: the smallest share of a value's bytes worth compressing it for (see codecs.Zvc).
    """

    min_saving: float = 0.02

    def decide(self, saved: SavedTensor) -> Action:
        """The smallest exact form of what backward reads."""
        if saved.need is Need.SHAPE:
            return Stash(Shape())
        if saved.need is Need.SIGN and saved.mask is not None:
            return Stash(Bitmask(saved.mask))
        if saved.spec.dtype in INTEGERS:
            windowed = () if saved.window is None else (Narrow(saved.window),)
            return Stash((*windowed, Narrow()))
        if saved.spec.dtype in FLOATS:
            return Stash((Binary(), Zvc(self.min_saving)))
        return Keep(f"no exact codec takes {saved.spec.dtype}")

    def observe(self, outcome: Outcome) -> None:
        """Learns nothing."""


@dataclass(frozen=True)
class KeepAll:
    """Encodes nothing: what plain PyTorch does, with the report."""

    def decide(self, saved: SavedTensor) -> Action:
        """Keep."""
        return Keep()

    def observe(self, outcome: Outcome) -> None:
        """Learns nothing."""


POLICIES: dict[str, Callable[[], Policy]] = {"lossless": Lossless, "keep": KeepAll}


def lossless(min_saving: float = 0.02) -> Policy:
    """The policy :class:`Lossless`."""
    return Lossless(min_saving)


def get(policy: str | Policy) -> Policy:
    """A policy by name, or the policy itself.

    Raises:
        UnknownNameError: no policy has that name.
        TypeError: it is neither a name nor a policy.
    """
    if isinstance(policy, str):
        if policy not in POLICIES:
            raise UnknownNameError(f"policy {policy!r} was asked for, but there are {', '.join(sorted(POLICIES))}.")
        return POLICIES[policy]()
    if isinstance(policy, type) or not isinstance(policy, Policy):
        raise TypeError(
            f"a policy was asked for, got {policy!r}, which has no decide() and observe(). Pass a name "
            f"({', '.join(sorted(POLICIES))}) or an object with these methods."
        )
    return policy
