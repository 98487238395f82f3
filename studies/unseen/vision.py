"""Image classifiers with parts that the planner's own networks lack. Blocks follow the papers, widths are small."""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from studies.unseen.program import Program, supervised

CLASSES = 10


def classify(model: nn.Module, batch: int, image: int, smoothing: float = 0.0) -> Program:
    """Trains a classifier on noise, with cross entropy."""
    images, labels = torch.randn(batch, 3, image, image), torch.randint(CLASSES, (batch,))
    return supervised(model, lambda: F.cross_entropy(model(images), labels, label_smoothing=smoothing))


class SqueezeExcite(nn.Module):
    """Scales channels by what a bottleneck makes of their means."""

    def __init__(self, channels: int, squeezed: int) -> None:
        super().__init__()
        self.squeeze, self.excite = nn.Conv2d(channels, squeezed, 1), nn.Conv2d(squeezed, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.excite(F.silu(self.squeeze(F.adaptive_avg_pool2d(x, 1)), inplace=True)))


def conv_norm(a: int, b: int, kernel: int | tuple[int, int] = 3, stride: int = 1, groups: int = 1) -> nn.Sequential:
    """A convolution that keeps the size, and batch norm."""
    padding = kernel // 2 if isinstance(kernel, int) else (kernel[0] // 2, kernel[1] // 2)
    return nn.Sequential(nn.Conv2d(a, b, kernel, stride, padding, groups=groups, bias=False), nn.BatchNorm2d(b))


class InvertedBottleneck(nn.Module):
    """EfficientNet's block: expand, depthwise, squeeze and excite, project; whole samples are dropped."""

    def __init__(self, a: int, b: int, kernel: int, stride: int, drop: float) -> None:
        super().__init__()
        wide = 6 * a
        self.expand, self.depthwise = conv_norm(a, wide, 1), conv_norm(wide, wide, kernel, stride, wide)
        self.excite, self.project = SqueezeExcite(wide, a // 4), conv_norm(wide, b, 1)
        self.drop = drop if a == b and stride == 1 else None

    def forward(self, x: Tensor) -> Tensor:
        y = F.silu(self.depthwise(F.silu(self.expand(x), inplace=True)), inplace=True)
        y = self.project(self.excite(y))
        if self.drop is None:
            return y
        kept = torch.empty(len(x), 1, 1, 1).bernoulli_(1 - self.drop).div_(1 - self.drop)
        return y * kept + x


def efficientnet() -> Program:
    """EfficientNet: SiLU in place, squeeze and excite, stochastic depth, dropout before the classifier."""
    shapes = [(16, 24, 3, 2), (24, 24, 3, 1), (24, 40, 5, 2), (40, 40, 5, 1), (40, 80, 3, 1), (80, 80, 3, 1)]
    blocks = [InvertedBottleneck(*shape, drop=0.1 * number / 6) for number, shape in enumerate(shapes)]
    head = [conv_norm(80, 320, 1), nn.SiLU(inplace=True), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2)]
    stem = [conv_norm(3, 16, 3, 2), nn.SiLU(inplace=True)]
    return classify(nn.Sequential(*stem, *blocks, *head, nn.Linear(320, CLASSES)), 8, 96, smoothing=0.1)


