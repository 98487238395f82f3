"""The numbers that a step leaves behind, and the first difference between those of two steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from backstash.testing.bits import equal_bits

Numbers = dict[str, Tensor | None]
"""Copies of tensors and numbers by what they are, such as ``"the gradient of 0.weight"``; None for a missing one."""


def leaves(name: str, value: object) -> Iterator[tuple[str, object]]:
    """Yields the leaves of nested tuples, lists and mappings, each with the path to it, which begins with ``name``."""
    if isinstance(value, (tuple, list)):
        for position, item in enumerate(value):
            yield from leaves(f"{name}[{position}]", item)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from leaves(f"{name}[{key!r}]", item)
    else:
        yield name, value


def numbers_in(name: str, value: object) -> Numbers:
    """Copies of every tensor and number in nested tuples, lists and mappings, by the path to it."""
    numbers: Numbers = {}
    for path, leaf in leaves(name, value):
        if isinstance(leaf, Tensor):
            numbers[path] = dense_copy(leaf)
        elif isinstance(leaf, (bool, int, float)):
            numbers[path] = torch.tensor(leaf, dtype=torch.float64)
    return numbers


def dense_copy(x: Tensor) -> Tensor:
    """A copy of ``x`` without its graph. A sparse tensor becomes dense."""
    x = x.detach()
    return x.clone() if x.layout is torch.strided else x.to_dense()


def first_difference(plain: Numbers, other: Numbers) -> str | None:
    """Returns the first difference between the bits of two steps in words, or None if there is none."""
    if plain.keys() != other.keys():
        return f"the step gives other results: {some_of(sorted(plain.keys() ^ other.keys()))}"
    for name, expected in plain.items():
        got = other[name]
        if (expected is None) != (got is None):
            return f"{name} is {'there' if expected is None else 'missing'}"
        if expected is not None and got is not None and not equal_bits(expected, got):
            return f"{name} differs{_how_far(expected, got)}"
    return None


def _how_far(a: Tensor, b: Tensor) -> str:
    if a.shape != b.shape or a.dtype != b.dtype or not a.dtype.is_floating_point:
        return ""
    return f" by up to {float((a.double() - b.double()).abs().max()):.3g}"


def some_of(names: Sequence[str]) -> str:
    """The first three names, and how many more there are."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
