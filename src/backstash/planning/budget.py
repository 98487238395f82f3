"""What a user asks a planner for: a budget, and the ways in which values may be held."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from math import isfinite

from backstash import codecs
from backstash.errors import PlanError
from backstash.planning.problem import Choice, StepProfile

ALLOW = ("lossless", "recompute", "offload", "bounded")
"""Words for whole families of choices: exact codecs, values that are remade, other memory, and codecs with an error."""

_UNITS = {"b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}
_UNITS |= {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "%": 0}


def parse_budget(budget: int | str, plain_peak_nbytes: int) -> int:
    """Returns a budget in bytes.

    Args:
        budget: a number of bytes, or a text: a number with one of the units B, KiB, MiB, GiB, TiB, KB, MB, GB, TB, or a
            share of the plain step's peak such as ``"60%"``.
        plain_peak_nbytes: that peak.

    Raises:
        PlanError: the budget is none of these, or not above 0.

    Example:
        >>> parse_budget("1.5 KiB", 0), parse_budget("60%", 1000)
        (1536, 600)
    """
    asked = f"a plan was asked for with the budget {budget!r}"
    do = "Pass a number of bytes above 0, or a text such as '2GiB', '512 MiB' or '60%' (of the plain step's peak)."
    if isinstance(budget, str):
        found = re.fullmatch(r"\s*(\d+(?:\.\d*)?)\s*([a-z%]+)\s*", budget.lower())
        if found is None or found[2] not in _UNITS:
            raise PlanError(f"{asked}, but that is no number with a unit. {do}")
        amount = float(found[1])
        nbytes = int(amount / 100 * plain_peak_nbytes if found[2] == "%" else amount * _UNITS[found[2]])
    elif isinstance(budget, int) and not isinstance(budget, bool):
        nbytes = budget
    else:
        raise PlanError(f"{asked}, but that is a {type(budget).__name__}. {do}")
    if nbytes <= 0:
        raise PlanError(f"{asked}, but every step takes some memory above what is held before it. {do}")
    return nbytes


def check_error(max_error: float | None) -> None:
    """Raises an error for a limit on errors that is none.

    Raises:
        PlanError: it is neither None nor a number of 0 or more.
    """
    is_number = isinstance(max_error, (int, float)) and not isinstance(max_error, bool)
    if max_error is not None and not (is_number and isfinite(max_error) and max_error >= 0):
        raise PlanError(
            f"a plan was asked for with max_error={max_error!r}, but that is the largest sum of relative errors of "
            f"gradients. Pass a number of 0 or more, or None for no limit."
        )


def restrict(profile: StepProfile, allow: str | Sequence[str]) -> StepProfile:
    """Returns the profile with those choices alone that are allowed; to keep a value always is.

    Args:
        profile: the step.
        allow: words of :data:`ALLOW`, and names of codecs.

    Raises:
        PlanError: a word is neither.
    """
    words = (allow,) if isinstance(allow, str) else tuple(allow)
    named = {
        choice.name for value in profile.values for choice in value.choices if choice.kind in ("encode", "offload")
    }
    for word in words:
        if word not in ALLOW and word not in named and word not in codecs.names():
            raise PlanError(
                f"a plan was asked for with allow={allow!r}, but {word!r} is neither a family of choices nor a codec. "
                f"Pass any of {', '.join(ALLOW)}, or names of codecs: {', '.join(codecs.names())}."
            )

    def is_allowed(choice: Choice) -> bool:
        if choice.kind == "keep" or choice.name in words:
            return True
        if choice.error and "bounded" not in words:
            return False
        families = {"encode": ("bounded",) if choice.error else ("lossless",)}
        return any(family in words for family in families.get(choice.kind, (choice.kind,)))

    values = (replace(v, choices=tuple(choice for choice in v.choices if is_allowed(choice))) for v in profile.values)
    return replace(profile, values=tuple(values))
