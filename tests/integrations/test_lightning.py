"""Lightning trains bit for bit as it does without, opens no Session in evaluation, and gets its own method back."""

from __future__ import annotations

import copy
import logging
import pickle
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from integration_checks import Noting, assert_equal_bits, batches, installed, network, parameters_of
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader

import backstash as bs
from backstash.errors import IntegrationError, UnknownNameError

pytest.importorskip("lightning")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import lightning
    from lightning.pytorch.loggers import CSVLogger
    from lightning.pytorch.loops import training_epoch_loop

    from backstash.integrations.lightning import BackstashCallback

pytestmark = pytest.mark.filterwarnings("ignore:.*(treespec|num_workers|log_every_n_steps|val_dataloader).*")
for name in ("lightning.pytorch", "lightning.fabric"):
    logging.getLogger(name).setLevel(logging.ERROR)


class Module(lightning.LightningModule):
    """A classifier that is trained by automatic optimisation."""

    def __init__(self) -> None:
        super().__init__()
        self.network = network()
        self.losses: list[Tensor] = []

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return functional.cross_entropy(self.network(batch[0]).float(), batch[1])

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        loss = self.loss(batch)
        self.losses.append(loss.detach())
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        self.log("validation", self.loss(batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Manual(Module):
    """The same with manual optimisation: backward and two optimizers inside the training step."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        for optimizer in self.optimizers():
            loss = self.loss(batch)
            self.losses.append(loss.detach())
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.network.up, self.network.down)]


def trainer(callback: BackstashCallback | None = None, **settings: Any) -> lightning.Trainer:
    return lightning.Trainer(
        callbacks=[] if callback is None else [callback],
        **{
            "max_steps": 4,
            "accelerator": "cpu",
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "log_every_n_steps": 1,
            **settings,
        },
    )


def data(count: int = 4) -> DataLoader[Any]:
    return DataLoader(batches(count), batch_size=None)


def fit(kind: type[Module], callback: BackstashCallback | None, **settings: Any) -> list[Tensor]:
    """The losses and the final parameters."""
    module = kind()
    torch.manual_seed(6)
    used = trainer(callback, **settings)
    used.fit(module, data(), data(1))
    assert "train_step_context" not in used.precision_plugin.__dict__
    assert installed() == []
    return [*module.losses, *parameters_of(module)]


def make_callback(policy: str = "lossless") -> BackstashCallback:
    return BackstashCallback(policy, min_nbytes=0, print_report=False)


@pytest.mark.parametrize("kind", [Module, Manual], ids=["automatic", "manual"])
@pytest.mark.parametrize("policy", ["lossless", "offload"])
def test_training_gives_the_same_bits(kind: type[Module], policy: str) -> None:
    callback = make_callback(policy)
    assert_equal_bits(fit(kind, None), fit(kind, callback))
    assert callback.report().steps == 4
    assert policy != "lossless" or callback.report().ratio > 1.5


@pytest.mark.parametrize(
    "settings",
    [{"accumulate_grad_batches": 2, "max_steps": 2}, {"precision": "bf16-mixed"}, {"gradient_clip_val": 0.1}],
    ids=str,
)
def test_settings_compose(settings: dict[str, Any]) -> None:
    callback = make_callback()
    assert_equal_bits(fit(Module, None, **settings), fit(Module, callback, **settings))
    assert callback.report().ratio > 1


def test_evaluation_opens_nothing() -> None:
    module, callback = Module(), make_callback()
    used = trainer(callback, val_check_interval=2)
    used.fit(module, data(), data(1))
    used.validate(module, data(1), verbose=False)
    # Lightning validates once before it trains, twice in between, and once because it was asked to.
    assert module.network.was_open == [False, True, True, False, True, True, False, False]
    assert callback.report().steps == 4


def test_figures_are_logged_and_the_report_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    callback = BackstashCallback(min_nbytes=0)
    used = trainer(callback, logger=CSVLogger(tmp_path, flush_logs_every_n_steps=1), log_every_n_steps=2)
    used.fit(Module(), data())
    assert used.callback_metrics["backstash/ratio"] == pytest.approx(callback.report().ratio, rel=0.1)
    assert 0 < used.callback_metrics["backstash/stash_mib"] < used.callback_metrics["backstash/peak_mib"]
    assert "backstash/ratio" in (tmp_path / "lightning_logs/version_0/metrics.csv").read_text()
    assert str(callback.report()).splitlines()[0] in capsys.readouterr().out


@pytest.mark.parametrize("error", [RuntimeError("stop"), KeyboardInterrupt()], ids=["error", "ctrl-c"])
def test_an_interrupted_training_leaves_nothing_behind(error: BaseException) -> None:
    module, callback = Module(), make_callback()
    module.network.error = error
    used = trainer(callback, num_sanity_val_steps=0)
    with pytest.raises((type(error), SystemExit)):
        used.fit(module, data())
    assert "train_step_context" not in used.precision_plugin.__dict__
    assert installed() == []
    module.network.error = None
    used.fit(module, data())
    assert callback.report().steps == 4


def test_the_plugin_gets_back_what_the_program_had_put_there() -> None:
    used = trainer(make_callback())
    own = used.precision_plugin.train_step_context
    used.precision_plugin.train_step_context = own
    used.fit(Module(), data())
    assert used.precision_plugin.__dict__["train_step_context"] is own


def test_a_trainer_under_a_session_is_left_to_it() -> None:
    callback = make_callback()
    with bs.Session("lossless", min_nbytes=0) as session:
        found = trainer(callback)
        found.fit(Module(), data())
    assert (session.report().steps, callback.report().steps) == (4, 0)


def test_the_callback_can_be_sent_to_other_processes() -> None:
    callback = make_callback()
    trainer(callback).fit(Module(), data())
    for other in (pickle.loads(pickle.dumps(callback)), copy.deepcopy(callback)):
        with pytest.raises(IntegrationError, match="no training ran in this process"):
            other.report()
        trainer(other).fit(Module(), data())
        assert other.report().ratio > 1


def test_wrong_arguments_raise_at_once() -> None:
    with pytest.raises(UnknownNameError):
        BackstashCallback("losless")
    with pytest.raises(IntegrationError, match="budget=1000 was asked for"):
        BackstashCallback("keep", budget=1000)


def test_the_library_under_its_other_name() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        other = pytest.importorskip("pytorch_lightning")

    class Other(other.LightningModule):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            super().__init__()
            self.network = network()

        def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
            return functional.cross_entropy(self.network(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    callback, module = make_callback(), Other()
    other.Trainer(
        callbacks=[callback],
        max_steps=2,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(module, data())
    assert module.network.was_open == [True, True]
    assert callback.report().ratio > 1


@pytest.mark.parametrize("when", ["before setup", "after setup"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_fabric(when: str, precision: str) -> None:
    def run(wrapped: bool) -> list[Tensor]:
        fabric = lightning.Fabric(accelerator="cpu", devices=1, precision=precision)
        model: Any = network()
        inner: Noting = model
        if wrapped and when == "before setup":
            bs.wrap(model, min_nbytes=0)
        model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
        if wrapped and when == "after setup":
            bs.wrap(model, min_nbytes=0)
        torch.manual_seed(6)
        losses = []
        for x, y in batches(3):
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(x), y)
            fabric.backward(loss)
            fabric.clip_gradients(model, optimizer, max_norm=0.5)
            optimizer.step()
            losses.append(loss.detach())
        assert inner.was_open == [wrapped] * 3
        model.eval()
        model(x)
        assert not inner.was_open[-1]
        if wrapped:
            report = bs.integrations.loop.session_of(inner if when == "before setup" else model).report()
            assert report.ratio > 1
        return [*losses, *parameters_of(inner)]

    assert_equal_bits(run(wrapped=False), run(wrapped=True))
    assert installed() == []


@pytest.mark.parametrize("settings", [{}, {"accumulate_grad_batches": 2}, {"gradient_clip_val": 0.1}], ids=str)
def test_a_trainer_under_a_budget_is_planned_for(settings: dict[str, Any]) -> None:
    """Its steps run in a closure of the optimizer, where nothing can be profiled, and there is no callback."""

    def train(context: Any) -> list[Tensor]:
        module = Module()
        torch.manual_seed(6)
        used = trainer(max_steps=-1, max_epochs=1, limit_val_batches=0, **settings)
        with context:
            used.fit(module, data(40))
        return [*module.losses, *parameters_of(module)]

    loop: Any = training_epoch_loop._TrainingEpochLoop
    advance = loop.advance
    budget = bs.Budgeted("95%", min_nbytes=0)
    assert_equal_bits(train(nullcontext()), train(budget))
    assert budget.found.plan is not None and not budget.found.trouble, budget.found
    assert 0 < budget.found.reached_nbytes <= budget.found.budget_nbytes
    assert loop.advance is not advance
    budget.close()
    assert loop.advance is advance
    assert installed() == []
