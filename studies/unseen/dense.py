"""Networks whose outputs are as large as their inputs: segmentation, diffusion, flows, operators."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from studies.unseen.program import Program, supervised
from tests.networks.unet import DoubleConvolution, UNet


def unet() -> Program:
    """U-Net in two dimensions with a cross entropy for each pixel."""
    model = UNet(width=16, levels=3)
    images, labels = torch.randn(2, 3, 128, 128), torch.randint(4, (2, 128, 128))
    return supervised(model, lambda: F.cross_entropy(model(images), labels))


class Residual3d(nn.Module):
    """Instance norm and leaky relu in three dimensions."""

    def __init__(self, a: int, b: int, stride: int) -> None:
        super().__init__()
        self.first, self.second = nn.Conv3d(a, b, 3, stride, 1), nn.Conv3d(b, b, 3, 1, 1)
        self.norm, self.again = nn.InstanceNorm3d(b, affine=True), nn.InstanceNorm3d(b, affine=True)
        self.short = nn.Conv3d(a, b, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = self.again(self.second(F.leaky_relu(self.norm(self.first(x)), 0.01)))
        return F.leaky_relu(y + self.short(x), 0.01)


class UNet3d(nn.Module):
    """Strided convolutions down, trilinear interpolation up."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = Residual3d(1, 8, 1), Residual3d(8, 16, 2), Residual3d(16, 32, 2)
        self.up_two, self.up_one, self.head = Residual3d(48, 16, 1), Residual3d(24, 8, 1), nn.Conv3d(8, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        one = self.one(x)
        two = self.two(one)
        up = F.interpolate(self.three(two), scale_factor=2, mode="trilinear", align_corners=False)
        up = F.interpolate(self.up_two(torch.cat((up, two), 1)), scale_factor=2, mode="nearest")
        logits: Tensor = self.head(self.up_one(torch.cat((up, one), 1)))
        return logits


def unet_3d() -> Program:
    """U-Net in three dimensions, with the Dice loss and a cross entropy."""
    model = UNet3d()
    volume, labels = torch.randn(1, 1, 32, 32, 32), torch.randint(2, (1, 32, 32, 32))

    def loss() -> Tensor:
        logits = model(volume)
        found, wanted = logits.softmax(1)[:, 1], labels.float()
        dice = 1 - (2 * (found * wanted).sum() + 1) / (found.sum() + wanted.sum() + 1)
        return dice + F.cross_entropy(logits, labels)

    return supervised(model, loss)


class DeepLab(nn.Module):
    """Dilated convolutions of several rates side by side, and the mean of the image."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 32, 3, 2, 1), nn.BatchNorm2d(32), nn.Hardswish(inplace=True))
        self.body = nn.Sequential(DoubleConvolution(32, 48), nn.MaxPool2d(3, 2, 1), DoubleConvolution(48, 64))
        self.rates = nn.ModuleList([nn.Conv2d(64, 32, 3, padding=rate, dilation=rate) for rate in (1, 6, 12)])
        self.mean, self.join = nn.Conv2d(64, 32, 1), nn.Conv2d(128, 64, 1)
        self.head = nn.Sequential(nn.BatchNorm2d(64), nn.ELU(), nn.Dropout2d(0.1), nn.Conv2d(64, 6, 1))

    def forward(self, x: Tensor) -> Tensor:
        size = x.shape[-2:]
        x = self.body(self.stem(x))
        mean = F.interpolate(self.mean(x.mean((2, 3), keepdim=True)), size=x.shape[-2:], mode="nearest")
        x = self.join(torch.cat([*(rate(x) for rate in self.rates), mean], dim=1))
        return F.interpolate(self.head(x), size=size, mode="bilinear", align_corners=False)


def deeplab() -> Program:
    """DeepLab with a loss that ignores pixels."""
    model = DeepLab()
    images, labels = torch.randn(2, 3, 160, 160), torch.randint(-1, 6, (2, 160, 160))
    return supervised(model, lambda: F.cross_entropy(model(images), labels, ignore_index=-1))


class TimedResidual(nn.Module):
    """Group norm, SiLU, and a shift and scale by the time of the noise."""

    def __init__(self, a: int, b: int, times: int) -> None:
        super().__init__()
        self.norm, self.first = nn.GroupNorm(8, a), nn.Conv2d(a, b, 3, padding=1)
        self.time, self.again, self.second = nn.Linear(times, 2 * b), nn.GroupNorm(8, b), nn.Conv2d(b, b, 3, padding=1)
        self.short = nn.Conv2d(a, b, 1) if a != b else nn.Identity()

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        y = self.first(F.silu(self.norm(x)))
        scale, shift = self.time(F.silu(time))[:, :, None, None].chunk(2, dim=1)
        y = self.second(F.dropout(F.silu(self.again(y) * (1 + scale) + shift), 0.1))
        short: Tensor = self.short(x)
        return (y + short) / math.sqrt(2)


class PixelAttention(nn.Module):
    """Attention between all pixels."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = (
            nn.GroupNorm(8, width),
            nn.Conv1d(width, 3 * width, 1),
            nn.Conv1d(width, width, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        n, c, h, w = x.shape
        qkv = self.qkv(self.norm(x).view(n, c, h * w)).view(n, 3, 4, c // 4, h * w).transpose(-2, -1)
        y = F.scaled_dot_product_attention(*qkv.unbind(1)).transpose(-2, -1).reshape(n, c, h * w)
        return x + self.out(y).view(n, c, h, w)


class Denoiser(nn.Module):
    """A U-Net of residual blocks with the time of the noise, and attention at the coarsest level."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(32, 64), nn.SiLU(), nn.Linear(64, 64))
        self.enter = nn.Conv2d(3, 32, 3, padding=1)
        self.down = nn.ModuleList([TimedResidual(32, 32, 64), TimedResidual(32, 64, 64)])
        self.middle, self.attention = TimedResidual(64, 64, 64), PixelAttention(64)
        self.up = nn.ModuleList([TimedResidual(128, 32, 64), TimedResidual(64, 32, 64)])
        self.leave = nn.Conv2d(32, 3, 3, padding=1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        angles = time[:, None] * torch.exp(-torch.arange(16) / 2)
        known = self.time(torch.cat([angles.sin(), angles.cos()], dim=-1))
        x, skips = self.enter(x), []
        for block in self.down:
            x = block(x, known)
            skips.append(x)
            x = F.avg_pool2d(x, 2)
        x = self.attention(self.middle(x, known))
        for block in self.up:
            x = block(torch.cat([F.interpolate(x, scale_factor=2.0), skips.pop()], dim=1), known)
        noise: Tensor = self.leave(x)
        return noise


def diffusion() -> Program:
    """A diffusion model that predicts the noise; times and noise are drawn in each step."""
    model, images = Denoiser(), torch.randn(4, 3, 64, 64)

    def loss() -> Tensor:
        time, noise = torch.rand(4), torch.randn_like(images)
        angle = time.view(-1, 1, 1, 1) * math.pi / 2
        noisy = angle.cos() * images + angle.sin() * noise
        weight = (1 + time).view(-1, 1, 1, 1)
        return (weight * (model(noisy, 1000 * time) - noise).square()).mean()

    return supervised(model, loss)


class Coupling(nn.Module):
    """RealNVP's layer: half of the numbers say how the other half is scaled and shifted."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        layers = nn.Linear(width // 2, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Softplus()
        self.net = nn.Sequential(*layers, nn.Linear(hidden, width))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        held, moved = x.chunk(2, dim=-1)
        scale, shift = self.net(held).chunk(2, dim=-1)
        scale = torch.tanh(scale)
        return torch.cat([moved * torch.exp(scale) + shift, held], dim=-1), scale.sum(-1)


def flow() -> Program:
    """A normalising flow, trained by its likelihood."""
    layers, points = nn.ModuleList([Coupling(64, 192) for _ in range(6)]), torch.randn(4096, 64)

    def loss() -> Tensor:
        x, volume = points, torch.zeros(len(points))
        for layer in layers:
            x, added = layer(x)
            volume = volume + added
        return (x.square().sum(-1) / 2 - volume).mean()

    return supervised(layers, loss)


class Spectral(nn.Module):
    """A Fourier neural operator's layer: low frequencies are mixed by complex weights."""

    def __init__(self, width: int, modes: int) -> None:
        super().__init__()
        self.modes, self.local = modes, nn.Conv2d(width, width, 1)
        self.weight = nn.Parameter(torch.randn(width, width, modes, modes, dtype=torch.cfloat) / width)

    def forward(self, x: Tensor) -> Tensor:
        found = torch.fft.rfft2(x)
        mixed = torch.zeros_like(found)
        low = found[..., : self.modes, : self.modes]
        mixed[..., : self.modes, : self.modes] = torch.einsum("nixy,ioxy->noxy", low, self.weight)
        return F.gelu(torch.fft.irfft2(mixed, s=x.shape[-2:]) + self.local(x))


def fourier() -> Program:
    """A Fourier neural operator."""
    model = nn.Sequential(nn.Conv2d(1, 24, 1), *(Spectral(24, 12) for _ in range(4)), nn.Conv2d(24, 1, 1))
    given, wanted = torch.randn(4, 1, 96, 96), torch.randn(4, 1, 96, 96)

    def loss() -> Tensor:
        off = (model(given) - wanted).flatten(1).norm(dim=1) / wanted.flatten(1).norm(dim=1)
        return off.mean()

    return supervised(model, loss)


PROGRAMS = {
    "U-Net": unet,
    "U-Net, 3-D": unet_3d,
    "DeepLab": deeplab,
    "diffusion": diffusion,
    "normalising flow": flow,
    "Fourier operator": fourier,
}
