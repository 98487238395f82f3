"""Architectures of transformers, each built from its own configuration, made small: two layers, 32 channels, 99 words.

Whatever an architecture is for, it gets the inputs that its forward function names: words, images, or a recording. The
loss is the mean square of every output that has a gradient. Dropout and all else is as the configuration has it.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from studies.unseen.program import Program

SEED = 7
"""Of weights and batches, and of the generators of Python and NumPy, which some architectures draw from in a step."""

BATCH, WORDS = 2, 16

_SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "hidden_dim", "encoder_hidden_dim"), 32),
    **dict.fromkeys(("embedding_size", "word_embed_proj_dim", "projection_dim", "lru_width"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_decoder_layers", "num_encoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "n_kv_heads", "num_experts_per_tok"), 2),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "n_inner", "encoder_ffn_dim", "decoder_ffn_dim"), 64),
    **dict.fromkeys(("ffn_hidden_size", "max_source_positions", "max_target_positions"), 64),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("d_kv", "head_dim", "attention_head_dim", "rotary_dim", "state_size", "mamba_d_state"), 8),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "patch_size"), 8),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "num_mel_bins", "attention_window_size"), 16),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 128),
    **{"num_feat_extract_layers": 2, "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2},
    **{"conv_dim": (32, 32), "conv_stride": (5, 2), "conv_kernel": (10, 3), "mamba_expand": 2, "image_size": 32},
    **{"vocab_size": 99, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1},
    "use_cache": False,
}
"""What a configuration may call its sizes, and the sizes that it gets."""

_TASKS = ("CAUSAL_LM", "MASKED_LM", "SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ", "IMAGE_CLASSIFICATION")

_NAMES = """
    afmoe aimv2_vision_model albert altclip apertus arcee aria aria_text audioflamingo3 aya_vision bart beam beit
    bert bert-generation big_bird bigbird_pegasus biogpt bitnet blenderbot blenderbot-small bloom camembert canine
    chinese_clip chinese_clip_vision_model clip clip_text_model clip_vision_model clipseg codegen cohere cohere2
    cohere2_moe cohere2_vision convbert cosmos3_edge cosmos3_edge_text cosmos3_omni cpmant ctrl cvt cwm
    data2vec-audio data2vec-text data2vec-vision deberta deberta-v2 deepseek_v4 deepseek_vl deepseek_vl_hybrid deit
    diffllama dinov2 dinov2_with_registers dinov3_vit distilbert doge dpr dpt electra encoder-decoder ernie ernie4_5
    ernie4_5_moe eurobert exaone4 exaone4_5 exaone_moe falcon falcon_mamba flaubert flava flex_olmo flint fnet
    focalnet fsmt fun_asr_nano funnel fuyu gemma gemma2 gemma3 gemma3_text gemma4_audio git glm glm4 glm4_moe glmasr
    glmasr_encoder glpn got_ocr2 gpt-sw3 gpt2 gpt_bigcode gpt_neo gpt_neox gpt_neox_japanese gpt_oss gptj
    gradium_phonon_tts granite granite_docling granite_docling_text granite_speech granite_speech_plus granite_swa
    granitemoe granitemoe_swa granitemoeshared gte helium hgnet_v2 hiera higgs_audio_v2 hrm_text hubert hy_v3
    hyperclovax hyperclovax_vision_v2 ibert idefics2 idefics3 ijepa imagegpt inkling2_text inkling_mm_model
    inkling_text internlm3 internvl internvl_vision iquestcoder jais2 jamba jetmoe jina_embeddings_v3 kolibri1
    kosmos-2.5 laguna layoutlm led lfm2 lfm2_vl lfm3 lfm3_vl lighton_ocr llama llama4_text llava llava_next
    llava_next_video llava_onevision longformer longt5 m2m_100 mamba marian markuplm maskformer mbart megatron-bert
    mellum metaclip_2 mimo_v2_flash minicpm_ocr minicpmv4_6 minicpmv4_7 minimax minimax_m2 minimax_m3_vl_text
    ministral3 mistral mistral3 mixtral mlcd_vision_model mllama mobilebert mobilenet_v1 mobilenet_v2 mobilevit
    modernbert modernbert-decoder modernvbert molmo2_text moshi moss_transcribe_diarize
    moss_transcribe_diarize_audio mpnet mpt mra mt5 muse_glimmer_text muse_spark_text musicflamingo mvp nanochat
    nemotron_h nllb-moe nomic_bert nystromformer olmo olmo2 olmo3 olmo_hybrid olmoe openai-gpt openai_privacy_filter
    opt ovis2 paligemma pegasus persimmon phi phi3 phi4_multimodal phimoe pixtral plbart pocket_tts poolformer
    pop2piano pp_lcnet prophetnet pvt qianfan_ocr qianfan_ocr_vision qwen2 qwen2_audio qwen2_audio_encoder qwen2_moe
    qwen3 qwen3_5_moe_text qwen3_5_text qwen3_asr qwen3_moe qwen3_next qwen3_omni_moe_thinker qwen3_vl qwen3_vl_moe
    qwen3_vl_moe_text qwen3_vl_text recurrent_gemma rembert roberta roberta-prelayernorm roc_bert roformer rwkv
    sam3_lite_text_text_model sam3_vision_model sam3_vit_model sam_hq_vision_model sam_vision_model seamless_m4t
    seamless_m4t_v2 seed_oss segformer sew sew-d siglip siglip_vision_model smollm3 smolvlm solar_open splinter
    squeezebert stablelm starcoder2 swiftformer switch_transformers t5 t5gemma2 tapas tipsv2 tipsv2_text_model
    tipsv2_vision_model trocr ultrabert ultravbert umt5 unispeech
