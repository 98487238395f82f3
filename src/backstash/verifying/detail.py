"""Two values element by element: how many differ, how far, and in which way. For a run that looks into a difference."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

_SAME_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def compared(forward: Tensor, backward: Tensor) -> dict[str, Any]:
    """Returns how the value that backward got differs from forward's.

    Returns:
        A dict with ``elements`` and ``differ`` (how many), ``first`` (the index of the first), ``forward`` and
        ``backward`` (its values), ``relative`` (length of the difference as a share of forward's), ``ulps`` (the
        largest distance in steps of the dtype, of floating dtypes), ``way``: ``"order"`` (the same elements in another
        order), ``"blank"`` (all zero, or NaN that was not there), ``"rounded"`` (each element is near its own), or
        ``""``.
    """
    if forward.shape != backward.shape:
        if forward.numel() == backward.numel():
            found = compared(forward.reshape(-1), backward.reshape(-1))
            return found if found["differ"] else {**found, "way": "shape"}
        return {"elements": forward.numel(), "differ": forward.numel(), "way": "shape"}
    one, two = (
        each.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1) for each in (forward, backward)
    )
    if one.is_complex():
        one, two = torch.view_as_real(one).reshape(-1), torch.view_as_real(two).reshape(-1)
    if one.dtype != two.dtype:
        two_back = two.to(one.dtype)
        return {**compared(one, two_back), "dtype": f"{two.dtype}".removeprefix("torch.")}
    unequal = _bits(one) != _bits(two)
    count = int(unequal.sum())
    found = {"elements": one.numel(), "differ": count, "way": ""}
    if not count:
        return found
    first = int(unequal.to(torch.uint8).argmax())
    found["first"] = [int(place) for place in np.unravel_index(first % forward.numel(), tuple(forward.shape))]
    found["forward"], found["backward"] = one[first].item(), two[first].item()
    exact, got = one.to(torch.float64), two.to(torch.float64)
    length = float(exact.norm())
    found["relative"] = float((got - exact).norm()) / length if length else float("inf")
    if one.dtype.is_floating_point:
        found["ulps"] = _ulps(one, two)
    found["way"] = _way(one, two, exact, got)
    return found


def _bits(x: Tensor) -> Tensor:
    return x if x.dtype == torch.bool else x.view(_SAME_SIZE[x.element_size()])


def _way(one: Tensor, two: Tensor, exact: Tensor, got: Tensor) -> str:
    if one.numel() > 1 and torch.equal(_bits(one).sort().values, _bits(two).sort().values):
        return "order"
    if not bool(got.any()) or (bool(got.isnan().any()) and not bool(exact.isnan().any())):
        return "blank"
    far = (got - exact).abs() > exact.abs() * 2.0**-3 + 1e-6 * exact.abs().max()
    return "rounded" if one.dtype.is_floating_point and not bool(far.any()) else ""


def _ulps(one: Tensor, two: Tensor) -> int | None:
    """The largest distance of two finite numbers, in steps of their dtype."""
    finite = one.isfinite() & two.isfinite()
    if one.element_size() == 8 or not bool(finite.any()):
        return None

    def steps(x: Tensor) -> Tensor:
        bits = x[finite].view(_SAME_SIZE[x.element_size()]).to(torch.int64)
        lowest = -(1 << (8 * x.element_size() - 1))
        return torch.where(bits < 0, lowest - bits, bits)

    return int((steps(one) - steps(two)).abs().max())
