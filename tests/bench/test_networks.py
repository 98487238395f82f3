"""The benchmarks' networks have their published sizes and run on small images, and data sets explain their errors."""

from __future__ import annotations

import gzip
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from thinning import only
from torch import Tensor, nn
from torch.nn import functional

from bench import datasets
from bench.datasets import TEST_IMAGES, TEST_LABELS, TRAIN_IMAGES, TRAIN_LABELS
from tests import networks
from tests.networks import NETWORKS

# The smallest images that a network takes, and 8x8 where any size would do.
SMALLEST = {
    "alexnet": 63,
    "overfeat": 71,
    "nin": 67,
    "vgg16": 32,
    "vgg_small": 8,
    "googlenet": 31,
    "googlenet_bn": 15,
    "squeezenet1_0": 21,
    "squeezenet1_1": 17,
    "densenet121": 29,
}
# Too many weights or layers to compute with here: run on the meta device, while their smaller kin,
# made by the same code, run in earnest.
TOO_LARGE = {"resnet101", "resnet152", "resnet1517", "resnet_cifar1202", "wrn28_10"}
VERY_DEEP = {"resnet1517", "resnet_cifar512", "resnet_cifar1202"}


def count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def on_meta(name: str, **options: int) -> nn.Module:
    with torch.device("meta"):
        return networks.build(name, **options)


def step(network: nn.Module, images: Tensor) -> Tensor:
    """One forward and backward pass; returns the logits."""
    logits: Tensor = network(images)
    labels = torch.zeros(len(images), dtype=torch.int64, device=images.device)
    torch.autograd.backward([functional.cross_entropy(logits, labels)])
    return logits


# ---- networks ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("alexnet", 61.1e6),
        ("overfeat", 145e6),
        ("nin", 7.6e6),
        ("vgg16", 138e6),
        ("googlenet", 7.0e6),
        ("squeezenet1_0", 1.25e6),
        ("mobilenet_v2", 3.47e6),  # in the authors' repository; their paper rounds it to 3.4 million
        ("densenet121", 8.0e6),
        ("resnet50", 25.6e6),
        ("resnet_cifar20", 0.27e6),
        ("resnet_cifar56", 0.85e6),
        ("resnet_cifar110", 1.7e6),
        ("resnet_cifar1202", 19.4e6),
        ("wrn28_10", 36.5e6),
    ],
)
def test_registered_count_rounds_to_the_published_one(name: str, published: float) -> None:
    assert NETWORKS[name].parameters == pytest.approx(published, rel=0.02)


@pytest.mark.parametrize("name", only(NETWORKS.keys() - VERY_DEEP, NETWORKS))
def test_has_the_registered_count_and_runs_at_the_published_size(name: str) -> None:
    network = NETWORKS[name]
    module = on_meta(name, num_classes=network.classes)
    assert network.parameters in (count(module), None)
    images = torch.empty(2, 3, network.image_size, network.image_size, device="meta")
    assert step(module, images).shape == (2, network.classes)
    assert all(parameter.grad is not None for parameter in module.parameters())


@pytest.mark.parametrize("name", only(NETWORKS.keys() - VERY_DEEP, [n for n in NETWORKS if n not in TOO_LARGE]))
def test_runs_with_ten_classes_of_grey_images(name: str) -> None:
    size = SMALLEST.get(name, 8)
    network = networks.build(name, num_classes=10, in_channels=1)
    logits = step(network, torch.randn(2, 1, size, size))
    assert logits.shape == (2, 10)
    assert logits.isfinite().all()
    gradients = [parameter.grad for parameter in network.parameters()]
    assert all(gradient is not None and gradient.sum().isfinite() for gradient in gradients)


@pytest.mark.parametrize("name", SMALLEST)
def test_refuses_images_below_the_smallest_size(name: str) -> None:
    size = SMALLEST[name] - 1
    with pytest.raises(RuntimeError):
        on_meta(name)(torch.empty(2, 3, size, size, device="meta"))


def test_overfeat_keeps_the_published_feature_map() -> None:
    features = on_meta("overfeat").get_submodule("features")
    assert features(torch.empty(1, 3, 231, 231, device="meta")).shape == (1, 1024, 6, 6)


def test_overfeat_takes_images_of_224() -> None:
    assert on_meta("overfeat")(torch.empty(1, 3, 224, 224, device="meta")).shape == (1, 1000)


