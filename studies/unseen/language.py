"""Recurrent networks, and transformers from ``transformers`` with dropout, in shapes that the families' table lacks."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from studies.unseen.program import Program, supervised

WORDS = 1024


class Tagger(nn.Module):
    """Two layers of LSTM in both directions over texts of different lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 128, padding_idx=0)
        self.lstm = nn.LSTM(128, 128, num_layers=2, bidirectional=True, batch_first=True, dropout=0.2)
        self.head = nn.Linear(256, 20)

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        x = F.dropout(self.words(tokens), 0.1)
        packed, _ = self.lstm(pack_padded_sequence(x, lengths, batch_first=True))
        x, _ = pad_packed_sequence(packed, batch_first=True)
        tags: Tensor = self.head(torch.tanh(x))
        return tags


def tagger() -> Program:
    """An LSTM tagger with packed sequences."""
    model, lengths = Tagger(), torch.arange(64, 32, -2)
    tokens, tags = torch.randint(1, WORDS, (16, 64)), torch.randint(20, (16, 64))
    return supervised(model, lambda: F.cross_entropy(model(tokens, lengths).flatten(0, 1), tags.flatten()))


class Translator(nn.Module):
    """A GRU that reads, and a cell that writes word by word and attends to what was read."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.reader = nn.Embedding(WORDS, 96), nn.GRU(96, 96, batch_first=True)
        self.cell, self.query = nn.GRUCell(192, 96), nn.Linear(96, 96, bias=False)
        self.head = nn.Linear(192, WORDS)

    def forward(self, tokens: Tensor, following: Tensor) -> Tensor:
        read, last = self.reader(self.words(tokens))
        state, logits = last[0], []
        for word in self.words(following).unbind(1):
            weights = torch.softmax(torch.bmm(read, self.query(state)[:, :, None]), dim=1)
            context = (weights * read).sum(1)
            state = self.cell(torch.cat([word, context], dim=-1), state)
            logits.append(self.head(torch.cat([state, context], dim=-1)))
        return torch.stack(logits, dim=1)


def translator() -> Program:
    """A recurrent translator with attention, in a Python loop."""
    model, tokens = Translator(), torch.randint(WORDS, (16, 48))
    return supervised(model, lambda: F.cross_entropy(model(tokens, tokens).flatten(0, 1), tokens.flatten()))


def _from_config(kind: str, model: str, inputs: dict[str, Any], **settings: Any) -> Program:
    """Trains a model of transformers on its own loss."""
    import transformers

    names: Any = transformers
    made: nn.Module = getattr(names, model)(getattr(names, kind)(**settings))
    return supervised(made, lambda: made(**inputs).loss)


def _texts(batch: int, tokens: int) -> dict[str, Tensor]:
    found = torch.randint(5, WORDS, (batch, tokens))
    return {"input_ids": found, "labels": found}


_DECODER: dict[str, Any] = {
    "vocab_size": WORDS,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def llama() -> Program:
    """Llama whose attention is computed step by step."""
    return _from_config("LlamaConfig", "LlamaForCausalLM", _texts(4, 128), attn_implementation="eager", **_DECODER)


def gemma_2() -> Program:
    """Gemma 2: soft caps, sliding windows in every second layer."""
    inputs = _texts(4, 128)
    return _from_config(
        "Gemma2Config", "Gemma2ForCausalLM", inputs, sliding_window=32, query_pre_attn_scalar=32, **_DECODER
    )


def mixtral() -> Program:
    """Mixtral: experts that different tokens go to."""
    settings = {**_DECODER, "num_local_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 2}
    return _from_config("MixtralConfig", "MixtralForCausalLM", _texts(4, 128), output_router_logits=True, **settings)


def t5() -> Program:
    """T5 with gated GELU and tied embeddings."""
    settings: dict[str, Any] = {
        "vocab_size": WORDS,
        "d_model": 128,
        "d_kv": 32,
        "d_ff": 384,
        "num_layers": 2,
        "num_heads": 4,
    }
    settings |= {"feed_forward_proj": "gated-gelu", "decoder_start_token_id": 0}
    return _from_config("T5Config", "T5ForConditionalGeneration", _texts(4, 96), **settings)


def bart() -> Program:
    """BART with dropout in attention and activations."""
    return _from_config(
        "BartConfig",
        "BartForConditionalGeneration",
        _texts(4, 96),
        vocab_size=WORDS,
        d_model=128,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=512,
        decoder_ffn_dim=512,
        max_position_embeddings=128,
        attention_dropout=0.1,
        activation_dropout=0.1,
        forced_eos_token_id=2,
    )


def whisper() -> Program:
    """Whisper: convolutions over sound, then cross attention."""
    inputs = {"input_features": torch.randn(2, 80, 256), "labels": torch.randint(5, WORDS, (2, 64))}
    return _from_config(
        "WhisperConfig",
        "WhisperForConditionalGeneration",
        inputs,
        vocab_size=WORDS,
        d_model=128,
        encoder_layers=3,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=512,
        decoder_ffn_dim=512,
        max_source_positions=128,
        max_target_positions=64,
        dropout=0.1,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )


def deberta() -> Program:
    """DeBERTa: content and position attend to each other."""
    settings = {**_DECODER, "pad_token_id": 0, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]}
    del settings["num_key_value_heads"], settings["head_dim"]
    return _from_config("DebertaV2Config", "DebertaV2ForMaskedLM", _texts(4, 128), **settings)


def mamba() -> Program:
    """Mamba: a selective scan in a Python loop."""
    settings = {"vocab_size": WORDS, "hidden_size": 96, "num_hidden_layers": 2, "state_size": 8, "use_cache": False}
    return _from_config("MambaConfig", "MambaForCausalLM", _texts(4, 48), **settings, pad_token_id=0, bos_token_id=1)


PROGRAMS = {
    "LSTM tagger": tagger,
    "GRU translator": translator,
    "Llama, eager attention": llama,
    "Gemma 2": gemma_2,
    "Mixtral": mixtral,
    "T5": t5,
    "BART": bart,
    "Whisper": whisper,
    "DeBERTa-v2": deberta,
    "Mamba": mamba,
}