"""

NAMES = tuple(_NAMES.split())
"""The architectures of transformers 5.23 that can be built and fed so, with fewer than 20 million parameters."""


def build(name: str) -> Program:
    """Makes a model and its step; the same weights and numbers at every call.

    Args:
        name: an architecture, as `transformers.CONFIG_MAPPING` has it.

    Raises:
        ImportError: transformers is not installed.
        KeyError: it knows no such architecture.
    """
    from transformers import CONFIG_MAPPING

    configuration = CONFIG_MAPPING[name]()
    _shrink(configuration)
    _seed(SEED)
    model: nn.Module = _class(type(configuration))(configuration).train()
    batch = _batch(model, configuration)
    drawn = SEED

    def step() -> None:
        nonlocal drawn
        drawn += 1
        random.seed(drawn)
        np.random.seed(drawn)
        outputs = model(**batch)
        torch.stack([output.float().square().mean() for output in _with_gradient(outputs)]).sum().backward()

    return Program(model, step)


def _seed(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def _class(configuration: type) -> type[nn.Module]:
    """The class of a configuration that has a head, if there is one."""
    from transformers.models.auto import modeling_auto

    tables = [getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING") for task in _TASKS] + [modeling_auto.MODEL_MAPPING]
    found = next(table[configuration] for table in tables if configuration in table)
    first: type[nn.Module] = found[0] if isinstance(found, tuple) else found
    return first


def _shrink(configuration: Any) -> None:
    """Gives a configuration, and those of its parts, small sizes."""
    from transformers import PretrainedConfig

    for key, size in _SIZES.items():
        there = getattr(configuration, key, None)
        is_list = isinstance(there, (list, tuple))
        is_absent = there is None and key != "pad_token_id"
        if is_absent or is_list is not isinstance(size, tuple) or isinstance(there, dict):
            continue
        with suppress(AttributeError, NotImplementedError, ValueError):  # it may follow from others
            setattr(configuration, key, size)
    for key, part in list(vars(configuration).items()):
        if isinstance(part, PretrainedConfig):
            _shrink(part)
        elif key == "layer_types" and isinstance(part, list):
            configuration.layer_types = part[:2]


def _batch(model: nn.Module, configuration: Any) -> dict[str, Tensor]:
    """The inputs that a model's forward function names."""
    named, main = inspect.signature(model.forward).parameters, model.main_input_name
    if main == "input_values":
        return {"input_values": torch.randn(BATCH, 1600)}
    words = torch.randint(3, 90, (BATCH, WORDS))
    batch = {key: words.clone() for key in ("input_ids", "decoder_input_ids") if key in named}
    if main == "input_features":
        batch["input_features"] = torch.randn(BATCH, getattr(configuration, "num_mel_bins", 16), 128)
    if main == "pixel_values" or ("pixel_values" in named and "CLIP" in type(model).__name__):
        part = configuration if hasattr(configuration, "image_size") else getattr(configuration, "vision_config", None)
        size = getattr(part, "image_size", 32)
        size = size[0] if isinstance(size, (list, tuple)) else size
        batch["pixel_values"] = torch.randn(BATCH, getattr(configuration, "num_channels", 3) or 3, size, size)
    return batch


def _with_gradient(outputs: Any) -> Iterator[Tensor]:
    """Every floating tensor among the outputs that has a gradient, but for what is cached for later words."""
    if isinstance(outputs, Tensor):
        if outputs.is_floating_point() and outputs.requires_grad:
            yield outputs
    elif isinstance(outputs, Mapping):
        for key, part in outputs.items():
            if key != "past_key_values":
                yield from _with_gradient(part)
    elif isinstance(outputs, (list, tuple)):
        for part in outputs:
            yield from _with_gradient(part)
