"""No alarm is raised for programs that compute right gradients in unusual ways."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import backstash as bs
from backstash.verifying.reference import Reference
from verify.faults import Block, Net, plain_checkpoint, step_of
from verify.healthy import HEALTHY

CALLS = itertools.count()
"""No two numbers are equal, as those of a clock may be."""


@pytest.mark.parametrize("name", HEALTHY)
def test_no_alarm(name: str) -> None:
    torch.manual_seed(0)
    found = bs.verify(HEALTHY[name]())
    assert (found.verdict, found.exit_code, found.findings) == ("equal", 0, ()), str(found)
    assert found.runs == 2
    assert found.watched.values or found.watched.sessions


def test_the_corpus_is_large_enough() -> None:
    assert len(HEALTHY) >= 40


class Noisy(torch.autograd.Function):
    """Stands for a kernel whose sums depend on the order of atomics."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * (1 + 1e-5 * next(CALLS))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * (1 + 1e-5 * next(CALLS))


class NoisyBackward(Noisy):
    """The same of the backward pass alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2


def test_a_step_that_does_not_repeat_is_unsteady() -> None:
    block = Block()
    x = torch.randn(8, 16)
    found = bs.verify(lambda: Noisy.apply(block(x)).sum().backward())
    assert (found.verdict, found.exit_code) == ("unsteady", 0), str(found)


def test_a_kernel_that_does_not_repeat_in_a_checkpoint_is_unsteady() -> None:
    @torch.library.custom_op("backstash_tests::noisy", mutates_args=())
    def noisy(x: Tensor) -> Tensor:
        return x * (1 + 1e-5 * next(CALLS))

    noisy.register_autograd(lambda ctx, gradient: gradient)

    class Layer(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return noisy(x).tanh()

    found = bs.verify(step_of(Net([Block(), Layer()], plain_checkpoint)))
    assert (found.verdict, found.exit_code) == ("unsteady", 0), str(found)
    assert found.first is not None and "noisy" in found.first.cause.reason


class Scaling(nn.Module):
    """Multiplies by a number that is another one each time, as a kernel does that adds up in any order."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (1 + 1e-5 * next(CALLS))