@pytest.mark.parametrize(("batch_norm", "parameters"), [(False, 13_378_280), (True, 13_004_888)])
def test_googlenet_with_auxiliary_heads(batch_norm: bool, parameters: int) -> None:
    with torch.device("meta"):
        network = networks.googlenet(batch_norm=batch_norm, auxiliary_heads=True)
    assert count(network) == parameters
    images = torch.empty(2, 3, 224, 224, device="meta")
    logits = network.train()(images)
    assert [part.shape for part in logits] == [(2, 1000)] * 3
    assert network.eval()(images).shape == (2, 1000)


@pytest.mark.parametrize("batch_norm", [False, True])
def test_googlenet_normalises_in_one_way(batch_norm: bool) -> None:
    with torch.device("meta"):
        layers = list(networks.googlenet(batch_norm=batch_norm).modules())
    assert any(isinstance(layer, nn.BatchNorm2d) for layer in layers) is batch_norm
    assert any(isinstance(layer, nn.LocalResponseNorm) for layer in layers) is not batch_norm


@pytest.mark.parametrize("name", ["nin", "vgg_small", "googlenet", "squeezenet1_1"])
def test_start_without_batch_norm_does_not_fade_out(name: str) -> None:
    """The features behind the last ReLU are neither all zero nor vanishingly small."""
    network = networks.build(name, num_classes=10, in_channels=1).eval()
    seen: list[float] = []
    last = [layer for layer in network.modules() if isinstance(layer, nn.Conv2d)][-1]
    last.register_forward_pre_hook(lambda _, inputs: seen.append(float(inputs[0].std())))
    with torch.no_grad():
        network(torch.randn(1, 1, SMALLEST[name], SMALLEST[name]))
    assert 1e-2 < seen[0] < 1e2


@pytest.mark.parametrize("name", ["alexnet", "vgg16", "resnet50", "squeezenet1_0", "googlenet", "densenet121"])
def test_every_relu_works_in_place(name: str) -> None:
    relus = [layer for layer in on_meta(name).modules() if isinstance(layer, nn.ReLU)]
    assert relus
    assert all(relu.inplace for relu in relus)


def test_very_deep_resnet_trains_without_recursion() -> None:
    depth = 6 * 100 + 2
    network = networks.resnet_cifar(depth, in_channels=1)
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(200 + _stack_depth())
    try:
        logits = step(network, torch.randn(2, 1, 4, 4))
    finally:
        sys.setrecursionlimit(limit)
    assert logits.shape == (2, 10)
    assert logits.isfinite().all()


def _stack_depth() -> int:
    frame, depth = sys._getframe(), 0
    while frame.f_back is not None:
        frame, depth = frame.f_back, depth + 1
    return depth


def test_resnet_takes_any_blocks() -> None:
    with torch.device("meta"):
        network = networks.resnet(blocks=(1, 2, 30), block="bottleneck", num_classes=10, in_channels=1)
    blocks = [len(stage) for stage in network.get_submodule("stages").children() if isinstance(stage, nn.Sequential)]
    assert blocks == [1, 2, 30]
    assert network(torch.empty(2, 1, 32, 32, device="meta")).shape == (2, 10)


def test_padded_shortcut_adds_zero_channels() -> None:
    x = torch.randn(2, 3, 5, 5)
    out = networks.resnet_cifar(8).get_submodule("stages.1.0.shortcut")(x)
    assert out.shape == (2, 3 + 16, 3, 3)
    assert torch.equal(out[:, :3], x[:, :, ::2, ::2])
    assert not out[:, 3:].any()


def test_unknown_network_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"the network 'lenet' was asked for; .*; use one of alexnet, overfeat, "):
        networks.build("lenet")


@pytest.mark.parametrize(("depth", "nearest"), [(21, 20), (2, 8), (-5, 8), (111, 110)])
def test_wrong_depth_names_a_right_one(depth: int, nearest: int) -> None:
    with pytest.raises(ValueError, match=f"a depth of {depth} was asked for; it is not 6n [+] 2; .* {nearest}$"):
        networks.resnet_cifar(depth)


def test_a_narrow_resnet_has_narrow_stages() -> None:
    with torch.device("meta"):
        network = networks.resnet(blocks=(1, 1), width=16, num_classes=10)
    assert network.get_submodule("classifier").in_features == 4 * 2 * 16
    assert network(torch.empty(2, 3, 32, 32, device="meta")).shape == (2, 10)


