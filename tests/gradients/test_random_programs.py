"""Programs made up at random: views, in-place changes, values with many uses, values held and dropped.

Whatever the program does, its gradients are the bits of plain torch under every policy, and nothing is left afterwards.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from gradient_checks import Everything, differences
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from backstash import Policy, Session

SMALL = (2, 4, 6, 8)
LARGE = (4, 8, 32, 96)
"""384 KiB: decoded into buffers that are used again."""

PROGRAMS = 60
STEPS = 14


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        square = x * x
        ctx.save_for_backward(x, square)
        return x * square

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        x, square = ctx.saved_tensors
        return gradient * square * 3 + 0 * x


class Weights(nn.Module):
    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        _, channels, _, width = shape
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)
        self.linear = nn.Linear(width, width)
        self.norm = nn.BatchNorm2d(channels)
        self.layer_norm = nn.LayerNorm(width)


def _gather(x: Tensor) -> Tensor:
    index = torch.arange(x.numel()).reshape(x.shape) % x.shape[3]
    return x.gather(3, index.flip(3))


def _half_of_the_channels_in_place(x: Tensor) -> Tensor:
    y = x * 1.0
    y[:, : x.shape[1] // 2].mul_(0.5)
    return y


def _set_item(x: Tensor) -> Tensor:
    y = x.clone()
    y[..., 1:3] = x[..., 2:4].tanh()
    return y


Unary = Callable[[Tensor, Weights], Tensor]

UNARY: list[Unary] = [
    lambda x, w: F.relu(x),
    lambda x, w: F.relu_(x * 1.5),
    lambda x, w: F.leaky_relu(x, 0.1),
    lambda x, w: F.hardtanh(x, -0.5, 1.5),
    lambda x, w: x.clamp(-1, 1),
    lambda x, w: x.abs(),
    lambda x, w: F.threshold(x, 0.25, 0.0),
    lambda x, w: torch.tanh(x),
    lambda x, w: torch.sigmoid(x),
    lambda x, w: torch.exp(x * 0.1),
    lambda x, w: torch.sin(x),
    lambda x, w: x * 2,
    lambda x, w: x + 1,
    lambda x, w: x * x,
    lambda x, w: F.dropout(x, 0.3),
    lambda x, w: F.gelu(x),
    lambda x, w: F.silu(x),
    lambda x, w: F.softmax(x, 3),
    lambda x, w: x.transpose(2, 3).tanh().transpose(2, 3),
    lambda x, w: x.contiguous(memory_format=torch.channels_last),
    lambda x, w: x.flatten(1).sin().view(x.shape),
    lambda x, w: x.view(-1)[3:].cos().sum() * 0.1 + x,
    lambda x, w: (x.mean(1, keepdim=True).expand_as(x) * x).tanh(),
    lambda x, w: torch.cat([piece.exp().clamp(max=3) for piece in x.chunk(2, 1)], 1),
    lambda x, w: x.flip(2).square(),
    lambda x, w: F.max_pool2d(x, 3, 1, 1),
    lambda x, w: F.avg_pool2d(x, 3, 1, 1),
    lambda x, w: F.interpolate(F.max_pool2d(x, 2), scale_factor=2),
    lambda x, w: F.pad(x, (1, 1, 2, 0), mode="reflect")[:, :, : x.shape[2], : x.shape[3]],
    lambda x, w: x.sort(3)[0],
    lambda x, w: x.cummax(2)[0],
    lambda x, w: _gather(x),
    lambda x, w: x.masked_fill(x > 1, 0.5),
    lambda x, w: x.bfloat16().sin().float(),
    lambda x, w: x.double().exp().clamp(max=5).float(),
    lambda x, w: torch.view_as_real(torch.view_as_complex(x.reshape(*x.shape[:3], -1, 2)).exp()).reshape(x.shape) * 0.1,
    lambda x, w: Cube.apply(x.tanh()),
    lambda x, w: checkpoint(lambda y: torch.tanh(y).exp(), x, use_reentrant=False),
    lambda x, w: checkpoint(lambda y: torch.relu(y * 2).sin(), x, use_reentrant=True),
    lambda x, w: w.conv(x),
    lambda x, w: F.relu_(w.conv(x)),
    lambda x, w: w.linear(x),
    lambda x, w: w.norm(x),
    lambda x, w: F.relu_(w.norm(x)),
    lambda x, w: w.layer_norm(x),
    lambda x, w: _half_of_the_channels_in_place(x),
    lambda x, w: _set_item(x),
    lambda x, w: x.detach().sin() * x,
    lambda x, w: x.unfold(3, 3, 1).mean(4).tanh().sum() + x,
    lambda x, w: x[:, [0, 1] * (x.shape[1] // 2)].tanh(),
]

BINARY: list[Callable[[Tensor, Tensor], Tensor]] = [
    lambda a, b: a * b,
    lambda a, b: a + b,
    lambda a, b: a - b * 0.5,
    lambda a, b: torch.maximum(a, b),
    lambda a, b: a / (b.abs() + 1),
    lambda a, b: torch.where(a > b, a.tanh(), b),
    lambda a, b: torch.matmul(a.transpose(2, 3), b).mean() + a,
    lambda a, b: F.scaled_dot_product_attention(a, b, a * 0.5),
    lambda a, b: torch.addcmul(a, a, b, value=0.3),
    lambda a, b: torch.lerp(a, b, 0.3),
    lambda a, b: F.cosine_similarity(a, b, dim=1).unsqueeze(1) + b,
]

IN_PLACE: list[Callable[[Tensor], Any]] = [
    lambda x: x.mul_(0.5),
    lambda x: x.add_(1),
    lambda x: F.relu_(x),
    lambda x: x[:, :1].zero_(),
    lambda x: x.tanh_(),
    lambda x: F.dropout(x, 0.2, inplace=True),
    lambda x: F.leaky_relu_(x, 0.2),
    lambda x: x.clamp_(-2, 2),
]


def forward(seed: int, leaf: Tensor, weights: Weights, held: list[Tensor]) -> Tensor:
    """Run the program that ``seed`` stands for."""
    random = Random(seed)
    torch.manual_seed(seed)
    live = [leaf * 1]
    for _ in range(STEPS):
        kind, x = random.random(), random.choice(live)
        if kind < 0.7:
            live.append(random.choice(UNARY)(x, weights))
        elif kind < 0.92:
            live.append(random.choice(BINARY)(x, random.choice(live)))
        elif x.grad_fn is not None:
            random.choice(IN_PLACE)(x)
        del x
        if len(live) > 3:
            live.pop(random.randrange(len(live) - 1))
    if random.random() < 0.5:
        held.append(random.choice(live))
    return torch.stack([x.clamp(-10, 10).mean() for x in live]).sum()


def run(seed: int, shape: tuple[int, ...], session: Session | None) -> tuple[list[Tensor | None], str]:
    """Gradients of two passes over the graph, and the error if one was raised."""
    random = Random(-seed - 1)
    torch.manual_seed(seed)
    weights, leaf, held = Weights(shape), torch.randn(shape).requires_grad_(), []
    inside = random.random() < 0.3
    found: list[Tensor | None] = []

    def backward(loss: Tensor) -> None:
        for retain in (True, False):
            loss.backward(retain_graph=retain)
            found.extend(None if x.grad is None else x.grad.clone() for x in (leaf, *weights.parameters()))

    try:
        if session is None:
            backward(forward(seed, leaf, weights, held))
        else:
            with session:
                loss = forward(seed, leaf, weights, held)
                if inside:
                    backward(loss)
            if not inside:
                backward(loss)
    except RuntimeError as error:
        return [], str(error)
    return found, ""


@pytest.mark.filterwarnings("ignore:.*:UserWarning:torch.utils.checkpoint")
@pytest.mark.parametrize("policy", ["lossless", Everything()], ids=["lossless", "everything"])
@pytest.mark.parametrize(
    ("shape", "seed"),
    [pytest.param(SMALL, seed, id=f"small-{seed}") for seed in range(PROGRAMS)]
    + [pytest.param(LARGE, seed, id=f"large-{seed}") for seed in range(PROGRAMS, PROGRAMS + PROGRAMS // 4)],
)
def test_random_program(shape: tuple[int, ...], seed: int, policy: str | Policy) -> None:
    expected, error = run(seed, shape, None)
    session = Session(policy, min_nbytes=0)
    got, got_error = run(seed, shape, session)
    if error and not got_error:
        # More lenient than plain torch, where backward reads only the shape of what was changed.
        assert "modified by an inplace operation" in error
    elif error:
        assert "modified by an inplace operation" in error, error
        assert "modified by an inplace operation" in got_error, got_error
    else:
        assert got_error == ""
        assert not differences(expected, got)
    gc.collect()
    if got_error:  # after an error, autograd itself holds what it has not run until its next backward
        return
    assert session.stores["device"].usage().nbytes == 0
    assert session._live.saved == 0
    assert session._live.nbytes == 0
