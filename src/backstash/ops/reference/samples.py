"""A look at a few elements, by which codecs decide whether a pass over all of them would pay."""

from __future__ import annotations

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
    bits = bits_of(x.as_strided((runs, run), (step, 1)).reshape(-1))
    differs = bits != bits[0]
    second = bits.take(differs.int().argmax())  # the first one again where all are equal
    counts = torch.stack((torch.count_nonzero(bits), differs.any().long(), (differs & (bits != second)).any().long()))
    nonzeros, has_second, has_third = counts.tolist()  # on a GPU the host waits once, for all of them
    return nonzeros, 1 + has_second + has_third
