"""Settings of the process that a program changes between the passes: what is made again is made under its own ones."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from gradient_checks import Remake
from torch import Tensor, nn
from torch_settings import OPT_EINSUM, SETTINGS, setting

import backstash as bs
from backstash.numerics import settings, under
from backstash.testing import equal_bits

TINY = 1e-39
"""Below the smallest normal float32."""


class Attending(nn.Module):
    """Attention, convolutions, and results whose type or whose zeros depend on the settings."""

    def __init__(self, inside: list[Callable[[], AbstractContextManager[Any]]]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inside = inside
        self.norm, self.qkv, self.out = nn.LayerNorm(32), nn.Linear(32, 96), nn.Linear(32, 32)
        self.convolution = nn.Conv1d(32, 32, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        for number in range(4):
            with self.inside[number % len(self.inside)]():
                q, k, v = (each.unflatten(-1, (4, 8)).transpose(1, 2) for each in self.qkv(self.norm(x)).chunk(3, -1))
                attended = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
                x = x + torch.tanh(self.out(attended))
                x = x * F.silu(self.convolution(x.transpose(1, 2))).transpose(1, 2)
                scale = torch.arange(x.shape[1]) * 0.1  # of the default dtype
                x = (x.double() * scale[:, None].sin()).exp().log1p().float()
                x = x + (x * TINY * 0.5).sin() * 1e38
        return x


def gradients(
    model: nn.Module,
    context: AbstractContextManager[Any],
    around: Callable[[], AbstractContextManager[Any]],
    steps: int,
) -> list[Tensor]:
    found = []
    for number in range(steps):
        torch.manual_seed(number)
        x = torch.randn(2, 12, 32, requires_grad=True)
        model.zero_grad()
        with around(), context:
            loss = model(x).square().mean()
        loss.backward()
        found += [loss.detach(), x.grad, *(parameter.grad for parameter in model.parameters())]
    return [each.clone() for each in found if each is not None]


def assert_equal(found: list[Tensor], expected: list[Tensor]) -> None:
    assert all(each.isfinite().all() for each in expected)
    assert len(found) == len(expected)
    assert all(equal_bits(one, other) for one, other in zip(found, expected, strict=True))


CONTEXTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "lossless": lambda: bs.Session("lossless", min_nbytes=0),
    "any producer": lambda: bs.Session(Remake(), min_nbytes=0),
    "budget": lambda: bs.Budgeted("85%", min_nbytes=0),
}


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("context", CONTEXTS)
def test_around_the_forward_pass(name: str, context: str) -> None:
    around, model = SETTINGS[name], Attending([nullcontext])
    steps = 8 if context == "budget" else 2
    expected = gradients(model, nullcontext(), around, steps)
    before = settings("cpu")
    assert_equal(gradients(model, CONTEXTS[context](), around, steps), expected)
    assert settings("cpu") == before


def of_layers() -> nn.Module:
    """Layers whose values have codecs, kernels and proofs of their own."""
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.GELU(), nn.GroupNorm(4, 16), nn.SiLU()),
        *(nn.Conv2d(16, 16, 3, padding=1), nn.Dropout(0.1), nn.LayerNorm((16, 16, 16)), nn.Hardswish()),
        *(nn.AdaptiveAvgPool2d(8), nn.Flatten(), nn.Linear(1024, 32), nn.Sigmoid(), nn.Linear(32, 10)),
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    ("policy", "autocast"), [("quantized", False), *((name, each) for name in CONTEXTS for each in (False, True))]
)
def test_default_dtypes_that_change_between_the_passes(policy: str, autocast: bool, dtype: torch.dtype) -> None:
    layout = torch.channels_last if dtype is torch.bfloat16 else torch.contiguous_format

    def trained(context: AbstractContextManager[Any], dtypes: tuple[torch.dtype, torch.dtype]) -> list[Tensor]:
        model, found = of_layers().to(memory_format=layout), []  # type: ignore[call-overload]
        for number in range(30 if policy == "budget" else 14):
            torch.manual_seed(number)
            x = torch.randn(4, 3, 32, 32, dtype=torch.float32).to(memory_format=layout)
            with setting(torch.get_default_dtype, torch.set_default_dtype, dtypes[number % 2]):
                with context, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                    loss = F.cross_entropy(model(x), torch.arange(4))
            model.zero_grad()
            with setting(torch.get_default_dtype, torch.set_default_dtype, dtypes[1 - number % 2]):
                loss.backward()
            found += [parameter.grad for parameter in model.parameters()]
        return [each.clone() for each in found if each is not None]

    context = CONTEXTS.get(policy, lambda: bs.Session(policy, min_nbytes=0))

    expected = trained(context() if policy == "quantized" else nullcontext(), (torch.float32, torch.float32))
    assert_equal(trained(context(), (torch.float32, dtype)), expected)


@pytest.mark.slow
@pytest.mark.parametrize("context", CONTEXTS)
def test_inside_the_forward_pass(context: str) -> None:
    """Each layer has settings of its own, and other ones than the backward pass; they change from step to step."""
    dice = random.Random(context)
    for _ in range(3):
        chosen = [dice.choice([*SETTINGS.values(), nullcontext]) for _ in range(dice.randrange(1, 5))]
        around, model = dice.choice([*SETTINGS.values(), nullcontext]), Attending(chosen)
        expected = gradients(model, nullcontext(), around, 6)
        before = settings("cpu")
        assert_equal(gradients(model, CONTEXTS[context](), around, 6), expected)
        assert settings("cpu") == before


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_are_those_and_then_what_they_were(name: str) -> None:
    with SETTINGS[name]():  # what it leaves behind may be another name for what was there
        pass
    outside = settings("cpu")
    with SETTINGS[name]():
        inside = settings("cpu")
    assert settings("cpu") is outside
    with under(inside, "cpu"):
        assert settings("cpu") is inside
    assert settings("cpu") is outside
    with SETTINGS[name](), under(outside, "cpu"):
        assert settings("cpu") is outside


ONEDNN: Any = torch.backends.mkldnn
LEVELS: tuple[Any, ...] = torch.backends, ONEDNN, ONEDNN.matmul, ONEDNN.conv


@pytest.fixture
def precisions() -> Iterator[None]:
    """No precision is set for products of float32, on any level."""
    before = [level.fp32_precision for level in LEVELS]
    with torch.backends.__allow_nonbracketed_mutation():  # torch's own tests, which others import, forbid it
        for level in LEVELS:
            level.fp32_precision = "none"
        yield
        for level, precision in zip(LEVELS, before, strict=True):
            level.fp32_precision = precision


@pytest.mark.usefixtures("precisions")
@pytest.mark.parametrize("is_own", [True, False])
@pytest.mark.parametrize("above", LEVELS[:2], ids=["all backends", "oneDNN"])
def test_a_precision_that_an_operation_has_of_its_own_stays_that(above: Any, is_own: bool) -> None:
    """Torch tells it from one that is set for all operations only when that is changed."""
    matmul = ONEDNN.matmul
    matmul.fp32_precision = "bf16"
    outside = settings("cpu")
    matmul.fp32_precision = "ieee" if is_own else "none"
    above.fp32_precision = "ieee"
    with under(outside, "cpu"):
        assert matmul.fp32_precision == "bf16"
    assert matmul.fp32_precision == above.fp32_precision == "ieee"
    above.fp32_precision = "bf16"
    assert matmul.fp32_precision == ("ieee" if is_own else "bf16")


@pytest.mark.usefixtures("precisions")
@pytest.mark.parametrize("above", LEVELS[:2], ids=["all backends", "oneDNN"])
def test_what_was_computed_before_any_precision_was_set_is_made_again_so(above: Any) -> None:
    def train(context: AbstractContextManager[Any]) -> list[Tensor]:
        torch.manual_seed(0)
        model, x = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.Tanh()), torch.randn(64, 64)
        for number in range(3):
            model.zero_grad()
            above.fp32_precision = "none"
            with context:
                loss = model(x + number).square().sum()
            above.fp32_precision = "bf16"
            loss.backward()
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    outside = settings("cpu")
    plain = train(nullcontext())
    assert all(map(equal_bits, train(bs.Session(Remake(), min_nbytes=0)), plain))
    with under(outside, "cpu"):
        assert ONEDNN.matmul.fp32_precision == "ieee"
    assert ONEDNN.matmul.fp32_precision == "bf16"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_setting_can_be_written(device: str) -> None:
    from backstash import numerics

    for each in numerics._OF_CPU if device == "cpu" else numerics._OF_OTHERS:
        value = each.read()
        each.write(value)
        assert each.read() == value


CONTRACTING = (
    OPT_EINSUM
    + """
