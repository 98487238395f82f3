"""Actions by pattern, in front of another policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from backstash.policies.adapted import adapt
from backstash.policies.base import Action, Policy, Recompute, Wrapper
from backstash.saved import SavedTensor


@dataclass(frozen=True)
class Rules(Wrapper):
    """Actions by pattern. The first pattern that matches a tensor's key decides.

    Args:
        rules: (pattern, action) pairs. A pattern is matched against the whole ``SavedTensor.key`` as in a shell, with
            regard to case (``"features.*/Relu*:result"``).
        otherwise: the policy for every other tensor.

    Raises:
        TypeError: ``otherwise`` is not a policy.

    Example:
        >>> from backstash.policies import Keep, get
        >>> rules = Rules((("classifier.*", Keep()),), otherwise=get("lossless"))
    """

    rules: tuple[tuple[str, Action], ...]
    otherwise: Policy

    def __post_init__(self) -> None:
        object.__setattr__(self, "otherwise", adapt(self.otherwise))

    @property
    def inner(self) -> Policy:
        """The policy ``otherwise``."""
        return self.otherwise

    @property
    def is_fixed(self) -> bool:  # type: ignore[override]  # read-only here
        """As ``otherwise``: patterns depend on the tensor's key alone."""
        return self.otherwise.is_fixed

    @property
    def recomputes(self) -> bool:  # type: ignore[override]  # read-only here
        """Whether the action of a rule is Recompute, or ``otherwise`` recomputes."""
        return any(isinstance(action, Recompute) for _, action in self.rules) or self.otherwise.recomputes

    @property
    def remakes_anything(self) -> bool:  # type: ignore[override]  # read-only here
        """Whether the action of a rule is a Recompute of any producer, or ``otherwise`` has such actions."""
        actions = (action for _, action in self.rules if isinstance(action, Recompute))
        return any(action.any_producer for action in actions) or self.otherwise.remakes_anything

    def decide(self, saved: SavedTensor) -> Action:
        """Returns the action of the first pattern that matches, or else what ``otherwise`` decides."""
        action = self._by_pattern(saved)
        return self.otherwise.decide(saved) if action is None else action

    def decide_together(self, saved: SavedTensor, readers: Sequence[SavedTensor]) -> Action:
        """Likewise; only the key of ``saved`` is matched."""
        action = self._by_pattern(saved)
        return self.otherwise.decide_together(saved, readers) if action is None else action

    def _by_pattern(self, saved: SavedTensor) -> Action | None:
        return next((action for pattern, action in self.rules if fnmatchcase(saved.key, pattern)), None)
