"""A budget in the line that a user adds: the bits of plain training, and a plan after the first backward passes."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import backstash as bs
from backstash.bits import equal_bits
from backstash.capture import modules
from backstash.errors import IntegrationError, PlanError
from backstash.integrations.attaching import figures, session_for
from backstash.integrations.loop import session_of
from backstash.planning.run import budgeted, course
from backstash.planning.run.budgeted import Budgeted

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*num_workers.*"),
]
STEPS = 9


@pytest.fixture(autouse=True)
def _no_step_runs_without_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where something was compiled, which earlier tests may have done: a budget needs fewer steps then."""
    monkeypatch.setattr(course, "may_compile", lambda: True)
    monkeypatch.setattr(budgeted, "may_compile", lambda: True)


class Network(nn.Module):
    """Two blocks with dropout, which note whether a Session is open."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(32, 128), nn.BatchNorm1d(128), nn.Linear(128, 4)
        self.drop = nn.Dropout(0.2)
        self.was_open: list[bool] = []

    def forward(self, x: Tensor) -> Tensor:
        """Maps [N, 32] to [N, 4]."""
        self.was_open.append(modules.is_active())
        result: Tensor = self.last(self.drop(functional.gelu(self.norm(self.first(x)))))
        return result


def state_of(model: nn.Module) -> list[Tensor]:
    return [tensor.detach().clone() for tensor in model.state_dict().values()]


def same(expected: list[Tensor], found: list[Tensor]) -> bool:
    return len(expected) == len(found) and all(equal_bits(*pair) for pair in zip(expected, found, strict=True))


def assert_within(session: Any) -> None:
    """There is a plan, a step was counted under it, and it has kept the budget."""
    assert isinstance(session, Budgeted)
    found = session.found
    assert found.plan is not None and not found.plan.is_empty and found.plan.unknown == ()
    assert 0 < found.reached_nbytes <= found.budget_nbytes < found.plain_nbytes


def assert_nothing_is_left() -> None:
    assert torch.autograd.backward.__module__ == "torch.autograd"
    assert not nn.modules.module._global_forward_pre_hooks
    assert not modules.is_active() and not torch.autograd._profiler_enabled()


def batch(number: int) -> Tensor:
    return torch.randn(64, 32, generator=torch.Generator().manual_seed(number))


# -- a plain loop ----------------------------------------------------------------------------------------------------


def loop(model: nn.Module, accumulate: int = 1, autocast: bool = False, closure: bool = False) -> list[Tensor]:
    torch.manual_seed(1)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01)

    def micro_steps(number: int) -> Tensor:
        optimizer.zero_grad()
        for part in range(accumulate):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
                loss = model(batch(number * accumulate + part)).float().square().mean() / accumulate
            loss.backward()
        return loss

    for number in range(STEPS):
        if closure:
            optimizer.step(lambda number=number: micro_steps(number))
        else:
            micro_steps(number)
            optimizer.step()
        if number % 4 == 3:
            model.eval()
            with torch.no_grad():
                model(batch(1000 + number))
            model.train()
    return [*state_of(model), torch.get_rng_state()]


@pytest.mark.parametrize(
    "settings", [{}, {"accumulate": 2}, {"autocast": True}], ids=["plain", "accumulate", "autocast"]
)
def test_a_wrapped_model_trains_within_a_budget(settings: dict[str, Any]) -> None:
    model = bs.wrap(Network(), budget="85%" if "autocast" in settings else "80%", min_nbytes=1024)
    assert same(loop(Network(), **settings), loop(model, **settings))
    calls = STEPS * settings.get("accumulate", 1) + 2
    assert len(model.was_open) == calls and model.was_open.count(False) == 2
    session = session_of(model)
    assert_within(session)
    assert session.report().steps == calls - 2
    assert figures(session)["backstash/ratio"] > 1
    bs.unwrap(model)
    assert_nothing_is_left()


def test_a_loop_in_its_optimizer_s_closure_is_not_profiled_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("backstash.planning.run.following.PATIENCE", 2)
    model = bs.wrap(Network(), budget="80%", min_nbytes=1024)
    with pytest.warns(UserWarning, match="closure"):
        found = loop(model, closure=True)
    assert same(loop(Network(), closure=True), found)
    session = session_of(model)
    assert isinstance(session, Budgeted) and "closure" in session.found.trouble
    bs.unwrap(model)
    assert_nothing_is_left()


def test_a_copy_has_a_budget_of_its_own() -> None:
    model = bs.wrap(Network(), budget="80%", min_nbytes=1024)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert session_of(other) is not session_of(model)
        assert same(loop(Network()), loop(other))
        assert_within(session_of(other))


@pytest.mark.parametrize("budget", ["6 gigs", 0, "0%"])
def test_a_budget_that_means_nothing_is_an_error_at_once(budget: Any) -> None:
    with pytest.raises(PlanError, match="budget"):
        bs.wrap(Network(), budget=budget)


def test_a_budget_and_another_policy_is_an_error() -> None:
    with pytest.raises(IntegrationError, match=r"budget='6GiB' was asked for.*Leave policy= out"):
        session_for("gist", "6GiB")
    with pytest.raises(IntegrationError, match=r"budget='6GiB' was asked for"):
        bs.wrap(Network(), "quantized", budget="6GiB")


def test_an_allocation_that_fails_in_a_wrapped_model_is_repeated_once() -> None:
    def failing(model: Network) -> Network:
        calls: list[int] = []

        def fail(module: nn.Module, args: Any, output: Any) -> None:
            calls.append(1)
            if len(calls) == 8:
                raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes.")

        model.last.register_forward_hook(fail)
        return model

    model = bs.wrap(failing(Network()), budget="80%", min_nbytes=1024)
    assert same(loop(Network()), loop(model))
    session = session_of(model)
    assert isinstance(session, Budgeted) and session.found.retried == 1


def test_a_budget_that_saw_no_step_says_so() -> None:
    model = bs.wrap(Network(), budget="80%")
    model.eval()(batch(0)).sum().backward()  # evaluation alone
    assert "no training step was seen" in str(session_of(model).report())
    model.train()(batch(0)).sum().backward()
    assert "no training step was seen" not in str(session_of(model).report())


# -- Hugging Face ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_trainer_of_hugging_face(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    from backstash.integrations.huggingface import attach, detach

    def trainer(**settings: Any) -> Any:
        torch.manual_seed(1)
        config = transformers.GPT2Config(
            n_layer=2, n_embd=32, n_head=2, vocab_size=48, n_positions=24, bos_token_id=0, eos_token_id=0
        )
        generator = torch.Generator().manual_seed(2)
        texts = [torch.randint(48, (24,), generator=generator) for _ in range(32)]
        arguments = {
            "max_steps": 8,
            "per_device_train_batch_size": 4,
            "logging_steps": 1,
            "report_to": [],
            "use_cpu": True,
            "save_strategy": "no",
            "disable_tqdm": True,
            "eval_strategy": "steps",
            "eval_steps": 3,
            **settings,
        }
        data = [{"input_ids": text, "labels": text} for text in texts]
        made = transformers.Trainer(
            transformers.GPT2LMHeadModel(config),
            transformers.TrainingArguments(str(tmp_path), **arguments),
            train_dataset=data,
            eval_dataset=data[:4],
        )
        made.pop_callback(transformers.PrinterCallback)
        return made

    def train(trained: Any) -> list[Tensor]:
        torch.manual_seed(6)
        trained.train()
        keys = ("loss", "grad_norm", "eval_loss")
        logged = [log[key] for log in trained.state.log_history for key in keys if key in log]
        return [torch.tensor(logged, dtype=torch.float64), *state_of(trained.model)]

    attached = trainer(gradient_accumulation_steps=2)
    attachment = attach(attached, budget="80%", min_nbytes=1024, print_report=False)
    assert same(train(trainer(gradient_accumulation_steps=2)), train(attached))
    assert_within(attachment.session)
    assert attach(attached, budget="80%", min_nbytes=1024, print_report=False) is attachment
    detach(attached)
    assert "compute_loss" not in attached.__dict__
    assert_nothing_is_left()


# -- Lightning -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("accumulate", [1, 2])
def test_lightning(tmp_path: Path, accumulate: int) -> None:
    pytorch = pytest.importorskip("lightning.pytorch")
    from backstash.integrations.lightning import BackstashCallback

    class Module(pytorch.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.network = Network()

        def training_step(self, x: Tensor, index: int) -> Tensor:
            return self.network(x).square().mean()  # type: ignore[no-any-return]

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    def fit(callbacks: list[Any]) -> list[Tensor]:
        model = Module()
        torch.manual_seed(3)
        quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        trainer = pytorch.Trainer(
            max_epochs=1,
            accelerator="cpu",
            callbacks=callbacks,
            accumulate_grad_batches=accumulate,
            enable_model_summary=False,
            default_root_dir=tmp_path,
            **quiet,
        )
        trainer.fit(model, torch.utils.data.DataLoader([batch(n) for n in range(14)], batch_size=None))
        return state_of(model)

    callback = BackstashCallback(budget="80%", min_nbytes=1024, print_report=False)
    assert same(fit([]), fit([callback]))
    assert_within(callback.session)
    assert_nothing_is_left()


# -- Accelerate ------------------------------------------------------------------------------------------------------


def test_accelerate() -> None:
    accelerate = pytest.importorskip("accelerate")
    from backstash.integrations.accelerate import attach

    def train(is_attached: bool) -> tuple[list[Tensor], Any]:
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
        model = Network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = accelerator.prepare(model, optimizer)
        attachment = attach(accelerator, model, budget="80%", min_nbytes=1024) if is_attached else None
        torch.manual_seed(4)
        for number in range(14):
            with accelerator.accumulate(model):
                accelerator.backward(model(batch(number)).square().mean())
                optimizer.step()
                optimizer.zero_grad()
        if attachment is not None:
            attachment.detach()
        return state_of(model), attachment

    expected, _ = train(False)
    found, attachment = train(True)
    assert same(expected, found)
    assert_within(attachment.session)
    assert_nothing_is_left()


# -- a notebook ------------------------------------------------------------------------------------------------------

CELL = """
model = Network()
torch.manual_seed(1)
for number in range(9):
    model(batch(number)).square().mean().backward()
"""


def test_a_cell_of_a_notebook() -> None:
    pytest.importorskip("IPython")
    from IPython.core.error import UsageError
    from IPython.core.interactiveshell import InteractiveShell

    from backstash.integrations.notebook import load_ipython_extension, unload_ipython_extension

    shell = InteractiveShell.instance()
    load_ipython_extension(shell)
    try:
        shell.user_ns.update(Network=Network, batch=batch, torch=torch)
        shell.run_cell_magic("backstash", "--budget 80% --min-nbytes 1024 --output report", CELL)
        report = shell.user_ns["report"]
        assert report.steps == 9
        assert any("planned" in note and "reached" in note for note in report.notes)
        with pytest.raises(UsageError, match="budget 'many'"):
            shell.run_cell_magic("backstash", "--budget many", CELL)
    finally:
        unload_ipython_extension(shell)
        InteractiveShell.clear_instance()
    assert_nothing_is_left()
