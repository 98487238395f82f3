"""Checks of the arguments of public functions: what was asked, what was got, what to do."""

from __future__ import annotations

import inspect
import os
from collections.abc import Collection, Mapping
from typing import Any, Literal

from torch import nn

LARGEST = 1 << 62
"""The largest number of bytes or steps: kernels count in 64 bits."""


def check_step(step: object, asked: str, example: str = "lambda: criterion(model(x), y).backward()") -> None:
    """Raises an error for a step that cannot be called without arguments.

    Args:
        step: a step, of any type.
        asked: the function that was asked for something.
        example: a step that it takes.

    Raises:
        TypeError: it cannot be called, or takes arguments.
    """
    if not callable(step):
        raise TypeError(
            f"{asked} was asked for the step {_shown(step)}, but that cannot be called. Pass a function without "
            f"arguments that runs one step, such as {example}."
        )
    called = step.forward if isinstance(step, nn.Module) else step
    try:
        signature = inspect.signature(called)
    except (TypeError, ValueError):  # of some functions in C nothing is known
        return
    try:
        signature.bind()
    except TypeError as error:
        raise TypeError(
            f"{asked} was asked for the step {_shown(step)}, but it is called without arguments, and this one has "
            f"{error}. Pass a function that has them at hand, such as {example}."
        ) from None


