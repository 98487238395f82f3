"""Small programs with faults that were reported in public, each written anew. Each is named after its report or kind.

Every function returns a step, and is listed in FAULTS with the kind of cause and the place that verify has to name.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

Step = Callable[[], Any]


class Block(nn.Module):
    """A residual layer."""

    def __init__(self, act: nn.Module | None = None, drop: float = 0.0, width: int = 16) -> None:
        super().__init__()
        self.lin = nn.Linear(width, width)
        self.act = act or nn.Tanh()
        self.drop = nn.Dropout(drop)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.act(self.lin(x)))


class Net(nn.Module):
    """Blocks and a head. ``run`` calls a block: plainly, or in a checkpoint."""

    def __init__(self, blocks: list[nn.Module], run: Callable[[nn.Module, Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(blocks)
        self.head = nn.Linear(16, 1)
        self.run = run or (lambda block, x: block(x))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.layers:
            x = self.run(block, x)
        return self.head(x)


def data() -> Tensor:
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(1))


def step_of(net: nn.Module, x: Tensor | None = None, hooks: Any = None) -> Step:
    given = data() if x is None else x

    def step() -> None:
        if hooks is None:
            loss = net(given).square().mean()
        else:
            with hooks():
                loss = net(given).square().mean()
        loss.backward()

    return step


def plain_checkpoint(block: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(block, x, use_reentrant=False)


def forgetful_checkpoint(block: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(block, x, use_reentrant=False, preserve_rng_state=False)


def reentrant_checkpoint(block: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(block, x.requires_grad_() if x.is_leaf else x, use_reentrant=True)


# -- generators --------------------------------------------------------------------------------------------------


def olmo_core_828_dropout_without_generator_state() -> Step:
    return step_of(Net([Block(), Block(drop=0.5), Block()], forgetful_checkpoint))


def reentrant_dropout_without_generator_state() -> Step:
    def run(block: nn.Module, x: Tensor) -> Tensor:
        return checkpoint(block, x, use_reentrant=True, preserve_rng_state=False)

    return step_of(Net([Block(), Block(drop=0.5)], run), data().requires_grad_())


def checkpoint_sequential_without_generator_state() -> Step:
    layers = nn.Sequential(*[Block(drop=0.3) for _ in range(4)])
    x = data()
    return lambda: checkpoint_sequential(layers, 2, x, use_reentrant=False, preserve_rng_state=False).sum().backward()


def nested_dropout_without_generator_state() -> Step:
    inner, outer = Block(drop=0.5), Block()

    def both(x: Tensor) -> Tensor:
        return outer(checkpoint(inner, x, use_reentrant=False, preserve_rng_state=False))

    x = data()
    net = nn.ModuleList([inner, outer])
    step = lambda: checkpoint(both, x, use_reentrant=False, preserve_rng_state=False).sum().backward()  # noqa: E731
    step.net = net  # type: ignore[attr-defined]
    return step


class LayerDrop(nn.Module):
    """Skips its block now and then, as Python's generator says."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block(nn.GELU())

    def forward(self, x: Tensor) -> Tensor:
        keep = random.random()
        return self.block(x * keep) if keep < 2 else x


def fairseq_layerdrop_by_python_random() -> Step:
    return step_of(Net([Block(), LayerDrop()], plain_checkpoint))


class NumpyMask(nn.Module):
    """Masks by NumPy's generator."""

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.from_numpy((np.random.rand(*x.shape) > 0.5).astype(np.float32))
        return (x * mask).tanh()


def spec_augment_by_numpy() -> Step:
    return step_of(Net([Block(), NumpyMask()], plain_checkpoint))


