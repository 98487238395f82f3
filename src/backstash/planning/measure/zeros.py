"""A model as after its first updates, for a profile: weights that begin with zeros have small numbers in their place.

Note: [zeros that do not last]
    Many networks begin with weights that are zero: the last convolution of a block, the second factor of a low rank
    update, a gate, a bias. What they compute is zero as well, or the same number everywhere, so an exact codec makes
    next to nothing of it, until the optimizer's first step. A plan that rests on such sizes passes its budget in the
    second step. So a profile is taken with small random numbers in the place of these zeros. Zeros that an op makes,
    such as those of a relu, of dropout or of padding, are still there, and can be counted on.
"""

from __future__ import annotations

from copy import copy

import torch
from torch import Tensor, nn

from backstash.rewrites.state import State

SCALE = 0.02
"""Standard deviation of the numbers in the place of zeros: that of usual initialisations. In bfloat16 it still makes a
difference to what is computed beside it."""

SEED = 0
"""Of these numbers: so that each profile of a model is taken with the same."""


def without_initial_zeros(state: State) -> State:
    """Returns the state of a model in which no weight that is trained is zero (Note: [zeros that do not last]).

    Args:
        state: the model's own state. It is not changed, and it shares the copies of all weights without a zero.
    """
    trained = copy(state)
    trained.contents = dict(state.contents)
    for number, weight in enumerate(state.parameters.values()):
        known = state.contents.get(id(weight))
        if known is not None and _can_be_filled(weight):
            trained.contents[id(weight)] = weight, _filled(known[1], SEED + number)
    return trained


def _can_be_filled(weight: Tensor) -> bool:
    is_plain = type(weight) in (Tensor, nn.Parameter)
    is_number = weight.is_floating_point() or weight.is_complex()
    return is_plain and is_number and weight.requires_grad and weight.element_size() > 1


def _filled(content: Tensor, seed: int) -> Tensor:
    """Returns a weight's numbers with others in the place of zeros; the same tensor if there are none."""
    zeros = content.numel() - int(torch.count_nonzero(content))
    if not zeros:
        return content
    generator = torch.Generator(content.device).manual_seed(seed)
    drawn = torch.randn(zeros, generator=generator, dtype=content.dtype, device=content.device)
    return content.masked_scatter(content == 0, drawn * SCALE)
