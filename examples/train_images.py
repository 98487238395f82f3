"""Trains a small VGG or ResNet on real images: an ordinary training script that knows nothing of backstash.

It reads Fashion-MNIST (the gzipped IDX files of Debian's package dataset-fashion-mnist, or of ``--data``), or else the
digits that come with scikit-learn, and enlarges them to ``--image-size``: activations then outweigh the parameters by
far, as they do in most training of image networks. The same seed gives the same losses, bit for bit.
"""

from __future__ import annotations

import argparse
import gzip
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

FASHION_MNIST = Path("/usr/share/datasets/fashion-mnist")
MEAN, DEVIATION = 73.0, 90.0  # grey levels of Fashion-MNIST; near enough for the digits
TEST_IMAGES = 512
PRINT_EVERY = 4


def vgg(classes: int) -> nn.Module:
    """A VGG for one-channel images: four times three 3x3 convolutions and a pooling."""
    layers: list[nn.Module] = []
    channels = 1
    for width in (16, 32, 64, 128):
        for _ in range(3):
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU()]
            channels = width
        layers.append(nn.MaxPool2d(2))
    head = [nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4 * channels, 256), nn.ReLU(), nn.Dropout(0.2)]
    network = nn.Sequential(*layers, *head, nn.Linear(256, classes))
    for layer in network:
        if isinstance(layer, nn.Conv2d):  # torch's own start is too small where no norm follows
            nn.init.kaiming_normal_(layer.weight)
    return network


def norm(channels: int) -> nn.Module:
    """Batch normalisation whose running statistics follow quickly: a few steps must be enough for them."""
    return nn.BatchNorm2d(channels, momentum=0.5)


class Block(nn.Module):
    """Two 3x3 convolutions with batch normalisation, and the block's input added to what they learn."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 3, stride, padding=1, bias=False)
        self.bn1 = norm(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = norm(width)
        self.relu = nn.ReLU()
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels != width:
            self.shortcut = nn.Sequential(nn.Conv2d(channels, width, 1, stride, bias=False), norm(width))

    def forward(self, x: Tensor) -> Tensor:
        """Maps [N, channels, H, W] to [N, width, H / stride, W / stride]."""
        y = self.relu(self.bn1(self.conv1(x)))
        return self.relu(self.bn2(self.conv2(y)) + self.shortcut(x))


def resnet(classes: int) -> nn.Module:
    """A ResNet of six blocks for one-channel images."""
    stem = [
        nn.Conv2d(1, 16, 3, padding=1, bias=False),
        norm(16),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, padding=1),
    ]
    blocks: list[nn.Module] = []
    channels = 16
    for width in (16, 32, 64):
        blocks += [Block(channels, width, stride=1 if width == channels else 2), Block(width, width, stride=1)]
        channels = width
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))


def read_idx(file: Path, dimensions: int) -> Tensor:
    """The bytes of a gzipped IDX file: a header of 4 bytes and a 32-bit size per dimension, then the values."""
    content = bytearray(gzip.decompress(file.read_bytes()))
    sizes = [int.from_bytes(content[at : at + 4], "big") for at in range(4, 4 + 4 * dimensions, 4)]
    return torch.frombuffer(content, dtype=torch.uint8, offset=4 + 4 * dimensions).view(sizes)


def load(folder: Path | None) -> tuple[str, tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Name, training part and test part: images uint8 [N, H, W] and labels int64 [N]."""
    if folder is None and FASHION_MNIST.is_dir():
        folder = FASHION_MNIST
    if folder is not None:
        train, test = (
            (read_idx(folder / f"{part}-images-idx3-ubyte.gz", 3), read_idx(folder / f"{part}-labels-idx1-ubyte.gz", 1))
            for part in ("train", "t10k")
        )
        return "Fashion-MNIST", (train[0], train[1].long()), (test[0], test[1].long())
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = (torch.from_numpy(digits.images) * (255 / 16)).to(torch.uint8)
    labels = torch.from_numpy(digits.target).long()
    return "digits", (images[:1300], labels[:1300]), (images[1300:], labels[1300:])


def enlarge(images: Tensor, size: int) -> Tensor:
    """Bytes [N, H, W] as normalised float32 [N, 1, size, size]."""
    scaled = (images.unsqueeze(1).float() - MEAN) / DEVIATION
    return functional.interpolate(scaled, size=(size, size), mode="bilinear")


def main() -> None:
    """Trains for ``--steps`` batches and prints the accuracy on unseen images."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", choices=("vgg", "resnet"), default="vgg")
    parser.add_argument("--data", type=Path, help="folder of Fashion-MNIST's files")
    parser.add_argument("--image-size", type=int, default=64)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--learning-rate", type=float, default=0.01)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    torch.manual_seed(options.seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    name, (images, labels), (test_images, test_labels) = load(options.data)
    model = (vgg if options.network == "vgg" else resnet)(classes=10)
    model.to(device, memory_format=torch.channels_last)  # the layout that convolutions compute in: no reordered copies
    optimizer = torch.optim.SGD(model.parameters(), lr=options.learning_rate, momentum=0.9)
    print(
        f"{options.network} on {name}, batches of {options.batch}x{options.image_size}x{options.image_size}, {device}"
    )

    for step in range(1, options.steps + 1):
        chosen = torch.randint(len(images), (options.batch,))
        x, y = enlarge(images[chosen], options.image_size).to(device), labels[chosen].to(device)
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        if step % PRINT_EVERY == 0 or step in (1, options.steps):
            print(f"step {step:4}  loss {loss.item():.4f}")

    model.eval()
    test_images, test_labels = test_images[:TEST_IMAGES], test_labels[:TEST_IMAGES]
    right = 0
    with torch.no_grad():
        for part, truth in zip(test_images.split(64), test_labels.split(64), strict=True):
            right += int((model(enlarge(part, options.image_size).to(device)).argmax(1).cpu() == truth).sum())
    print(f"accuracy on {len(test_labels)} test images: {right / len(test_labels):.1%}")


if __name__ == "__main__":
    main()
