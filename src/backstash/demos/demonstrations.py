"""The table of demonstrations: networks, the ways to train them, and the unit in which a user counts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from backstash.demos.networks import Bottleneck, Decoder, Llama, Spiking, UNet, add_lora, resnet

Training = Literal["full", "adapters"]
"""Which weights are trained: all of them, or those of LoRA adapters alone."""

Saver = Literal["plain", "checkpoint", "lossless", "disk", "plan"]

Step = Callable[[], object]


@dataclass(frozen=True)
class Way:
    """A way to train.

    Attributes:
        label: as people say it.
        saver: what treats the tensors that backward reads. A disk is the one with the folder of temporary files.
        training: which weights are trained.
    """

    label: str
    saver: Saver
    training: Training = "full"


PLAIN = Way("plain PyTorch", "plain")
CHECKPOINT = Way("checkpoint of every block", "checkpoint")
LOSSLESS = Way("lossless", "lossless")
DISK = Way("moved to a disk", "disk")
PLAN = Way("a plan", "plan")


@dataclass(frozen=True)
class Demonstration:
    """A training whose size can be chosen.

    Attributes:
        name: of the command.
        title: what is trained.
        unit: what its size counts, in the plural.
        nbytes: the memory that a step may take above weights, gradients and the optimizer's state.
        start: the smallest size that is tried.
        grain: the steps between sizes.
        power: how its peak grows with the size: 3 for the edge of a volume.
        ways: the ways to train it, plain PyTorch first.
        make: returns the model and the step that trains it at a size, as they are in plain PyTorch.
        blocks: the classes of modules that a checkpoint is put around.
        most: the largest size that is tried, ``start`` and a multiple of ``grain``; None for no limit.
    """

    name: str
    title: str
    unit: str
    nbytes: int
    start: int
    grain: int
    power: int
    ways: tuple[Way, ...]
    make: Callable[[int, Training], tuple[nn.Module, Step]]
    blocks: tuple[type[nn.Module], ...] = ()
    most: int | None = None

    def build(self, way: Way, size: int) -> tuple[nn.Module, Step]:
        """Returns the model and the step, forward and backward, without a Session.

        Args:
            way: the way to train; of its savers the checkpoints are the model's own.
            size: in the demonstration's unit.
        """
        model, step = self.make(size, way.training)
        if way.saver == "checkpoint":
            for module in model.modules():
                if isinstance(module, self.blocks):
                    module.forward = partial(checkpoint, module.forward, use_reentrant=False)  # type: ignore[method-assign]
        return model, step


def _images(count: int, edge: int) -> tuple[Any, Any]:
    """Noise [count, 3, edge, edge] and classes [count]."""
    images = torch.randn(count, 3, edge, edge).to(memory_format=torch.channels_last)
    return images, torch.randint(10, (count,))


def _resnet50(size: int, training: Training) -> tuple[nn.Module, Step]:
    model: nn.Module = resnet((3, 4, 6, 3))
    model = model if training == "full" else add_lora(model)
    images, classes = _images(size, 112)
    return model, lambda: functional.cross_entropy(model(images), classes).backward()


def _language_model(tokens: int, layers: int, size: int, training: Training) -> tuple[nn.Module, Step]:
    model: nn.Module = Llama(layers, 256, 4, 1024)
    model = model if training == "full" else add_lora(model)
    words = torch.randint(1024, (size, tokens) if tokens else (1, size))
    return model, lambda: model(words).backward()


def _unet(size: int, training: Training) -> tuple[nn.Module, Step]:
    model = UNet(8)
    volume = torch.randn(1, 1, size, size, size)
    inside = (volume > 0).float()
    return model, lambda: functional.binary_cross_entropy_with_logits(model(volume), inside).backward()


def _deep(size: int, training: Training) -> tuple[nn.Module, Step]:
    blocks = (size - 2) // 3
    model = resnet((blocks // 3, blocks // 3, blocks - 2 * (blocks // 3)), width=16)
    images, classes = _images(4, 96)
    return model, lambda: functional.cross_entropy(model(images), classes).backward()


def _spiking(size: int, training: Training) -> tuple[nn.Module, Step]:
    model = Spiking(16, size)
    images, classes = _images(8, 32)
    return model, lambda: functional.cross_entropy(model(images), classes).backward()


_WAYS = (PLAIN, LOSSLESS, CHECKPOINT, PLAN)
_ADAPTED = (
    Way("all weights, plain PyTorch", "plain"),
    Way("LoRA, plain PyTorch", "plain", "adapters"),
    Way("LoRA, lossless", "lossless", "adapters"),
    Way("LoRA, checkpoint of every block", "checkpoint", "adapters"),
    Way("LoRA, a plan", "plan", "adapters"),
)

_MIB = 1 << 20

DEMONSTRATIONS = {
    each.name: each
    for each in (
        Demonstration(
            name="lora",
            title="LoRA adapters of a ResNet-50",
            unit="images of 112 x 112",
            nbytes=128 * _MIB,
            start=1,
            grain=1,
            power=1,
            ways=_ADAPTED,
            make=_resnet50,
            blocks=(Bottleneck,),
        ),
        Demonstration(
            name="lora-lm",
            title="LoRA adapters of a small Llama",
            unit="texts of 128 tokens",
            nbytes=128 * _MIB,
            start=1,
            grain=1,
            power=1,
            ways=_ADAPTED,
            make=partial(_language_model, 128, 8),
            blocks=(Decoder,),
        ),
        Demonstration(
            name="llama",
            title="The longest sequence of a small Llama",
            unit="tokens",
            nbytes=128 * _MIB,
            start=128,
            grain=64,
            power=1,
            ways=_WAYS,
            make=partial(_language_model, 0, 16),
            blocks=(Decoder,),
        ),
        Demonstration(
            name="unet",
            title="The largest volume of a U-Net",
            unit="voxels along each edge",
            nbytes=128 * _MIB,
            start=32,
            grain=8,
            power=3,
            ways=_WAYS,
            make=_unet,
            blocks=(nn.Sequential,),
        ),
        Demonstration(
            name="deep",
            title="The deepest ResNet of up to 1,517 layers",
            unit="layers",
            nbytes=96 * _MIB,
            start=47,
            grain=30,
            power=1,
            ways=(PLAIN, LOSSLESS, CHECKPOINT, DISK, PLAN),
            make=_deep,
            blocks=(Bottleneck,),
            most=1517,  # the depth that Layrub's paper reached; a disk has room for more
        ),
        Demonstration(
            name="spiking",
            title="The most time steps of a spiking network",
            unit="time steps",
            nbytes=128 * _MIB,
            start=8,
            grain=4,
            power=1,
            ways=(PLAIN, LOSSLESS, PLAN),
            make=_spiking,
        ),
    )
}
"""By name."""