def test_wide_resnet_of_any_depth_trains() -> None:
    network = networks.wide_resnet(10, 1, in_channels=1)
    assert step(network, torch.randn(2, 1, 8, 8)).isfinite().all()
    with pytest.raises(ValueError, match=r"a depth of 27 was asked for; it is not 6n [+] 4; .* 22$"):
        networks.wide_resnet(27)


def test_unknown_block_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"the block 'wide' was asked for; .*; use 'basic' or 'bottleneck'"):
        networks.resnet(block="wide")  # type: ignore[arg-type]


# ---- data sets -----------------------------------------------------------------------------------


def write_idx(file: Path, values: np.ndarray) -> None:
    header = bytes((0, 0, 8, values.ndim)) + np.array(values.shape, dtype=">u4").tobytes()
    file.write_bytes(gzip.compress(header + values.astype(np.uint8).tobytes(), compresslevel=1))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with twelve training and seven test images in fashion_mnist's format."""
    random = np.random.default_rng(0)
    for images, labels, entries in ((TRAIN_IMAGES, TRAIN_LABELS, 12), (TEST_IMAGES, TEST_LABELS, 7)):
        write_idx(tmp_path / images, random.integers(0, 256, (entries, 28, 28)))
        write_idx(tmp_path / labels, np.arange(entries) % 10)
    return tmp_path


def check(dataset: datasets.Dataset, train: int, test: int, size: int) -> None:
    assert dataset.classes == 10
    for images, labels, entries in (
        (dataset.train_images, dataset.train_labels, train),
        (dataset.test_images, dataset.test_labels, test),
    ):
        assert images.shape == (entries, 1, size, size)
        assert images.dtype == torch.float32
        assert images.isfinite().all()
        assert labels.shape == (entries,)
        assert labels.dtype == torch.int64
        assert ((labels >= 0) & (labels < 10)).all()


def same(left: datasets.Dataset, right: datasets.Dataset) -> bool:
    fields = ("train_images", "train_labels", "test_images", "test_labels")
    return all(torch.equal(getattr(left, field), getattr(right, field)) for field in fields)


@pytest.mark.parametrize("size", [8, 12])
def test_digits(size: int) -> None:
    pytest.importorskip("sklearn")
    dataset = datasets.digits(size)
    assert dataset.name == "digits"
    check(dataset, 1437, 360, size)
    assert same(dataset, datasets.digits(size))
    for labels in (dataset.train_labels, dataset.test_labels):
        assert (labels.bincount(minlength=10) > 0.08 * len(labels)).all()


def test_digits_are_normalised() -> None:
    pytest.importorskip("sklearn")
    deviation, mean = torch.std_mean(datasets.digits().train_images, correction=0)
    assert float(mean) == pytest.approx(0, abs=1e-5)
    assert float(deviation) == pytest.approx(1, abs=1e-5)


def test_digits_need_scikit_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ModuleNotFoundError, match=r"digits was asked for; scikit-learn.*; run 'pip install"):
        datasets.digits()


@pytest.mark.parametrize("size", [28, 32])
def test_fashion_mnist_from_a_folder(folder: Path, size: int) -> None:
    dataset = datasets.fashion_mnist(folder, size)
    assert dataset.name == "fashion_mnist"
    check(dataset, 12, 7, size)
    assert dataset.train_labels.tolist() == [*range(10), 0, 1]
    assert same(dataset, datasets.fashion_mnist(str(folder), size))


def test_fashion_mnist_keeps_the_bytes_up_to_scale(folder: Path) -> None:
    written = np.random.default_rng(0).integers(0, 256, (12, 28, 28))
    images = datasets.fashion_mnist(folder).train_images[:, 0].double().numpy()
    expected = (written - written.mean()) / written.std()
    assert np.abs(images - expected).max() < 1e-5


def test_fashion_mnist_installed() -> None:
    if not datasets.FASHION_MNIST_PATH.is_dir():
        pytest.skip("the package dataset-fashion-mnist is not installed")
    dataset = datasets.fashion_mnist(image_size=32, limit=1000)
    check(dataset, 1000, 1000, 32)
    assert dataset.train_labels[:5].tolist() == [9, 0, 0, 3, 0]
    assert same(dataset, datasets.load("fashion_mnist", 32, limit=1000))


