"""The networks of the demonstrations: as people write them, with random weights, and no package but torch.

They are small, so that a step takes seconds on a CPU; what they save for each image, token or time step is what their
large relatives save, in proportion.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


class Bottleneck(nn.Module):
    """A block of ResNet-50 and its deeper relatives (He et al., CVPR 2016): [N, C, H, W] to [N, 4 * width, H', W']."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Conv2d(channels, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)),
            *(nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)),
            *(nn.Conv2d(width, 4 * width, 1, bias=False), nn.BatchNorm2d(4 * width)),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels != 4 * width:
            convolution = nn.Conv2d(channels, 4 * width, 1, stride, bias=False)
            self.shortcut = nn.Sequential(convolution, nn.BatchNorm2d(4 * width))

    def forward(self, x: Tensor) -> Tensor:
        """Maps [N, channels, H, W] to [N, 4 * width, H / stride, W / stride]."""
        return functional.relu(self.layers(x) + self.shortcut(x), inplace=True)


def resnet(blocks: tuple[int, ...], width: int = 64, classes: int = 10) -> nn.Sequential:
    """Returns a bottleneck ResNet in channels-last order: images [N, 3, H, W] to logits [N, classes].

    Args:
        blocks: the number of blocks of each stage; (3, 4, 6, 3) is ResNet-50.
        width: channels of the first stage; 64 in the paper. Each further stage has twice as many.
        classes: number of logits.
    """
    stem = (nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True))
    layers: list[nn.Module] = [*stem, nn.MaxPool2d(3, 2, 1)]
    channels = width
    for stage, count in enumerate(blocks):
        for position in range(count):
            layers.append(Bottleneck(channels, width << stage, 2 if stage and not position else 1))
            channels = 4 * (width << stage)
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))
    return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


class Decoder(nn.Module):
    """A layer of a Llama: attention with rotated positions and a gated linear unit, each behind an RMS norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        hidden = 8 * width // 3 // 32 * 32
        self.heads = heads
        self.norm, self.gated_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        """Maps [N, tokens, width] to the same shape; cosine and sine are [tokens, width / heads / 2]."""
        y = self.norm(x)
        q, k, v = (part(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.q, self.k, self.v))
        q, k = (rotate(part, cosine, sine) for part in (q, k))
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(-2))
        y = self.gated_norm(x)
        result: Tensor = x + self.down(functional.silu(self.gate(y)) * self.up(y))
        return result


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotates pairs of channels of [N, heads, tokens, channels] by an angle for each token."""
    even, odd = x.chunk(2, -1)
    return torch.cat([even * cosine - odd * sine, odd * cosine + even * sine], -1)


