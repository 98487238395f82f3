"""Programs that look for a batch which fits go on with the next one where a budget cannot be kept."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import backstash as bs
from backstash.capture import modules
from backstash.errors import BatchTooLargeError, BudgetError

pytestmark = [pytest.mark.filterwarnings("ignore")]

BUDGET = 300_000
"""Bytes within which there is a plan for 256 rows of the network, and none for 512."""


def network() -> nn.Sequential:
    torch.manual_seed(0)
    layers = (layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.Tanh()))
    return nn.Sequential(*layers, nn.Linear(64, 1))


def assert_nothing_is_left() -> None:
    assert not modules.is_active() and not torch.autograd._profiler_enabled()
    assert not nn.modules.module._global_forward_pre_hooks


def test_a_refused_batch_leaves_nothing_and_the_next_one_gets_a_plan() -> None:
    utils = pytest.importorskip("accelerate.utils")
    model, session = network(), bs.Budgeted(BUDGET, min_nbytes=0)
    session.is_hurried = True
    tried: list[int] = []
    made: list[weakref.ref[Tensor]] = []

    def train(size: int) -> None:
        gc.collect()
        assert all(each() is None for each in made)
        assert_nothing_is_left()
        tried.append(size)
        for _ in range(40):
            model.zero_grad()
            with session:
                result = model(torch.randn(size, 64))
                loss = result.square().mean()
            made.append(weakref.ref(result))
            loss.backward()

    def halve() -> int:
        return tried[-1] // 2

    utils.find_executable_batch_size(train, starting_batch_size=1024, reduce_batch_size_fn=halve)()
    assert tried == [1024, 512, 256]
    found = session.found
    assert found.plan is not None and 0 < found.reached_nbytes <= found.budget_nbytes == BUDGET < found.plain_nbytes
    assert [bucket.plan is not None for bucket in session.buckets] == [False, False, True]
    session.close()
    assert_nothing_is_left()


def test_the_error_is_both_that_of_a_budget_and_what_finders_know() -> None:
    plain = BudgetError("nothing fits", 7, 0.5, "plan")
    error = BatchTooLargeError(plain)
    assert isinstance(error, BudgetError) and isinstance(error, RuntimeError) and len(error.args) == 1
    assert str(error).startswith("nothing fits") and (error.smallest_nbytes, error.seconds, error.plan) == (
        7,
        0.5,
        "plan",
    )
    assert pytest.importorskip("accelerate.utils").memory.should_reduce_batch_size(error)
    assert pytest.importorskip("lightning.pytorch.utilities.memory").is_oom_error(error)


def test_a_trainer_that_finds_its_batch_trains_within_the_budget(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from backstash.integrations import huggingface

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = network()

        def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
            return {"loss": self.network(x).square().mean()}

    data = [{"x": torch.randn(64), "labels": torch.zeros(())} for _ in range(4096)]
    options: dict[str, Any] = {"report_to": "none", "use_cpu": True, "disable_tqdm": True, "save_strategy": "no"}
    arguments = transformers.TrainingArguments(
        str(tmp_path), per_device_train_batch_size=512, auto_find_batch_size=True, max_steps=40, **options
    )
    trainer = transformers.Trainer(Model(), arguments, train_dataset=data)
    attachment = huggingface.attach(trainer, budget=BUDGET, min_nbytes=0, strict=True, print_report=False)
    trainer.train()
    assert 128 <= trainer._train_batch_size < 512
    found = attachment.session.found
    assert found.plan is not None and found.planned_nbytes <= BUDGET
    huggingface.detach(trainer)
    assert_nothing_is_left()


def test_lightning_finds_the_batch_within_the_budget(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning")
    from lightning.pytorch.callbacks import BatchSizeFinder

    from backstash.integrations.lightning import BackstashCallback

    class Model(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.network, self.batch_size = network(), 128

        def training_step(self, batch: Tensor, index: int) -> Tensor:
            loss: Tensor = self.network(batch).square().mean()
            return loss

        def train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(torch.randn(60 * self.batch_size, 64), self.batch_size)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.01)

    model, callback = Model(), BackstashCallback(budget=BUDGET, min_nbytes=0, strict=True, print_report=False)
    assert isinstance(callback.session, bs.Budgeted)
    finder = BatchSizeFinder(mode="power", steps_per_trial=40, init_val=128, max_trials=4)
    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = lightning.Trainer(
        accelerator="cpu", max_steps=40, callbacks=[callback, finder], default_root_dir=tmp_path, **quiet
    )
    trainer.fit(model)
    assert model.batch_size == 256
    assert isinstance(callback.session, bs.Budgeted)
    found = callback.session.found
    assert found.plan is not None and found.planned_nbytes <= BUDGET
    assert_nothing_is_left()
