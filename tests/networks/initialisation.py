"""Starting weights that the networks share."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor, nn

Initialiser = Callable[[Tensor], object]

kaiming_fan_out: Initialiser = partial(nn.init.kaiming_normal_, mode="fan_out", nonlinearity="relu")
"""Normal, for ReLU, scaled by the outputs of a layer: ResNet's and VGG's convolutions."""

kaiming_fan_in: Initialiser = partial(nn.init.kaiming_uniform_, mode="fan_in", nonlinearity="relu")
"""Uniform, for ReLU, scaled by the inputs of a layer: deep networks without batch normalisation."""

kaiming_fan_in_normal: Initialiser = partial(nn.init.kaiming_normal_, mode="fan_in", nonlinearity="relu")
"""Normal, for ReLU, scaled by the inputs of a layer: DenseNet's convolutions."""


def initialise(module: nn.Module, convolution: Initialiser, linear: Initialiser | None = None) -> None:
    """Fills the weights of `module` in place and sets the biases beside them to zero.

    Args:
        module: The network, or a part of one.
        convolution: Fills the weight of each `nn.Conv2d`.
        linear: Fills the weight of each `nn.Linear`; None leaves linear layers as PyTorch made them.
    """
    for layer in module.modules():
        if isinstance(layer, nn.Conv2d):
            convolution(layer.weight)
        elif isinstance(layer, nn.Linear) and linear is not None:
            linear(layer.weight)
        else:
            continue
        if layer.bias is not None:
            nn.init.zeros_(layer.bias)
