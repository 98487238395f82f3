"""A U-Net like Stable Diffusion's, 860 million weights: residual blocks, attention to pixels and to a text.

    backstash fit --device h100-80gb,rtx4090-24gb examples/fit/train_sd_unet.py --images {size}

Latents of 64x64 are images of 512x512. The noise is predicted under autocast to bfloat16, and AdamW trains all weights.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn
from torch.nn import functional

WIDTHS, TEXT, HEADS = (320, 640, 1280, 1280), 768, 8


class Residual(nn.Module):
    """Two convolutions behind group norms, with the time of the diffusion between them."""

    def __init__(self, channels: int, out: int) -> None:
        super().__init__()
        self.norm, self.norm_after = nn.GroupNorm(32, channels), nn.GroupNorm(32, out)
        self.convolution, self.convolution_after = nn.Conv2d(channels, out, 3, 1, 1), nn.Conv2d(out, out, 3, 1, 1)
        self.time = nn.Linear(1280, out)
        self.shortcut = nn.Identity() if channels == out else nn.Conv2d(channels, out, 1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        """Maps [N, channels, H, W] and [N, 1280] to [N, out, H, W]."""
        y = self.convolution(functional.silu(self.norm(x))) + self.time(functional.silu(time))[:, :, None, None]
        result: Tensor = self.shortcut(x) + self.convolution_after(functional.silu(self.norm_after(y)))
        return result


class Attention(nn.Module):
    """Attention of pixels to pixels, or to a text."""

    def __init__(self, width: int, context: int) -> None:
        super().__init__()
        self.q, self.out = nn.Linear(width, width, bias=False), nn.Linear(width, width)
        self.k, self.v = nn.Linear(context, width, bias=False), nn.Linear(context, width, bias=False)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        """Maps [N, pixels, width] and [N, words, context] to [N, pixels, width]."""
        split = (
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in (self.q(x), self.k(context), self.v(context))
        )
        result: Tensor = self.out(functional.scaled_dot_product_attention(*split).transpose(1, 2).flatten(-2))
        return result


class Transformer(nn.Module):
    """A layer of a transformer over the pixels of a feature map."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.before, self.after = (
            nn.GroupNorm(32, width),
            nn.Conv2d(width, width, 1),
            nn.Conv2d(width, width, 1),
        )
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.pixels, self.text = Attention(width, width), Attention(width, TEXT)
        self.gated, self.down = nn.Linear(width, 8 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, text: Tensor) -> Tensor:
        """Maps [N, width, H, W] and [N, words, 768] to [N, width, H, W]."""
        y = self.before(self.norm(x)).flatten(2).transpose(1, 2)
        y = y + self.pixels(z := self.norms[0](y), z)
        y = y + self.text(self.norms[1](y), text)
        value, gate = self.gated(self.norms[2](y)).chunk(2, -1)
        y = y + self.down(value * functional.gelu(gate))
        result: Tensor = x + self.after(y.transpose(1, 2).unflatten(2, x.shape[2:]))
        return result


class Stage(nn.Module):
    """Residual blocks of one size, each with a transformer behind it if there are any."""

    def __init__(self, channels: list[int], out: int, has_attention: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Residual(each, out) for each in channels)
        self.transformers = nn.ModuleList(Transformer(out) for _ in channels if has_attention)


class UNet(nn.Module):
    """The network."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(320, 1280), nn.SiLU(), nn.Linear(1280, 1280))
        self.stem, self.down, self.up = nn.Conv2d(4, WIDTHS[0], 3, 1, 1), nn.ModuleList(), nn.ModuleList()
        self.smaller, self.larger = nn.ModuleList(), nn.ModuleList()
        skips, channels = [WIDTHS[0]], WIDTHS[0]
        for level, width in enumerate(WIDTHS):
            self.down.append(Stage([channels, width], width, level < 3))
            skips += [width, width]
            channels = width
            if level < 3:
                self.smaller.append(nn.Conv2d(width, width, 3, 2, 1))
                skips.append(width)
        self.middle, self.between, self.middle_after = Residual(1280, 1280), Transformer(1280), Residual(1280, 1280)
        for level, width in reversed(list(enumerate(WIDTHS))):
            taken = [skips.pop() for _ in range(3)]
            self.up.append(Stage([channels + taken[0], width + taken[1], width + taken[2]], width, level < 3))
            channels = width
            if level:
                self.larger.append(nn.Conv2d(width, width, 3, 1, 1))
        self.norm, self.head = nn.GroupNorm(32, WIDTHS[0]), nn.Conv2d(WIDTHS[0], 4, 3, 1, 1)

    def forward(self, x: Tensor, time: Tensor, text: Tensor) -> Tensor:
        """Maps latents [N, 4, H, W], times [N, 320] and texts [N, words, 768] to noise [N, 4, H, W]."""
        when = self.time(time)
        x = self.stem(x)
        skips = [x]
        for level, stage in enumerate(self.down):
            for number, block in enumerate(stage.blocks):
                x = block(x, when)
                x = stage.transformers[number](x, text) if stage.transformers else x
                skips.append(x)
            if level < 3:
                x = self.smaller[level](x)
                skips.append(x)
        x = self.middle_after(self.between(self.middle(x, when), text), when)
        for level, stage in enumerate(self.up):
            for number, block in enumerate(stage.blocks):
                x = block(torch.cat([x, skips.pop()], 1), when)
                x = stage.transformers[number](x, text) if stage.transformers else x
            if level < 3:
                x = self.larger[level](functional.interpolate(x, scale_factor=2.0))
        result: Tensor = self.head(functional.silu(self.norm(x)))
        return result


parser = argparse.ArgumentParser()
parser.add_argument("--images", type=int, default=1, help="images in a batch")
parser.add_argument("--steps", type=int, default=10)
asked = parser.parse_args()

model = UNet().train()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for _ in range(asked.steps):
    latents, noise = torch.randn(2, asked.images, 4, 64, 64)
    time, text = torch.randn(asked.images, 320), torch.randn(asked.images, 77, TEXT)
    with torch.autocast("cpu", torch.bfloat16):
        predicted = model(latents + noise, time, text)
    functional.mse_loss(predicted.float(), noise).backward()
    optimizer.step()
    optimizer.zero_grad()
print(f"trained on {asked.images} images at a time")
