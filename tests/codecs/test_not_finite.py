"""Infinities and NaNs stay visible: no lossy codec and no policy turns them into finite numbers unseen."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backstash import Policy, Session
from backstash.codecs import BlockQuant, Codec, Csr, FewBit, Minifloat, Signed, Sz, Szp, Zvc
from backstash.codecs.minifloat.formats import FORMATS, SCALED
from backstash.errors import CodecRefusedError
from backstash.papers.comet import comet
from backstash.papers.gist import gist
from backstash.policies import quantized
from backstash.policies.registry import descriptions

CODECS: list[Codec] = [
    *(Minifloat(name, 0) for name in FORMATS),
    *(Minifloat(name, size) for name in SCALED for size in (16, 256)),
    *(Zvc(values=Minifloat(name, 0)) for name in FORMATS),
    *(Csr(values=Minifloat(name, 0)) for name in FORMATS),
    *(BlockQuant(bits) for bits in (1, 2, 4, 8)),
    *(FewBit(function, bits) for function in ("gelu", "silu", "tanh", "sigmoid") for bits in (1, 2, 3, 4)),
    *(kind(0.01, mode) for kind in (Sz, Szp) for mode in ("abs", "rel")),
    Signed(),
    Signed(Sz(0.01)),
    Signed(BlockQuant(4)),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_a_codec_keeps_them_or_refuses(codec: Codec, dtype: torch.dtype) -> None:
    """Its neighbours are decoded as they would be without it, as far as one scale or range does not tell."""
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    for number in (math.inf, -math.inf, math.nan):
        odd = x.clone()
        odd[3, 5] = odd[40, 63] = number
        try:
            if codec.declines(odd) is not None:
                continue
            got = codec.decode(codec.encode(odd))
        except CodecRefusedError:
            continue
        assert torch.equal(got.isnan(), odd.isnan())
        assert torch.equal(got[odd.isinf()], odd[odd.isinf()])
        assert got.isfinite().sum() == odd.isfinite().sum()


LOSSY: dict[str, Callable[[], str | Policy]] = {
    **{row.name: (lambda name=row.name: name) for row in descriptions() if not row.is_exact},
    **{f"gist {name}": (lambda name=name: gist(name)) for name in FORMATS},
    **{f"gist {name} without remaking": (lambda name=name: gist(name, recompute=False)) for name in FORMATS},
    "gist with few bits": lambda: gist("fp8", fewbit=2),
    **{f"quantized {bits}": (lambda bits=bits: quantized(bits)) for bits in (2, 4, 8)},
    "comet": comet,
}


def _network(kind: str) -> nn.Module:
    torch.manual_seed(0)
    if kind == "images":
        layers = [nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()]
        return nn.Sequential(*layers, nn.Conv2d(8, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(72, 8))
    layers = [nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 64), nn.SiLU(), nn.LayerNorm(64), nn.Linear(64, 64)]
    return nn.Sequential(*layers, nn.Tanh(), nn.Linear(64, 8))


def _inputs(kind: str) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn((4, 3, 8, 8) if kind == "images" else (24, 32), generator=generator)


class _Put(torch.autograd.Function):
    """Puts a number into an activation."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, number: float) -> Tensor:
        x = x.clone()
        x.view(-1)[x.numel() // 2] = number
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def _gradients(kind: str, session: Any, number: float, place: int, scale: float) -> list[Tensor]:
    network, x = _network(kind), _inputs(kind)
    targets = torch.arange(x.shape[0]) % 8
    with session:
        for index, layer in enumerate(network):  # type: ignore[arg-type]
            x = layer(x)
            if index == place:
                x = _Put.apply(x, number)
        loss = F.cross_entropy(x, targets) * scale
    loss.backward()
    return [parameter.grad for parameter in network.parameters() if parameter.grad is not None]


CAUSES: dict[str, tuple[float, int, float]] = {
    **{
        f"{number} behind layer {place}": (number, place, 1.0)
        for number in (math.inf, -math.inf, math.nan)
        for place in (0, 2)
    },
    "a loss scale": (0.5, 0, 3e38),
    "an infinite loss scale": (0.5, 0, math.inf),
}


@pytest.mark.cases(30)
@pytest.mark.parametrize("cause", CAUSES.values(), ids=CAUSES)
@pytest.mark.parametrize("kind", ["images", "tokens"])
@pytest.mark.parametrize("policy", LOSSY.values(), ids=LOSSY)
def test_a_loss_scaler_sees_what_plain_would_show(
    policy: Callable[[], str | Policy], kind: str, cause: tuple[float, int, float]
) -> None:
    number, place, scale = cause
    expected = _gradients(kind, torch.enable_grad(), number, place, scale * 1e4 if scale > 1 else scale)
    got = _gradients(kind, Session(policy(), min_nbytes=0), number, place, scale * 1e4 if scale > 1 else scale)
    for one, other in zip(expected, got, strict=True):
        if not one.isfinite().all():
            assert not other.isfinite().all()


def test_the_largest_number_of_a_format_is_no_infinity() -> None:
    """What is finite stays finite: it becomes the largest number of the format, as in the paper."""
    for name, form in FORMATS.items():
        x = torch.tensor([3e38, -3e38, form.largest, -form.largest])
        got = Minifloat(name, 0).decode(Minifloat(name, 0).encode(x))
        assert got.isfinite().all() and got.abs().max() <= form.largest
