"""Training programs that are more than one loss and one backward pass."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.utils.checkpoint import checkpoint

from studies.unseen.program import Program, supervised


def gan() -> Program:
    """A generator and a discriminator with an optimizer each, and spectral norm."""

    def up(a: int, b: int) -> list[nn.Module]:
        return [nn.ConvTranspose2d(a, b, 4, 2, 1, bias=False), nn.BatchNorm2d(b), nn.ReLU(True)]

    def down(a: int, b: int) -> list[nn.Module]:
        return [spectral_norm(nn.Conv2d(a, b, 4, 2, 1)), nn.LeakyReLU(0.2, inplace=True)]

    generator = nn.Sequential(*up(32, 64), *up(64, 48), *up(48, 32), nn.ConvTranspose2d(32, 3, 4, 2, 1), nn.Tanh())
    critic = nn.Sequential(*down(3, 32), *down(32, 48), *down(48, 64), nn.Conv2d(64, 1, 8))
    both = nn.ModuleDict({"generator": generator, "critic": critic})
    sgd = [torch.optim.SGD(part.parameters(), lr=1e-3) for part in (generator, critic)]
    real = torch.randn(12, 3, 64, 64)

    def step() -> None:
        for optimizer in sgd:
            optimizer.zero_grad()
        fake = generator(torch.randn(12, 32, 4, 4))
        (F.softplus(-critic(real)).mean() + F.softplus(critic(fake.detach())).mean()).backward()
        sgd[1].step()
        F.softplus(-critic(fake)).mean().backward()
        sgd[0].step()

    return Program(both.train(), step)


class TwoHeads(nn.Module):
    """A shared trunk, a classifier and a decoder, and a weight for each loss that is learned."""

    def __init__(self) -> None:
        super().__init__()
        layers = nn.Conv2d(3, 32, 3, padding=1), nn.GroupNorm(4, 32), nn.Mish(), nn.Conv2d(32, 48, 3, 2, 1), nn.CELU()
        self.trunk, self.classes, self.depth = nn.Sequential(*layers), nn.Linear(48, 10), nn.Conv2d(48, 4, 3, padding=1)
        self.weights = nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.trunk(x)
        return self.classes(x.amax((2, 3))), F.pixel_shuffle(self.depth(x), 2)


def multi_task() -> Program:
    """Two losses, a backward pass for each of them through one graph."""
    model, images = TwoHeads(), torch.randn(8, 3, 64, 64)
    labels, depth = torch.randint(10, (8,)), torch.rand(8, 1, 64, 64)

    def step() -> None:
        logits, found = model(images)
        factors = torch.exp(-model.weights)
        (factors[0] * F.cross_entropy(logits, labels) + model.weights[0]).backward(retain_graph=True)
        (factors[1] * F.smooth_l1_loss(found, depth) + model.weights[1]).backward()

    return Program(model.train(), step)


def accumulation() -> Program:
    """Gradients of three batches, in bfloat16 by autocast, with dropout everywhere."""
    layers: list[nn.Module] = []
    for a, b in ((3, 32), (32, 48), (48, 64)):
        layers += [nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(), nn.Dropout2d(0.1), nn.MaxPool2d(2)]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Dropout(0.5), nn.Linear(4096, 64), nn.GELU(), nn.Linear(64, 10))
    images, labels = torch.randn(3, 8, 3, 64, 64), torch.randint(10, (3, 8))

    def step() -> None:
        for batch, wanted in zip(images, labels, strict=True):
            with torch.autocast("cpu", torch.bfloat16):
                loss = F.cross_entropy(model(batch), wanted) / 3
            loss.backward()

    return Program(model.train(), step)


class Checkpointed(nn.Module):
    """Encoder layers, of which every second one is in a checkpoint of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(32, 128)
        self.layers = nn.ModuleList([nn.TransformerEncoderLayer(128, 4, 256, 0.1, batch_first=True) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x).add_(1.0)
        for number, layer in enumerate(self.layers):
            x = checkpoint(layer, x, use_reentrant=False) if number % 2 else layer(x)
        return x


def checkpointed() -> Program:
    """A transformer's encoder with torch's own checkpoints inside."""
    model, x = Checkpointed(), torch.randn(8, 96, 32)
    return supervised(model, lambda: model(x).mul_(2).square().mean())


class RoundHalf(torch.autograd.Function):
    """Rounds to halves; the gradient passes where the input is small."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return (2 * x).round() / 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return gradient * (x.abs() <= 3)


def quantised() -> Program:
    """A custom Function between layers, and a penalty that torch.func computes from Jacobian products."""
    model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 256), nn.SiLU(), nn.Linear(256, 16))
    x = torch.randn(2048, 64)

    def loss() -> Tensor:
        y = model[1](model[0](x))
        y = model[4](model[3](model[2](RoundHalf.apply(y))))
        found = dict(model.named_parameters())
        near, push = x[:128], torch.ones(128, 64)
        calls: Any = torch.func
        _, moved = calls.jvp(lambda z: calls.functional_call(model, found, (z,)), (near,), (push,))
        return y.square().mean() + 1e-2 * moved.square().mean()

    return supervised(model, loss)


class Tied(nn.Module):
    """One block that is used four times, tied embeddings, and a part that is scripted."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.block = nn.Embedding(512, 128), nn.TransformerEncoderLayer(128, 4, 256, 0.0, batch_first=True)
        self.gate = torch.jit.script(Gate(128))
        self.head = nn.Linear(128, 512, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        for _ in range(4):
            x = self.gate(self.block(x), x)
        logits: Tensor = self.head(x)
        return logits


class Gate(nn.Module):
    """Mixes two tensors by a gate."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mix = nn.Linear(2 * width, width)

    def forward(self, new: Tensor, old: Tensor) -> Tensor:
        share = torch.sigmoid(self.mix(torch.cat([new, old], dim=-1)))
        return share * new + (1 - share) * old


def tied() -> Program:
    """A shared block with a scripted gate and tied weights."""
    model, tokens = Tied(), torch.randint(512, (8, 64))
    return supervised(model, lambda: F.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(1, 1).flatten()))


def contrastive() -> Program:
    """Two views through one encoder, a slow copy of it without gradients, and weight norm in the projection."""
    encoder = nn.Sequential(
        *(nn.Conv2d(3, 32, 5, 2, 2), nn.BatchNorm2d(32), nn.ReLU(True)),
        *(nn.Conv2d(32, 64, 3, 1, 1), nn.BatchNorm2d(64), nn.ReLU(True), nn.MaxPool2d(2)),
        *(nn.AdaptiveAvgPool2d(4), nn.Flatten(), weight_norm(nn.Linear(1024, 128))),
    )
    slow = copy.deepcopy(encoder).requires_grad_(False)
    both = nn.ModuleDict({"encoder": encoder, "slow": slow})
    images = torch.randn(12, 3, 64, 64)

    def step() -> None:
        views = [images + 0.1 * torch.randn_like(images), images.flip(-1)]
        with torch.no_grad():
            for old, new in zip(slow.parameters(), encoder.parameters(), strict=True):
                old.lerp_(new, 0.01)
            keys = [F.normalize(slow(view), dim=-1) for view in views]
        queries = [F.normalize(encoder(view), dim=-1) for view in views]
        logits = torch.cat([queries[0] @ keys[1].T, queries[1] @ keys[0].T]) / 0.2
        F.cross_entropy(logits, torch.arange(12).repeat(2)).backward()

    return Program(both.train(), step)


class Messages(nn.Module):
    """A graph network's layer: messages along edges are added up at nodes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.message = nn.Sequential(nn.Linear(2 * width, width), nn.ReLU(), nn.Linear(width, width))
        self.update, self.norm = nn.GRUCell(width, width), nn.LayerNorm(width)

    def forward(self, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        messages = self.message(torch.cat([x[a], x.index_select(0, b)], dim=-1))
        gathered = torch.zeros_like(x).index_add(0, b, messages)
        most = torch.zeros_like(x).scatter_reduce(0, b[:, None].expand_as(messages), messages, "amax")
        updated: Tensor = self.norm(self.update(gathered + most, x))
        return updated


def graph() -> Program:
    """A graph network with gathers and scatters."""
    layers = nn.ModuleList([Messages(64) for _ in range(3)])
    nodes, a, b = torch.randn(1024, 64), torch.randint(1024, (8192,)), torch.randint(1024, (8192,))

    def loss() -> Tensor:
        x = nodes
        for layer in layers:
            x = layer(x, a, b)
        return x.square().mean() + F.mse_loss(x[a].mean(0), x[b].mean(0))

    return supervised(layers, loss)


def volume() -> Program:
    """A field of colours that rays are rendered through: sines, a cumulative product, an einsum."""
    layers = [nn.Linear(30, 128), nn.ReLU(True), nn.Linear(128, 128), nn.ReLU(True), nn.Linear(128, 128), nn.ReLU(True)]
    model = nn.Sequential(*layers, nn.Linear(128, 4))
    wanted = torch.rand(128, 3)

    def loss() -> Tensor:
        points = torch.rand(128, 64, 3)
        angles = torch.einsum("rsd,f->rsdf", points, 2.0 ** torch.arange(5)).flatten(-2)
        found = model(torch.cat([angles.sin(), angles.cos()], dim=-1))
        alpha = 1 - torch.exp(-F.relu(found[..., 3]) / 64)
        left = torch.cumprod(torch.cat([torch.ones(128, 1), 1 - alpha[:, :-1]], dim=1), dim=1)
        return (torch.einsum("rs,rsc->rc", alpha * left, torch.sigmoid(found[..., :3])) - wanted).square().mean()

    return supervised(model, loss)


PROGRAMS = {
    "GAN, two optimizers": gan,
    "two tasks, two backward passes": multi_task,
    "accumulated bfloat16": accumulation,
    "torch's checkpoints inside": checkpointed,
    "custom Function, torch.func": quantised,
    "shared, tied, scripted": tied,
    "contrastive, slow copy": contrastive,
    "graph network": graph,
    "volume rendering": volume,
}
