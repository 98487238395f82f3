"""Real images for benchmarks and studies, read from this machine: nothing is downloaded.

* `fashion_mnist`: 70,000 images of clothes (Xiao et al., arXiv:1708.07747), from the files of Debian's
  package dataset-fashion-mnist or from any folder with files of the same names and format.
* `digits`: 1,797 images of handwritten digits (Alpaydin and Kaynak, UCI), from scikit-learn itself.

`load` takes the first one that is there.
"""

from __future__ import annotations

import gzip
import importlib
import math
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

FASHION_MNIST_PATH = Path("/usr/share/datasets/fashion-mnist")
"""Where Debian's package dataset-fashion-mnist puts its files."""

TRAIN_IMAGES = "train-images-idx3-ubyte.gz"
TRAIN_LABELS = "train-labels-idx1-ubyte.gz"
TEST_IMAGES = "t10k-images-idx3-ubyte.gz"
TEST_LABELS = "t10k-labels-idx1-ubyte.gz"

Part = tuple[Tensor, Tensor]
"""Images, uint8 [N, H, W], and labels, integers [N]."""


@dataclass(frozen=True, eq=False)
class Dataset:
    """Images and their labels, some for training and some for testing.

    Attributes:
        name: "fashion_mnist" or "digits".
        classes: Number of classes.
        train_images: float32 [N, 1, H, W], shifted and scaled so that all training images at their
            own size, also those that a limit leaves out, have mean 0 and standard deviation 1.
        train_labels: int64 [N], from 0 to `classes` - 1.
        test_images: float32 [M, 1, H, W], shifted and scaled as the training images.
        test_labels: int64 [M].
    """

    name: str
    classes: int
    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor


def load(name: str | None, image_size: int, path: str | Path | None = None, limit: int | None = None) -> Dataset:
    """Loads a data set.

    Args:
        name: "fashion_mnist", "digits", or None for fashion_mnist where its files are and digits elsewhere.
        image_size: Height and width of the images.
        path: Folder of fashion_mnist's files; None means `FASHION_MNIST_PATH`. A path is never passed
            over: with the name None it means fashion_mnist.
        limit: Most training and most test images to keep, or None for all. All of
            fashion_mnist is 14 GB at 224.

    Returns:
        The images and labels, the same at every call.

    Raises:
        FileNotFoundError: fashion_mnist was asked for and its files are not there.
        ValueError: No data set of that name, a path for one that has none, a damaged file, or a limit
            below 1.
    """
    if name is None:
        name = "fashion_mnist" if path is not None or not _missing(FASHION_MNIST_PATH) else "digits"
    if name == "fashion_mnist":
        return fashion_mnist(path, image_size, limit)
    if name != "digits":
        raise ValueError(f"the data set {name!r} was asked for; there is no such data set; use fashion_mnist or digits")
    if path is not None:
        raise ValueError(
            f"digits was asked for with the path {path}; digits comes with scikit-learn and reads no path; "
            "leave the path out or use fashion_mnist"
        )
    return digits(image_size, limit)


def digits(image_size: int = 8, limit: int | None = None) -> Dataset:
    """Reads the 8x8 digits that scikit-learn comes with.

    The first 1,437 images are for training and the last 360 for testing.

    Args:
        image_size: Height and width of the images, reached by bilinear interpolation.
        limit: Most training and most test images to keep, or None for all.

    Returns:
        The images and labels, the same at every call.

    Raises:
        ModuleNotFoundError: scikit-learn is not installed.
        ValueError: The limit is below 1.
    """
    try:
        bunch = importlib.import_module("sklearn.datasets").load_digits()
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "the data set digits was asked for; scikit-learn, which holds it, is not installed; "
            "run 'pip install scikit-learn', or 'apt-get install dataset-fashion-mnist' to use fashion_mnist"
        ) from error
    images, labels = torch.from_numpy(bunch.images).to(torch.uint8), torch.from_numpy(bunch.target)
    split = 1437
    train, test = (images[:split], labels[:split]), (images[split:], labels[split:])
    return _dataset("digits", train, test, image_size, limit)