class OwnGenerator(nn.Module):
    """Adds noise from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, x: Tensor) -> Tensor:
        return (x + torch.randn(x.shape, generator=self.generator)).sigmoid()


def diffusers_noise_from_an_own_generator() -> Step:
    return step_of(Net([Block(), OwnGenerator()], plain_checkpoint))


# -- other ways through the function -----------------------------------------------------------------------------


class OtherOrder(nn.Module):
    """Sums in another order where autograd records."""

    def forward(self, x: Tensor) -> Tensor:
        scale = x.view(x.shape[0], 4, -1).sum(2).sum(1) if torch.is_grad_enabled() else x.sum(1)
        return (x * scale[:, None] * 0.1).tanh()


def pytorch_186572_reduction_in_another_order() -> Step:
    return step_of(Net([Block(), OtherOrder()], reentrant_checkpoint), data().requires_grad_())


def comfyui_15846_another_device_path() -> Step:
    state = {"is_fast": True}

    class Offloaded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(16, 16) / 4)

        def forward(self, x: Tensor) -> Tensor:
            y = x @ self.weight if state["is_fast"] else torch.einsum("ij,jk->ik", x.double(), self.weight.double())
            return y.float().tanh()

    net = Net([Block(), Offloaded()], plain_checkpoint)
    x = data()

    def step() -> None:
        state["is_fast"] = True
        loss = net(x).sum()
        state["is_fast"] = False
        loss.backward()

    return step


def deepspeed_moe_capacity_that_counts_calls() -> Step:
    class Router(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return (x * (1.0 + 0.1 * self.calls)).tanh()

    return step_of(Net([Block(), Router()], plain_checkpoint))


def peft_eval_before_backward() -> Step:
    net = Net([Block(), Block(drop=0.5)], plain_checkpoint)
    x = data()

    def step() -> None:
        net.train()
        loss = net(x).sum()
        net.eval()
        loss.backward()

    return step


class Scaled(TorchFunctionMode):
    """A mode that computes another gelu."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.gelu:
            return func(*args, approximate="tanh")
        return func(*args, **(kwargs or {}))


def function_mode_in_forward_only() -> Step:
    net = Net([Block(), Block(nn.Sequential(nn.GELU(), nn.Tanh()))], plain_checkpoint)
    x = data()

    def step() -> None:
        with Scaled():
            loss = net(x).sum()
        loss.backward()

    return step


def default_dtype_changed_before_backward() -> Step:
    class Made(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x * torch.full((), 0.1).to(x.dtype) * torch.linspace(0, 1, 16).float()).tanh()

    net = Net([Block(), Made()], plain_checkpoint)
    x = data()

    def step() -> None:
        loss = net(x).sum()
        torch.set_default_dtype(torch.float64)
        try:
            loss.backward()
        finally:
            torch.set_default_dtype(torch.float32)

    return step


