"""A look at a few elements, by which codecs decide whether a pass over all of them would pay."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from backstash.ops.reference.bits import bits_of
from backstash.ops.table import kernel


@kernel(None, without={"triton": "the host waits for two numbers, and torch's own kernels find them"})
def sample_counts(x: Tensor, runs: int, run: int, step: int) -> tuple[int, int]:
    """Counts the elements of a sample that are not zero, and its different bit patterns.

    Args:
        x: [n].
        runs, run, step: the sample is ``runs`` runs of ``run`` neighbours, each run ``step`` elements after the last.

    Returns:
        (elements that have any bit set, bit patterns: 1, 2, or 3 for more).
    """
    return counts_of(numbers_of_sample(x, runs, run, step).tolist())  # on a GPU the host waits once, for all of them


def numbers_of_sample(x: Tensor, runs: int, run: int, step: int) -> Tensor:
    """Returns what :func:`sample_counts` is made of, where the tensor is: [4] of int64."""
    bits = bits_of(x.as_strided((runs, run), (step, 1)).reshape(-1))
    least, most = bits.aminmax()
    between = (bits != least).logical_and_(bits != most)
    return torch.stack((torch.count_nonzero(bits), torch.count_nonzero(between), least, most))


def counts_of(numbers: Sequence[int]) -> tuple[int, int]:
    """Returns what :func:`sample_counts` does, given the numbers of the sample on the host."""
    nonzeros, between, least, most = numbers
    return nonzeros, 3 if between else 1 if least == most else 2
