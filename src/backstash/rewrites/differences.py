"""The numbers that a step leaves behind, and the first difference between those of two steps."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from backstash.bits import equal_bits

StepNumbers = dict[str, Tensor | None]
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


def numbers_in(name: str, value: object) -> StepNumbers:
    """Copies of every tensor and number in nested tuples, lists and mappings, by the path to it."""
    numbers: StepNumbers = {}
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


def first_difference(plain: StepNumbers, other: StepNumbers) -> str | None:
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


def largest_distance(plain: StepNumbers, other: StepNumbers) -> tuple[float, str]:
    """Returns the largest relative distance between the numbers of two steps, and where it is.

    A distance is the length of the difference over the plain tensor's own length. A gradient that is small beside the
    others may be nothing but rounding, as that of a bias in front of a batch norm is. So its difference counts over a
    hundredth of the length that it would have if it were as large as the gradients are on average, where that is more.

    Returns:
        The distance, infinity where something is missing or an integer differs; and the name of the tensor.
    """
    if plain.keys() != other.keys():
        return math.inf, f"the results {some_of(sorted(plain.keys() ^ other.keys()))}"
    gradients = [x for name, x in plain.items() if name.startswith("the gradient") and x is not None]
    count = sum(x.numel() for x in gradients)
    mean_square = sum(float(x.double().square().sum()) for x in gradients) / max(count, 1)
    worst, where = 0.0, ""
    for name, expected in plain.items():
        got = other[name]
        if expected is None or got is None:
            far = 0.0 if expected is got else math.inf
        elif expected.shape != got.shape or not expected.is_floating_point():
            far = 0.0 if equal_bits(expected, got) else math.inf
        else:
            least = 0.01 * math.sqrt(mean_square * expected.numel()) if name.startswith("the gradient") else 0.0
            off, size = float((got - expected).double().norm()), max(float(expected.double().norm()), least)
            far = 0.0 if equal_bits(expected, got) else off / size if size else math.inf
        if not far <= worst:  # also where it is no number
            worst, where = (far, name) if far == far else (math.inf, name)
    return worst, where


def rounding_limit(numbers: Iterable[Tensor | None], computed: torch.dtype | None = None) -> float:
    """Returns the distance that rounding explains: the square root of the coarsest ``eps``.

    Args:
        numbers: those that a step leaves behind.
        computed: the coarsest dtype in which the step computes, which may be coarser than those of the numbers.
    """
    dtypes = [x.dtype for x in numbers if x is not None and x.is_floating_point()]
    return math.sqrt(max(torch.finfo(dtype).eps for dtype in [*dtypes, *([] if computed is None else [computed])]))


def check_tolerance(tolerance: object, asked_by: str, error: type[Exception]) -> None:
    """Raises an error for a tolerance that is neither a distance nor None."""
    is_number = isinstance(tolerance, (int, float)) and not isinstance(tolerance, bool)
    if tolerance is not None and not (is_number and 0.0 <= tolerance < math.inf):  # type: ignore[operator]
        raise error(
            f"{asked_by} was asked for tolerance={tolerance!r:.80}, but it is the largest relative distance between "
            f"the numbers of two steps: 0 or more, and finite."
        )


@dataclass(frozen=True)
class Beyond:
    """Numbers of two steps that are further apart than rounding explains.

    Attributes:
        where: what they are.
        distance: how far they are apart, relative to their length.
        limit: what rounding explains.
    """

    where: str
    distance: float
    limit: float


def beyond_another_order(plain: StepNumbers, other: StepNumbers, computed: torch.dtype | None) -> Beyond | None:
    """Returns what another order of a loss's sums does not explain, or None if it explains all distances.

    Where products round to a coarser dtype than that of the gradients, each gradient may be as far away as that
    dtype's rounding explains. A loss in another order leaves the forward pass alone, so what the step returns may
    only round once more. And roundings of millions of numbers have no common direction: all gradients together are
    hardly further away than one rounding. A loss that is off by a twentieth, or some rows that should not count, are
    found so.
    """
    own = rounding_limit(plain.values())
    limit = rounding_limit(plain.values(), computed)
    if plain.keys() != other.keys() or computed is None or limit <= own:
        distance, where = largest_distance(plain, other)
        return Beyond(where, distance, limit) if distance > limit else None
    eps = torch.finfo(computed).eps
    gradients = [name for name in plain if name.startswith("the gradient")]
    for names, most in ((plain.keys() - gradients, max(own, 2.0 * eps)), (gradients, limit)):
        distance, where = largest_distance({n: plain[n] for n in names}, {n: other[n] for n in names})
        if distance > most:
            return Beyond(where, distance, most)
    together, most = _distance_together([(plain[n], other[n]) for n in gradients]), max(own, 4.0 * eps)
    return Beyond("the vector of all gradients", together, most) if together > most else None


def _distance_together(pairs: Sequence[tuple[Tensor | None, Tensor | None]]) -> float:
    """Returns how far all tensors are apart, relative to the length of the first of each pair."""
    off = size = 0.0
    for expected, got in pairs:
        if expected is None or got is None:
            continue
        length = float(expected.double().norm())
        size += length**2 if math.isfinite(length) else 0.0
        off += 0.0 if equal_bits(expected, got) else float((got.double() - expected.double()).norm()) ** 2
    return math.sqrt(off / size) if off and size else 0.0


def _how_far(a: Tensor, b: Tensor) -> str:
    if a.shape != b.shape or a.dtype != b.dtype or not a.dtype.is_floating_point:
        return ""
    return f" by up to {float((a.double() - b.double()).abs().max()):.3g}"


def some_of(names: Sequence[str]) -> str:
    """The first three names, and how many more there are."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
