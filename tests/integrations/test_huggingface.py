"""A trainer of Hugging Face trains bit for bit as it does without, and evaluation opens no Session."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from integration_checks import assert_equal_bits, installed, parameters_of
from torch import Tensor, nn

import backstash as bs
from backstash.capture import modules
from backstash.errors import IntegrationError, UnknownNameError

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments  # noqa: E402
from transformers.utils import logging as transformers_logging  # noqa: E402

from backstash.integrations.huggingface import TrainerAttachment, TrainerMixin, attach, detach  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning"),
]
transformers_logging.set_verbosity_error()

WORDS, LENGTH = 48, 24


class Noting(GPT2LMHeadModel):
    """A small GPT-2 that notes, for each call, whether it trains and whether a Session is open."""

    def forward(self, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:
        """As GPT-2."""
        calls = self.__dict__.setdefault("calls", [])
        calls.append((self.training and torch.is_grad_enabled(), modules.is_active()))
        found = super().forward(input_ids=input_ids, labels=labels, **kwargs)
        if self.__dict__.get("error") is not None:
            raise self.error
        return found


def model(layers: int = 2) -> Noting:
    torch.manual_seed(1)
    return Noting(
        GPT2Config(
            n_layer=layers, n_embd=32, n_head=2, vocab_size=WORDS, n_positions=LENGTH, bos_token_id=0, eos_token_id=0
        )
    )


def examples(count: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(2)
    tokens = [torch.randint(WORDS, (LENGTH,), generator=generator) for _ in range(count)]
    return [{"input_ids": text, "labels": text} for text in tokens]


def trainer(folder: Path, kind: type[Trainer] = Trainer, layers: int = 2, **settings: Any) -> Trainer:
    arguments = TrainingArguments(
        str(folder),
        **{
            "max_steps": 3,
            "per_device_train_batch_size": 4,
            "logging_steps": 1,
            "report_to": [],
            "use_cpu": True,
            "save_strategy": "no",
            "disable_tqdm": True,
            "seed": 5,
            **settings,
        },
    )
    made = kind(model(layers), arguments, train_dataset=examples(16), eval_dataset=examples(4))
    made.pop_callback(transformers.PrinterCallback)
    return made


def train(trained: Trainer) -> None:
    """Trains with the same random numbers each time, from the first dropout on."""
    torch.manual_seed(6)
    trained.train()


def outcome(trained: Trainer) -> list[Tensor]:
    """The losses and gradient norms that were logged, and the final parameters."""
    keys = ("loss", "grad_norm", "eval_loss")
    logged = [log[key] for log in trained.state.log_history for key in keys if key in log]
    return [torch.tensor(logged, dtype=torch.float64), *parameters_of(trained.model)]


def assert_same_bits(folder: Path, policy: str | bs.Policy = "lossless", **settings: Any) -> TrainerAttachment:
    """Trains without and with a Session, and compares."""
    plain, attached = trainer(folder, **settings), trainer(folder, **settings)
    attachment = attach(attached, policy, min_nbytes=0, print_report=False)
    train(plain)
    train(attached)
    assert_equal_bits(outcome(plain), outcome(attached))
    assert installed() == []
    assert attachment.report().steps > 0
    return attachment


@pytest.mark.parametrize("policy", ["lossless", "offload"])
def test_training_gives_the_same_bits(policy: str, tmp_path: Path) -> None:
    report = assert_same_bits(tmp_path, policy).report()
    assert report.steps == 3
    assert policy != "lossless" or report.ratio > 1.5


@pytest.mark.parametrize(
    "settings",
    [
        {"gradient_accumulation_steps": 2},
        {"bf16": True},
        {"activation_checkpointing": True},
        {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"use_reentrant": True}},
        {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"every_n_layers": 2}},
        {"label_smoothing_factor": 0.1},
        {"optim": "sgd", "max_grad_norm": 0.1},
        {"neftune_noise_alpha": 1.0},
    ],
    ids=str,
)
def test_settings_compose(settings: dict[str, Any], tmp_path: Path) -> None:
    assert_same_bits(tmp_path, **settings)


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning")
def test_the_deprecated_name_of_checkpointing_composes(tmp_path: Path) -> None:
    assert_same_bits(tmp_path, gradient_checkpointing=True)


def test_checkpoints_that_offload_compose(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On CPU there is no pinned memory to offload to, so the copies are pageable here."""
    from functools import partial

    from transformers import modeling_utils

    unpinned = partial(torch.autograd.graph.save_on_cpu, pin_memory=False)
    monkeypatch.setattr(modeling_utils, "save_on_cpu", lambda pin_memory, device_type: unpinned())
    assert_same_bits(tmp_path, activation_checkpointing=True, activation_checkpointing_kwargs={"offload": True})