def threads_changed_before_backward() -> Step:
    class Threaded(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            parts = x.chunk(torch.get_num_threads() + 1, dim=1)
            return (x * sum(part.sum(1, keepdim=True) for part in parts)).tanh()

    net = Net([Block(), Threaded()], plain_checkpoint)
    x = data()

    def step() -> None:
        before = torch.get_num_threads()
        loss = net(x).sum()
        torch.set_num_threads(before + 2)
        try:
            loss.backward()
        finally:
            torch.set_num_threads(before)

    return step


# -- what was written between ------------------------------------------------------------------------------------


class Running(nn.Module):
    """Divides by a buffer that is written after forward."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.scale).tanh()


def ema_buffer_written_before_backward() -> Step:
    running = Running()
    net = Net([Block(), running], plain_checkpoint)
    x = data()

    def step() -> None:
        loss = net(x).sum()
        running.scale.mul_(0.9)
        loss.backward()

    return step


def torchvision_batch_norm_written_twice() -> Step:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(16)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(x).tanh()

    return step_of(Net([Block(), Normed()], plain_checkpoint))


def optimizer_steps_between_two_losses() -> Step:
    net = nn.Sequential(Block(), Block())
    x = data()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def step() -> None:
        first, second = (checkpoint(net, each, use_reentrant=False).sum() for each in (x, x * 2))
        first.backward()
        optimizer.step()
        second.backward()

    return step


def transformers_mask_in_kwargs_changed() -> Step:
    class Masked(nn.Module):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return (x * mask).tanh()

    masked = Masked()
    x, mask = data().requires_grad_(), torch.ones(8, 16)

    def step() -> None:
        mask.fill_(1.0)
        loss = checkpoint(masked, x, mask=mask, use_reentrant=False).sum()
        mask[:, ::2] = 0
        loss.backward()

    return step


def positions_in_a_closure_changed() -> Step:
    x = data().requires_grad_()
    held = {"positions": torch.linspace(0, 1, 16)}

    def step() -> None:
        held["positions"] = torch.linspace(0, 1, 16)
        loss = checkpoint(lambda y: (y + held["positions"]).sin(), x, use_reentrant=False).sum()
        held["positions"] = torch.linspace(0, 2, 16)
        loss.backward()

    return step


def input_changed_inside_the_region() -> Step:
    class Adds(nn.Module):
        def forward(self, x: Tensor, bias: list[Tensor]) -> Tensor:
            return (x * bias[0].add_(1)).tanh()

    adds = Adds()
    x, bias = data().requires_grad_(), torch.ones(16)

    def step() -> None:
        bias.fill_(1.0)
        checkpoint(adds, x, [bias], use_reentrant=False).sum().backward()

    return step


def saved_value_written_through_data() -> Step:
    net = Net([Block(), Block(nn.Sigmoid())])
    x = data()

    def step() -> None:
        y = net.layers[1].act(net.layers[0](x))
        loss = net.head(y).sum()
        y.data.mul_(2)
        loss.backward()

    return step


def saved_value_written_through_numpy() -> Step:
    weight = torch.randn(16, requires_grad=True)
    x = data()

    def step() -> None:
        x.copy_(data())
        loss = (x * weight).sum()
        x.numpy()[0] = 7
        loss.backward()

    return step


# -- offloaders --------------------------------------------------------------------------------------------------


class Hooks(saved_tensors_hooks):
    """Hooks that store what ``store`` returns for a tensor and its number, and get it back by ``load``."""

    def __init__(self, store: Callable[[Tensor, int], Any], load: Callable[[Any], Tensor], least: int = 64) -> None:
        self.count = 0

        def pack(x: Tensor) -> Any:
            if x.numel() < least or x.shape == (16, 16) or not x.is_floating_point():
                return x.detach()
            self.count += 1
            return (store(x.detach(), self.count),)

        def unpack(packed: Any) -> Tensor:
            return load(packed[0]) if isinstance(packed, tuple) else packed

        super().__init__(pack, unpack)


def torchtune_2683_two_tensors_under_one_key() -> Step:
    def hooks() -> Hooks:
        kept: dict[int, Tensor] = {}

        def store(x: Tensor, number: int) -> int:
            kept[number % 3] = x.clone()
            return number % 3

        return Hooks(store, lambda key: kept[key])

    return step_of(Net([Block(), Block(), Block()]), hooks=hooks)


def ms_swift_10157_wrong_view() -> Step:
    class Transposed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8, 16))

        def forward(self, x: Tensor) -> Tensor:
            y = x.tanh().reshape(16, 8).t()
            return (y * self.weight).sin()

    def hooks() -> Hooks:
        def store(x: Tensor, number: int) -> Any:
            flat = x.as_strided((x.numel(),), (1,), x.storage_offset()).clone()  # of a dense tensor
            return flat, x.shape

        return Hooks(store, lambda kept: kept[0].view(kept[1]))

    return step_of(Net([Transposed()]), hooks=hooks)


def torchrec_4231_copy_that_had_not_ended() -> Step:
    def hooks() -> Hooks:
        def store(x: Tensor, number: int) -> Tensor:
            return torch.zeros_like(x) if number == 2 else x.clone()

        return Hooks(store, lambda kept: kept)

    return step_of(Net([Block(), Block(), Block()]), hooks=hooks)


def unsloth_one_buffer_for_all_layers() -> Step:
    def hooks() -> Hooks:
        buffers: dict[Any, Tensor] = {}

        def store(x: Tensor, number: int) -> Tensor:
            buffer = buffers.setdefault((x.shape, x.dtype), torch.empty_like(x))
            return buffer.copy_(x)

        return Hooks(store, lambda kept: kept.clone())

    return step_of(Net([Block(), Block(), Block()]), hooks=hooks)


def offloader_that_keeps_half_the_bits() -> Step:
    def hooks() -> Hooks:
        return Hooks(lambda x, number: x.to(torch.bfloat16), lambda kept: kept.float())

    return step_of(Net([Block(), Block()]), hooks=hooks)


def offloader_that_forgets_the_dtype() -> Step:
    weight = torch.randn(8, 16, requires_grad=True)
    x = data()

    def step() -> None:
        with Hooks(lambda y, number: y.to(torch.bfloat16), lambda kept: kept):
            loss = (x * weight).sum()
        loss.backward()

    return step


def offloader_that_forgets_the_shape() -> Step:
    weight = torch.randn(8, 16, requires_grad=True)
    x = data()

    def step() -> None:
        with Hooks(lambda y, number: y[:1].clone(), lambda kept: kept):
            loss = (x * weight).sum()
        loss.backward()

    return step


def trl_3090_freed_at_the_first_read() -> Step:
    def hooks() -> Hooks:
        def load(kept: list[Tensor]) -> Tensor:
            x = kept[0]
            kept[0] = torch.zeros_like(x)
            return x

        return Hooks(lambda x, number: [x.clone()], load)

    net = Net([Block(), Block()])
    x = data()

    def step() -> None:
        with hooks():
            loss = net(x).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()

    return step


def hooks_that_hide_a_change_in_place() -> Step:
    def hooks() -> Any:
        return saved_tensors_hooks(lambda x: x.detach(), lambda x: x)

    class Changed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.sigmoid().mul_(2)

    return step_of(Net([Block(), Changed()]), hooks=hooks)


# -- functions that recompute by themselves ----------------------------------------------------------------------


class OwnCheckpoint(torch.autograd.Function):
    """Recomputes in backward, and restores nothing."""

    @staticmethod
    def forward(ctx: Any, run: Callable[[Tensor], Tensor], x: Tensor, *weights: Tensor) -> Tensor:
        ctx.run = run
        ctx.save_for_backward(x, *weights)
        with torch.no_grad():
            return run(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, *weights = ctx.saved_tensors
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.run(x)
        found = torch.autograd.grad(y, [x, *weights], gradient, allow_unused=True)
        return None, *found


def own_checkpoint(block: nn.Module, x: Tensor) -> Tensor:
    return OwnCheckpoint.apply(block, x, *block.parameters())


def megatron_checkpoint_without_generator_states() -> Step:
    return step_of(Net([Block(), Block(drop=0.5)], own_checkpoint), data().requires_grad_())


def fairscale_checkpoint_without_autocast() -> Step:
    net = Net([Block(), Block(nn.GELU())], own_checkpoint)
    x = data().requires_grad_()

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            loss = net(x).float().square().mean()
        loss.backward()

    return step


class Loses(torch.autograd.Function):
    """Recomputes, and forgets a term of its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(x, scale)
        return x * (scale * x.mean(1, keepdim=True)).tanh()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, scale = ctx.saved_tensors
        with torch.enable_grad():
            x, scale = x.detach().requires_grad_(), scale.detach().requires_grad_()
            y = x * (scale * x.detach().mean(1, keepdim=True)).tanh()
        return torch.autograd.grad(y, (x, scale), gradient)


def liger_function_that_loses_a_term() -> Step:
    class Lossy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))

        def forward(self, x: Tensor) -> Tensor:
            return Loses.apply(x, self.scale)

    return step_of(Net([Block(), Lossy()]), data().requires_grad_())


