"""Families of models from transformers, built from small configs with random weights, each with a batch to train on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn

hf: Any = transformers  # whose configs take more arguments than their annotations say

WORDS = 512
"""Size of the vocabulary of every language model."""

CLASSES = 10
"""Classes of every image classifier."""


@dataclass(frozen=True)
class Size:
    """How large a model and its batch are.

    Attributes:
        layers: number of blocks, or of blocks in each stage of a network of stages.
        width: width of a token, a multiple of 32.
        tokens: tokens of a text.
        image: height and width of an image, a multiple of 32.
        batch: texts or images in a batch.
    """

    layers: int
    width: int
    tokens: int
    image: int
    batch: int

    @property
    def heads(self) -> int:
        """Attention heads, of width 32 each."""
        return self.width // 32


TABLE = Size(layers=2, width=256, tokens=256, image=64, batch=8)
"""For the table in docs."""

TINY = Size(layers=1, width=32, tokens=16, image=32, batch=2)
"""For tests."""

Inputs = Mapping[str, Tensor]


def _text(size: Size, words: int = WORDS) -> dict[str, Tensor]:
    tokens = torch.randint(5, words, (size.batch, size.tokens))
    return {"input_ids": tokens, "labels": tokens}


def _pictures(size: Size) -> dict[str, Tensor]:
    pixels = torch.randn(size.batch, 3, size.image, size.image)
    return {"pixel_values": pixels, "labels": torch.randint(CLASSES, (size.batch,))}


def _usual(size: Size) -> dict[str, Any]:
    """The settings that most decoders call by the same names."""
    return {
        "vocab_size": WORDS,
        "hidden_size": size.width,
        "intermediate_size": 4 * size.width,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "max_position_embeddings": size.tokens,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def gpt2(size: Size, words: int = WORDS) -> tuple[nn.Module, Inputs]:
    config = hf.GPT2Config(
        vocab_size=words,
        n_positions=size.tokens,
        n_embd=size.width,
        n_layer=size.layers,
        n_head=size.heads,
        bos_token_id=1,
        eos_token_id=2,
    )
    return hf.GPT2LMHeadModel(config), _text(size, words)


def llama(size: Size) -> tuple[nn.Module, Inputs]:
    config = hf.LlamaConfig(**_usual(size), num_key_value_heads=max(1, size.heads // 2))
    return hf.LlamaForCausalLM(config), _text(size)


def qwen3(size: Size) -> tuple[nn.Module, Inputs]:
    config = hf.Qwen3Config(**_usual(size), num_key_value_heads=max(1, size.heads // 2), head_dim=32)
    return hf.Qwen3ForCausalLM(config), _text(size)


def mixtral(size: Size) -> tuple[nn.Module, Inputs]:
    config = hf.MixtralConfig(
        **_usual(size), num_key_value_heads=max(1, size.heads // 2), num_local_experts=4, num_experts_per_tok=2
    )
    return hf.MixtralForCausalLM(config), _text(size)


def gemma(size: Size) -> tuple[nn.Module, Inputs]:
    config = hf.GemmaConfig(**_usual(size), num_key_value_heads=1, head_dim=32)
    return hf.GemmaForCausalLM(config), _text(size)


def phi(size: Size) -> tuple[nn.Module, Inputs]:
    return hf.PhiForCausalLM(hf.PhiConfig(**_usual(size), resid_pdrop=0.1)), _text(size)


def bert(size: Size) -> tuple[nn.Module, Inputs]:
    return hf.BertForMaskedLM(hf.BertConfig(**_usual(size))), _text(size)


def deberta(size: Size) -> tuple[nn.Module, Inputs]:
    config = hf.DebertaV2Config(**_usual(size), relative_attention=True, pos_att_type=["p2c", "c2p"])
    return hf.DebertaV2ForMaskedLM(config), _text(size)


def t5(size: Size) -> tuple[nn.Module, Inputs]:
    config = hf.T5Config(
        vocab_size=WORDS,
        d_model=size.width,
        d_kv=32,
        d_ff=4 * size.width,
        num_layers=size.layers,
        num_heads=size.heads,
        decoder_start_token_id=0,
    )
    return hf.T5ForConditionalGeneration(config), _text(size)


def whisper(size: Size) -> tuple[nn.Module, Inputs]:
    config = hf.WhisperConfig(
        vocab_size=WORDS,
        num_mel_bins=80,
        d_model=size.width,
        encoder_layers=size.layers,
        decoder_layers=size.layers,
        encoder_attention_heads=size.heads,
        decoder_attention_heads=size.heads,
        encoder_ffn_dim=4 * size.width,
        decoder_ffn_dim=4 * size.width,
        max_source_positions=size.tokens,
        max_target_positions=size.tokens,
        dropout=0.1,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )
    sound = torch.randn(size.batch, 80, 2 * size.tokens)
    return hf.WhisperForConditionalGeneration(config), {"input_features": sound, "labels": _text(size)["labels"]}


def vit(size: Size) -> tuple[nn.Module, Inputs]:
    config = hf.ViTConfig(
        hidden_size=size.width,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        intermediate_size=4 * size.width,
        image_size=size.image,
        patch_size=4,
        hidden_dropout_prob=0.1,
        num_labels=CLASSES,
    )
    return hf.ViTForImageClassification(config), _pictures(size)


def swin(size: Size) -> tuple[nn.Module, Inputs]:
    config = hf.SwinConfig(
        image_size=size.image,
        patch_size=2,
        embed_dim=size.width // 2,
        depths=[size.layers, size.layers],
        num_heads=[size.heads, 2 * size.heads],
        window_size=4,
        num_labels=CLASSES,
    )
    return hf.SwinForImageClassification(config), _pictures(size)


def convnext(size: Size) -> tuple[nn.Module, Inputs]:
    config = hf.ConvNextConfig(
        patch_size=2,
        hidden_sizes=[size.width // 2, size.width],
        depths=[size.layers, size.layers],
        num_stages=2,
        image_size=size.image,
        drop_path_rate=0.1,
        num_labels=CLASSES,
    )
    return hf.ConvNextForImageClassification(config), _pictures(size)


def mamba(size: Size) -> tuple[nn.Module, Inputs]:
    config = hf.MambaConfig(
        vocab_size=WORDS,
        hidden_size=size.width,
        num_hidden_layers=size.layers,
        state_size=8,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        use_cache=False,
    )
    texts = _text(size)
    return hf.MambaForCausalLM(config), {name: tokens[:, : max(8, size.tokens // 4)] for name, tokens in texts.items()}


FAMILIES: dict[str, Callable[[Size], tuple[nn.Module, Inputs]]] = {
    "GPT-2": gpt2,
    "Llama": llama,
    "Qwen3": qwen3,
    "Mixtral": mixtral,
    "Gemma": gemma,
    "Phi": phi,
    "BERT": bert,
    "DeBERTa-v2": deberta,
    "T5": t5,
    "Whisper": whisper,
    "ViT": vit,
    "Swin": swin,
    "ConvNeXt": convnext,
    "Mamba": mamba,
}


def make(name: str, size: Size) -> tuple[nn.Module, Inputs]:
    """Builds a model in training mode and its batch; the same weights and numbers at every call."""
    torch.manual_seed(0)
    model, inputs = FAMILIES[name](size)
    return model.train(), inputs


def gpt2_of(size: Size, words: int) -> tuple[nn.Module, Inputs]:
    """A GPT-2 with a vocabulary of ``words``, in training mode, and its batch."""
    torch.manual_seed(0)
    model, inputs = gpt2(size, words)
    return model.train(), inputs