def test_evaluation_prediction_and_generation_open_nothing(tmp_path: Path) -> None:
    plain, attached = (trainer(tmp_path, eval_strategy="steps", eval_steps=1) for _ in range(2))
    attachment = attach(attached, min_nbytes=0, print_report=False)
    train(plain)
    train(attached)
    assert_equal_bits(outcome(plain), outcome(attached))
    assert attached.model.calls.count((True, True)) == 3
    assert all(training == is_open for training, is_open in attached.model.calls)
    assert len(attached.model.calls) > 3
    attached.model.train()  # generation in training mode
    attached.model.generate(examples(1)[0]["input_ids"][None, :4], max_new_tokens=2, do_sample=False, pad_token_id=0)
    attached.evaluate()
    attached.predict(examples(2))
    assert attachment.report().steps == 3
    assert all(training == is_open for training, is_open in attached.model.calls)


def test_figures_are_logged_and_the_report_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[dict[str, float]] = []

    class Listener(TrainerCallback):  # type: ignore[misc]
        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **kwargs: Any) -> None:
            seen.append(dict(logs))

    attached = trainer(tmp_path)
    attached.add_callback(Listener())
    attachment = attach(attached, min_nbytes=0)
    train(attached)
    losses = [log for log in seen if "loss" in log]
    assert len(losses) == 3
    for log in [*losses, *(log for log in attached.state.log_history if "loss" in log)]:
        assert log["backstash/ratio"] == pytest.approx(attachment.report().ratio, rel=0.2)
        assert 0 < log["backstash/stash_mib"] < log["backstash/peak_mib"]
    assert str(attachment.report()).splitlines()[0] in capsys.readouterr().out


@pytest.mark.parametrize("error", [RuntimeError("stop"), KeyboardInterrupt()], ids=["error", "ctrl-c"])
def test_an_interrupted_training_leaves_nothing_open(error: BaseException, tmp_path: Path) -> None:
    attached = trainer(tmp_path)
    attach(attached, min_nbytes=0, print_report=False)
    attached.model.error = error
    with pytest.raises(type(error)):
        train(attached)
    assert installed() == []
    attached.model.error = None
    plain = trainer(tmp_path)
    train(plain)
    again = trainer(tmp_path)
    attach(again, min_nbytes=0, print_report=False)
    train(again)
    assert_equal_bits(outcome(plain), outcome(again))


def test_attaching_twice_changes_nothing(tmp_path: Path) -> None:
    attached = trainer(tmp_path)
    first = attach(attached, "lossless")
    count = len(attached.callback_handler.callbacks)
    assert attach(attached, "lossless") is first
    assert len(attached.callback_handler.callbacks) == count
    with pytest.raises(IntegrationError, match=r"'keep', but this trainer is attached already.*detach"):
        attach(attached, "keep")


def test_detach_restores_the_trainer(tmp_path: Path) -> None:
    attached = trainer(tmp_path)
    before, callbacks = dict(attached.__dict__), list(attached.callback_handler.callbacks)
    attach(attached, print_report=False)
    detach(attached)
    assert attached.__dict__ == before
    assert attached.callback_handler.callbacks == callbacks
    train(attached)
    assert not any(is_open for _, is_open in attached.model.calls)
    with pytest.raises(IntegrationError, match="not attached"):
        detach(attached)
    for call in (attach, detach):
        with pytest.raises(IntegrationError, match="works on a transformers.Trainer"):
            call(attached.model)