class Llama(nn.Module):
    """A small Llama: words [N, tokens] to the mean loss of each next word.

    Args:
        layers, width, heads, words: its sizes.
    """

    def __init__(self, layers: int, width: int, heads: int, words: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.layers = nn.ModuleList(Decoder(width, heads) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, words, bias=False)
        half = width // heads // 2
        self.frequencies: Tensor
        self.register_buffer("frequencies", 10000 ** (-torch.arange(half) / half))

    def forward(self, words: Tensor) -> Tensor:
        """Returns the loss, a scalar."""
        angles = torch.arange(words.shape[1], device=words.device)[:, None] * self.frequencies
        cosine, sine = angles.cos(), angles.sin()
        x = self.embedding(words)
        for layer in self.layers:
            x = layer(x, cosine, sine)
        logits = self.head(self.norm(x[:, :-1]))
        return functional.cross_entropy(logits.flatten(0, 1), words[:, 1:].flatten())


class LoraLayer(nn.Module):
    """A frozen layer with a LoRA adapter beside it (Hu et al., ICLR 2022), as peft adds one to a Linear or a Conv2d.

    The dropout in front of the adapter makes a tensor of the input's size that backward reads. That is why adapters,
    which have few weights, may double what a step saves.
    """

    def __init__(self, layer: nn.Module, rank: int, dropout: float) -> None:
        super().__init__()
        self.layer, self.dropout = layer.requires_grad_(False), nn.Dropout(dropout)
        if isinstance(layer, nn.Conv2d):
            shape = (layer.kernel_size, layer.stride, layer.padding)
            self.down: nn.Module = nn.Conv2d(layer.in_channels, rank, *shape, bias=False)  # type: ignore[arg-type]
            self.up: nn.Module = nn.Conv2d(rank, layer.out_channels, 1, bias=False)
        else:
            assert isinstance(layer, nn.Linear)
            self.down = nn.Linear(layer.in_features, rank, bias=False)
            self.up = nn.Linear(rank, layer.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """As the layer, and the adapter's part on top."""
        result: Tensor = self.layer(x) + self.up(self.down(self.dropout(x)))
        return result


def add_lora(model: nn.Module, rank: int = 8, dropout: float = 0.1) -> nn.Module:
    """Freezes a model, and gives each of its convolutions and linear layers but the last an adapter. Returns it."""
    model.requires_grad_(False)
    last = [module for module in model.modules() if isinstance(module, nn.Linear)][-1]
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Conv2d | nn.Linear) and child is not last:
                setattr(parent, name, LoraLayer(child, rank, dropout))
    last.requires_grad_(True)
    return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


def _convolutions(channels: int, width: int) -> nn.Sequential:
    return nn.Sequential(
        *(nn.Conv3d(channels, width, 3, padding=1, bias=False), nn.BatchNorm3d(width), nn.ReLU(inplace=True)),
        *(nn.Conv3d(width, width, 3, padding=1, bias=False), nn.BatchNorm3d(width), nn.ReLU(inplace=True)),
    )


class UNet(nn.Module):
    """A U-Net of three levels in three dimensions (Cicek et al., MICCAI 2016): [N, 1, D, H, W] to the same shape.

    Args:
        width: channels of the first level; each further one has twice as many.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.down1, self.down2 = _convolutions(1, width), _convolutions(width, 2 * width)
        self.bottom = _convolutions(2 * width, 4 * width)
        self.up2, self.up1 = _convolutions(6 * width, 2 * width), _convolutions(3 * width, width)
        self.pool, self.enlarge = nn.MaxPool3d(2), nn.Upsample(scale_factor=2, mode="nearest")
        self.head = nn.Conv3d(width, 1, 1)
        self.to(memory_format=torch.channels_last_3d)  # type: ignore[call-overload]

    def forward(self, x: Tensor) -> Tensor:
        """Maps [N, 1, D, H, W], edges multiples of 4, to scores of the same shape."""
        first = self.down1(x)
        second = self.down2(self.pool(first))
        y = self.enlarge(self.bottom(self.pool(second)))
        y = self.enlarge(self.up2(torch.cat([second, y], 1)))
        scores: Tensor = self.head(self.up1(torch.cat([first, y], 1)))
        return scores


class Spike(torch.autograd.Function):
    """1 above a potential of 1, else 0; backward takes a fast sigmoid's derivative (Zenke and Ganguli, 2018)."""

    @staticmethod
    def forward(ctx: Any, potential: Tensor) -> Tensor:
        """Maps potentials to spikes of the same shape."""
        ctx.save_for_backward(potential)
        return (potential > 1).to(potential.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        """The gradient times the surrogate's derivative."""
        (potential,) = ctx.saved_tensors
        surrogate: Tensor = gradient / (1 + 4 * (potential - 1).abs()).square()
        return surrogate


class Spiking(nn.Module):
    """Three convolutions of leaky neurons that run for a number of time steps: [N, 3, H, W] to logits [N, 10].

    Args:
        width: channels of the first convolution; the others have twice and four times as many.
        times: number of time steps. What each of them saves is held until backward.
    """

    def __init__(self, width: int, times: int) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(
            nn.Sequential(nn.Conv2d(inner, outer, 3, padding=1, bias=False), nn.BatchNorm2d(outer))
            for inner, outer in pairwise((3, width, 2 * width, 4 * width))
        )
        self.pool, self.head, self.times = nn.MaxPool2d(2), nn.Linear(4 * width, 10), times
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, images: Tensor) -> Tensor:
        """Returns the mean over the time steps of what the last spikes say."""
        potentials: list[Tensor | None] = [None] * len(self.convolutions)
        scores = images.new_zeros(len(images), 10)
        for _ in range(self.times):
            x = images
            for layer, convolution in enumerate(self.convolutions):
                left, current = potentials[layer], convolution(x)
                potential = current if left is None else 0.5 * left + current
                spikes = Spike.apply(potential)  # type: ignore[no-untyped-call]
                potentials[layer] = potential - spikes.detach()
                x = self.pool(spikes)
            scores = scores + self.head(x.mean((2, 3)))
        return scores / self.times
