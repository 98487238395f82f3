"""Networks of the step table, with batches, layouts, and how each is cut for checkpointing."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from bench import datasets
from tests import networks
from tests.networks.resnet import Residual
from tests.networks.transformers_vision import VISION

SEED = 20
"""Of weights, stand-in images, and the dropout of every step."""

IMAGES = 128
"""Images that are made ready at a time; batches are taken from them in turn."""


@dataclass(frozen=True)
class Case:
    """One line of work for the step table.

    Attributes:
        name: what ``--case`` calls it.
        network: a key of `networks.NETWORKS`, ``"gpt2"`` or ``"gpt2_words"``.
        batch: images or texts per step.
        size: height and width of an image, or tokens of a text.
        channels_last: whether images and weights are laid out channels_last instead of contiguous.
        share: of the time, relative to the other cases.
        needs: a package that the case does not run without.
    """

    name: str
    network: str
    batch: int
    size: int
    channels_last: bool = False
    share: float = 1.0
    needs: str | None = None

    def absent(self) -> str | None:
        """Why it cannot run here; None where it can."""
        if self.needs is None or importlib.util.find_spec(self.needs) is not None:
            return None
        return f"{self.needs} is not installed"

    def __str__(self) -> str:
        unit = f"{self.size} tokens" if self.network.startswith("gpt2") else f"{self.size}x{self.size}"
        layout = ", channels_last" if self.channels_last else ""
        return f"{self.network}, batch {self.batch}, {unit}{layout}"


CPU = (
    Case("alexnet", "alexnet", 32, 224, share=1.5),
    Case("alexnet-channels_last", "alexnet", 32, 224, channels_last=True, share=1.5),
    Case("resnet18", "resnet18", 8, 224),
    Case("gpt2", "gpt2", 2, 512, share=1.5, needs="transformers"),
    Case("resnet50", "resnet50", 8, 224, share=2.0),
    Case("resnet50-channels_last", "resnet50", 8, 224, channels_last=True, share=2.0),
    Case("vgg16", "vgg16", 8, 224, share=4.5),
    Case("vgg16-channels_last", "vgg16", 8, 224, channels_last=True, share=4.5),
)
"""The cheap ones first: what they leave of their time goes to the others. Shares are for equal numbers of rounds."""

CUDA = (
    Case("alexnet", "alexnet", 256, 224),
    Case("alexnet-channels_last", "alexnet", 256, 224, channels_last=True),
    Case("resnet18", "resnet18", 128, 224),
    Case("gpt2", "gpt2", 16, 512, needs="transformers"),
    Case("resnet50", "resnet50", 64, 224),
    Case("resnet50-channels_last", "resnet50", 64, 224, channels_last=True),
    Case("vgg16", "vgg16", 64, 224),
    Case("vgg16-channels_last", "vgg16", 64, 224, channels_last=True),
)
WORDS = Case("gpt2-50257_words", "gpt2_words", 2, 512, share=2.5, needs="transformers")
"""GPT-2 with all its words, whose logits are its peak."""

QUICK = (Case("vgg_small", "vgg_small", 4, 32), Case("resnet_cifar20", "resnet_cifar20", 4, 32, channels_last=True))


def cases(device: str, quick: bool = False) -> tuple[Case, ...]:
    """The cases of a device; with ``quick`` small ones that only show that everything runs."""
    if quick:
        return QUICK
    return CUDA if device == "cuda" else CPU


def find(name: str, device: str, quick: bool = False) -> Case:
    """A case by its name.

    Raises:
        ValueError: no case of that name.
    """
    named = {case.name: case for case in (*cases(device, quick), WORDS)}
    if name not in named:
        raise ValueError(f"the case {name!r} was asked for; there is no such case; use one of {', '.join(named)}")
    return named[name]


@dataclass(frozen=True, eq=False)
class Workload:
    """A case made ready to train.

    Attributes:
        case: the case.
        model: the network, on the device, with a gradient for every parameter.
        device: ``"cpu"`` or ``"cuda"``.
        data: what it is trained on.
        loss: runs the forward pass.
        checkpointed_loss: runs it with torch.utils.checkpoint around each segment.
        segments: what the segments are.
    """

    case: Case
    model: nn.Module
    device: str
    data: str
    loss: Callable[[], Tensor]
    checkpointed_loss: Callable[[], Tensor]
    segments: str

    @property
    def parameter_nbytes(self) -> int:
        """Bytes of the parameters; the gradients take as many."""
        return sum(parameter.nbytes for parameter in self.model.parameters())


def build(case: Case, device: str) -> Workload:
    """Makes the network, its gradients and a batch, the same at every call."""
    torch.manual_seed(SEED)
    if case.network in VISION:
        workload = _vision(case, device)
    else:
        workload = _gpt2(case, device) if case.network.startswith("gpt2") else _images(case, device)
    for parameter in workload.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return workload


def image_batch(count: int, size: int, start: int = 0) -> tuple[str, Tensor, Tensor]:
    """Images of 3 equal channels, [count, 3, size, size], their labels, [count], and what they are."""
    name, images, labels = _prepared(size)
    chosen = torch.arange(start, start + count) % len(images)
    return name, images[chosen].expand(-1, 3, -1, -1).contiguous(), labels[chosen]


@cache
def _prepared(size: int) -> tuple[str, Tensor, Tensor]:
    """Grey images [N, 1, size, size] of real things where there are some, else noise."""
    try:
        real = datasets.load(None, size, limit=IMAGES)
    except ModuleNotFoundError:  # neither Fashion-MNIST nor scikit-learn
        noise = torch.Generator().manual_seed(SEED)
        images = torch.randn(IMAGES, 1, size, size, generator=noise)
        return f"noise {size}x{size}", images, torch.randint(10, (IMAGES,), generator=noise)
    return f"{real.name} at {size}x{size}", real.train_images, real.train_labels


def _images(case: Case, device: str) -> Workload:
    layout = torch.channels_last if case.channels_last else torch.contiguous_format
    model = networks.build(case.network).to(device)
    model = model.to(memory_format=layout)  # type: ignore[call-overload]  # an overload that the stubs lack
    data, images, labels = image_batch(case.batch, case.size)
    images, labels = images.to(device=device).contiguous(memory_format=layout), labels.to(device)
    parts = segments(model)
    count = sum(recomputed for _, recomputed in parts)

    def loss() -> Tensor:
        return functional.cross_entropy(model(images), labels)

    def checkpointed_loss() -> Tensor:
        x = images
        for module, recomputed in parts:
            x = checkpoint(module, x, use_reentrant=False) if recomputed else module(x)
        return functional.cross_entropy(x, labels)

    return Workload(case, model, device, data, loss, checkpointed_loss, f"{count} segments")


def _vision(case: Case, device: str) -> Workload:
    """One of the networks for images that the library transformers builds."""
    model = VISION[case.network]().to(device)
    data, images, labels = image_batch(case.batch, case.size)
    images, labels = images.to(device), labels.to(device)
    blocks = [module for name, module in model.named_modules() if name.rpartition(".")[0].endswith(("layer", "layers"))]

    def loss() -> Tensor:
        return functional.cross_entropy(model(images), labels)

    def checkpointed_loss() -> Tensor:
        with recomputed(blocks):
            return loss()

    return Workload(case, model, device, data, loss, checkpointed_loss, f"{len(blocks)} layers")


def segments(model: nn.Module) -> list[tuple[nn.Module, bool]]:
    """The modules that a network runs in turn, and whether each is recomputed.

    A plain stack of convolutions is cut behind each pooling, a ResNet into its stem and its blocks; the classifier is
    not recomputed. No segment begins with an in-place ReLU: that would change what the segment before it saved, and
    torch refuses it ("modified by an inplace operation"). Inside a segment in-place ReLUs are fine.
    """
    parts: list[tuple[nn.Module, bool]] = []
    for name, child in model.named_children():
        if name == "features" and isinstance(child, nn.Sequential):
            parts += [(segment, True) for segment in _behind_pools(child)]
        elif name == "stem":
            parts.append((child, True))
        elif name == "stages":
            parts += [(block, True) for block in child.modules() if isinstance(block, Residual)]
        else:
            parts.append((child, False))
    return parts


def _behind_pools(features: nn.Sequential) -> list[nn.Sequential]:
    found: list[list[nn.Module]] = [[]]
    for layer in features:
        found[-1].append(layer)
        if isinstance(layer, nn.MaxPool2d):
            found.append([])
    return [nn.Sequential(*layers) for layers in found if layers]


def _gpt2(case: Case, device: str) -> Workload:
    """A GPT-2 of 4 layers: 512 wide with 8,192 words, so that the logits do not outweigh everything else; or as it is.

    As it is, it is 768 wide and has 50,257 words.
    """
    from transformers import GPT2Config, GPT2LMHeadModel

    words, width, heads = (50257, 768, 12) if case.network == "gpt2_words" else (8192, 512, 8)
    config = GPT2Config(
        vocab_size=words,
        n_positions=case.size,
        n_embd=width,
        n_layer=4,
        n_head=heads,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    model: Any = GPT2LMHeadModel(config)
    model = model.to(device).train()
    tokens = torch.randint(config.vocab_size, (case.batch, case.size), device=device)
    following = functional.pad(tokens[:, 1:], (0, 1), value=-100).flatten()  # cross_entropy ignores -100

    def loss() -> Tensor:
        return functional.cross_entropy(model(tokens).logits.flatten(0, 1), following)

    def checkpointed_loss() -> Tensor:
        with recomputed(model.transformer.h):
            return loss()

    return Workload(case, model, device, "random tokens", loss, checkpointed_loss, "4 layers")


@contextmanager
def recomputed(blocks: Iterable[nn.Module], preserve_rng_state: bool = True) -> Iterator[None]:
    """Inside, each block runs in a checkpoint, which draws the same random numbers again if it is to.

    Not by transformers' own switch: it leaves hooks on the embeddings, which plain PyTorch would then pay for too.
    """
    for block in blocks:
        block.forward = partial(  # type: ignore[method-assign]
            checkpoint, block.forward, use_reentrant=False, preserve_rng_state=preserve_rng_state
        )
    try:
        yield
    finally:
        for block in blocks:
            del block.forward