def test_detach_puts_back_what_the_program_had_put_there(tmp_path: Path) -> None:
    attached = trainer(tmp_path)
    own = attached.compute_loss_context_manager
    attached.compute_loss_context_manager = own
    attach(attached, print_report=False)
    detach(attached)
    assert attached.__dict__["compute_loss_context_manager"] is own


def test_a_mixin_attaches_by_itself(tmp_path: Path) -> None:
    class Mine(TrainerMixin, Trainer):  # type: ignore[misc]
        backstash_policy = "lossless"
        backstash_options = {"min_nbytes": 0, "print_report": False}  # noqa: RUF012

    plain, mine = trainer(tmp_path), trainer(tmp_path, Mine)
    train(plain)
    train(mine)
    assert_equal_bits(outcome(plain), outcome(mine))
    assert mine.backstash.report().ratio > 1


def test_a_trainer_under_a_session_is_left_to_it(tmp_path: Path) -> None:
    attached = trainer(tmp_path)
    attachment = attach(attached, print_report=False)
    with bs.Session("lossless", min_nbytes=0) as session:
        train(attached)
    assert session.report().steps == 3
    assert attachment.report().steps == 0
    assert not any("backstash/ratio" in log for log in attached.state.log_history)


def test_activation_offloading_names_its_replacement(tmp_path: Path) -> None:
    """The flag of TRL's trainers, which open saved-tensor hooks of their own around the step."""
    attached = trainer(tmp_path)
    attached.args.activation_offloading = True
    with pytest.raises(IntegrationError, match=r"activation_offloading=True.*policy='offload'"):
        attach(attached)
    assert "compute_loss_context_manager" not in attached.__dict__
    attached.args.activation_offloading = False
    attach(attached)
    attached.args.activation_offloading = True  # as a callback may do before training begins
    with pytest.raises(IntegrationError, match="activation_offloading"):
        train(attached)


def test_replicas_on_threads_are_refused(tmp_path: Path) -> None:
    attached = trainer(tmp_path)
    attached.args._n_gpu = 2
    with pytest.raises(IntegrationError, match=r"2 GPUs in one process.*torchrun --nproc-per-node 2"):
        attach(attached)


def test_wrong_arguments_change_nothing(tmp_path: Path) -> None:
    attached = trainer(tmp_path)
    with pytest.raises(UnknownNameError):
        attach(attached, "losless")
    with pytest.raises(IntegrationError, match="budget='6GiB' was asked for"):
        attach(attached, "keep", budget="6GiB")
    assert "compute_loss_context_manager" not in attached.__dict__
    assert not [found for found in attached.callback_handler.callbacks if isinstance(found, TrainerAttachment)]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_a_compiled_trainer_is_warned_of_and_gives_the_same_bits(tmp_path: Path) -> None:
    settings = {"torch_compile": True, "torch_compile_backend": "eager", "max_steps": 2, "layers": 1}
    torch._dynamo.reset()
    plain = trainer(tmp_path, **settings)
    train(plain)
    torch._dynamo.reset()
    attached = trainer(tmp_path, **settings)
    with pytest.warns(UserWarning, match=r"torch_compile=True.*torch_compile=False"):
        attach(attached, print_report=False)
    train(attached)
    assert_equal_bits(outcome(plain), outcome(attached))
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_a_model_that_is_compiled_with_a_policy_gives_the_same_bits(tmp_path: Path) -> None:
    """What the warning recommends."""
    found = []
    backend = bs.compile_backend("lossless", min_nbytes=0)
    for chosen in ("aot_eager", backend):
        torch._dynamo.reset()
        compiled = trainer(tmp_path, max_steps=2, layers=1)
        compiled.model.compile(backend=chosen)
        train(compiled)
        found.append(outcome(compiled))
    assert_equal_bits(*found)
    assert backend.report().ratio > 1
    torch._dynamo.reset()


def test_a_model_that_is_wrapped_before_the_trainer_gets_it(tmp_path: Path) -> None:
    plain, wrapped = trainer(tmp_path), trainer(tmp_path)
    found: nn.Module = bs.wrap(wrapped.model, min_nbytes=0)
    train(plain)
    train(wrapped)
    assert_equal_bits(outcome(plain), outcome(wrapped))
    assert found.calls == [(True, True)] * 3
