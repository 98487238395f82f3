"""Images of convolutions, which Inductor lays out in channels last on a CPU, whatever the program's order is.

Planes lie by channel, so what a compiler writes to decode them in the loops of a batch norm's backward reads bytes that
lie far apart, several times each. One call of a kernel is faster.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, fx

from backstash.integrations.compile.layout import have_same_sizes


def convolved_images(graph: fx.Graph) -> list[Tensor]:
    """What convolutions on a CPU have read, and the gradients of what they have returned, in a backward graph."""
    target = torch.ops.aten.convolution_backward.default
    calls = graph.find_nodes(op="call_function", target=target)
    read: list[Any] = [argument for node in calls for argument in node.args[:2]]
    found = [x for argument in read if (x := argument.meta["val"]).device.type == "cpu"]
    return list({tuple(map(str, x.shape)): x for x in found}.values())


def looks_convolved(x: Tensor, images: Iterable[Tensor]) -> bool:
    """Whether it has the sizes of one of these images."""
    return x.dim() == 4 and any(have_same_sizes(image.shape, x.shape) for image in images)
