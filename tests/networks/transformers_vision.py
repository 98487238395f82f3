"""Networks for images that the library transformers builds, with random weights: ConvNeXt-T, ViT-B/16 and Swin-T.

They are not in `NETWORKS`, because they need that library.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn


class Logits(nn.Module):
    """A classifier of transformers, called with images alone and returning logits alone."""

    def __init__(self, model: nn.Module) -> None:
        """Takes one of transformers' models for image classification."""
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        """Maps [N, 3, 224, 224] to [N, num_classes]."""
        logits: Tensor = self.model(pixel_values=images).logits
        return logits


def convnext_tiny(num_classes: int = 1000) -> Logits:
    """ConvNeXt-T, 28,589,128 parameters: Liu et al., A ConvNet for the 2020s, arXiv:2201.03545."""
    from transformers import ConvNextConfig, ConvNextForImageClassification

    return Logits(ConvNextForImageClassification(ConvNextConfig(**_labels(num_classes))))


def vit_b16(num_classes: int = 1000) -> Logits:
    """ViT-B/16, 86,567,656 parameters: Dosovitskiy et al., An image is worth 16x16 words, arXiv:2010.11929."""
    from transformers import ViTConfig, ViTForImageClassification

    return Logits(ViTForImageClassification(ViTConfig(**_labels(num_classes))))


def swin_tiny(num_classes: int = 1000) -> Logits:
    """Swin-T, 28,288,354 parameters: Liu et al., Swin transformer, arXiv:2103.14030."""
    from transformers import SwinConfig, SwinForImageClassification

    return Logits(SwinForImageClassification(SwinConfig(**_labels(num_classes))))


def _labels(num_classes: int) -> dict[str, Any]:
    """A keyword of every configuration, which the library's annotations do not list."""
    return {"num_labels": num_classes}


VISION: dict[str, Callable[..., Logits]] = {
    "convnext_tiny": convnext_tiny,
    "vit_b16": vit_b16,
    "swin_tiny": swin_tiny,
}