@pytest.mark.parametrize("limit", [1, 5, 100])
def test_limit_keeps_the_first_images(folder: Path, limit: int) -> None:
    whole, some = datasets.fashion_mnist(folder), datasets.fashion_mnist(folder, limit=limit)
    check(some, min(limit, 12), min(limit, 7), 28)
    assert torch.equal(some.train_images, whole.train_images[:limit])
    assert torch.equal(some.test_labels, whole.test_labels[:limit])


def test_limit_below_one(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"at most 0 images of fashion_mnist were asked for; .*; use 1 or more"):
        datasets.fashion_mnist(folder, limit=0)


def test_labels_of_other_images(folder: Path) -> None:
    write_idx(folder / TEST_LABELS, np.zeros(6))
    with pytest.raises(ValueError, match="there are 7 images and 6 labels; take both files from the same"):
        datasets.fashion_mnist(folder)


def test_fashion_mnist_without_a_folder(tmp_path: Path) -> None:
    nowhere = tmp_path / "nowhere"
    with pytest.raises(FileNotFoundError) as raised:
        datasets.fashion_mnist(nowhere)
    asked, found, do = str(raised.value).split("; ")
    assert asked == f"the data set fashion_mnist was asked for from {nowhere}"
    assert found == f"{nowhere} is not a folder"
    assert "apt-get install dataset-fashion-mnist" in do
    assert "--data PATH" in do


def test_fashion_mnist_with_a_file_missing(folder: Path) -> None:
    (folder / TEST_LABELS).unlink()
    with pytest.raises(FileNotFoundError, match=f"has no {TEST_LABELS}; run"):
        datasets.fashion_mnist(folder)


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (b"no gzip", "Not a gzipped file"),
        (gzip.compress(b""), "it starts with b''"),
        (gzip.compress(b"\0\0\x0d\x03" + bytes(12)), "it starts with b.*x03"),
        (gzip.compress(b"\0\0\x08\x03" + b"\0\0"), "it starts with b"),
        (gzip.compress(b"\0\0\x08\x03" + b"\0\0\0\x02" * 3 + bytes(5)), "it holds 5 of 8 values"),
        (gzip.compress(b"\0\0\x08\x03" + bytes(12))[:-10], "Compressed file ended"),
    ],
    ids=["no gzip", "empty", "other type", "no sizes", "too few values", "cut short"],
)
def test_fashion_mnist_with_a_damaged_file(folder: Path, content: bytes, found: str) -> None:
    (folder / TRAIN_IMAGES).write_bytes(content)
    with pytest.raises(ValueError, match=f"{TRAIN_IMAGES} was to be read as .*; {found}.*; fetch the file again"):
        datasets.fashion_mnist(folder)


def test_load_takes_what_is_there(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sklearn")
    monkeypatch.setattr(datasets, "FASHION_MNIST_PATH", folder)
    assert datasets.load(None, 28).name == "fashion_mnist"
    monkeypatch.setattr(datasets, "FASHION_MNIST_PATH", folder / "nowhere")
    assert datasets.load(None, 8).name == "digits"
    assert datasets.load(None, 28, path=folder).name == "fashion_mnist"
    assert datasets.load("digits", 8, limit=4).train_images.shape == (4, 1, 8, 8)


def test_load_does_not_pass_over_a_path(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="fashion_mnist was asked for"):
        datasets.load(None, 28, path=tmp_path)
    with pytest.raises(ValueError, match=r"digits was asked for with the path .*; leave the path out"):
        datasets.load("digits", 8, path=tmp_path)


def test_load_of_an_unknown_name_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"the data set 'cifar' was asked for; .*; use fashion_mnist or digits"):
        datasets.load("cifar", 32)


def test_a_network_learns_from_the_digits() -> None:
    pytest.importorskip("sklearn")
    dataset = datasets.digits(8, limit=64)
    network = networks.resnet_cifar(8, in_channels=1)
    optimiser = torch.optim.SGD(network.parameters(), lr=0.1)
    losses: list[float] = []
    for _ in range(15):
        optimiser.zero_grad()
        loss = functional.cross_entropy(network(dataset.train_images), dataset.train_labels)
        torch.autograd.backward([loss])
        optimiser.step()
        losses.append(float(loss.detach()))
    assert losses[0] == pytest.approx(math.log(10), abs=1.5)
    assert losses[-1] < 0.5 * losses[0]
