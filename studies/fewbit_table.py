"""Writes the table of ``codecs.fewbit``: ``python -m studies.fewbit_table > src/backstash/codecs/fewbit/table.py``.

For every function and number of bits: the intervals of the input that minimise the mean square of what the derivative
differs from its mean in the interval, over standard normal inputs; found by dynamic programming on a grid of 1/128.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from backstash.codecs.fewbit.codec import ACTIVATIONS, BITS, grid

CELLS = 128
"""Of the grid, per unit of the input: bounds between intervals are multiples of 1/128."""

Intervals = tuple[list[float], list[float]]
"""The bounds between the intervals, and for each interval the number that stands for it; of what is saved."""

_HEAD = '''"""Intervals for ``codecs.fewbit``, made by studies/fewbit_table.py: do not edit."""

# fmt: off
TABLE: dict[tuple[str, int], tuple[tuple[float, ...], tuple[float, ...]]] = {'''

_TAIL = '''}
# fmt: on
"""By function and bits: the bounds between 2**bits intervals of what is saved, and of each interval the stand-in."""
'''


def cut(slope: Tensor, shares: Tensor, most: int) -> Iterator[list[int]]:
    """The best cuts of a row of cells into 1, 2, ... ``most`` intervals.

    Args:
        slope: float64 [cells].
        shares: float64 [cells], the weight of each.

    Yields:
        For every number of intervals, where they begin, and the number of cells.
    """
    zero = torch.zeros(1, dtype=torch.float64)
    weight, first, second = (torch.cat([zero, (shares * slope**k).cumsum(0)]) for k in range(3))
    mass = (weight[None, :] - weight[:, None]).clamp(min=1e-300)
    sums = first[None, :] - first[:, None]
    cost = (second[None, :] - second[:, None] - sums * sums / mass).clamp(min=0)  # of the cells [row, column)
    cost.masked_fill_(torch.ones_like(cost, dtype=torch.bool).tril(), torch.inf)
    best, begins = cost[0].clone(), []
    yield [0, len(slope)]
    for _ in range(most - 1):
        best, begin = (best[:, None] + cost).min(0)
        begins.append(begin)
        cuts = [len(slope)]
        for begin in reversed(begins):
            cuts.append(int(begin[cuts[-1]]))
        yield [0, *reversed(cuts)]


def intervals(function: str) -> dict[int, Intervals]:
    """For every number of bits, the best intervals of a function."""
    activation, (x, shares) = ACTIVATIONS[function], grid(CELLS)
    slope = activation.slope(activation.saved(x))
    half_cell = float(x[1] - x[0]) / 2
    found = {}
    for cuts in cut(slope, shares, 2 ** max(BITS)):
        count = len(cuts) - 1
        if count.bit_count() == 1 and count.bit_length() - 1 in BITS:
            bounds = activation.saved(x[cuts[1:-1]] - half_cell)
            stand_ins = [_stand_in(function, x[a:b], slope[a:b], shares[a:b]) for a, b in pairwise(cuts)]
            found[count.bit_length() - 1] = bounds.float().tolist(), stand_ins
    return found


def _stand_in(function: str, x: Tensor, slope: Tensor, shares: Tensor) -> float:
    """What is saved of an input among ``x`` whose slope is their mean; of several, that nearest to zero."""
    activation = ACTIVATIONS[function]
    mean = (slope * shares).sum() / shares.sum()
    fine = torch.linspace(float(x[0]), float(x[-1]), 100_001, dtype=torch.float64)
    fine = fine[fine.abs().argsort(stable=True)]
    saved = activation.saved(fine).float().double()  # a number of float32
    return float(saved[(activation.slope(saved) - mean).abs().argmin()])


def text() -> str:
    """The module."""
    lines = [_HEAD]
    for function in ACTIVATIONS:
        for bits, pair in intervals(function).items():
            lines.append(f'    ("{function}", {bits}): (')
            lines += [_tuple(numbers) for numbers in pair]
            lines.append("    ),")
    return "\n".join([*lines, _TAIL])


def _tuple(numbers: Sequence[float]) -> str:
    shortest = ", ".join(str(torch.tensor(number).numpy()) for number in numbers)
    whole = f"({shortest}{',' * (len(numbers) == 1)}),"
    return textwrap.fill(whole, 120, initial_indent=" " * 8, subsequent_indent=" " * 9)


if __name__ == "__main__":
    print(text(), end="")
