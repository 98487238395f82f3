"""Profiles of training steps that never ran: networks of known kinds, with the bytes and times of real layers.

A planner is judged on them against an exact solver, at sizes and shapes that no network at hand has. Bytes are those of
the tensors; times are arithmetic at :data:`FLOPS` and memory at :data:`BANDWIDTH`, with some noise, as measured times
have. Which tensors a node saves, and what it needs of them, is as in PyTorch.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from backstash.planning.model.problem import Choice, PlannedValue, Position, StepProfile

FLOPS = 60e9
"""Arithmetic of two cores, in operations per second."""
BANDWIDTH = 10e9
"""Memory that a function reads and writes, in bytes per second."""
LINK = 4e9
"""Speed of a copy to another memory, in bytes per second."""

ZVC_DENSITY = 0.45
"""Share of a relu's result that is not zero."""


@dataclass(eq=False)
class Tensor:
    """The result of a call, or the batch.

    Attributes:
        nbytes: its bytes.
        call: number of the call that computes it; -1 for the batch.
        is_sparse: whether about half of it is zero.
        used: numbers of the calls that read it in the forward pass.
        saved: for each call whose node saves it, the need: ``"value"``, ``"sign"`` or ``"index"``.
    """

    nbytes: int
    call: int
    is_sparse: bool = False
    used: list[int] = field(default_factory=list)
    saved: dict[int, str] = field(default_factory=dict)


@dataclass
class Call:
    """One function of the forward pass."""

    name: str
    module: str
    inputs: list[Tensor]
    outputs: list[Tensor]
    seconds: float
    workspace: int
    is_random: bool


