"""A policy that rounds values stores one of them exactly where others can then be made again from it."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import backstash as bs
from backstash.papers.gist import Gist

STEPS = 5


class Activation(nn.Module):
    """A gelu in five functions, each of which autograd saves something for."""

    def forward(self, x):
        return 0.5 * x * (1.0 + torch.tanh(0.8 * (x + 0.04 * torch.pow(x, 3.0))))


class Gated(nn.Module):
    """Two activations of one projection, multiplied."""

    def forward(self, x):
        return torch.sigmoid(x) * torch.tanh(x) * F.silu(x)


def network(activation, width=64):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, 2 * width), activation, nn.Linear(2 * width, width), nn.LayerNorm(width))


def gradients(model, x, session=None, steps=STEPS):
    for _ in range(steps):
        model.zero_grad()
        with session or nullcontext():
            loss = model(x).square().mean()
        loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


@pytest.mark.parametrize("policy", ["gist_fp16", "gist_fp8", "quantized"])
@pytest.mark.parametrize("activation", [Activation, Gated])
def test_no_more_bytes_and_no_larger_error(policy, activation):
    model, x = network(activation()), torch.randn(128, 64)
    exact = gradients(model, x)
    found = {}
    for name in ("rounded", "rooted"):
        session = bs.Session(policy, model=model)
        got = gradients(model, x, session, 1 if name == "rounded" else STEPS)
        found[name] = session.report().stash_nbytes, float((got - exact).norm() / exact.norm())
        del session
    assert found["rooted"][0] <= found["rounded"][0]
    assert found["rooted"][1] <= 1.5 * found["rounded"][1]


def test_what_a_gelu_computes_is_made_again_from_its_exact_input():
    model, x = network(Activation()), torch.randn(128, 64)
    session = bs.Session("gist_fp16", model=model)
    gradients(model, x, session)
    rows = {row.key: row for row in session.report().rows}
    remade = {key.rpartition("/")[2] for key, row in rows.items() if row.codec == "recompute"}
    assert {"Tanh#0:result", "Addmm#0:mat1"} <= remade
    root = rows["1/Pow#0:self"]
    assert root.stash_nbytes == root.saved_nbytes
    assert "others are made again of it" in root.reason


def test_a_value_to_which_nothing_goes_back_stays_rounded():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh()), torch.randn(128, 64)
    session = bs.Session("gist_fp8", model=model)
    gradients(model, x, session)
    codecs = {row.key: row.codec for row in session.report().rows if row.key.endswith("Tanh#0:result")}
    assert len(codecs) == 2
    assert all("fp8" in codec for codec in codecs.values())


def test_without_remaking_nothing_is_a_root():
    model, x = network(Activation()), torch.randn(128, 64)
    session = bs.Session(Gist("fp16", recompute=False), model=model)
    gradients(model, x, session)
    assert {row.codec for row in session.report().rows if row.need == "VALUE"} <= {"fp16", "kept"}
