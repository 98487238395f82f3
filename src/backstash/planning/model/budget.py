"""The user's words to a planner: a budget, and the ways in which values may be held."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from backstash import accelerator, codecs
from backstash.arguments import are_words
from backstash.errors import PlanError
from backstash.planning.model.problem import Choice, StepProfile
from backstash.planning.model.rounding import codec_named, is_named, nearest, word_has_error
from backstash.planning.model.sealed import LARGEST

ALLOW = ("lossless", "recompute", "offload", "bounded")
"""Words for whole families of choices: exact codecs, values that are remade, other memory, and codecs with an error."""

REORDERED = "reordered"
"""A word for sums in another order, which a whole step has and not a value: a loss of a head's logits in chunks."""

ERROR_LIMIT = 0.01
"""How far the gradients of a bounded plan may be off, relative to their length, if nobody says otherwise."""

_UNITS = {"b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}
_UNITS |= {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "%": 0}


def check_device(device: str | None, asked: str) -> None:
    """Checks that memory of a type of device can be planned.

    Args:
        device: the type; None for whichever there is.
        asked: who was asked for what, as the beginning of a sentence.

    Raises:
        PlanError: there is no such device.
    """
    if device is not None and not accelerator.is_here(device):
        raise PlanError(
            f"{asked} device={device!r:.80}, but memory is planned of 'cpu', and of an accelerator where one is "
            f"({accelerator.kind() or 'none'} here). Leave device= out."
        )


def bytes_in(text: str, plain_peak_nbytes: int) -> float | None:
    """Returns the bytes of a number with a unit, or of a share of a peak such as ``"60%"``; None for any other text."""
    found = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*([a-z%]+)\s*", text.lower()) if text.isascii() else None
    if found is None or found[2] not in _UNITS:
        return None
    amount = float(found[1])
    return amount / 100 * plain_peak_nbytes if found[2] == "%" else amount * _UNITS[found[2]]


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
    asked = f"a plan was asked for with the budget {budget!r:.80}"
    do = "Pass a number of bytes above 0, or a text such as '2GiB', '512 MiB' or '60%' (of the plain step's peak)."
    if isinstance(budget, str):
        found = bytes_in(budget, plain_peak_nbytes)
        if found is None:
            raise PlanError(f"{asked}, but that is no number with a unit. {do}")
        nbytes = int(min(found, LARGEST))
    elif isinstance(budget, int) and not isinstance(budget, bool):
        nbytes = min(budget, LARGEST)
    else:
        raise PlanError(f"{asked}, but that is a {type(budget).__name__}. {do}")
    if nbytes <= 0:
        raise PlanError(f"{asked}, but every step takes some memory above what is held before it. {do}")
    return nbytes


def families(allow: str | Sequence[str]) -> tuple[str, ...]:
    """Returns the words of :data:`ALLOW` that a user's words need: a codec with an error is one of ``"bounded"``.

    Raises:
        PlanError: a word is neither in :data:`ALLOW` nor the name of a codec; or it is :data:`REORDERED`.

    Example:
        >>> families(("recompute", "blockquant4", "zvc"))
        ('lossless', 'recompute', 'bounded')
    """
    if not are_words(allow):
        raise PlanError(
            f"a plan was asked for with allow={allow!r:.80}, but that is no list of words. Pass any of "
            f"{', '.join(ALLOW)}, or names of codecs."
        )
    words = (allow,) if isinstance(allow, str) else tuple(allow)
    for word in words:
        if word == REORDERED:
            raise PlanError(
                f"a plan was asked for with allow={allow!r}, but {REORDERED!r} is a choice of a whole step, which "
                f"backstash.plan alone proves. Leave it out here, and use rewrites.chunked_loss."
            )
        if word not in ALLOW and codec_named(word) is None:
            several = tuple(part.strip() for part in word.split(","))
            meant = nearest(word, ALLOW) if len(several) == 1 else f" Several words are a tuple: allow={several}."
            raise PlanError(
                f"a plan was asked for with allow={allow!r}, but {word!r} is neither a family of choices nor a codec."
                f"{meant} Pass any of {', '.join(ALLOW)}, or names of codecs: "
                f"{', '.join(codecs.names())}, or with their bits, such as blockquant4."
            )
    needed = {word if word in ALLOW else "bounded" if word_has_error(word) else "lossless" for word in words}
    return tuple(word for word in ALLOW if word in needed)


def limit_of_errors(error_limit: float | None, allow: str | Sequence[str]) -> float:
    """Returns the largest error that gradients may have: what the user said, or else a hundredth; 0 for exact plans.

    Args:
        error_limit: what the user said; None for nothing.

    Raises:
        PlanError: it is no number above 0, or a limit was given and nothing that has an error is allowed.
    """
    is_bounded = "bounded" in families(allow)
    if error_limit is None:
        return ERROR_LIMIT if is_bounded else 0.0
    asked = f"a plan was asked for with error_limit={error_limit!r:.80}"
    is_number = isinstance(error_limit, (int, float)) and not isinstance(error_limit, bool)
    if not (is_number and 0 < error_limit <= LARGEST):  # NaN is not
        raise PlanError(
            f"{asked}, but that is how far gradients may be off, relative to their length. Pass a number above 0, such "
            f"as 0.01; for exact gradients leave it out, and 'bounded' out of allow."
        )
    if not is_bounded:
        words = allow if isinstance(allow, str) else ", ".join(allow)
        raise PlanError(
            f"{asked}, but allow={words!r} has nothing that makes an error, so gradients are exact. Add 'bounded' or "
            f"the name of a codec with an error to allow, or leave error_limit out."
        )
    return float(error_limit)


def restrict(profile: StepProfile, allow: str | Sequence[str]) -> StepProfile:
    """Returns the profile with those choices alone that are allowed; to keep a value always is.

    Args:
        allow: words of :data:`ALLOW`, and names of codecs.

    Raises:
        PlanError: a word is neither.
    """
    words = (allow,) if isinstance(allow, str) else tuple(allow)
    families(words)

    def is_allowed(choice: Choice) -> bool:
        if choice.kind == "keep" or (choice.kind == "encode" and any(is_named(word, choice.name) for word in words)):
            return True
        family = choice.kind if choice.kind != "encode" else "lossless"
        return ("bounded" if choice.error else family) in words

    values = (replace(v, choices=tuple(choice for choice in v.choices if is_allowed(choice))) for v in profile.values)
    return replace(profile, values=tuple(values))


def with_choices(profile: StepProfile, allow: tuple[str, ...]) -> StepProfile:
    """Returns the profile with all families of choices that are allowed, measured now if they were not yet.

    Raises:
        PlanError: some were not tried when the profile was taken, and its step is not at hand any more.
    """
    missing = tuple(family for family in families(allow) if family not in profile.tries)
    if not missing:
        return profile
    tries_more = profile.tries_more
    if tries_more is None:
        raise PlanError(
            f"a plan was asked for with allow={', '.join(allow)}, but the profile has tried {', '.join(profile.tries)} "
            f"alone, and it comes from a file, so that {' and '.join(missing)} cannot be tried any more. Take it with "
            f"bs.profile(step, allow={allow!r}), or leave that out."
        )
    return tries_more(missing)