class Named(nn.Module):
    """Calls its block by a name, as transformers' models are called."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, *, x: Tensor) -> Tensor:
        return self.block(x)


X = torch.linspace(-1, 1, 128).view(8, 16)


def drawn() -> Tensor:
    """Inputs that are others each time, as those of a generator without a seed."""
    return X * (1 + 1e-5 * next(CALLS))


def reading(block: nn.Module, later: bool) -> None:
    block(X if later else drawn()).sum().backward()
    block(drawn()).sum().backward()


OTHERS = "the program's inputs differ between runs"


@pytest.mark.parametrize("later", [False, True])
def test_inputs_that_differ_are_no_kernels(later: bool) -> None:
    block = Block()
    found = bs.verify(lambda: reading(block, later), block)
    assert (found.verdict, found.exit_code) == ("unsteady", 0), str(found)
    assert found.headline().endswith(OTHERS)
    assert found.fixes() and "seed" in found.fixes()[0] and "deterministic" not in found.fixes()[0]


def test_inputs_that_differ_and_have_names() -> None:
    model = Named()
    assert bs.verify(lambda: model(x=drawn()).sum().backward()).headline().endswith(OTHERS)


def test_targets_that_differ() -> None:
    block, loss = Block(), nn.MSELoss()
    assert bs.verify(lambda: loss(block(X), drawn()).backward()).headline().endswith(OTHERS)
    found = bs.verify(lambda: nn.functional.mse_loss(block(X), drawn()).backward())
    assert found.headline().endswith(
        "what the loss reads differs between runs, or its kernels do not repeat themselves"
    )
    assert "seed" in found.fixes()[0] and "use_deterministic_algorithms" in found.fixes()[0]


def test_weights_that_differ() -> None:
    def step() -> None:
        torch.manual_seed(next(CALLS))
        Block()(X).sum().backward()

    assert bs.verify(step).headline().endswith(OTHERS)


def test_parameters_that_are_not_there_yet() -> None:
    model = nn.Sequential(nn.LazyLinear(4), nn.Tanh())
    with Reference() as run:
        model(X).sum().backward()
    assert [call[0] for call in run.log.calls[0]] == [1, 0]


@pytest.mark.parametrize("grad", [False, True])
def test_a_kernel_between_modules_is_none_of_the_programs_inputs(grad: bool) -> None:
    """A frozen encoder, or a generator, before the model."""
    first, block = Scaling(), Block()

    def step() -> None:
        with torch.set_grad_enabled(grad):
            x = first(X)
        block(x.detach()).sum().backward()

    found = bs.verify(step)
    assert found.verdict == "unsteady"
    assert found.headline().endswith("kernels of this step do not repeat themselves")
    assert found.fixes() == ["torch.use_deterministic_algorithms(True)"]


def test_later_inputs_may_follow_from_kernels() -> None:
    """As those of a critic, which a generator makes that was trained in between."""
    block = Block()

    def step() -> None:
        NoisyBackward.apply(block(X)).sum().backward()
        block(X + sum(each.grad.sum() for each in block.parameters() if each.grad is not None)).sum().backward()

    assert bs.verify(step).headline().endswith("kernels of this step do not repeat themselves")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning")
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_transformers_gradient_checkpointing(use_reentrant: bool) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=40, n_positions=16)
    model = transformers.GPT2LMHeadModel(config)
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    model.enable_input_require_grads()
    words = torch.arange(16).view(2, 8)
    found = bs.verify(lambda: model(words, labels=words).loss.backward())
    assert found.verdict == "equal", str(found)
    assert len(found.watched.regions) == 2


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*(treespec|num_workers|log_every_n_steps|val_dataloader).*")
def test_lightning() -> None:
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.block, self.head = Block(drop=0.2), nn.Linear(16, 1)

        def training_step(self, batch: list[Tensor], number: int) -> Tensor:
            (x,) = batch
            return self.head(checkpoint(self.block, x, use_reentrant=False)).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(16, 16)), batch_size=8)
    module = Module()

    def step() -> None:
        quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        trainer = lightning.Trainer(max_steps=2, accelerator="cpu", enable_model_summary=False, **quiet)
        trainer.fit(module, data)

    found = bs.verify(step, module)
    assert found.verdict == "equal", str(found)
    assert (found.watched.passes, len(found.watched.regions)) == (2, 2)


@pytest.mark.slow
def test_a_compiled_model_is_compared_with_eager_mode() -> None:
    model = torch.compile(nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1)), backend="aot_eager")
    x = torch.randn(8, 16)
    found = bs.verify(lambda: model(x).sum().backward())
    assert found.exit_code == 0, str(found)
    assert any("torch.compile" in note for note in found.notes)


@pytest.mark.slow
def test_a_compiler_whose_backward_is_wrong_is_found() -> None:
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_func

    def plain(graph: Any, inputs: Any) -> Any:
        return make_boxed_func(graph.forward)

    def wrong(graph: Any, inputs: Any) -> Any:
        return make_boxed_func(lambda *args: [None if x is None else x * 1.01 for x in graph.forward(*args)])

    backend = aot_autograd(fw_compiler=plain, bw_compiler=wrong)
    model = torch.compile(nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1)), backend=backend)
    x = torch.randn(8, 16)
    found = bs.verify(lambda: model(x).sum().backward())
    assert found.first is not None and found.first.cause.kind == "compiled", str(found)
    assert found.exit_code == 1 and 0.005 < found.errors[0].relative < 0.05


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # which Dynamo asks for
@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_numbers_that_a_compiler_draws_are_no_alarm(is_checkpointed: bool) -> None:
    """Inductor draws others than eager mode, so the same program without a budget is what is compared."""
    pytest.importorskip("torch._inductor")
    block = torch.compile(nn.Sequential(nn.Linear(32, 32), nn.Dropout(0.3), nn.GELU(), nn.Linear(32, 32)))
    model = nn.Sequential(nn.Linear(32, 32), block)
    x = torch.randn(8, 32)

    def step() -> None:
        loss = checkpoint(model, x, use_reentrant=False) if is_checkpointed else model(x)
        loss.square().mean().backward()

    found = bs.verify(step, model)
    assert found.verdict in ("equal", "rounded") and found.exit_code == 0, str(found)
    assert any("compiled without a budget" in note for note in found.notes)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # which Dynamo asks for
def test_dropout_under_a_budget_is_judged_by_what_it_does() -> None:
    """Torch 2.13 draws other numbers when it computes a dropout again, so the gradients are wrong: then it is found."""
    block, x = nn.Sequential(nn.Linear(32, 32), nn.Dropout(0.3), nn.GELU(), nn.Linear(32, 32)), torch.randn(8, 32)

    def gradient(budget: float) -> Tensor:
        torch._dynamo.reset()
        torch.manual_seed(1)
        with torch._functorch.config.patch(activation_memory_budget=budget, enable_autograd_cache=False):
            (found,) = torch.autograd.grad(torch.compile(block)(x).square().mean(), block[0].weight)
        return found

    plain, within = gradient(1.0), gradient(0.5)
    is_wrong = float((plain - within).norm()) > 0.01 * float(plain.norm())
    torch._dynamo.reset()
    compiled = torch.compile(block)
    with torch._functorch.config.patch(activation_memory_budget=0.5):
        found = bs.verify(lambda: compiled(x).square().mean().backward())
    assert found.exit_code == int(is_wrong), str(found)


@pytest.mark.slow
def test_a_compiler_that_is_wrong_under_a_budget_alone_is_found() -> None:
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch import config
    from torch._functorch.aot_autograd import make_boxed_func
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    def rounding(graph: Any, inputs: Any) -> Any:
        """Forward has other bits than eager mode, as fused kernels have."""
        return make_boxed_func(lambda *args: [graph.forward(*args)[0] * (1 + 1e-6), *graph.forward(*args)[1:]])

    def wrong(graph: Any, inputs: Any) -> Any:
        """What is computed again is off by a percent."""
        off = 1.01 if config.activation_memory_budget < 1 else 1.0
        return make_boxed_func(lambda *args: [None if x is None else x * off for x in graph.forward(*args)])

    backend = aot_autograd(fw_compiler=rounding, bw_compiler=wrong, partition_fn=min_cut_rematerialization_partition)
    model = torch.compile(nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1)), backend=backend)
    x = torch.randn(8, 16)
    for budget, exit_code in ((1.0, 0), (0.5, 1)):
        torch._dynamo.reset()
        with config.patch(activation_memory_budget=budget):
            found = bs.verify(lambda: model(x).sum().backward())
        assert found.exit_code == exit_code, str(found)
    assert found.first is not None and found.first.cause.kind == "compiled", str(found)
    assert "without a budget" in found.first.cause.reason
