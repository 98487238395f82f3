"""Norms and curves that are made again in one pass: they have the bits of torch's calls, and are made so."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import backstash
from backstash.ops import backends
from backstash.remake import onepass
from backstash.replay import replaying

needs_kernels = pytest.mark.skipif(
    not backends.has_own_kernel("row_norm", "cpu"), reason="the native kernels are not built"
)
WIDTH = 256


class Gated(nn.Module):
    """A layer norm and a gated product, as in a Llama."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.gate, self.up = nn.LayerNorm(64), nn.Linear(64, WIDTH), nn.Linear(64, WIDTH)
        self.down = nn.Linear(WIDTH, 64)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class OwnGelu(nn.Module):
    """A layer norm without weights, and a GELU of several calls, as in a GPT-2."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(64, elementwise_affine=False)
        self.up, self.down = nn.Linear(64, WIDTH), nn.Linear(WIDTH, 64)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(self.norm(x))
        return x + self.down(0.5 * h * (1.0 + torch.tanh(0.79788456 * (h + 0.044715 * torch.pow(h, 3.0)))))


class RootMeanSquare(nn.Module):
    """An RMS norm as transformers writes it, whose weight is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 64), requires_grad=False)
        self.up, self.down = nn.Linear(64, WIDTH), nn.Linear(WIDTH, 64)

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        normal = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)
        return x + self.down(F.gelu(self.up(self.weight * normal)))


class Images(nn.Module):
    """A group norm and silu before a convolution, as in a diffusion U-Net."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.convolution = nn.GroupNorm(8, 64), nn.Conv2d(64, 64, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.convolution(F.silu(self.norm(x)))


class Residual(nn.Module):
    """A convolution, a batch norm, a sum and an activation, as in a ResNet."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(64, 64, 3, padding=1), nn.BatchNorm2d(64)
        self.inner, self.second = nn.Conv2d(64, 64, 1), nn.BatchNorm2d(64)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu6(self.second(self.inner(x)))
        return F.relu(x + self.norm(self.convolution(h)))


def tokens() -> Tensor:
    return torch.randn(2, 64, 64, generator=torch.Generator().manual_seed(1))


def images() -> Tensor:
    return torch.randn(2, 64, 16, 16, generator=torch.Generator().manual_seed(1))


def gradients(layer: type[nn.Module], x: Tensor, mode: str, steps: int, is_stashed: bool) -> list[Tensor]:
    """The gradients of the last step: of float32, of autocast with inputs of both dtypes, or of bfloat16 throughout."""
    torch.manual_seed(0)
    network = nn.Sequential(layer(), layer())
    if mode == "bfloat16":
        network = network.bfloat16()
    if mode in ("bfloat16", "mixed"):
        x = x.bfloat16()
    session = backstash.Session("lossless", model=network, min_nbytes=4096)
    for _ in range(steps):
        network.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=mode in ("autocast", "mixed")):
            if is_stashed:
                with session:
                    loss = network(x).float().square().mean()
            else:
                loss = network(x).float().square().mean()
        loss.backward()
    return [parameter.grad for parameter in network.parameters() if parameter.grad is not None]


