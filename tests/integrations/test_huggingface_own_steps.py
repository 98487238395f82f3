"""Trainers whose own step or loop passes by the methods that are replaced, as TRL's OnlineDPOTrainer does."""

from __future__ import annotations

import copy
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from integration_checks import assert_equal_bits, installed
from torch import Tensor

import backstash as bs
from backstash.errors import IntegrationError

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
from test_huggingface import Noting, examples, model, outcome, train, trainer
from transformers import Trainer, TrainerCallback

from backstash.integrations.huggingface import attach, detach

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning"),
]
CALL = "_call_impl"  # in a model's dictionary as long as its calls open a Session


class OwnStep(Trainer):  # type: ignore[misc]
    """Generates, asks a second model, and computes the loss by itself: all inside of its ``training_step``."""

    reference: Any = None

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """As TRL's OnlineDPOTrainer: no method of Trainer is called for the forward pass or the loss."""
        model.train()
        inputs = self._prepare_inputs(inputs)
        model.generate(inputs["input_ids"][:, :4], max_new_tokens=2, do_sample=False, pad_token_id=0)
        logits = model(input_ids=inputs["input_ids"]).logits
        with torch.no_grad():
            known = (self.reference or self.model)(input_ids=inputs["input_ids"]).logits
        loss = (logits.log_softmax(-1) - known.log_softmax(-1) + 1).square().mean()
        self.accelerator.backward(loss / self.current_gradient_accumulation_steps)
        return loss.detach() / self.current_gradient_accumulation_steps


class OwnContext(Trainer):  # type: ignore[misc]
    """Enters the context around a loss of its own."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Without ``compute_loss``."""
        model.train()
        with self.compute_loss_context_manager():
            loss = model(**self._prepare_inputs(inputs)).loss
        self.accelerator.backward(loss)
        return loss.detach()


class NoContext(Trainer):  # type: ignore[misc]
    """Computes the loss outside of the context."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Without ``compute_loss_context_manager``."""
        model.train()
        loss = self.compute_loss(model, self._prepare_inputs(inputs))
        self.accelerator.backward(loss)
        return loss.detach()


class ByPart(Trainer):  # type: ignore[misc]
    """Calls the parts of its model by themselves, so that nothing that is replaced is ever called."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Without a call of the model."""
        model.train()
        tokens = self._prepare_inputs(inputs)["input_ids"]
        loss = model.lm_head(model.transformer(input_ids=tokens).last_hidden_state).square().mean()
        self.accelerator.backward(loss)
        return loss.detach()


class OwnLoop(Trainer):  # type: ignore[misc]
    """Trains in a loop of its own, as TRL's PPOTrainer did, and calls the callbacks."""

    def train(self, *args: Any, **kwargs: Any) -> None:
        """Three steps."""
        self.create_optimizer_and_scheduler(3)
        self.control = self.callback_handler.on_train_begin(self.args, self.state, self.control)
        for inputs in [self.get_train_dataset_batch(number) for number in range(3)]:
            self.model.train()
            loss = self.model(**inputs).loss
            self.accelerator.backward(loss)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.control = self.callback_handler.on_step_end(self.args, self.state, self.control)
        self.control = self.callback_handler.on_train_end(self.args, self.state, self.control)

    def get_train_dataset_batch(self, number: int) -> dict[str, Tensor]:
        """Rows [4, LENGTH] of the data, always the same for a number."""
        return self.data_collator(self.train_dataset[4 * number : 4 * number + 4])  # type: ignore[no-any-return]


def calls(trained: Trainer) -> list[bool]:
    """For each training call of the model, whether a Session was open."""
    return [is_open for training, is_open in trained.model.calls if training]