def check_model(model: object, asked: str, otherwise: str = "") -> None:
    """Raises an error for a model that is no module.

    Args:
        model: a model, of any type.
        asked: the function that was asked for something.
        otherwise: what else may be passed, as the end of a sentence.

    Raises:
        TypeError: it is no module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"{asked} was asked for model={_shown(model)}, but that is no nn.Module. Pass the module that is "
            f"trained{otherwise}."
        )


def check_session(session: object, asked: str) -> None:
    """Raises an error for what opens no Session.

    Raises:
        TypeError: it is not None and no context.
    """
    if session is not None and not (hasattr(type(session), "__enter__") and hasattr(session, "report")):
        raise TypeError(
            f"{asked} was asked for session={_shown(session)}, but that is no Session. Pass the Session that the model "
            f"will be trained under, or None."
        )


def check_count(number: object, name: str, unit: str, asked: str) -> None:
    """Raises an error for what is no number of things, 0 or more.

    Raises:
        TypeError: it is no int.
        ValueError: it is out of range.
    """
    if not isinstance(number, int) or isinstance(number, bool):
        raise TypeError(
            f"{asked} was asked for {name}={_shown(number)}, but that is a number of {unit}. Pass an int, 0 or more."
        )
    if number < 0:
        raise ValueError(
            f"{asked} was asked for {name}={number}, but there are no fewer than 0 {unit}. Pass 0 or more."
        )
    if number > LARGEST:
        raise ValueError(f"{asked} was asked for {name} above 2**62, but there are no so many {unit}. Pass fewer.")


def check_switch(found: object, name: str, asked: str) -> None:
    """Raises an error for what is neither True nor False.

    Raises:
        TypeError: it is something else.
    """
    if not isinstance(found, bool):
        raise TypeError(f"{asked} was asked for {name}={_shown(found)}, but that is a switch. Pass True or False.")


def check_number(found: object, name: str, asked: str, example: float) -> None:
    """Raises an error for what is no number.

    Raises:
        TypeError: it is something else.
    """
    if not isinstance(found, (int, float)) or isinstance(found, bool):
        raise TypeError(
            f"{asked} was asked for {name}={_shown(found)}, but that is a number. Pass one such as {example}."
        )


def check_share(found: object, name: str, asked: str) -> None:
    """Raises an error for what is no share, from 0 to 1.

    Raises:
        TypeError: it is no number.
        ValueError: it is out of range.
    """
    check_number(found, name, asked, 0.5)
    assert isinstance(found, (int, float))
    if not 0 <= found <= 1:
        raise ValueError(f"{asked} was asked for {name}={found}, but that is a share. Pass a number from 0 to 1.")


def check_word(found: object, name: str, asked: str, example: str) -> None:
    """Raises an error for what is no text.

    Raises:
        TypeError: it is something else.
    """
    if not isinstance(found, str):
        raise TypeError(
            f"{asked} was asked for {name}={_shown(found)}, but that is a name. Pass one such as {example!r}."
        )


def is_path(path: object) -> bool:
    """Whether something names a file or a folder: a text without zero bytes, or a path."""
    return isinstance(path, (str, os.PathLike)) and isinstance(text := os.fspath(path), str) and "\0" not in text


def are_words(words: object) -> bool:
    """Whether something is a word or several words."""
    return isinstance(words, str) or (isinstance(words, Collection) and all(isinstance(word, str) for word in words))


def _shown(found: object) -> str:
    return f"{found!r:.80}"


def check_arguments(
    model: object,
    stores: object,
    min_nbytes: object,
    check: object,
    check_limit: object,
    overwrite_gradients: object,
    stop_if_useless: object = None,
) -> None:
    """Raises an error for an argument that a Session could not use later. Takes the arguments of Session, of any type.

    Raises:
        TypeError: an argument is of another type.
        ValueError: a number is out of its range.
    """
    if model is not None and not isinstance(model, nn.Module):
        raise TypeError(
            f"Session was asked to name tensors by model={_shown(model)}, but that is no nn.Module. Pass the module "
            f"that is trained, or None for whichever is called outermost."
        )
    if stores is not None and not isinstance(stores, Mapping):
        raise TypeError(
            f"Session was asked for stores={stores!r}, but that is no mapping. Pass stores by their names, such as "
            f"stores={{'disk': DiskStore(...)}}."
        )
    for name, store in (stores or {}).items():
        if not isinstance(name, str):
            raise TypeError(
                f"Session was asked for stores={{{name!r}: {store!r}}}, but a name is a str. Pass stores by "
                f"their names, such as stores={{'disk': DiskStore(...)}}."
            )
    check_switch(overwrite_gradients, "overwrite_gradients", "Session")
    if stop_if_useless is not None and not isinstance(stop_if_useless, bool):
        raise TypeError(
            f"Session was asked for stop_if_useless={stop_if_useless!r}, but that is a switch. Pass True, False, or "
            f"None to have the policy decide."
        )
    if isinstance(check, str) and check != "full":
        raise ValueError(
            f"Session was asked for check={check!r}, but the only check that has a name is 'full'. Pass that, or a "
            f"number of steps."
        )
    check_count(0 if min_nbytes is None else min_nbytes, "min_nbytes", "bytes", "Session")
    check_count(0 if check == "full" else check, "check", "steps", "Session")
    if not isinstance(check_limit, (int, float)) or isinstance(check_limit, bool):
        raise TypeError(
            f"Session was asked for check_limit={check_limit!r}, but that is a relative error. Pass a number above 0, "
            f"such as 0.3."
        )
    if not check_limit > 0:
        raise ValueError(
            f"Session was asked for check_limit={check_limit}, but an error is never less than 0, and NaN is no limit. "
            f"Pass a number above 0, such as 0.3, or check=0 to measure nothing."
        )


def replanned(plan: Any, replan: Literal["auto"] | None, **options: Any) -> Any:
    """Returns what opens the Sessions in a Session's place whose plan is made anew where steps do not match it.

    Args:
        plan: the Session's policy, which has to be a Plan.
        replan: ``"auto"``, or None for a Session that stays with its policy.
        options: further arguments of the Session.

    Returns:
        A context with a ``report()``; None without ``replan``.

    Raises:
        ValueError: the policy is no plan, or ``replan`` means nothing.
    """
    if replan is None:
        return None
    make = getattr(plan, "replanning", None)
    if replan != "auto" or make is None:
        raise ValueError(
            f"a Session was asked for with replan={replan!r} and the policy {plan!r:.80}, but it takes replan='auto' "
            f"with a Plan as the policy. Pass what backstash.plan(...) has returned, or leave replan= out."
        )
    return make(**options)