class GroupedBottleneck(nn.Module):
    """RegNetY's block: a grouped convolution with squeeze and excite."""

    def __init__(self, a: int, b: int, stride: int) -> None:
        super().__init__()
        self.enter, self.grouped = conv_norm(a, b, 1), conv_norm(b, b, 3, stride, b // 16)
        self.excite, self.leave = SqueezeExcite(b, a // 4), conv_norm(b, b, 1)
        self.shortcut = conv_norm(a, b, 1, stride) if stride > 1 or a != b else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = self.excite(F.relu(self.grouped(F.relu(self.enter(x), inplace=True)), inplace=True))
        return F.relu(self.leave(y) + self.shortcut(x), inplace=True)


def regnet() -> Program:
    """RegNetY, channels last."""
    widths = [32, 48, 48, 96, 96, 96, 192]
    blocks = [GroupedBottleneck(a, b, 2 if a != b else 1) for a, b in pairwise(widths)]
    stem, head = [conv_norm(3, 32, 3, 2), nn.ReLU(inplace=True)], [nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    model = nn.Sequential(*stem, *blocks, *head, nn.Linear(192, CLASSES)).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    images = torch.randn(8, 3, 96, 96).contiguous(memory_format=torch.channels_last)
    labels = torch.randint(CLASSES, (8,))
    return supervised(model, lambda: F.cross_entropy(model(images), labels))


class ShuffleUnit(nn.Module):
    """ShuffleNetV2's unit: half of the channels pass, then the channels are shuffled."""

    def __init__(self, channels: int, down: bool) -> None:
        super().__init__()
        half, own = channels // 2, channels if down else channels // 2
        stride = 2 if down else 1
        self.down = nn.Sequential(conv_norm(channels, channels, 3, 2, channels), conv_norm(channels, channels, 1))
        self.is_down, act = down, partial(nn.ReLU, inplace=True)
        enter, depthwise = conv_norm(channels if down else half, own, 1), conv_norm(own, own, 3, stride, own)
        self.branch = nn.Sequential(enter, act(), depthwise, conv_norm(own, own, 1), act())

    def forward(self, x: Tensor) -> Tensor:
        left, right = (F.relu(self.down(x)), x) if self.is_down else x.chunk(2, dim=1)
        y = torch.cat((left, self.branch(right)), dim=1)
        n, c, h, w = y.shape
        return y.view(n, 2, c // 2, h, w).transpose(1, 2).reshape(n, c, h, w)


def shufflenet() -> Program:
    """ShuffleNetV2: chunk, cat and channel shuffle."""
    units = [ShuffleUnit(48, False), ShuffleUnit(48, True), ShuffleUnit(96, False), ShuffleUnit(96, False)]
    units += [ShuffleUnit(96, True), ShuffleUnit(192, False)]
    stem = [conv_norm(3, 48, 3, 2), nn.ReLU(inplace=True)]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(192, CLASSES)]
    return classify(nn.Sequential(*stem, *units, *head), 12, 96)


class InceptionBlock(nn.Module):
    """Inception-v3's block with factorised convolutions: four branches, joined."""

    def __init__(self, a: int, b: int) -> None:
        super().__init__()
        self.one = conv_norm(a, b, 1)
        self.seven = nn.Sequential(conv_norm(a, b, 1), nn.ReLU(), conv_norm(b, b, (1, 7)), conv_norm(b, b, (7, 1)))
        self.twice = nn.Sequential(conv_norm(a, b, 1), nn.ReLU(), conv_norm(b, b, 3), nn.ReLU(), conv_norm(b, b, 3))
        self.pool = nn.Sequential(nn.AvgPool2d(3, 1, 1), conv_norm(a, b, 1))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(torch.cat([self.one(x), self.seven(x), self.twice(x), self.pool(x)], dim=1))


class Inception(nn.Module):
    """Blocks with a second classifier in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(conv_norm(3, 32, 3, 2), nn.ReLU(), nn.MaxPool2d(3, 2))
        self.first, self.second = InceptionBlock(32, 24), InceptionBlock(96, 32)
        self.third = InceptionBlock(128, 32)
        self.side, self.head = nn.Linear(128, CLASSES), nn.Linear(128, CLASSES)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.second(self.first(self.stem(x)))
        side = self.side(F.adaptive_avg_pool2d(x, 1).flatten(1))
        return self.head(F.dropout(self.third(x).mean((2, 3)), 0.5)), side


def inception() -> Program:
    """Inception-v3 with its auxiliary classifier."""
    model = Inception()
    images, labels = torch.randn(8, 3, 112, 112), torch.randint(CLASSES, (8,))

    def loss() -> Tensor:
        logits, side = model(images)
        return F.cross_entropy(logits, labels) + 0.4 * F.cross_entropy(side, labels)

    return supervised(model, loss)


class WindowAttention(nn.Module):
    """Attention inside windows of 8 by 8, with a learned bias for relative positions; windows may be shifted."""

    def __init__(self, width: int, heads: int, shift: int, is_grid: bool) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.heads, self.shift, self.is_grid = heads, shift, is_grid
        self.bias = nn.Parameter(torch.zeros(15 * 15, heads))
        rows = torch.arange(64) // 8
        columns = torch.arange(64) % 8
        index = (rows[:, None] - rows + 7) * 15 + columns[:, None] - columns + 7
        self.register_buffer("index", index)

    def forward(self, x: Tensor) -> Tensor:
        n, h, w, c = x.shape
        y = self.norm(x)
        if self.shift:
            y = torch.roll(y, (-self.shift, -self.shift), dims=(1, 2))
        if self.is_grid:
            windows = y.view(n, 8, h // 8, 8, w // 8, c).permute(0, 2, 4, 1, 3, 5).reshape(-1, 64, c)
        else:
            windows = y.view(n, h // 8, 8, w // 8, 8, c).permute(0, 1, 3, 2, 4, 5).reshape(-1, 64, c)
        q, k, v = self.qkv(windows).view(-1, 64, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        bias = self.bias[self.index.view(-1)].view(64, 64, -1).permute(2, 0, 1)  # type: ignore[operator,index]
        weights = F.dropout((q * c**-0.5) @ k.transpose(-2, -1) + bias, 0.0).softmax(-1)
        windows = self.out((weights @ v).transpose(1, 2).reshape(-1, 64, c))
        if self.is_grid:
            y = windows.view(n, h // 8, w // 8, 8, 8, c).permute(0, 3, 1, 4, 2, 5).reshape(n, h, w, c)
        else:
            y = windows.view(n, h // 8, w // 8, 8, 8, c).permute(0, 1, 3, 2, 4, 5).reshape(n, h, w, c)
        return x + (torch.roll(y, (self.shift, self.shift), dims=(1, 2)) if self.shift else y)


class Wide(nn.Module):
    """A transformer's second half with GELU and dropout."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        layers = nn.Linear(width, 4 * width), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * width, width), nn.Dropout(0.1)
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.layers(self.norm(x))
        return y


class ToTokens(nn.Module):
    """Channels last, as tokens have them."""

    def forward(self, x: Tensor) -> Tensor:
        return x.permute(0, 2, 3, 1)


def window_attention() -> Program:
    """Swin's shifted windows and MaxViT's grids in turn."""
    blocks: list[nn.Module] = []
    for shift, is_grid in ((0, False), (4, False), (0, True), (4, True)):
        blocks += [WindowAttention(64, 2, shift, is_grid), Wide(64)]
    head = [nn.LayerNorm(64), nn.Flatten(1, 2), nn.AdaptiveAvgPool2d((1, 64)), nn.Flatten(), nn.Linear(64, CLASSES)]
    return classify(nn.Sequential(nn.Conv2d(3, 64, 4, 4), ToTokens(), *blocks, *head), 4, 128)


class ConvNextBlock(nn.Module):
    """ConvNeXt-V2's block: depthwise 7x7, layer norm, GELU, global response norm, a scale per channel."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise, self.norm = nn.Conv2d(width, width, 7, padding=3, groups=width), nn.LayerNorm(width)
        self.expand, self.project = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.gamma, self.beta = nn.Parameter(torch.ones(4 * width)), nn.Parameter(torch.zeros(4 * width))
        self.scale = nn.Parameter(torch.full((width,), 1e-2))

    def forward(self, x: Tensor) -> Tensor:
        y = F.gelu(self.expand(self.norm(self.depthwise(x).permute(0, 2, 3, 1))))
        norms = torch.linalg.vector_norm(y, dim=(1, 2), keepdim=True)
        y = self.gamma * (y * (norms / (norms.mean(-1, keepdim=True) + 1e-6))) + self.beta + y
        return x + (self.scale * self.project(y)).permute(0, 3, 1, 2)


def convnext_v2() -> Program:
    """ConvNeXt-V2."""
    stages = [ConvNextBlock(32), ConvNextBlock(32), nn.Conv2d(32, 64, 2, 2), ConvNextBlock(64), ConvNextBlock(64)]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.LayerNorm(64), nn.Linear(64, CLASSES)]
    return classify(nn.Sequential(nn.Conv2d(3, 32, 4, 4), *stages, *head), 8, 128)


PROGRAMS = {
    "EfficientNet": efficientnet,
    "RegNetY, channels last": regnet,
    "ShuffleNetV2": shufflenet,
    "Inception-v3": inception,
    "window attention": window_attention,
    "ConvNeXt-V2": convnext_v2,
}