SETTINGS: list[dict[str, Any]] = [
    {},
    {"gradient_accumulation_steps": 2},
    {"eval_strategy": "steps", "eval_steps": 1},
    {"activation_checkpointing": True, "bf16": True},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("kind", [OwnStep, NoContext, OwnContext, OwnLoop])
def test_a_step_of_its_own_runs_under_the_session(kind: type, settings: dict[str, Any], tmp_path: Path) -> None:
    plain, attached = (trainer(tmp_path, kind, **settings) for _ in range(2))
    attachment = attach(attached, min_nbytes=0, print_report=False)
    train(plain)
    train(attached)
    assert_equal_bits(outcome(plain), outcome(attached))
    passes = 3 * settings.get("gradient_accumulation_steps", 1) if kind is not OwnLoop else 3
    assert calls(attached) == [True] * passes
    assert not any(is_open for training, is_open in attached.model.calls if not training)
    assert attachment.report().steps == passes and attachment.report().ratio > 1
    assert all("backstash/ratio" in log for log in attached.state.log_history if "loss" in log)
    assert installed() == [] and CALL not in attached.model.__dict__


@pytest.mark.parametrize("kind", [OwnStep, NoContext, OwnContext])
def test_a_step_of_its_own_keeps_a_budget(kind: type, tmp_path: Path) -> None:
    plain, attached = (trainer(tmp_path, kind, max_steps=14) for _ in range(2))
    attachment: Any = attach(attached, budget="80%", min_nbytes=1024, strict=True, print_report=False)
    train(plain)
    train(attached)
    assert_equal_bits(outcome(plain), outcome(attached))
    found = attachment.session.found
    assert attachment.report().steps == 14
    assert found.plan is not None and 0 < found.reached_nbytes <= found.budget_nbytes < found.plain_nbytes
    assert installed() == []


def test_a_budget_that_a_step_of_its_own_cannot_keep_is_refused(tmp_path: Path) -> None:
    attached = trainer(tmp_path, OwnStep, max_steps=14)
    attach(attached, budget="1KiB", strict=True, print_report=False)
    with pytest.raises(bs.errors.BudgetError, match="1024 bytes"):
        train(attached)
    detach(attached)
    assert installed() == [] and CALL not in attached.model.__dict__


def test_a_second_model_is_left_alone(tmp_path: Path) -> None:
    plain, attached = (trainer(tmp_path, OwnStep) for _ in range(2))
    for made in (plain, attached):
        made.reference = copy.deepcopy(made.model).train()
    attach(attached, min_nbytes=0, print_report=False)
    train(plain)
    train(attached)
    assert_equal_bits(outcome(plain), outcome(attached))
    assert not any(is_open for _, is_open in attached.reference.calls)


def test_the_replaced_method_is_left_out_of_ordinary_trainers(tmp_path: Path) -> None:
    """Also of those whose ``training_step`` ends with the one of Trainer."""

    class Ordinary(Trainer):  # type: ignore[misc]
        def training_step(self, model: Any, *args: Any, **kwargs: Any) -> Tensor:
            found.append(CALL in self.model.__dict__)
            return super().training_step(model, *args, **kwargs)  # type: ignore[no-any-return]

    for options in ({}, {"budget": "80%"}):
        found: list[bool] = []
        attached = trainer(tmp_path, Ordinary)
        attach(attached, min_nbytes=0, print_report=False, **options)  # type: ignore[arg-type]
        train(attached)
        assert found == [False] * 3 and calls(attached) == [True] * 3


def test_a_trainer_that_only_seems_to_pass_by_opens_one_session(tmp_path: Path) -> None:
    class Roundabout(Trainer):  # type: ignore[misc]
        def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
            return self.ordinary(*args, **kwargs)

        def ordinary(self, *args: Any, **kwargs: Any) -> Tensor:
            return super().training_step(*args, **kwargs)  # type: ignore[no-any-return]

    plain, attached = (trainer(tmp_path, Roundabout) for _ in range(2))
    attachment = attach(attached, min_nbytes=0, print_report=False)
    train(plain)
    train(attached)
    assert_equal_bits(outcome(plain), outcome(attached))
    assert attachment.report().steps == 3 and calls(attached) == [True] * 3


@pytest.mark.parametrize("options", [{}, {"budget": "80%"}], ids=["policy", "budget"])
def test_an_optimizer_s_step_that_nothing_saw_is_warned_of(options: dict[str, Any], tmp_path: Path) -> None:
    plain, attached = (trainer(tmp_path, ByPart, max_steps=2) for _ in range(2))
    attachment = attach(attached, print_report=False, **options)
    train(plain)
    with pytest.warns(UserWarning, match=r"ByPart.*first optimizer step.*no Session.*compute_loss") as found:
        train(attached)
    assert len([each for each in found if "ByPart" in str(each.message)]) == 1
    assert_equal_bits(outcome(plain), outcome(attached))
    assert attachment.report().steps == 0
    if options:
        assert "no training step was seen" in str(attachment.report())
        assert "nine backward passes" not in str(attachment.report())


def test_a_strict_budget_refuses_an_optimizer_s_step_that_nothing_saw(tmp_path: Path) -> None:
    attached = trainer(tmp_path, ByPart)
    before = outcome(attached)[1:]
    attach(attached, budget="1KiB", strict=True, print_report=False)
    with pytest.raises(IntegrationError, match=r"ByPart.*first optimizer step.*no Session"):
        train(attached)
    assert_equal_bits(before, outcome(attached)[1:])  # the optimizer has not stepped
    assert installed() == []


def test_a_trainer_whose_way_is_not_foreseen_is_warned_of_and_served_from_then_on(tmp_path: Path) -> None:
    class Hidden(OwnStep):
        def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
            if self.args.max_steps == 0:
                self.compute_loss_context_manager()  # it is named, but never entered
            return super().training_step(*args, **kwargs)

    attached = trainer(tmp_path, Hidden)
    attach(attached, min_nbytes=0, print_report=False)
    with pytest.warns(UserWarning, match=r"Hidden.*first optimizer step"):
        train(attached)
    assert calls(attached) == [False, True, True]


def test_a_session_of_the_program_is_left_to_it(tmp_path: Path) -> None:
    attached = trainer(tmp_path, OwnStep)
    attachment = attach(attached, print_report=False)
    with bs.Session("lossless", min_nbytes=0) as session, warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*first optimizer step")
        train(attached)
    assert session.report().steps == 3 and attachment.report().steps == 0


def test_copies_of_the_model_are_plain(tmp_path: Path) -> None:
    class Copying(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, model: Any, **kwargs: Any) -> None:
            copies.extend([copy.deepcopy(model), copy.copy(model), pickle.loads(pickle.dumps(model))])

    copies: list[Noting] = []
    attached = trainer(tmp_path, OwnStep, max_steps=1)
    attached.add_callback(Copying())
    attachment = attach(attached, print_report=False)
    train(attached)
    for copied in copies:
        copied.__dict__["calls"] = []
        copied.train()(examples(1)[0]["input_ids"][None]).logits.sum().backward()
        assert copied.calls == [(True, False)]
    assert attachment.report().steps == 1


@pytest.mark.parametrize("kind", [OwnStep, OwnLoop])
def test_an_interrupted_step_of_its_own_leaves_nothing_open(kind: type, tmp_path: Path) -> None:
    attached = trainer(tmp_path, kind)
    attach(attached, min_nbytes=0, print_report=False)
    attached.model.error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        train(attached)
    assert installed() == []
    detach(attached)
    assert CALL not in attached.model.__dict__


def test_another_model_in_each_training_is_followed(tmp_path: Path) -> None:
    """As in each trial of a search."""
    attached = trainer(tmp_path, OwnStep)
    attachment = attach(attached, min_nbytes=0, print_report=False)
    trained = [attached.model, model()]
    for each in trained:
        attached.model = attached.model_wrapped = each
        attached.optimizer = attached.lr_scheduler = None
        train(attached)
        assert calls(attached) == [True] * 3
    assert attachment.report().steps == 6
    assert not any(CALL in each.__dict__ for each in trained)


def test_a_compiled_step_of_its_own_is_warned_of(tmp_path: Path) -> None:
    """Its calls are not followed, because what is compiled then is to be what it is without us."""
    attached = trainer(tmp_path, OwnStep)
    attach(attached, print_report=False)
    attached.model._compiled_call_impl = attached.model._call_impl  # as torch leaves it in model.compile()
    with pytest.warns(UserWarning, match=r"OwnStep.*first optimizer step"):
        train(attached)
    assert calls(attached) == [False] * 3
