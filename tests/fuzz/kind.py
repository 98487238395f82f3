"""The kind of a statement, and short ways to write down several kinds that have no special properties."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

HOLE = re.compile(r"\{(\w+)\}")
OPERANDS = ("a", "b")
GIVEN = ("out", "all", "leaf", *OPERANDS)
"""Holes that are no constants."""

FORWARD, BETWEEN, BACKWARD, SETUP = ("forward",), ("forward", "between"), ("backward",), ("setup",)
BEFORE = ("before",)
TRAINED = ("linear", "conv", "norm", "layer_norm")


@dataclass(frozen=True)
class Kind:
    """One kind of statement.

    Attributes:
        name: its name in a program's text.
        feature: the group that it belongs to, by which it is weighted and switched off.
        code: Python code with holes. A block's code ends in a colon.
        where: sections in which it may stand: ``setup``, ``before`` (each step), ``forward``, ``between`` (forward and
            backward, or two backward passes), ``backward`` (operand ``a`` is then a loss). Empty: the generator places
            it by itself.
        choices: constants by the name of their hole.
        each: for a kind with any number of operands, the code of each one; they are joined into the hole ``{all}``.
        join: what stands between them.
        tracked: operand ``a`` has to require a gradient.
        strict: fails on operands of different types, so no bfloat16 value may be its operand.
        lowers: returns bfloat16 under autocast.
        exact: returns float32 whatever it is given.
        detaches: returns a value that requires no gradient.
        trains: returns a value that requires a gradient, whatever it is given.
    """

    name: str
    feature: str
    code: str
    where: tuple[str, ...] = ("forward",)
    choices: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    each: str = ""
    join: str = ", "
    tracked: bool = False
    strict: bool = False
    lowers: bool = False
    exact: bool = False
    detaches: bool = False
    trains: bool = False

    @property
    def holes(self) -> list[str]:
        """Names of the holes, in the order of the code."""
        return list(dict.fromkeys(HOLE.findall(self.code)))

    @property
    def operands(self) -> int:
        """How many operands it takes, without those of ``each``."""
        return sum(name in self.holes for name in OPERANDS)

    @property
    def assigns(self) -> bool:
        """Whether it assigns a name."""
        return "out" in self.holes

    @property
    def is_block(self) -> bool:
        """Whether other statements stand inside it."""
        return self.code.endswith(":")


def values(feature: str, /, **codes: str) -> list[Kind]:
    """Kinds of the forward pass without further properties, as the expression that they assign."""
    return [Kind(name, feature, "{out} = " + code) for name, code in codes.items()]


def changes(feature: str, where: tuple[str, ...], /, **codes: str) -> list[Kind]:
    """Kinds that assign nothing."""
    return [Kind(name, feature, code, where) for name, code in codes.items()]


def hooks(feature: str, /, **codes: str) -> list[Kind]:
    """Kinds that need a value with a gradient."""
    return [Kind(name, feature, code, tracked=True) for name, code in codes.items()]
