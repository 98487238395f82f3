"""Two processes that talk over gloo, under each framework: DDP and FSDP2 give the bits that they give without."""

from __future__ import annotations

import contextlib
import io
import math
import os
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed.processes import WORLD, Block, batch, local, loss_of, network, run_together
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

import backstash as bs
from backstash.bits import equal_bits
from backstash.capture import modules
from backstash.planning.run import course
from backstash.stash.ledger import Report

pytestmark = pytest.mark.slow
STEPS = 3
BUDGETED_STEPS = 16
"""A budget is kept from the ninth backward pass on, where a course computes all that it can between two steps."""
MANY_ROWS = 16
"""So many times as many rows, so that a plan has more to gain than gloo's buffers, which live as long as they like."""
Outcome = tuple[list[Tensor], Report | None]


def outcome_of(losses: list[Tensor], model: nn.Module) -> list[Tensor]:
    return [*losses, *(local(parameter) for parameter in model.parameters())]


def compare(run: Callable[[str | None], Outcome]) -> str:
    """Runs without and with backstash; returns what is wrong, or nothing."""
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        expected, _ = run(None)
        found, report = run("lossless")
    same = len(expected) == len(found) and all(equal_bits(*pair) for pair in zip(expected, found, strict=True))
    if not same:
        return "bits differ"
    if report is None or report.steps < STEPS or report.ratio < 1.2:
        return f"little was treated: {report}"
    return "a Session is still open" if modules.is_active() else ""


def sharded(model: nn.Sequential) -> nn.Module:
    mesh = init_device_mesh("cpu", (WORLD,))
    for block in model:
        if isinstance(block, Block):
            fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


# -- a plain loop ------------------------------------------------------------------------------------------------------


def loop(model: nn.Module, steps: int = STEPS, times: int = 1) -> list[Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(steps):
        loss = loss_of(model(batch(step, dist.get_rank()).repeat(times, 1)))
        loss.backward()
        losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return outcome_of(losses, model)


def wrapped(parallel: Callable[[nn.Sequential], nn.Module], before: bool) -> Callable[[str | None], Outcome]:
    def run(policy: str | None) -> Outcome:
        inner: nn.Module = network()
        if policy and before:
            bs.wrap(inner, policy, min_nbytes=0)
        model = parallel(inner)  # type: ignore[arg-type]
        if policy and not before:
            bs.wrap(model, policy, min_nbytes=0)
        found = loop(model)
        treated = inner if before else model
        return found, bs.integrations.loop.session_of(treated).report() if policy else None

    return run


def plain_loops() -> dict[str, str]:
    return {
        f"{name}, wrapped {'before' if before else 'after'}": compare(wrapped(parallel, before))
        for name, parallel in (("DDP", DistributedDataParallel), ("FSDP2", sharded))
        for before in (True, False)
    }


def within_budgets() -> dict[str, str]:
    """Each process profiles its own steps and has its own plan; neither waits for the other to do so."""
    wrong = {}
    course.LEAST = math.inf  # this process is no one else's
    for name, parallel in (("DDP", DistributedDataParallel), ("FSDP2", sharded)):
        expected = loop(parallel(network()), BUDGETED_STEPS, MANY_ROWS)  # type: ignore[arg-type]
        model = bs.wrap(parallel(network()), budget="95%", min_nbytes=0)  # type: ignore[arg-type]
        found = loop(model, BUDGETED_STEPS, MANY_ROWS)
        within = bs.integrations.loop.session_of(model).found
        bs.unwrap(model)
        same = all(equal_bits(*pair) for pair in zip(expected, found, strict=True))
        planned = within.plan is not None and within.reached_nbytes > 0
        wrong[name] = "" if same and planned else f"bits {'equal' if same else 'differ'}; {within}"
    return wrong


# -- frameworks --------------------------------------------------------------------------------------------------------


def under_torchrun() -> None:
    """The environment that torchrun gives its processes; the group is there already."""
    rank = str(dist.get_rank())
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "test"}
    os.environ |= {"WORLD_SIZE": str(WORLD), "LOCAL_WORLD_SIZE": str(WORLD)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "ACCELERATE_USE_CPU": "true"}


def shard_on_cpu() -> None:
    """Tells accelerate that it shards on CPU too: it does so on accelerators alone, and falls back to DDP elsewhere."""
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    make = AcceleratorState.__init__

    def make_sharding(self: Any, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
        make(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None:
            self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, fsdp_plugin
            PartialState._shared_state["distributed_type"] = DistributedType.FSDP

    AcceleratorState.__init__ = make_sharding


def with_accelerate() -> dict[str, str]:
    under_torchrun()
    shard_on_cpu()
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.state import AcceleratorState, GradientState

    from backstash.integrations.accelerate import attach

    def run(policy: str | None, **settings: Any) -> Outcome:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, **settings)
        model: nn.Module = network()
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        assert isinstance(model, FSDPModule if settings else DistributedDataParallel)
        attachment = attach(accelerator, model, policy, min_nbytes=0) if policy else None
        losses = []
        for step in range(2 * STEPS):
            with accelerator.accumulate(model):
                loss = loss_of(model(batch(step, dist.get_rank())))
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.detach())
        return outcome_of(losses, model), attachment.report() if attachment else None

    def shards(policy: str | None) -> Outcome:
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Block"]
        )
        return run(policy, fsdp_plugin=plugin)

    return {"DDP": compare(run), "FSDP2": compare(shards)}