def equal(found: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    return len(found) == len(expected) and all(
        torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(found, expected, strict=True)
    )


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often a kernel has made a value in one pass, by the kernel's name."""
    counts: Counter[str] = Counter()
    served = backends.serving("cpu")

    def counted(name: str, kernel: Callable[..., None], *args: object) -> None:
        counts[name] += 1
        kernel(*args)

    for name in ("row_norm", "grouped_norm", "channel_norm", "gated", "curve"):
        monkeypatch.setattr(served, name, partial(counted, name, getattr(served, name)))
    return counts


@needs_kernels
@pytest.mark.parametrize("mode", ["float32", "autocast", "mixed", "bfloat16"])
@pytest.mark.parametrize("layer", [Gated, OwnGelu, RootMeanSquare, Images, Residual])
def test_gradients_are_those_of_torch(layer: type[nn.Module], mode: str, passes: Counter[str]) -> None:
    x = images() if layer in (Images, Residual) else tokens()
    expected = gradients(layer, x, mode, 1, is_stashed=False)
    passes.clear()
    assert equal(gradients(layer, x, mode, 8, is_stashed=True), expected)
    made = {
        (Gated, "float32"): {"row_norm"},
        (Gated, "autocast"): {"curve"},
        (Gated, "mixed"): {"row_norm", "curve"},
        (Gated, "bfloat16"): {"curve"},
        (OwnGelu, "float32"): {"row_norm"},
        (OwnGelu, "autocast"): {"curve"},
        (OwnGelu, "bfloat16"): {"curve"},
        (RootMeanSquare, "bfloat16"): {"row_norm", "curve"},
        (Residual, "mixed"): {"channel_norm"},
        (Images, "float32"): {"grouped_norm"},
        (Images, "mixed"): {"grouped_norm", "curve"},
    }.get((layer, mode), set())
    assert made <= set(passes), passes
    assert all(passes[name] >= 6 for name in made), passes  # in the steps that are replayed, too


@needs_kernels
@pytest.mark.parametrize("mode", ["float32", "autocast", "mixed", "bfloat16"])
def test_group_norms_in_channels_last_have_the_bits_of_torch(mode: str) -> None:
    """Whichever order this torch rounds them in: one that the kernel does not have is left to torch's calls."""
    x = images().to(memory_format=torch.channels_last).requires_grad_()  # without a gradient of it, torch 2.13 crashes
    expected = gradients(Images, x, mode, 1, is_stashed=False)
    assert equal(gradients(Images, x, mode, 8, is_stashed=True), expected)


OUT = {"row_norm": 8, "grouped_norm": 12, "channel_norm": 12, "affine": 11}
"""Kernels of norms, and which argument is the tensor that they fill."""


def mixed_with_nans(number: int, x: Tensor) -> Tensor:
    """Numbers of which every third step has some that are not finite, or whatever lay in the memory."""
    x = x.clone()
    if number % 3 == 1:
        x.view(-1)[number::97] = (math.nan, -math.nan, math.inf, -math.inf)[number // 3 % 4]
    if number % 6 == 4:
        noise = torch.randint(-(2**31), 2**31, x.shape, generator=torch.Generator().manual_seed(number))
        x = torch.where(torch.arange(x.shape[-1]) % 2 == 0, noise.int().view(torch.float32), x)
    return x


@needs_kernels
@pytest.mark.parametrize("mode", ["float32", "mixed"])
@pytest.mark.parametrize("layer", [Gated, RootMeanSquare, Images, Residual])
def test_which_nan_a_norm_keeps_is_left_to_torch(
    layer: type[nn.Module], mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels that another compiler has built may keep the other one of two NaNs: here they turn the sign of each."""
    served = backends.serving("cpu")

    def turned(kernel: Callable[..., None], place: int, *args: Any) -> None:
        kernel(*args)
        out = args[place]
        out.copy_(torch.where(out.isnan(), -out, out))

    for name, place in OUT.items():
        monkeypatch.setattr(served, name, partial(turned, getattr(served, name), place))
    shape = images() if layer in (Images, Residual) else tokens()

    def run(session: backstash.Session | None) -> Iterator[Tensor]:
        torch.manual_seed(0)
        network = nn.Sequential(layer(), layer())
        for number in range(15):
            x = mixed_with_nans(number, shape)
            with session or nullcontext(), torch.autocast("cpu", torch.bfloat16, enabled=mode == "mixed"):
                loss = network(x.bfloat16() if mode == "mixed" else x).float().square().mean()
            loss.backward()
            yield from (parameter.grad for parameter in network.parameters() if parameter.grad is not None)
            network.zero_grad()

    session = backstash.Session("lossless", min_nbytes=4096)
    for found, expected in zip(run(session), run(None), strict=True):
        assert torch.equal(found.isnan(), expected.isnan())
        assert equal([found.nan_to_num(0.0)], [expected.nan_to_num(0.0)])
    assert any("recompute" in row.codec for row in session.report().rows)


@needs_kernels
@pytest.mark.parametrize("replayed", [False, True])
def test_the_calls_have_the_last_word(replayed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that was proven and makes other numbers later is no error: torch's calls make the value instead."""
    expected = gradients(Gated, tokens(), "float32", 1, is_stashed=False)
    kernel, calls = backends.serving("cpu").row_norm, Counter[bool]()

    def spoilt(*args: Any) -> None:
        kernel(*args)
        calls[True] += 1
        if calls[True] > 8:
            args[-1].mul_(2.0)

    monkeypatch.setattr(backends.serving("cpu"), "row_norm", spoilt)
    if not replayed:
        monkeypatch.setattr(replaying, "native", None)
    assert equal(gradients(Gated, tokens(), "float32", 12, is_stashed=True), expected)
    assert calls[True] > 8


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_table_has_all_numbers(dtype: torch.dtype) -> None:
    numbers = torch.arange(onepass.CODES, dtype=torch.int32).to(torch.int16).view(dtype)
    for function in (F.silu, F.gelu, torch.tanh, F.mish):
        for n in (onepass.CODES, onepass.CODES - 1, onepass.TABLE_FROM + 17):
            x = numbers[:n].clone().requires_grad_()
            network = nn.Linear(1, 1)  # a Session's model; what is stashed is found without it
            with backstash.Session("lossless", model=network, min_nbytes=4096):
                y = function(x * 1.0)
                z = y * y.detach()
            z.backward(torch.ones_like(z))
            grad, x.grad = x.grad, None
            y = function(x * 1.0)
            (y * y.detach()).backward(torch.ones_like(y))
            assert grad is not None and x.grad is not None and equal([grad], [x.grad])