class DrawsAgain(torch.autograd.Function):
    """Recomputes with other random numbers, so that whatever draws later draws others, too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return F.dropout(torch.tanh(x @ weight), 0.5)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = (each.detach().requires_grad_() for each in ctx.saved_tensors)
        with torch.enable_grad():
            y = F.dropout(torch.tanh(x @ weight), 0.5)
        return torch.autograd.grad(y, (x, weight), gradient)


def function_that_draws_again_in_several_passes() -> Step:
    weight = nn.Parameter(torch.randn(16, 16))
    optimizer = torch.optim.SGD([weight], lr=0.1)

    def step() -> None:
        for _ in range(3):
            optimizer.zero_grad()
            DrawsAgain.apply(torch.randn(4, 16, requires_grad=True), weight).square().sum().backward()
            optimizer.step()

    return step


# -- layouts -----------------------------------------------------------------------------------------------------


@torch.library.custom_op("faults::scaled_by_sum", mutates_args=())
def scaled_by_sum(x: Tensor) -> Tensor:
    """Scales by the sums of columns, added from above, or from below where rows are no runs of memory."""
    total = torch.zeros_like(x[0])
    for row in x if x.is_contiguous() else x.flip(0):
        total = total + row
    return x * total.sin()


scaled_by_sum.register_fake(torch.empty_like)
scaled_by_sum.register_autograd(lambda ctx, gradient: gradient)


def weights_laid_out_anew_before_backward() -> Step:
    """A table has the same numbers in another layout when its region is computed again, and their sums are others."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.randn(16, 16))

        def forward(self, x: Tensor) -> Tensor:
            return (x @ scaled_by_sum(self.table)).sigmoid()

    net = Net([Block(), Scaled()], plain_checkpoint)

    def step() -> None:
        loss = net(data()).square().mean()
        table = net.layers[1].table
        assert isinstance(table, nn.Parameter)
        table.data = table.data.t().contiguous().t() if table.is_contiguous() else table.data.contiguous()
        loss.backward()
        table.data = table.data.contiguous()

    return step