class Network:
    """Builds the forward pass of a network, call by call, and the profile of its step.

    Args:
        seed: of the noise in times.
    """

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.calls: list[Call] = []

    def call(
        self,
        name: str,
        module: str,
        inputs: Sequence[Tensor],
        nbytes: int,
        *,
        flops: float = 0.0,
        saves: dict[int, str] | None = None,
        saves_result: str = "",
        extra: Sequence[tuple[int, str]] = (),
        workspace: int = 0,
        is_sparse: bool = False,
        is_random: bool = False,
    ) -> Tensor:
        """Adds a call and returns its result.

        Args:
            name, module: what is called, and where.
            inputs: the tensors that it reads.
            nbytes: bytes of its result.
            flops: its arithmetic, beside the memory that it touches.
            saves: which inputs its node saves, by their number, with the need.
            saves_result: the need of its result, if the node saves it.
            extra: bytes and need of what else it computes and saves, such as masks and indices.
            workspace: bytes that it takes while it runs.
            is_sparse, is_random: whether half of the result is zero, and whether it cannot be computed again.
        """
        number = len(self.calls)
        result = Tensor(nbytes, number, is_sparse)
        moved = sum(tensor.nbytes for tensor in inputs) + nbytes
        seconds = (flops / FLOPS + moved / BANDWIDTH) * self.random.uniform(0.8, 1.3)
        beside = [Tensor(size, number, saved={number: need}) for size, need in extra]
        for tensor in inputs:
            tensor.used.append(number)
        for index, need in (saves or {}).items():
            inputs[index].saved[number] = need
        if saves_result:
            result.saved[number] = saves_result
        self.calls.append(Call(name, module, list(inputs), [result, *beside], seconds, workspace, is_random))
        return result

    def profile(self) -> StepProfile:
        """Returns the profile of a step of the network."""
        count = len(self.calls)
        forward = [Position(call.name, call.module, False, call.seconds) for call in self.calls]
        backward = [Position(f"{c.name}Backward0", c.module, True, 2 * c.seconds) for c in reversed(self.calls)]
        base = [call.workspace for call in self.calls] + [call.workspace for call in reversed(self.calls)]
        planned: list[Tensor] = []
        for number, call in enumerate(self.calls):
            for tensor in call.outputs:
                last = max([number, *tensor.used])
                if tensor.saved:
                    planned.append(tensor)
                for position in range(number, last + (0 if tensor.saved else 1)):
                    base[position] += tensor.nbytes  # the program holds it
            result = call.outputs[0]
            last = max([number, *result.used])
            for position in range(2 * count - 1 - last, 2 * count - number):
                base[position] += result.nbytes  # its gradient
        index = {id(tensor): n for n, tensor in enumerate(planned)}
        values = [self._value(tensor, index, f"{n}") for n, tensor in enumerate(planned)]
        profile = StepProfile(tuple(forward + backward), tuple(base), tuple(values), 0)
        live = list(base)
        for value in values:
            for position in range(value.born, value.reads[-1] + 1):
                live[position] += value.nbytes
        return StepProfile(profile.positions, profile.base_nbytes, profile.values, max(live))

    def _value(self, tensor: Tensor, index: dict[int, int], number: str) -> PlannedValue:
        call, count = self.calls[tensor.call], len(self.calls)
        reads = tuple(sorted(2 * count - 1 - node for node in tensor.saved))
        choices = [Choice.keep(tensor.nbytes), *self._encodings(tensor, set(tensor.saved.values()))]
        remake = self._remake(tensor, index)
        if remake is not None:
            choices.append(remake)
        moving = tensor.nbytes / LINK
        choices.append(Choice("offload", "offload", 0, 0, tensor.nbytes, 0.3 * moving, 0.6 * moving))
        key = f"{call.module}/{call.name}#{number}:result"
        spec = f"float32 [{tensor.nbytes // 4}]"
        born = max([tensor.call, *tensor.used])
        return PlannedValue(key, call.module, call.name, spec, tensor.nbytes, born, reads, tuple(choices))

    def _encodings(self, tensor: Tensor, needs: set[str]) -> list[Choice]:
        size, seconds = tensor.nbytes, tensor.nbytes / BANDWIDTH
        if needs == {"sign"}:
            return [Choice("bitmask", "encode", size // 32, size, 0, seconds)]
        if needs == {"index"}:
            return [Choice("narrow", "encode", size // 16, size, size, seconds, seconds)]
        if not tensor.is_sparse:
            return [Choice("blockquant", "encode", size // 8, size, size, 3 * seconds, seconds, error=0.001)]
        held = int(ZVC_DENSITY * size) + size // 32
        return [Choice("zvc", "encode", held, size, size, 2 * seconds, seconds)]

    def _remake(self, tensor: Tensor, index: dict[int, int]) -> Choice | None:
        """The recipe of a tensor: back to planned values, through what nobody saves."""
        parents: list[int] = []
        workspace, seconds = 0, 0.0
        waiting, seen = [self.calls[tensor.call]], set[int]()
        while waiting:
            call = waiting.pop()
            if call.is_random or len(seen) > 6:
                return None
            seen.add(id(call))
            workspace += call.workspace
            seconds += call.seconds
            for source in call.inputs:
                if source.call >= 0 and id(source) in index:
                    parents.append(index[id(source)])
                elif source.call >= 0 and id(self.calls[source.call]) not in seen:
                    workspace += source.nbytes
                    waiting.append(self.calls[source.call])
        found = tuple(sorted(set(parents)))
        return Choice("recompute", "recompute", 0, parents=found, workspace_nbytes=workspace, seconds=seconds)


def _conv(net: Network, module: str, x: Tensor, pixels: int, into: int, out: int, kernel: int, batch: int) -> Tensor:
    """A convolution that returns ``[batch, out, pixels, pixels]``."""
    flops = 2.0 * batch * pixels * pixels * into * out * kernel * kernel
    size = 4 * batch * out * pixels * pixels
    return net.call("Convolution", module, [x], size, flops=flops, saves={0: "value"}, workspace=size // 4)


def _norm_relu(net: Network, module: str, x: Tensor, other: Tensor | None = None) -> Tensor:
    y = net.call("NativeBatchNorm", f"{module}.bn", [x], x.nbytes, saves={0: "value"})
    if other is not None:
        y = net.call("Add", module, [y, other], y.nbytes)
    return net.call("Relu", f"{module}.relu", [y], y.nbytes, saves_result="sign", is_sparse=True)


def _head(net: Network, x: Tensor, width: int, classes: int, rows: int) -> None:
    out = net.call("Addmm", "head", [x], 4 * rows * classes, flops=2.0 * rows * width * classes, saves={0: "value"})
    log = net.call("LogSoftmax", "loss", [out], out.nbytes, saves_result="value")
    net.call("NllLoss", "loss", [log], 4)


def resnet(blocks: Sequence[int], width: int = 64, batch: int = 8, image: int = 224, seed: int = 0) -> StepProfile:
    """Bottleneck blocks, as in ResNet-50 with ``blocks=(3, 4, 6, 3)``."""
    net = Network(seed)
    pixels, channels = image // 2, width
    x = _conv(net, "conv1", Tensor(4 * batch * 3 * image * image, -1), pixels, 3, width, 7, batch)
    x = _norm_relu(net, "stem", x)
    pixels //= 2
    size = 4 * batch * width * pixels * pixels
    x = net.call("MaxPool2D", "pool", [x], size, extra=[(2 * size, "index")], is_sparse=True)
    for stage, repeats in enumerate(blocks):
        inner = width << stage
        for block in range(repeats):
            name = f"layer{stage + 1}.{block}"
            before = x
            first = stage > 0 and block == 0
            y = _norm_relu(net, f"{name}.1", _conv(net, f"{name}.conv1", x, pixels, channels, inner, 1, batch))
            pixels = pixels // 2 if first else pixels
            y = _norm_relu(net, f"{name}.2", _conv(net, f"{name}.conv2", y, pixels, inner, inner, 3, batch))
            y = _conv(net, f"{name}.conv3", y, pixels, inner, 4 * inner, 1, batch)
            if block == 0:
                skip = _conv(net, f"{name}.down", before, pixels, channels, 4 * inner, 1, batch)
                before = net.call("NativeBatchNorm", f"{name}.down.bn", [skip], skip.nbytes, saves={0: "value"})
                channels = 4 * inner
            x = _norm_relu(net, f"{name}.3", y, before)
    x = net.call("Mean", "pool", [x], 4 * batch * channels)
    _head(net, x, channels, 1000, batch)
    return net.profile()


def transformer(
    layers: int, width: int = 768, tokens: int = 512, batch: int = 2, words: int = 8192, seed: int = 0
) -> StepProfile:
    """GPT-2-like blocks: attention and a perceptron of four times the width, with dropout."""
    net = Network(seed)
    rows = batch * tokens
    size = 4 * rows * width
    x = net.call("Embedding", "wte", [], size)

    def linear(module: str, y: Tensor, into: int, out: int) -> Tensor:
        return net.call("Addmm", module, [y], 4 * rows * out, flops=2.0 * rows * into * out, saves={0: "value"})

    def dropout(module: str, y: Tensor) -> Tensor:
        return net.call("NativeDropout", module, [y], y.nbytes, extra=[(y.nbytes // 4, "index")], is_random=True)

    for layer in range(layers):
        name = f"h.{layer}"
        y = net.call("NativeLayerNorm", f"{name}.ln_1", [x], size, saves={0: "value"})
        heads = [linear(f"{name}.attn.{part}", y, width, width) for part in "qkv"]
        arithmetic = 4.0 * rows * tokens * width
        saves = {0: "value", 1: "value", 2: "value"}
        y = net.call("Attention", f"{name}.attn", heads, size, flops=arithmetic, saves=saves, saves_result="value")
        x = net.call("Add", name, [x, dropout(f"{name}.attn.drop", linear(f"{name}.attn.proj", y, width, width))], size)
        y = net.call("NativeLayerNorm", f"{name}.ln_2", [x], size, saves={0: "value"})
        y = linear(f"{name}.mlp.fc", y, width, 4 * width)
        y = net.call("Gelu", f"{name}.mlp.act", [y], 4 * size, saves={0: "value"})
        x = net.call(
            "Add", name, [x, dropout(f"{name}.mlp.drop", linear(f"{name}.mlp.proj", y, 4 * width, width))], size
        )
    x = net.call("NativeLayerNorm", "ln_f", [x], size, saves={0: "value"})
    _head(net, x, width, words, rows)
    return net.profile()


def unet(depth: int, width: int = 32, batch: int = 4, image: int = 128, seed: int = 0) -> StepProfile:
    """Two convolutions per level on the way down and up; what a level has computed is read again on the way up."""
    net = Network(seed)
    x, pixels, channels = Tensor(4 * batch * 3 * image * image, -1), image, 3
    skips: list[tuple[Tensor, int]] = []

    def double(module: str, y: Tensor, into: int, out: int) -> Tensor:
        y = _norm_relu(net, f"{module}.0", _conv(net, f"{module}.0.conv", y, pixels, into, out, 3, batch))
        return _norm_relu(net, f"{module}.1", _conv(net, f"{module}.1.conv", y, pixels, out, out, 3, batch))

    for level in range(depth):
        out = width << level
        x = double(f"down.{level}", x, channels, out)
        skips.append((x, out))
        pixels, channels = pixels // 2, out
        size = 4 * batch * out * pixels * pixels
        x = net.call("MaxPool2D", f"down.{level}.pool", [x], size, extra=[(2 * size, "index")], is_sparse=True)
    x = double("middle", x, channels, 2 * channels)
    channels *= 2
    for level in reversed(range(depth)):
        skip, out = skips[level]
        pixels *= 2
        x = net.call("Upsample", f"up.{level}.up", [x], 4 * x.nbytes)
        x = net.call("Cat", f"up.{level}", [x, skip], x.nbytes + skip.nbytes, is_sparse=True)
        x = double(f"up.{level}", x, channels + out, out)
        channels = out
    x = _conv(net, "head", x, pixels, channels, 2, 1, batch)
    x = net.call("LogSoftmax", "loss", [x], x.nbytes, saves_result="value")
    net.call("NllLoss", "loss", [x], 4)
    return net.profile()


def mobilenet(blocks: int, width: int = 24, batch: int = 8, image: int = 56, seed: int = 0) -> StepProfile:
    """Inverted bottlenecks: six times as many channels inside a block as between blocks."""
    net = Network(seed)
    x = _conv(net, "stem", Tensor(4 * batch * 3 * image * image, -1), image, 3, width, 3, batch)
    for block in range(blocks):
        name, inner = f"features.{block}", 6 * width
        y = _norm_relu(net, f"{name}.0", _conv(net, f"{name}.0.conv", x, image, width, inner, 1, batch))
        y = _norm_relu(net, f"{name}.1", _conv(net, f"{name}.1.conv", y, image, 1, inner, 3, batch))
        y = _conv(net, f"{name}.2.conv", y, image, inner, width, 1, batch)
        y = net.call("NativeBatchNorm", f"{name}.2.bn", [y], y.nbytes, saves={0: "value"})
        x = net.call("Add", name, [x, y], x.nbytes)
    x = net.call("Mean", "pool", [x], 4 * batch * width)
    _head(net, x, width, 1000, batch)
    return net.profile()


def random_network(seed: int) -> StepProfile:
    """A network of a kind, depth, width and batch that the seed draws."""
    draw = random.Random(seed)
    kinds: list[Callable[[], StepProfile]] = [
        lambda: resnet([draw.randint(1, 2) for _ in range(4)], draw.choice([32, 64]), draw.choice([2, 8]), seed=seed),
        lambda: transformer(draw.randint(2, 4), draw.choice([256, 768]), draw.choice([128, 512]), seed=seed),
        lambda: unet(draw.randint(2, 4), draw.choice([16, 32]), draw.choice([2, 4]), seed=seed),
        lambda: mobilenet(draw.randint(2, 8), draw.choice([16, 24]), draw.choice([2, 8]), seed=seed),
    ]
    return kinds[seed % len(kinds)]()
