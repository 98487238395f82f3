"""The networks, each in the size that people train and in a small one with the same graph, and steps of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from bench.cases import SEED, segments
from bench.gpu.device import Device
from tests.networks.resnet import resnet
from tests.networks.unet import DoubleConvolution, UNet

Batch = tuple[Tensor, Tensor]
Loss = Callable[[nn.Module, Batch], Tensor]


@dataclass(frozen=True, eq=False)
class Model:
    """A network that is made ready.

    Attributes:
        module: the network.
        batch: makes a batch of a size.
        loss: of the network and a batch.
        blocks: the modules that a checkpoint recomputes.
    """

    module: nn.Module
    batch: Callable[[int], Batch]
    loss: Loss
    blocks: Sequence[nn.Module]


@dataclass(frozen=True)
class Network:
    """A network and how it is trained.

    Attributes:
        build: makes it, small or as people train it.
        words: what it is, for the page.
        unit: what the size of a batch counts.
        size: of a batch where the host sets the pace.
        small_size: the same of the small network.
        autocast: whether products are computed in bfloat16.
        needs: a package that it is not built without.
    """

    build: Callable[[bool], Model]
    words: str
    unit: str
    size: int
    small_size: int
    autocast: bool = False
    needs: str = "torch"


def _classes(module: nn.Module, batch: Batch) -> Tensor:
    return functional.cross_entropy(module(batch[0]), batch[1])


def _resnet50(small: bool) -> Model:
    classes, width, side = (10, 16, 64) if small else (1000, 64, 224)
    module = resnet(num_classes=classes, width=width)

    def batch(size: int) -> Batch:
        return torch.randn(size, 3, side, side), torch.randint(classes, (size,))

    return Model(module, batch, _classes, [part for part, is_recomputed in segments(module) if is_recomputed])


def _resnet50_channels_last(small: bool) -> Model:
    model = _resnet50(small)
    module = model.module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # the stubs lack it

    def batch(size: int) -> Batch:
        images, labels = model.batch(size)
        return images.contiguous(memory_format=torch.channels_last), labels

    return Model(module, batch, _classes, model.blocks)


def _unet(small: bool) -> Model:
    width, side, levels = (8, 32, 3) if small else (64, 256, 5)
    module = UNet(width=width, levels=levels)

    def batch(size: int) -> Batch:
        return torch.randn(size, 3, side, side), torch.randint(4, (size, side, side))

    return Model(module, batch, _classes, [part for part in module.modules() if isinstance(part, DoubleConvolution)])


def _next_words(module: nn.Module, batch: Batch) -> Tensor:
    return functional.cross_entropy(module(batch[0]).logits.flatten(0, 1), batch[1].flatten())


def _words(texts: int, tokens: int, count: int) -> Batch:
    words = torch.randint(5, count, (texts, tokens))
    return words, functional.pad(words[:, 1:], (0, 1), value=-100)  # cross_entropy leaves -100 out


def _never_packed() -> None:
    """Keeps transformers from looking, in each step, whether texts are packed, for which it would wait for the device.

    It looks where no keys are cached, and cannot where a step is captured or compiled.
    """
    from transformers import masking_utils

    if hasattr(masking_utils, "find_packed_sequence_indices"):
        masking_utils.find_packed_sequence_indices = lambda position_ids: None


def _gpt2(small: bool) -> Model:
    import transformers

    _never_packed()

    words, width, heads, layers, tokens = (512, 64, 2, 2, 64) if small else (50257, 768, 12, 12, 1024)
    config: Any = transformers.GPT2Config(
        vocab_size=words,
        n_positions=tokens,
        n_embd=width,
        n_head=heads,
        n_layer=layers,
        bos_token_id=1,
        eos_token_id=2,
        use_cache=False,
        attn_pdrop=0.0,  # with it the fused attention draws random numbers that deterministic algorithms refuse
    )
    module: Any = transformers.GPT2LMHeadModel(config)
    return Model(module, lambda size: _words(size, tokens, words), _next_words, list(module.transformer.h))


def _llama(small: bool) -> Model:
    import transformers

    _never_packed()

    words, width, inner, heads, layers = (512, 64, 128, 2, 2) if small else (32000, 2048, 5632, 32, 12)
    config: Any = transformers.LlamaConfig(
        vocab_size=words,
        hidden_size=width,
        intermediate_size=inner,
        num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 4),
        num_hidden_layers=layers,
        max_position_embeddings=1 << 17,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        use_cache=False,
    )
    module: Any = transformers.LlamaForCausalLM(config)
    unit = 16 if small else 256
    return Model(module, lambda size: _words(1, size * unit, words), _next_words, list(module.model.layers))


NETWORKS = {
    "resnet50": Network(_resnet50, "ResNet-50, 224x224, float32", "images", 64, 4),
    "resnet50_bf16": Network(
        _resnet50_channels_last, "ResNet-50, 224x224, channels_last, autocast to bfloat16", "images", 64, 4, True
    ),
    "gpt2": Network(
        _gpt2, "GPT-2 of 12 layers, 1,024 tokens, autocast to bfloat16", "texts", 4, 2, True, "transformers"
    ),
    "llama": Network(
        _llama,
        "a Llama of 12 layers, 2,048 wide, one text, autocast to bfloat16",
        "256 tokens",
        4,
        2,
        True,
        "transformers",
    ),
    "unet": Network(_unet, "U-Net, 64 channels, 256x256, float32", "images", 8, 2),
}


class Training:
    """Steps of one network, on one batch at a time.

    Attributes:
        network: the network.
        model: made ready, on the device.
        size: of the batch.
        min_nbytes: of what Sessions leave alone; None for their own. The small networks' values are small as well.
    """

    def __init__(self, network: Network, device: Device, small: bool) -> None:
        torch.manual_seed(SEED)
        self.network, self.device = network, device
        self.model = network.build(small)
        self.module = self.model.module.to(device.kind).train()
        self.min_nbytes = 4096 if small else None
        for parameter in self.module.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self._optimizer = torch.optim.SGD(self.module.parameters(), lr=0.0)
        self._batch: Batch | None = None
        self.size = 0
        self.resize(network.small_size if small else network.size)

    def resize(self, size: int) -> None:
        """Takes another batch, the same for each size."""
        if size == self.size:
            return
        torch.manual_seed(SEED)
        self._batch, self.size = None, 0  # before the next one takes memory, which may not be there
        with torch.device(self.device.kind):
            self._batch = self.model.batch(size)
        self.size = size

    def loss(self) -> Tensor:
        """Runs the forward pass."""
        assert self._batch is not None
        with torch.autocast(self.device.kind, torch.bfloat16, enabled=self.network.autocast):
            return self.model.loss(self.module, self._batch)

    def zero(self) -> None:
        """Sets the gradients to zero, where they are."""
        self._optimizer.zero_grad(set_to_none=False)

    def gradients(self) -> list[Tensor]:
        """Returns copies of all gradients, in the host's memory."""
        return [x.grad.cpu() for x in self.module.parameters() if x.grad is not None]