import torch
import backstash as bs
from backstash import Keep, Recompute

class Remake(bs.Policy):
    is_fixed = remakes_anything = True
    def decide(self, saved):
        return Recompute(Keep(), any_producer=True)

def gradients(context, assigns):
    torch.manual_seed(0)
    found, flags = [], torch.backends.opt_einsum
    for forward, backward in ((False, True), (True, False), (True, True)):
        weights = [torch.randn(24, 24, requires_grad=True) for _ in range(3)]
        def put(value):
            if assigns:
                flags.enabled = value
            else:
                flags.set_flags(value)
        put(forward)
        with context:
            loss = torch.einsum("ij,jk,kl->il", *[w.sin() for w in weights]).sin().square().sum()
        put(backward)
        loss.backward()
        assert flags.enabled is backward
        found += [w.grad for w in weights]
    return found

def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other))

import contextlib
for assigns in (False, True):
    session = bs.Session(Remake(), min_nbytes=0)
    plain = gradients(contextlib.nullcontext(), assigns)
    assert same(plain, gradients(session, assigns))
    assert any("einsum" in row.reason for row in session.report().rows if row.codec == "recompute")
with torch.backends.opt_einsum.flags(enabled=True, strategy="greedy"):
    pass
"""
)


@pytest.mark.slow
def test_the_order_of_contractions() -> None:
    """Of a package that is not installed, for which another one stands."""
    done = subprocess.run([sys.executable, "-c", CONTRACTING], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
