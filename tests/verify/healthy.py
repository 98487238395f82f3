"""Small programs that compute right gradients in unusual ways: no alarm is raised for any of them."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.nn import functional as F
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

import backstash as bs
from verify.faults import Block, Hooks, Net, Step, data, plain_checkpoint, reentrant_checkpoint, step_of

HEALTHY: dict[str, Callable[[], Step]] = {}


def healthy(make: Callable[[], Step]) -> Callable[[], Step]:
    HEALTHY[make.__name__] = make
    return make


def images() -> Tensor:
    return torch.randn(4, 3, 12, 12, generator=torch.Generator().manual_seed(2))


# -- plain -------------------------------------------------------------------------------------------------------


@healthy
def perceptron() -> Step:
    return step_of(Net([Block(), Block(drop=0.1)]))


@healthy
def convolutions() -> Step:
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(288, 3),
    )  # fmt: skip
    x = images()
    return lambda: net(x).sum().backward()


@healthy
def convolutions_in_channels_last() -> Step:
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Hardswish(), nn.AvgPool2d(2)).to(memory_format=torch.channels_last)
    x = images().to(memory_format=torch.channels_last)
    return lambda: net(x).sum().backward()


@healthy
def embedding_and_loss() -> Step:
    net = nn.Sequential(nn.Embedding(20, 16), nn.LayerNorm(16), nn.Linear(16, 20))
    words = torch.arange(12).view(2, 6)
    return lambda: F.cross_entropy(net(words).flatten(0, 1), words.flatten()).backward()


@healthy
def sparse_embedding() -> Step:
    net = nn.EmbeddingBag(20, 16, sparse=True)
    words = torch.arange(12).view(2, 6)
    return lambda: net(words).sum().backward()


@healthy
def lstm() -> Step:
    net = nn.LSTM(16, 8, num_layers=2, dropout=0.1)
    x = torch.randn(5, 2, 16)
    return lambda: net(x)[0].sum().backward()


@healthy
def transformer_layer() -> Step:
    net = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    x = torch.randn(2, 6, 16)
    return lambda: net(x).square().mean().backward()


@healthy
def attention_with_dropout() -> Step:
    x = torch.randn(2, 2, 6, 8, requires_grad=True)
    return lambda: F.scaled_dot_product_attention(x, x, x, dropout_p=0.2, is_causal=True).sum().backward()


@healthy
def in_place_operations() -> Step:
    net = Net([Block(nn.ReLU(inplace=True)), Block(nn.SiLU(inplace=True))])
    return step_of(net)


@healthy
def expanded_and_complex_values() -> Step:
    x = torch.randn(4, 1, requires_grad=True)
    return lambda: (torch.fft.fft(x.expand(4, 8).sin()) * 1j).abs().sum().backward()


@healthy
def half_precision_and_masks() -> Step:
    x = torch.randn(8, 16, dtype=torch.bfloat16, requires_grad=True)
    mask = torch.arange(16) % 2 == 0
    return lambda: (x.masked_fill(mask, 0).exp()[:, mask.logical_not()]).sum().backward()


@healthy
def gradient_accumulation_and_clipping() -> Step:
    net = Net([Block(), Block()], plain_checkpoint)
    x = data()
    optimizer = torch.optim.AdamW(net.parameters())

    def step() -> None:
        optimizer.zero_grad()
        for scale in (1.0, 2.0):
            (net(x * scale).square().mean() / 2).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()

    return step


@healthy
def gan_with_two_optimizers() -> Step:
    maker, judge = Block(), nn.Sequential(Block(), nn.Linear(16, 1))
    one, two = torch.optim.SGD(judge.parameters(), lr=0.1), torch.optim.SGD(maker.parameters(), lr=0.1)
    x = data()

    def step() -> None:
        (judge(maker(x).detach()).mean() - judge(x).mean()).backward()
        one.step()
        judge.zero_grad()
        (-judge(maker(x)).mean()).backward()
        two.step()

    return step


@healthy
def gradient_twice_from_one_graph() -> Step:
    net = Net([Block(), Block()])
    x = data()

    def step() -> None:
        loss = net(x).sum()
        loss.backward(retain_graph=True)
        loss.backward()

    return step


@healthy
def gradient_penalty() -> Step:
    net = Net([Block(), Block()])
    x = data().requires_grad_()

    def step() -> None:
        (gradient,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
        (gradient.square().sum()).backward()

    return step


@healthy
def autograd_grad_alone() -> Step:
    net = Net([Block()], plain_checkpoint)
    x = data().requires_grad_()

    def step() -> Any:
        return torch.autograd.grad(net(x).sum(), x)

    return step


@healthy
def transform_of_functions() -> Step:
    weight = nn.Linear(16, 1)
    x = data()

    def step() -> None:
        found = torch.func.grad(lambda y: (y.sin() * 2).sum())(x)
        (weight(found)).sum().backward()

    return step


@healthy
def straight_through_estimator() -> Step:
    class Rounds(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.round()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient

    x = data().requires_grad_()
    return lambda: Rounds.apply(x * 3).square().sum().backward()


@healthy
def frozen_and_unused_parameters() -> Step:
    net = Net([Block(), Block()], plain_checkpoint)
    net.layers[0].requires_grad_(False)
    net.unused = nn.Linear(2, 2)  # type: ignore[assignment]
    return step_of(net)


@healthy
def tied_weights() -> Step:
    net = Net([Block(), Block()], plain_checkpoint)
    net.layers[1].lin.weight = net.layers[0].lin.weight  # type: ignore[union-attr]
    return step_of(net)


# -- checkpoints -------------------------------------------------------------------------------------------------


@healthy
def checkpoint_with_dropout() -> Step:
    return step_of(Net([Block(drop=0.3), Block(drop=0.3)], plain_checkpoint))


@healthy
def reentrant_checkpoint_with_dropout() -> Step:
    return step_of(Net([Block(drop=0.3), Block(drop=0.3)], reentrant_checkpoint), data().requires_grad_())


@healthy
def checkpoint_without_early_stop() -> Step:
    net = Net([Block(drop=0.3)], plain_checkpoint)
    x = data()

    def step() -> None:
        with set_checkpoint_early_stop(False):
            net(x).sum().backward()

    return step


@healthy
def nested_checkpoints() -> Step:
    inner, outer = Block(drop=0.2), Block(drop=0.2)
    x = data()
    both = lambda y: outer(plain_checkpoint(inner, y))  # noqa: E731
    return lambda: checkpoint(both, x, use_reentrant=False).sum().backward()


@healthy
def reentrant_in_reentrant_checkpoint() -> Step:
    inner, outer = Block(drop=0.2), Block(drop=0.2)
    x = data().requires_grad_()
    both = lambda y: outer(checkpoint(inner, y, use_reentrant=True))  # noqa: E731
    return lambda: checkpoint(both, x, use_reentrant=True).sum().backward()


@healthy
def checkpointed_sequence() -> Step:
    layers = nn.Sequential(*[Block(drop=0.2) for _ in range(4)])
    x = data()
    return lambda: checkpoint_sequential(layers, 2, x, use_reentrant=False).sum().backward()


@healthy
def keywords_and_several_results() -> Step:
    block = Block(drop=0.2)

    def run(x: Tensor, *, scale: Tensor, rest: dict[str, Tensor]) -> tuple[Tensor, Any]:
        return block(x * scale), {"sum": (x + rest["bias"]).sum(), "word": "none"}

    x, scale = data().requires_grad_(), torch.randn(16, requires_grad=True)

    def step() -> None:
        y, more = checkpoint(run, x, scale=scale, rest={"bias": torch.ones(16)}, use_reentrant=False)
        (y.sum() + more["sum"]).backward()

    return step


@healthy
def selective_checkpoint_by_list() -> Step:
    def run(block: nn.Module, x: Tensor) -> Tensor:
        contexts = partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])
        return checkpoint(block, x, use_reentrant=False, context_fn=contexts)

    return step_of(Net([Block(drop=0.2), Block()], run))


@healthy
def selective_checkpoint_by_policy() -> Step:
    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if "tanh" in str(op) else CheckpointPolicy.PREFER_RECOMPUTE

    def run(block: nn.Module, x: Tensor) -> Tensor:
        contexts = partial(create_selective_checkpoint_contexts, policy)
        return checkpoint(block, x, use_reentrant=False, context_fn=contexts)

    return step_of(Net([Block(drop=0.2), Block()], run))


@healthy
def autocast_and_checkpoint() -> Step:
    net = Net([Block(nn.GELU(), 0.2), Block(nn.GELU())], plain_checkpoint)
    x = data()

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            loss = net(x).float().sum()
        loss.backward()

    return step


@healthy
def autocast_and_reentrant_checkpoint() -> Step:
    net = Net([Block(nn.GELU(), 0.2)], reentrant_checkpoint)
    x = data().requires_grad_()

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            loss = net(x).float().sum()
        loss.backward()

    return step


@healthy
def checkpointed_batch_norm_that_evaluates() -> Step:
    net = Net([Block(nn.Sequential(nn.BatchNorm1d(16), nn.ReLU()))], plain_checkpoint)
    net.layers.eval()
    return step_of(net)


@healthy
def random_numbers_of_python_outside_of_the_region() -> Step:
    net = Net([Block(), Block()])
    x = data()

    def step() -> None:
        y = x
        for block in net.layers:
            y = checkpoint(lambda z, p, block=block: block(z) * p, y, random.random(), use_reentrant=False)
        net.head(y).sum().backward()

    return step


@healthy
def eval_without_gradients_before() -> Step:
    net = Net([Block(drop=0.2)], plain_checkpoint)
    x = data()

    def step() -> None:
        net.eval()
        with torch.no_grad():
            net(x)
        net.train()
        net(x).sum().backward()

    return step


class RestoringCheckpoint(torch.autograd.Function):
    """Recomputes by itself, with the generator's state and autocast of forward."""

    @staticmethod
    def forward(ctx: Any, run: Callable[[Tensor], Tensor], x: Tensor, *weights: Tensor) -> Tensor:
        ctx.run, ctx.state = run, torch.get_rng_state()
        ctx.cast = torch.is_autocast_enabled("cpu")
        ctx.save_for_backward(x, *weights)
        with torch.no_grad():
            return run(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, *weights = ctx.saved_tensors
        x = x.detach().requires_grad_()
        with torch.random.fork_rng(devices=[]), torch.enable_grad(), torch.autocast("cpu", enabled=ctx.cast):
            torch.set_rng_state(ctx.state)
            y = ctx.run(x)
        return None, *torch.autograd.grad(y, [x, *weights], gradient, allow_unused=True)


@healthy
def function_that_recomputes_well() -> Step:
    def run(block: nn.Module, x: Tensor) -> Tensor:
        return RestoringCheckpoint.apply(block, x, *block.parameters())

    return step_of(Net([Block(drop=0.3), Block()], run), data().requires_grad_())


# -- offloaders --------------------------------------------------------------------------------------------------


@healthy
def saved_on_cpu() -> Step:
    return step_of(Net([Block(), Block(drop=0.2)]), hooks=save_on_cpu)


@healthy
def saved_on_cpu_around_checkpoints() -> Step:
    return step_of(Net([Block(), Block(drop=0.2)], plain_checkpoint), hooks=save_on_cpu)


@healthy
def offloader_in_the_style_of_trl() -> Step:
    class Offload(saved_tensors_hooks):
        """Keeps tensors under running numbers, and drops them when they are read."""

        def __init__(self) -> None:
            self.kept: dict[int, Any] = {}
            self.count = 0
            super().__init__(self.pack, self.unpack)

        def pack(self, x: Tensor) -> int:
            self.count += 1
            is_large = x.numel() >= 64 and not isinstance(x, nn.Parameter)
            self.kept[self.count] = (x.detach().clone(), x.stride()) if is_large else x.detach()
            return self.count

        def unpack(self, number: int) -> Tensor:
            kept = self.kept.pop(number)
            return kept[0] if isinstance(kept, tuple) else kept

    return step_of(Net([Block(), Block(drop=0.2), Block()]), hooks=Offload)


@healthy
def offloader_that_shares_one_copy() -> Step:
    def hooks() -> Hooks:
        copies: dict[Any, Any] = {}

        def store(x: Tensor, number: int) -> Any:
            key = x.data_ptr(), x.shape, x.stride(), x._version
            return copies.setdefault(key, (x, x.clone()))[1]  # holds x, so that nothing else gets its address

        return Hooks(store, lambda kept: kept)

    return step_of(Net([Block(), Block()]), hooks=hooks)


@healthy
def hooks_inside_a_checkpoint() -> Step:
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block(drop=0.2)

        def forward(self, x: Tensor) -> Tensor:
            with save_on_cpu():
                return self.block(x)

    return step_of(Net([Inner()], plain_checkpoint))


# -- this library ------------------------------------------------------------------------------------------------


@healthy
def session_without_loss() -> Step:
    net = Net([Block(nn.ReLU(), 0.2), Block(nn.GELU())])
    x = data()

    def step() -> None:
        with bs.Session("lossless", min_nbytes=0):
            loss = net(x).sum()
        loss.backward()

    return step


@healthy
def session_around_checkpoints() -> Step:
    net = Net([Block(nn.ReLU(), 0.2), Block(nn.GELU())], plain_checkpoint)
    x = data()

    def step() -> None:
        with bs.Session("lossless", min_nbytes=0):
            loss = net(x).sum()
        loss.backward()

    return step


@healthy
def wrapped_model() -> Step:
    net = bs.wrap(Net([Block(nn.ReLU(), 0.2), Block(nn.ReLU())]), min_nbytes=0)
    return step_of(net)