def fashion_mnist(path: str | Path | None = None, image_size: int = 28, limit: int | None = None) -> Dataset:
    """Reads Fashion-MNIST: 60,000 images for training and 10,000 for testing, of 28x28.

    Args:
        path: Folder with the four gzipped IDX files; None means `FASHION_MNIST_PATH`.
        image_size: Height and width of the images, reached by bilinear interpolation.
        limit: Most training and most test images to keep, or None for all.

    Returns:
        The images and labels, the same at every call.

    Raises:
        FileNotFoundError: One of the files is not there.
        ValueError: A file is damaged or in another format, or the limit is below 1.
    """
    folder = FASHION_MNIST_PATH if path is None else Path(path)
    missing = _missing(folder)
    if missing:
        found = f"has no {', '.join(missing)}" if folder.is_dir() else "is not a folder"
        raise FileNotFoundError(
            f"the data set fashion_mnist was asked for from {folder}; {folder} {found}; "
            "run 'apt-get install dataset-fashion-mnist', or give its files' folder with --data PATH"
        )
    train = _read_idx(folder / TRAIN_IMAGES, 3), _read_idx(folder / TRAIN_LABELS, 1)
    test = _read_idx(folder / TEST_IMAGES, 3), _read_idx(folder / TEST_LABELS, 1)
    return _dataset("fashion_mnist", train, test, image_size, limit)


def _missing(folder: Path) -> list[str]:
    """Names of fashion_mnist's files that `folder` lacks."""
    names = (TRAIN_IMAGES, TRAIN_LABELS, TEST_IMAGES, TEST_LABELS)
    return [name for name in names if not (folder / name).is_file()]


def _read_idx(file: Path, dimensions: int) -> Tensor:
    """Reads a gzipped IDX file of bytes into a uint8 tensor of as many dimensions.

    The format is two zero bytes, the type 8 for bytes, the number of dimensions, each dimension as a
    big-endian 32-bit integer, and the values, the last dimension running fastest.
    """
    start = 4 + 4 * dimensions
    try:
        with gzip.open(file) as stream:
            content = bytearray(stream.read())
        if content[:4] != bytes((0, 0, 8, dimensions)) or len(content) < start:
            raise ValueError(f"it starts with {bytes(content[:start])!r}")
        shape = struct.unpack(f">{dimensions}I", content[4:start])
        if len(content) - start != math.prod(shape):
            raise ValueError(f"it holds {len(content) - start} of {math.prod(shape)} values")
    except (gzip.BadGzipFile, EOFError, zlib.error, ValueError) as error:
        raise ValueError(
            f"{file} was to be read as a gzipped IDX file of bytes with {dimensions} dimensions; {error}; "
            "fetch the file again, or install the package dataset-fashion-mnist"
        ) from error
    return torch.frombuffer(content, dtype=torch.uint8, offset=start).view(shape)


def _dataset(name: str, train: Part, test: Part, image_size: int, limit: int | None) -> Dataset:
    """Normalises by the grey levels of the training images, resizes, and puts the parts together."""
    if limit is not None and limit < 1:
        raise ValueError(f"at most {limit} images of {name} were asked for; none is too few; use 1 or more")
    for images, labels in (train, test):
        if len(images) != len(labels):
            raise ValueError(
                f"images of {name} were to be matched with labels; there are {len(images)} images and "
                f"{len(labels)} labels; take both files from the same data set"
            )
    levels = torch.arange(256, dtype=torch.float64)
    share = train[0].flatten().bincount(minlength=256).double() / train[0].numel()
    mean = float((share * levels).sum())
    deviation = float((share * (levels - mean).square()).sum().sqrt())

    def normalised(images: Tensor) -> Tensor:
        grey = images[:limit].unsqueeze(1).to(torch.float32).sub_(mean).div_(deviation)
        if grey.shape[-2:] == (image_size, image_size):
            return grey
        return functional.interpolate(grey, size=(image_size, image_size), mode="bilinear")

    return Dataset(
        name=name,
        classes=10,
        train_images=normalised(train[0]),
        train_labels=train[1][:limit].to(torch.int64),
        test_images=normalised(test[0]),
        test_labels=test[1][:limit].to(torch.int64),
    )
