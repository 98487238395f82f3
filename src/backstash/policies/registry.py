"""Policies by name, and what a reader needs to choose between them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module

from backstash.errors import UnknownNameError
from backstash.policies.adapted import adapt, is_policy
from backstash.policies.base import Policy


@dataclass(frozen=True)
class Description:
    """What a policy does to training, for the tables of the command line and of the documentation.

    Attributes:
        name: the name.
        is_exact: whether all gradients have the bits of plain PyTorch.
        gradients: what becomes of the gradients, in a few words.
        does: what the policy does, in one sentence without a full stop.
        use_when: when to use it, likewise.
        is_candidate: whether ``backstash choose`` tries it.
    """

    name: str
    is_exact: bool
    gradients: str
    does: str
    use_when: str
    is_candidate: bool


_REGISTRY: dict[str, Callable[[], Policy] | str] = {}
_DESCRIPTIONS: dict[str, Description] = {}


def register(
    name: str,
    policy: Callable[[], Policy] | str,
    *,
    is_exact: bool = False,
    gradients: str = "",
    does: str = "",
    use_when: str = "",
    is_candidate: bool = False,
) -> None:
    """Make a policy available by a name.

    Args:
        name: the name.
        policy: a class or a function that returns a new policy, without arguments; or where it is, as
            ``"package.module:Class"``, which is imported when the policy is asked for first.
        is_exact, gradients, does, use_when, is_candidate: as in Description. By default ``does`` is the first line of
            the docstring of ``policy``, and a policy is not taken for an exact one.

    Raises:
        TypeError: the name is no text, or the policy cannot be called.
        ValueError: another policy has that name.
    """
    is_place = isinstance(policy, str) and ":" in policy
    if not isinstance(name, str) or not (callable(policy) or is_place):
        raise TypeError(
            f"register was asked to add {policy!r:.80} as {name!r:.80}, but it takes a name, and a class or a function "
            f"that returns a new policy. Pass register('name', Class)."
        )
    known = _REGISTRY.setdefault(name, policy)
    if known != policy and _imported(known) is not _imported(policy):
        raise ValueError(
            f"register was asked to add {policy!r} as {name!r}, but that is {known!r}. Choose another name."
        )
    first_line = "" if is_place else (inspect.getdoc(policy) or "").partition("\n")[0].rstrip(".")
    gradients = gradients or ("the same bits" if is_exact else "may differ")
    _DESCRIPTIONS[name] = Description(name, is_exact, gradients, does or first_line, use_when, is_candidate)


def _imported(policy: Callable[[], Policy] | str) -> Callable[[], Policy]:
    if not isinstance(policy, str):
        return policy
    module, _, member = policy.partition(":")
    found: Callable[[], Policy] = getattr(import_module(module), member)
    return found


def names() -> tuple[str, ...]:
    """Returns the names of all registered policies, sorted."""
    return tuple(sorted(_REGISTRY))


def describe(name: str) -> Description:
    """Returns what the registered policy of that name does.

    Raises:
        UnknownNameError: no policy has that name.
    """
    require(name)
    return _DESCRIPTIONS[name]


def descriptions() -> tuple[Description, ...]:
    """Returns what every registered policy does: the usual first, in the order of their registration, ``keep`` last."""
    return tuple(sorted(_DESCRIPTIONS.values(), key=lambda description: description.name == "keep"))


def require(name: str, *others: str) -> None:
    """Checks that a policy has that name.

    Args:
        name: the name.
        others: names that are allowed as well.

    Raises:
        UnknownNameError: no policy has that name. The message suggests the name that is most like it.
    """
    known = sorted({*names(), *others})
    if name not in known:
        near = get_close_matches(name, known, n=1)
        advice = f" Did you mean {near[0]!r}?" if near else ""
        raise UnknownNameError(f"policy {name!r} was asked for, but there are {', '.join(known)}.{advice}")


def get(policy: str | Policy) -> Policy:
    """Returns a policy by name, or the given policy.

    An object that has ``decide()`` and ``observe()`` but does not inherit from Policy is returned in a wrapper that has
    the other members (see :func:`backstash.policies.adapted.adapt`).

    Raises:
        UnknownNameError: no policy has that name.
        TypeError: the argument is neither a name nor a policy.
    """
    if isinstance(policy, str):
        require(policy)
        return adapt(_imported(_REGISTRY[policy])())
    if not is_policy(policy):
        raise TypeError(
            f"a policy was asked for, got {policy!r}, which has no decide() and observe(). Pass a name "
            f"({', '.join(names())}) or an object with these methods."
        )
    return adapt(policy)
