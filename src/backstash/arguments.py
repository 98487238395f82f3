"""Checks of the arguments of a Session."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from torch import nn

from backstash.stores import Store


def check_arguments(
    model: object, stores: object, min_nbytes: object, check: object, check_limit: object, overwrite_gradients: object
) -> None:
    """Raises an error for an argument that a Session could not use later. Takes the arguments of Session, of any type.

    Raises:
        TypeError: an argument is of another type.
        ValueError: a number is out of its range.
    """
    if model is not None and not isinstance(model, nn.Module):
        raise TypeError(
            f"Session was asked to name tensors by model={model!r}, but that is no nn.Module. Pass the module that is "
            f"trained, or None for whichever is called outermost."
        )
    if stores is not None and not isinstance(stores, Mapping):
        raise TypeError(
            f"Session was asked for stores={stores!r}, but that is no mapping. Pass stores by their names, such as "
            f"stores={{'disk': DiskStore(...)}}."
        )
    for name, store in (stores or {}).items():
        if not isinstance(name, str) or isinstance(store, type) or not isinstance(store, Store):
            raise TypeError(
                f"Session was asked for stores={{{name!r}: {store!r}}}, but a name is a str, and a store has the "
                f"methods of backstash.stores.Store. Pass one such as HostStore()."
            )
    if not isinstance(overwrite_gradients, bool):
        raise TypeError(
            f"Session was asked for overwrite_gradients={overwrite_gradients!r}, but that is a switch. Pass True or "
            f"False."
        )
    if isinstance(check, str) and check != "full":
        raise ValueError(
            f"Session was asked for check={check!r}, but the only check that has a name is 'full'. Pass that, or a "
            f"number of steps."
        )
    numbers = [
        ("min_nbytes", 0 if min_nbytes is None else min_nbytes, "bytes"),
        ("check", 0 if check == "full" else check, "steps"),
    ]
    for argument, number, unit in numbers:
        if not isinstance(number, int) or isinstance(number, bool):
            raise TypeError(
                f"Session was asked for {argument}={number!r}, but that is a number of {unit}. Pass an int, 0 or more."
            )
        if number < 0:
            raise ValueError(
                f"Session was asked for {argument}={number}, but there are no fewer than 0 {unit}. Pass 0 or more."
            )
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
