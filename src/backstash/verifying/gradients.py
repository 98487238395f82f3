"""Gradients, parameters and buffers of two runs: their checksums, and how far they are from each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from backstash.torch_internals import gradient_of
from backstash.verifying.checksum import Checksum, checksum, numbers_of, why_unchecked
from backstash.verifying.paths import ModulePaths


def gradient_sums(paths: ModulePaths) -> dict[str, int | None]:
    """Checksums of the gradients of all parameters by name; None for a parameter without a gradient."""
    sums: dict[str, Checksum | None] = {}
    for name, parameter in paths.parameters():
        gradient = gradient_of(parameter)
        sums[name] = None if gradient is None or why_unchecked(gradient) is not None else checksum(gradient)
    known = {name: each for name, each in sums.items() if each is not None}
    numbers = dict(zip(known, numbers_of(list(known.values())), strict=True))
    return {name: numbers.get(name) for name in sums}


def gradient_copies(paths: ModulePaths) -> dict[str, Tensor]:
    """Copies of the gradients of all parameters by name, in the memory of the CPU."""
    found = {}
    for name, parameter in paths.parameters():
        gradient = gradient_of(parameter)
        if gradient is not None and why_unchecked(gradient) is None:
            local: Any = gradient.detach()
            local = local.to_local() if hasattr(local, "to_local") else local
            found[name] = local.cpu().clone()
    return found


def state_sums(paths: ModulePaths) -> dict[str, int]:
    """Checksums of all parameters and buffers by name."""
    held = [*paths.parameters(), *paths.buffers()]
    known = {name: checksum(x) for name, x in held if why_unchecked(x) is None and not name.startswith("leaf ")}
    return dict(zip(known, numbers_of(list(known.values())), strict=True))


@dataclass(frozen=True, slots=True)
class ParameterError:
    """How far a parameter's gradient is from that of the reference run.

    Attributes:
        relative: length of the difference as a share of the reference gradient's length.
        differ, elements: how many elements have other bits, and how many there are.
    """

    name: str
    relative: float
    largest: float
    differ: int
    elements: int


def gradient_errors(got: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> list[ParameterError]:
    """Returns the errors of all gradients that differ, the largest share first."""
    found = []
    for name, reference in expected.items():
        gradient = got.get(name)
        if gradient is None or gradient.shape != reference.shape:
            continue
        one, two = reference.to(torch.float64), gradient.to(torch.float64)
        unequal = ~((one == two) | (one.isnan() & two.isnan()))
        if bool(unequal.any()):
            length, difference = float(one.norm()), two - one
            share = float(difference.norm()) / length if length else float("inf")
            found.append(
                ParameterError(name, share, float(difference.abs().max()), int(unequal.sum()), reference.numel())
            )
    return sorted(found, key=lambda each: -each.relative if each.relative == each.relative else float("-inf"))


def unequal_names(
    got: Sequence[Mapping[str, int | None]], expected: Sequence[Mapping[str, int | None]]
) -> list[list[str]]:
    """For each backward pass, the names of the gradients of which one run has other bits than the other, or none."""
    return [
        [name for name in {**two, **one} if one.get(name) != two.get(name)]
        for one, two in zip(got, expected, strict=False)
    ]


def first_unequal(got: Sequence[Mapping[str, int | None]], expected: Sequence[Mapping[str, int | None]]) -> int | None:
    """The number of the first backward pass after which gradients differ, or None."""
    return next((place for place, names in enumerate(unequal_names(got, expected)) if names), None)


def missing_names(got: Sequence[Mapping[str, int | None]], expected: Sequence[Mapping[str, int | None]]) -> list[str]:
    """Names of parameters that have a gradient in the second run's passes, and none in the first's."""
    found: dict[str, None] = {}
    for one, two in zip(got, expected, strict=False):
        for name, total in two.items():
            if total is not None and one.get(name) is None:
                found[name] = None
    return list(found)
