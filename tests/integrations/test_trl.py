"""TRL's trainers train bit for bit as they do without, with the one line that every trainer of Hugging Face takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from integration_checks import assert_equal_bits, installed, parameters_of
from torch import Tensor, nn

from backstash.capture import modules
from backstash.errors import IntegrationError

pytest.importorskip("trl", reason="needs trl")
pytest.importorskip("datasets", reason="needs datasets")
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer
from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer

from backstash.integrations.huggingface import attach

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # of TRL's own calls
transformers_logging.set_verbosity_error()

LETTERS = "abcdefghijklmnopqrstuvwxyz"


def model() -> LlamaForCausalLM:
    """A small Llama that notes in ``calls`` whether a Session is open whenever it is called for training."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    made = LlamaForCausalLM(
        LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2, pad_token_id=0, eos_token_id=1)
    )
    calls = made.__dict__.setdefault("calls", [])

    def note(layers: nn.Module, arguments: Any) -> None:
        if layers.training and torch.is_grad_enabled():
            calls.append(modules.is_active())

    made.model.register_forward_pre_hook(note)  # TRL puts a loss of its own in place of the outer forward
    return made


def tokenizer() -> PreTrainedTokenizerFast:
    words = {word: number for number, word in enumerate(("<pad>", "<eos>", "<unk>", *LETTERS))}
    inner = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def variety(completions: list[str], **columns: Any) -> list[float]:
    """Rewards a text for the number of its letters."""
    return [float(len(set(text))) for text in completions]


def trainer(kind: str, folder: Path, **settings: Any) -> Any:
    common = {
        **{"output_dir": str(folder), "max_steps": 3, "per_device_train_batch_size": 4, "logging_steps": 1},
        **{"report_to": [], "use_cpu": True, "save_strategy": "no", "disable_tqdm": True, "seed": 3, "bf16": False},
        **settings,
    }
    texts = [" ".join(LETTERS[start : start + 8]) for start in range(16)]
    if kind == "sft":
        data, made = Dataset.from_dict({"text": texts}), (SFTTrainer, SFTConfig, {})
    elif kind == "dpo":
        columns = {"prompt": ["a b"] * 16, "chosen": texts, "rejected": texts[::-1]}
        data, made = Dataset.from_dict(columns), (DPOTrainer, DPOConfig, {"ref_model": model()})
    elif kind == "online":
        data, made = (
            Dataset.from_dict({"prompt": texts}),
            (OnlineDPOTrainer, OnlineDPOConfig, {"reward_funcs": variety}),
        )
        common |= {"max_new_tokens": 6}
    else:
        data, made = Dataset.from_dict({"prompt": texts}), (GRPOTrainer, GRPOConfig, {"reward_funcs": variety})
        common |= {"num_generations": 4, "max_completion_length": 8}
    trainers, settings_of, more = made
    return trainers(model(), args=settings_of(**common), train_dataset=data, processing_class=tokenizer(), **more)


def outcome(trained: Any) -> list[Tensor]:
    logged = [log[key] for log in trained.state.log_history for key in ("loss", "grad_norm") if key in log]
    return [torch.tensor(logged, dtype=torch.float64), *parameters_of(trained.model)]


def train(trained: Any) -> list[Tensor]:
    torch.manual_seed(1)
    trained.train()
    return outcome(trained)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("kind", ["sft", "dpo", "grpo", "online"])
def test_training_gives_the_same_bits(kind: str, checkpointing: bool, tmp_path: Path) -> None:
    """TRL has checkpoints on unless it is told otherwise."""
    settings = {"gradient_checkpointing": checkpointing}
    plain, attached = (trainer(kind, tmp_path, **settings) for _ in range(2))
    attachment = attach(attached, min_nbytes=0, print_report=False)
    assert_equal_bits(train(plain), train(attached))
    assert attachment.report().steps == 3
    assert checkpointing or attachment.report().ratio > 1.2
    assert attached.model.calls and all(attached.model.calls)
    assert not any(plain.model.calls)
    assert installed() == []


@pytest.mark.parametrize("kind", ["sft", "dpo", "grpo", "online"])
def test_a_budget_gives_the_same_bits(kind: str, tmp_path: Path) -> None:
    settings = {"gradient_checkpointing": False, "max_steps": 14}
    plain, attached = (trainer(kind, tmp_path, **settings) for _ in range(2))
    attachment = attach(attached, budget="100%", min_nbytes=0, print_report=False)
    assert_equal_bits(train(plain), train(attached))
    assert attachment.report().steps >= 14
    assert installed() == []


def test_its_own_offloading_is_refused(tmp_path: Path) -> None:
    with pytest.raises(IntegrationError, match="policy='offload'"):
        attached = trainer("sft", tmp_path)
        attached.args.activation_offloading = True  # without an accelerator TRL makes no such trainer
        attach(attached)