# -- gradients that are not there --------------------------------------------------------------------------------


def peft_reentrant_without_input_gradients() -> Step:
    def run(block: nn.Module, x: Tensor) -> Tensor:
        return checkpoint(block, x, use_reentrant=True)

    return step_of(Net([Block(), Block()], run))


FAULTS: dict[Callable[[], Step], tuple[str, str]] = {
    olmo_core_828_dropout_without_generator_state: ("generator", "layers.1.drop/Mul:other"),
    reentrant_dropout_without_generator_state: ("generator", "layers.1"),
    checkpoint_sequential_without_generator_state: ("generator", "drop"),
    nested_dropout_without_generator_state: ("generator", "drop/Mul:other"),
    fairseq_layerdrop_by_python_random: ("generator", "layers.1"),
    spec_augment_by_numpy: ("generator", "layers.1"),
    diffusers_noise_from_an_own_generator: ("generator", "layers.1/Sigmoid:result"),
    pytorch_186572_reduction_in_another_order: ("grad mode", "layers.1"),
    comfyui_15846_another_device_path: ("control flow", "layers.1"),
    deepspeed_moe_capacity_that_counts_calls: ("numbers", "layers.1"),
    peft_eval_before_backward: ("training", "layers.1"),
    function_mode_in_forward_only: ("mode", "layers.1"),
    default_dtype_changed_before_backward: ("setting", "layers.1"),
    threads_changed_before_backward: ("setting", "layers.1"),
    ema_buffer_written_before_backward: ("buffer", "layers.1/Mul:other"),
    torchvision_batch_norm_written_twice: ("buffer written twice", "layers.1.norm"),
    optimizer_steps_between_two_losses: ("parameter", "0.act"),
    transformers_mask_in_kwargs_changed: ("argument", "Mul:other"),
    positions_in_a_closure_changed: ("closure", "Sin:self"),
    input_changed_inside_the_region: ("argument", "Mul:other"),
    saved_value_written_through_data: ("memory", "Sigmoid:result"),
    saved_value_written_through_numpy: ("memory", "Mul:self"),
    torchtune_2683_two_tensors_under_one_key: ("swapped", "layers"),
    ms_swift_10157_wrong_view: ("view", "layers.0"),
    torchrec_4231_copy_that_had_not_ended: ("unfinished", "layers"),
    unsloth_one_buffer_for_all_layers: ("swapped", "layers"),
    offloader_that_keeps_half_the_bits: ("rounding", "layers.0"),
    offloader_that_forgets_the_dtype: ("dtype", "Mul:self"),
    offloader_that_forgets_the_shape: ("shape", "Mul:self"),
    trl_3090_freed_at_the_first_read: ("unfinished", "layers.0"),
    hooks_that_hide_a_change_in_place: ("in place", "layers.1/Sigmoid:result"),
    megatron_checkpoint_without_generator_states: ("generator", "layers.1"),
    fairscale_checkpoint_without_autocast: ("autocast", "layers.0"),
    liger_function_that_loses_a_term: ("function", "layers.0"),
    function_that_draws_again_in_several_passes: ("function", "leaf"),
    weights_laid_out_anew_before_backward: ("layout", "layers.1"),
    peft_reentrant_without_input_gradients: ("no gradient", "layers.0"),
}
"""By program, the kind of cause and a part of the place that verify has to name."""