def with_lightning() -> dict[str, str]:
    under_torchrun()
    import logging

    import lightning
    from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
    from torch.utils.data import DataLoader

    from backstash.integrations.lightning import BackstashCallback

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Module(lightning.LightningModule):
        def __init__(self, shard: bool) -> None:
            super().__init__()
            self.network, self.shard, self.losses = network(), shard, []  # type: ignore[var-annotated]

        def configure_model(self) -> None:
            if self.shard:
                for block in self.network:
                    fully_shard(block, mesh=self.device_mesh["data_parallel"])

        def training_step(self, x: Tensor, index: int) -> Tensor:
            loss = loss_of(self.network(x))
            self.losses.append(loss.detach())
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    def run(policy: str | None, shard: bool) -> Outcome:
        callback = BackstashCallback(policy or "keep", min_nbytes=0, print_report=False)
        trainer = lightning.Trainer(
            accelerator="cpu",
            devices=WORLD,
            strategy=ModelParallelStrategy() if shard else DDPStrategy(process_group_backend="gloo"),
            max_steps=STEPS,
            callbacks=[callback] if policy else [],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
        )
        module = Module(shard)
        data = [batch(step, dist.get_rank()) for step in range(STEPS)]
        trainer.fit(module, DataLoader(data, batch_size=None))  # type: ignore[arg-type]
        assert isinstance(module.network[0], FSDPModule) is shard
        return outcome_of(module.losses, module), callback.report() if policy else None

    return {
        "DDP": compare(lambda policy: run(policy, shard=False)),
        "FSDP2": compare(lambda policy: run(policy, shard=True)),
    }


def with_fabric() -> dict[str, str]:
    under_torchrun()
    import lightning
    from lightning.fabric.strategies import DDPStrategy, ModelParallelStrategy

    def shards(model: nn.Module, mesh: Any) -> nn.Module:
        for block in model.children():
            fully_shard(block, mesh=mesh["data_parallel"])
        return model

    def run(policy: str | None, shard: bool) -> Outcome:
        strategy: Any = ModelParallelStrategy(shards) if shard else DDPStrategy(process_group_backend="gloo")
        fabric = lightning.Fabric(accelerator="cpu", devices=WORLD, strategy=strategy)
        fabric.launch()
        inner = network()
        model: Any = fabric.setup(inner)
        optimizer = fabric.setup_optimizers(torch.optim.SGD(model.parameters(), lr=0.1))
        assert isinstance(inner[0], FSDPModule) is shard
        if policy:
            bs.wrap(model, policy, min_nbytes=0)
        losses = []
        for step in range(STEPS):
            loss = loss_of(model(batch(step, dist.get_rank())))
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        return outcome_of(losses, inner), bs.integrations.loop.session_of(model).report() if policy else None

    return {
        "DDP": compare(lambda policy: run(policy, shard=False)),
        "FSDP2": compare(lambda policy: run(policy, shard=True)),
    }


def with_huggingface() -> dict[str, str]:
    under_torchrun()
    shard_on_cpu()
    from accelerate.state import AcceleratorState, GradientState
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
    from transformers.utils import logging

    from backstash.integrations.huggingface import attach

    logging.set_verbosity_error()

    class OwnStep(Trainer):  # type: ignore[misc]
        def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
            loss: Tensor = model.train()(**self._prepare_inputs(inputs)).loss
            self.accelerator.backward(loss)
            return loss.detach()

    def run(policy: str | None, kind: type[Trainer] = Trainer, **settings: Any) -> Outcome:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        torch.manual_seed(0)
        config = GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=48, n_positions=24, bos_token_id=0)
        config.tie_word_embeddings = False
        generator = torch.Generator().manual_seed(1)
        texts = [torch.randint(48, (24,), generator=generator) for _ in range(16)]
        with tempfile.TemporaryDirectory() as folder:
            arguments = TrainingArguments(
                folder,
                max_steps=STEPS,
                per_device_train_batch_size=2,
                logging_steps=1,
                report_to=[],
                use_cpu=True,
                ddp_backend="gloo",
                save_strategy="no",
                disable_tqdm=True,
                **settings,
            )
            data: Any = [{"input_ids": text, "labels": text} for text in texts]
            trainer = kind(GPT2LMHeadModel(config), arguments, train_dataset=data)
            attachment = attach(trainer, policy, min_nbytes=0, print_report=False) if policy else None
            torch.manual_seed(2)
            trainer.train()
        losses = [torch.tensor(log["loss"]) for log in trainer.state.log_history if "loss" in log]
        model: Any = trainer.model_wrapped
        assert isinstance(model, FSDPModule if settings else DistributedDataParallel)
        return outcome_of(losses, model), attachment.report() if attachment else None

    fsdp = {
        "fsdp": "full_shard auto_wrap",
        "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": ["GPT2Block"]},
    }
    return {
        "DDP": compare(run),
        "DDP, own step": compare(lambda policy: run(policy, OwnStep)),
        "FSDP2": compare(lambda policy: run(policy, **fsdp)),
        "FSDP2, own step": compare(lambda policy: run(policy, OwnStep, **fsdp)),
    }


PROGRAMS = {
    "wrap": plain_loops,
    "budget": within_budgets,
    "accelerate": with_accelerate,
    "lightning": with_lightning,
    "lightning.fabric": with_fabric,
    "transformers": with_huggingface,
}


@pytest.mark.parametrize("framework", PROGRAMS)
def test_two_processes_give_the_same_bits(framework: str, tmp_path: Path) -> None:
    if framework not in ("wrap", "budget"):
        pytest.importorskip(framework)
    for rank, found in enumerate(run_together(tmp_path, PROGRAMS[framework])):
        assert not any(found.values()), f"rank {rank}: {found}"
        assert {name.partition(",")[0] for name in found} == {"DDP", "FSDP2"}
