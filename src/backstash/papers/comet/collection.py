"""The readings that a collecting step takes from each layer's backward."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from backstash.papers.comet.layers import Linear
from backstash.policies.base import hide_from_dynamo, no_torch_function


@dataclass(slots=True, weakref_slot=True)
class LayerReading:
    """The numbers of a layer in a collecting step. If a module runs twice they add up, as its weight gradients do.

    Attributes:
        shares: the input's share of elements that are not zero, ``[channels]``.
        spread: how large the input's numbers are (see layers.Linear.spread).
        pattern: which of a sample of the input's elements are not zero (see layers.pattern).
        coarsest: no larger bound is allowed.
        limit: the bound with which the input's gradient is off by its share ``sigma``; infinity if it is not off.
        energy: 3 / bound**2 times the variance of the weight gradient's error, ``[output channels]``; None until
            backward has run.
        lengths: the sum of the mean magnitudes of all calls' weight gradients.
        summed, apart: the sums of samples of these gradients, and of their magnitudes.
        accumulated: mean magnitude of what the latest backward pass has left in ``parameter.grad``; None before that.
        scale: by how much the optimizer's gradient is another one than those of the passes that it consists of, and how
            many these are; None until its step (Note: [gradients on the way to the optimizer] in momentum.py).
        error: mean square of the weight gradient's difference from the exact gradient; None if it was not compared.
    """

    parameter: nn.Parameter
    shares: Tensor
    spread: Tensor
    pattern: Tensor
    coarsest: Tensor | float = math.inf
    limit: Tensor | float = math.inf
    energy: Tensor | None = None
    lengths: Tensor | float = 0.0
    summed: Tensor | float = 0.0
    apart: Tensor | float = 0.0
    accumulated: Tensor | None = None
    scale: Tensor | None = None
    error: Tensor | float | None = None
    cosine: Tensor | float = 1.0

    @property
    def magnitude(self) -> Tensor | float:
        """Mean magnitude of the weight gradient, of which calls of the layer may have cancelled out the most."""
        if not isinstance(self.summed, Tensor) or not isinstance(self.apart, Tensor):
            return 0.0
        apart = self.apart.sum()
        return self.lengths * torch.where(apart == 0, 1.0, self.summed.abs().sum() / apart)

    def add(self, weight_grad: Tensor) -> None:
        """A call of the layer has made that gradient."""
        self.lengths = self.lengths + weight_grad.abs().mean(dtype=torch.float32)
        found = sample_of(weight_grad)
        self.summed, self.apart = self.summed + found, self.apart + found.abs()

    def listen(self) -> Callable[[], None]:
        """Has backward passes tell what they leave in ``parameter.grad``, until the returned function is called."""
        this = weakref.ref(self)

        def accumulate(parameter: Tensor) -> None:
            reading, grad = this(), parameter.grad
            # A distributed tensor would wait for other processes, which may not collect in this step.
            if reading is not None and type(grad) is Tensor and not grad.is_sparse:
                with no_torch_function(), torch.no_grad():
                    reading.accumulated = grad.abs().mean(dtype=torch.float32)

        hide_from_dynamo(accumulate, and_all_below=True)
        end: Callable[[], None] = self.parameter.register_post_accumulate_grad_hook(accumulate).remove
        return end

    def keep_below(self, bound: Tensor) -> None:
        """Allow no bound above the given bound."""
        self.coarsest = smaller(self.coarsest, bound)


def sample_of(x: Tensor) -> Tensor:
    """A copy of some elements, [n], the same ones of all tensors of a shape: up to 64 runs of 32 neighbours."""
    flat = x.detach().flatten()
    runs = flat.numel() // 32
    if runs > 32:
        flat = flat[: runs * 32].view(runs, 32)[:: runs // 32].flatten()
    return flat.to(torch.float32, copy=True)


def smaller(known: Tensor | float, found: Tensor) -> Tensor:
    """Returns the smaller one, or NaN if one is that. Copies no number to a device, for which the host would wait."""
    return torch.minimum(known, found) if isinstance(known, Tensor) else found.clamp(max=known)


def collector(
    reading: LayerReading, layer: Linear, sigma: float, place: int, exact: Tensor | None
) -> Callable[[Any, Any], None]:
    """Returns a hook for the layer's autograd node, which adds the node's gradients to the reading when it has run.

    Args:
        sigma: the wanted deviation, as a share of the gradient.
        place: the position of the weight among the node's inputs.
        exact: a copy of the exact input, to compare the weight gradient with that of the exact input; None: not
            compared.
    """

    def collect(outgoing: Sequence[Tensor | None], incoming: Sequence[Tensor | None]) -> None:
        grad, weight_grad = incoming[0], outgoing[place]
        if grad is None or weight_grad is None:
            return
        with no_torch_function(), torch.no_grad():
            grad, weight_grad, weight = grad.detach(), weight_grad.detach(), reading.parameter.detach()
            energy = layer.energy(grad, weight)
            reading.energy = energy if reading.energy is None else reading.energy + energy
            reading.add(weight_grad)
            coarsest = layer.coarsest(sigma, outgoing[0], weight_grad, weight)
            if coarsest is not None:
                reading.keep_below(coarsest)
                reading.limit = smaller(reading.limit, coarsest)
            if exact is not None:
                truth = layer.weight_gradient(grad, exact, torch.empty_like(weight_grad)).float()
                error = (weight_grad.float() - truth).square().mean()
                cosine = torch.cosine_similarity(weight_grad.float().flatten(), truth.flatten(), dim=0)
                cosine = torch.where(error == 0, 1.0, cosine)  # which is 0 of two gradients without a direction
                reading.error = error if reading.error is None else reading.error + error
                reading.cosine = smaller(reading.cosine, cosine)

    hide_from_dynamo(collect, and_all_below=True)
    return collect
