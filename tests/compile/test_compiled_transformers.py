"""Transformers compiled with treated graphs: the same gradients, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from compiled_steps import compare
from torch import Tensor, nn

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]
transformers = pytest.importorskip("transformers")

TOKENS = torch.arange(32).view(2, 16) % 50
SMALL = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
CAUSAL = {**SMALL, "intermediate_size": 64, "num_key_value_heads": 1, "max_position_embeddings": 32}


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=50, n_embd=32, n_layer=1, n_head=2, n_positions=32, bos_token_id=0, eos_token_id=0
    )
    return transformers.GPT2LMHeadModel(config)  # type: ignore[no-any-return]


def llama() -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**CAUSAL))  # type: ignore[no-any-return]


def bert() -> nn.Module:
    return transformers.BertForMaskedLM(transformers.BertConfig(**SMALL, intermediate_size=64))  # type: ignore[no-any-return]


def vit() -> nn.Module:
    sizes = {name: value for name, value in SMALL.items() if name != "vocab_size"}
    config = transformers.ViTConfig(**sizes, intermediate_size=64, image_size=16, patch_size=4, hidden_dropout_prob=0.1)
    return transformers.ViTForImageClassification(config)  # type: ignore[no-any-return]


def mixtral() -> nn.Module:
    config = transformers.MixtralConfig(**CAUSAL, num_local_experts=4, num_experts_per_tok=2)
    return transformers.MixtralForCausalLM(config)  # type: ignore[no-any-return]


def loss_of(make: Callable[[], nn.Module]) -> Callable[[Any], Tensor]:
    def forward(compiled: Any) -> Tensor:
        if make is vit:
            found = compiled(pixel_values=torch.linspace(-1, 1, 2 * 3 * 256).view(2, 3, 16, 16))
        else:
            found = compiled(input_ids=TOKENS)
        return found.logits.float().square().sum()  # type: ignore[no-any-return]

    return forward


@pytest.mark.parametrize("make", [gpt2, llama, bert, vit])
def test_a_budget_leaves_the_bits_as_they_are(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model, forward = make().train(), loss_of(make)
    whole = compare(model, forward, "keep").report()
    report = compare(model, forward, budget=1000).report()
    assert report.stash_nbytes <= whole.stash_nbytes
    assert "operators computed again" in report.notes[0]


@pytest.mark.parametrize("make", [gpt2, llama, bert, vit, mixtral])
def test_gradients_have_the_bits_of_compiled_plain(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model, forward = make().train(), loss_of(make)
    # A mixture of experts may break the graph where it routes tokens.
    report = compare(model, forward, fullgraph=make is not mixtral).report()
    assert report.rows
    if make in (gpt2, bert, vit):  # the others have no dropout, and so no mask
        assert any(row.codec == "bits" for row in report.rows)
