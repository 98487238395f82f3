"""A look at a few elements, by which codecs decide whether a pass over all of them would pay."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from backstash.ops.bits import bits_of
from backstash.ops.registration import kernel


@kernel(None, without={"triton": "the host waits for its numbers: sample_numbers finds them without a wait"})
def sample_counts(x: Tensor, runs: int, run: int, step: int) -> tuple[int, int]:
    """Counts the elements of a sample that are not zero, and its different bit patterns.

    Args:
        x: [n].
        runs, run, step: the sample is ``runs`` runs of ``run`` neighbours, each run ``step`` elements after the last.

    Returns:
        (elements that have any bit set, bit patterns: 1, 2, or 3 for more).
    """
    return counts_of(sample_numbers(x, runs, run, step).tolist())


@kernel(
    "(Tensor x, int runs, int run, int step) -> Tensor",
    lambda x, runs, run, step: x.new_empty(4, dtype=torch.int64),
    without={"native": "the host reads its own memory at once: sample_counts"},
)
def sample_numbers(x: Tensor, runs: int, run: int, step: int) -> Tensor:
    """Returns what :func:`sample_counts` is made of, where the tensor is.

    Args:
        x, runs, run, step: as there; at most 4,096 elements.

    Returns:
        int64 [4]: how many bit patterns are not zero, how many lie between the least and the most, the least and the
        most, as integers.
    """
    if not runs * run:
        return x.new_zeros(4, dtype=torch.int64)
    bits = bits_of(x.as_strided((runs, run), (step, 1)).reshape(-1))
    least, most = bits.aminmax()
    between = (bits != least).logical_and_(bits != most)
    return torch.stack((torch.count_nonzero(bits), torch.count_nonzero(between), least, most))


def counts_of(numbers: Sequence[int]) -> tuple[int, int]:
    """Returns what :func:`sample_counts` does, given the numbers of :func:`sample_numbers` on the host."""
    nonzeros, between, least, most = numbers
    return nonzeros, 3 if between else 1 if least == most else 2
