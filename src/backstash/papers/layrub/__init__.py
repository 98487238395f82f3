"""Layrub (TACO 2018): the inputs of all but the outermost layers are moved."""

from __future__ import annotations

from backstash.papers.layrub.policy import Layrub, layrub
from backstash.policies import publish, register

__all__ = ["Layrub", "layrub"]

publish(Layrub=Layrub, layrub=layrub)

register(
    "layrub",
    Layrub,
    is_exact=True,
    does="moves the inputs of all but the outermost layers, and masks (Layrub, TACO 2018)",
    use_when="you compare with Layrub's paper",
)
