"""Policies by name."""

from __future__ import annotations

from collections.abc import Callable

from backstash.errors import UnknownNameError
from backstash.policies.base import Policy, adapt, is_policy

_REGISTRY: dict[str, Callable[[], Policy]] = {}


def register(name: str, policy: Callable[[], Policy]) -> None:
    """Make a policy available by a name.

    Args:
        name: the name.
        policy: a class or a function that returns a new policy, without arguments.

    Raises:
        ValueError: another policy has that name.
    """
    if _REGISTRY.setdefault(name, policy) is not policy:
        raise ValueError(
            f"register was asked to add {policy!r} as {name!r}, but that is {_REGISTRY[name]!r}. Choose another name."
        )


def names() -> tuple[str, ...]:
    """Returns the names of all registered policies, sorted."""
    return tuple(sorted(_REGISTRY))


def get(policy: str | Policy) -> Policy:
    """Returns a policy by name, or the given policy.

    An object that has ``decide()`` and ``observe()`` but does not inherit from Policy is returned in a wrapper that has
    the other members (see :func:`backstash.policies.base.adapt`).

    Raises:
        UnknownNameError: no policy has that name.
        TypeError: the argument is neither a name nor a policy.
    """
    if isinstance(policy, str):
        if policy not in _REGISTRY:
            raise UnknownNameError(f"policy {policy!r} was asked for, but there are {', '.join(names())}.")
        return adapt(_REGISTRY[policy]())
    if not is_policy(policy):
        raise TypeError(
            f"a policy was asked for, got {policy!r}, which has no decide() and observe(). Pass a name "
            f"({', '.join(names())}) or an object with these methods."
        )
    return adapt(policy)
