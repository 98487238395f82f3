"""The networks that tests, benchmarks and studies train: ordinary modules, by name.

None of them knows of backstash. `build` makes one, `NETWORKS` says what there is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import nn

from tests.networks.alexnet import alexnet
from tests.networks.densenet import densenet121
from tests.networks.googlenet import googlenet
from tests.networks.mobilenet import mobilenet_v2
from tests.networks.nin import nin
from tests.networks.overfeat import overfeat
from tests.networks.resnet import BlockName, resnet, resnet_cifar, wide_resnet
from tests.networks.squeezenet import squeezenet1_0, squeezenet1_1
from tests.networks.vgg import vgg16, vgg_small

__all__ = [
    "NETWORKS",
    "Network",
    "alexnet",
    "build",
    "densenet121",
    "googlenet",
    "mobilenet_v2",
    "nin",
    "overfeat",
    "resnet",
    "resnet_cifar",
    "squeezenet1_0",
    "squeezenet1_1",
    "vgg16",
    "vgg_small",
    "wide_resnet",
]


@dataclass(frozen=True)
class Network:
    """One network of the registry.

    Attributes:
        build: Makes the network from the keywords `num_classes` and `in_channels`. It maps images
            [N, in_channels, image_size, image_size] to logits [N, num_classes].
        image_size: Height and width of the images it was published with.
        parameters: Number of parameters that the published layers add up to, at `classes` classes and
            3 channels; None for a network that was not published.
        source: Where it was published.
        classes: Number of classes it was published with.
    """

    build: Callable[..., nn.Module]
    image_size: int
    parameters: int | None
    source: str
    classes: int = 1000


_ALEXNET = "Krizhevsky, One weird trick for parallelizing convolutional neural networks, arXiv:1404.5997"
_DENSENET = "Huang et al., Densely connected convolutional networks, arXiv:1608.06993, DenseNet-121"
_GOOGLENET = "Szegedy et al., Going deeper with convolutions, arXiv:1409.4842"
_MOBILENET = "Sandler et al., MobileNetV2: inverted residuals and linear bottlenecks, arXiv:1801.04381"
_NIN = "Lin, Chen and Yan, Network in network, arXiv:1312.4400"
_OVERFEAT = "Sermanet et al., OverFeat, arXiv:1312.6229, fast model"
_RESNET = "He et al., Deep residual learning for image recognition, arXiv:1512.03385"
_SQUEEZENET = "Iandola et al., SqueezeNet, arXiv:1602.07360"
_WIDE = "Zagoruyko and Komodakis, Wide residual networks, arXiv:1605.07146"
_VGG = "Simonyan and Zisserman, Very deep convolutional networks, arXiv:1409.1556"


def _resnet(blocks: tuple[int, ...], block: BlockName, parameters: int) -> Network:
    return Network(partial(resnet, blocks=blocks, block=block), 224, parameters, _RESNET)


def _resnet_cifar(depth: int, parameters: int) -> Network:
    return Network(partial(resnet_cifar, depth=depth), 32, parameters, f"{_RESNET}, for CIFAR-10", classes=10)


NETWORKS: dict[str, Network] = {
    "alexnet": Network(alexnet, 224, 61_100_840, _ALEXNET),
    "overfeat": Network(overfeat, 231, 145_920_872, _OVERFEAT),
    "nin": Network(nin, 224, 7_595_176, _NIN),
    "vgg16": Network(vgg16, 224, 138_357_544, f"{_VGG}, configuration D"),
    "vgg_small": Network(vgg_small, 32, None, f"after {_VGG}", classes=10),
    "googlenet": Network(googlenet, 224, 6_998_552, _GOOGLENET),
    "googlenet_bn": Network(
        partial(googlenet, batch_norm=True), 224, 6_624_904, f"{_GOOGLENET}, as torchvision has it"
    ),
    "squeezenet1_0": Network(squeezenet1_0, 224, 1_248_424, _SQUEEZENET),
    "squeezenet1_1": Network(squeezenet1_1, 224, 1_235_496, f"{_SQUEEZENET}, release 1.1"),
    "mobilenet_v2": Network(mobilenet_v2, 224, 3_504_872, _MOBILENET),
    "densenet121": Network(densenet121, 224, 7_978_856, _DENSENET),
    "resnet18": _resnet((2, 2, 2, 2), "basic", 11_689_512),
    "resnet34": _resnet((3, 4, 6, 3), "basic", 21_797_672),
    "resnet50": _resnet((3, 4, 6, 3), "bottleneck", 25_557_032),
    "resnet101": _resnet((3, 4, 23, 3), "bottleneck", 44_549_160),
    "resnet152": _resnet((3, 8, 36, 3), "bottleneck", 60_192_808),
    "resnet1517": _resnet((3, 83, 416, 3), "bottleneck", 505_727_528),  # Layrub's deepest
    "resnet_cifar20": _resnet_cifar(20, 269_722),
    "resnet_cifar56": _resnet_cifar(56, 853_018),
    "resnet_cifar110": _resnet_cifar(110, 1_727_962),
    "resnet_cifar512": _resnet_cifar(512, 8_241_434),
    "resnet_cifar1202": _resnet_cifar(1202, 19_421_274),
    "wrn28_10": Network(wide_resnet, 32, 36_479_194, f"{_WIDE}, WRN-28-10", classes=10),
}


def build(name: str, num_classes: int = 1000, in_channels: int = 3) -> nn.Module:
    """Builds a network by its name.

    Args:
        name: A key of `NETWORKS`.
        num_classes: Number of logits.
        in_channels: Channels of an image.

    Returns:
        The network, in training mode, mapping images [N, in_channels, H, W] to logits [N, num_classes].

    Raises:
        ValueError: No network of that name.
    """
    if name not in NETWORKS:
        raise ValueError(
            f"the network {name!r} was asked for; there is no such network; use one of {', '.join(NETWORKS)}"
        )
    return NETWORKS[name].build(num_classes=num_classes, in_channels=in_channels)
