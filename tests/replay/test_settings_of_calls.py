"""Passes settle whose calls ran under settings of the process that are not those of the backward pass."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_settings import OPT_EINSUM, SETTINGS

from backstash.policies import get
from tests.replay.twins import STEPS, Twin, costly

Entered = Callable[[], AbstractContextManager[Any]]


class Blocks(nn.Module):
    """Blocks, each of which runs its attention, its convolution or all of it under settings of its own.

    Args:
        inside: the settings, of one block after the other.
        part: what runs under them.
    """

    def __init__(self, inside: list[Entered], part: str) -> None:
        super().__init__()
        self.inside, self.part = inside, part
        self.norm, self.qkv, self.out = nn.LayerNorm(32), nn.Linear(32, 96), nn.Linear(32, 32)
        self.convolution = nn.Conv1d(32, 32, 3, padding=1)

    def under(self, part: str, number: int) -> AbstractContextManager[Any]:
        """The settings of a part of a block."""
        return self.inside[number % len(self.inside)]() if self.part == part else nullcontext()

    def forward(self, x: Tensor) -> Tensor:
        """Rows [2, 24, 32] to a number."""
        for number in range(3):
            with self.under("all", number):
                q, k, v = (each.unflatten(-1, (4, 8)).transpose(1, 2) for each in self.qkv(self.norm(x)).chunk(3, -1))
                with self.under("attention", number):
                    attended = F.scaled_dot_product_attention(q, k, v)
                x = x + torch.tanh(self.out(attended.transpose(1, 2).flatten(2)))
                with self.under("convolution", number):
                    x = x + F.gelu(self.convolution(x.transpose(1, 2))).transpose(1, 2)
        return x.square().mean()


def rows(step: int) -> Tensor:
    return torch.randn(2, 24, 32, generator=torch.Generator().manual_seed(step), requires_grad=True)


def settled(twin: Twin) -> str:
    """Takes steps; returns what a report says of the programs."""
    for step in range(3 * STEPS):
        twin.step(rows(step))
    assert twin.session._is_replayed, twin.passes.refusal
    return twin.session.report().programs()


@pytest.mark.parametrize("policy", [costly, lambda: get("lossless")], ids=["costly", "lossless"])
@pytest.mark.parametrize("part", ["all", "attention", "convolution"])
@pytest.mark.parametrize("name", SETTINGS)
def test_settings_of_parts(name: str, part: str, policy: Callable[[], Any]) -> None:
    torch.manual_seed(0)
    programs = settled(Twin(Blocks([nullcontext, SETTINGS[name]], part), policy()))
    assert "0 values went the long way alone" in programs


@pytest.mark.parametrize("policy", [costly, lambda: get("lossless")], ids=["costly", "lossless"])
@pytest.mark.parametrize("name", SETTINGS)
def test_settings_around_the_forward_pass(name: str, policy: Callable[[], Any]) -> None:
    """They are others when the pass is written down, which is when backward begins."""
    torch.manual_seed(0)
    twin = Twin(Blocks([nullcontext], "all"), policy())
    for model in (twin.plain, twin.other):
        model.inside, model.part = [SETTINGS[name]], "all"
    assert "0 values went the long way alone" in settled(twin)


@pytest.mark.parametrize("part", ["all", "attention", "convolution"])
@pytest.mark.parametrize("name", SETTINGS)
def test_settings_that_change_once_passes_are_known(name: str, part: str) -> None:
    torch.manual_seed(0)
    twin = Twin(Blocks([SETTINGS[name], nullcontext], part), costly())
    settled(twin)
    for inside in ([nullcontext], [nullcontext, SETTINGS[name]], [SETTINGS[name], nullcontext]):
        for model in (twin.plain, twin.other):
            model.inside = inside
        for step in range(3):
            twin.step(rows(step))


CONTRACTING = (
    OPT_EINSUM
    + """
import torch
from tests.replay.twins import STEPS, Twin, costly

class Contracting(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weights = torch.nn.ParameterList([torch.nn.Parameter(torch.randn(48, 48)) for _ in range(3)])

    def forward(self, x):
        product = torch.einsum("ij,jk,kl->il", *[(w + x).sin() for w in self.weights])
        return product.sin().square().sum()

torch.manual_seed(0)
twin = Twin(Contracting(), costly())
flags = torch.backends.opt_einsum

def backward(loss):
    flags.set_flags(True)
    loss.backward()
    flags.set_flags(False)

flags.set_flags(False)
for _ in range(3 * STEPS):
    twin.step(torch.randn(48, 48), backward)
"""
)


def test_the_order_of_contractions() -> None:
    """Of a package that is not installed, for which another one stands."""
    done = subprocess.run([sys.executable, "-c", CONTRACTING], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
