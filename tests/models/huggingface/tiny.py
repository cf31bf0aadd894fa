"""Tiny causal language models of transformers."""

from __future__ import annotations

import functools
import re
from typing import Any

from transformers import AutoConfig, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from dynmo.models.huggingface.model import HuggingFaceModel, from_pretrained

VOCABULARY = 96

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "is_decoder": True,
    "max_position_embeddings": 64,
    "max_seq_len": 64,
    # Width.
    "hidden_size": 32,
    "n_embd": 32,
    "d_model": 32,
    "intermediate_size": 48,
    "shared_intermediate_size": 16,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "ffn_hidden_size": 48,
    "intermediate_size_mlp": 48,
    # Depth.
    "num_hidden_layers": 3,
    "n_layers": 3,
    "encoder_layers": 1,
    "decoder_layers": 3,
    "num_encoder_layers": 1,
    "num_decoder_layers": 3,
    "num_layers_per_stack": 3,
    # Heads.
    "num_attention_heads": 4,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "num_encoder_attention_heads": 4,
    "num_decoder_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rotary_dim": 4,
    "v_head_dim": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "index_n_heads": 2,
    "index_head_dim": 8,
    "index_topk": 4,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 8,
    "swa_v_head_dim": 8,
    # Experts.
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "n_group": 1,
    "topk_group": 1,
    "num_expert_group": 1,
    "n_shared_experts": 1,
    "moe_intermediate_size": 16,
    "expert_ffn_hidden_size": 16,
    "shared_expert_intermediate_size": 16,
    "moe_shared_expert_intermediate_size": 16,
    "router_hidden_size": 16,
    # Recurrent layers.
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_head_dim": 8,
    "linear_num_heads": 4,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 8,
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "mamba_d_ssm": 64,
    "ssm_state_size": 8,
    "state_size": 8,
    "chunk_size": 8,
    "n_groups": 1,
    # Gemma 3n and 4.
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size_per_layer_input": 8,
    "num_kv_shared_layers": 1,
    "laurel_rank": 8,
    "global_head_dim": 8,
    "sliding_window": 4,
}

MLA = (
    "axk1",
    "axk2",
    "deepseek_v2",
    "deepseek_v3",
    "deepseek_v32",
    "dots3_note",
    "glm4_moe_lite",
    "dots3_note_text",
    "glm_moe_dsa",
    "minicpm3",
    "youtu",
)

_VISION: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
_THREE = ["full_attention"] * 3
_DOTS = {
    "layer_types": ["indexed_attention", "sliding_attention", "indexed_attention"],
    "num_key_value_heads": 4,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 4,
    "swa_head_dim": 16,
    "swa_qk_nope_head_dim": 8,
    "swa_v_head_dim": 8,
}

# What a model type needs beside the sizes.
EXTRA: dict[str, dict[str, Any]] = {
    **{kind: {"num_key_value_heads": 4} for kind in MLA},
    "blt": {"encoder_hash_byte_group_vocab": 50},
    "cohere_compass_text": {
        "layer_types": _THREE,
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}},
    },
    "dots3_note": _DOTS,
    "dots3_note_text": _DOTS,
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8},
        "ffn_config": {"ffn_hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "fuyu": {"text_config": {"model_type": "persimmon", **SIZES}},
    "gemma3": {"vision_config": {"model_type": "siglip_vision_model", **_VISION}},
    "gemma4_text": {"layer_types": _THREE},
    "gemma4_unified_text": {"layer_types": _THREE},
    "git": {"vision_config": _VISION},
    "got_ocr2": {"text_config": {"model_type": "qwen2", **SIZES}},
    "gpt_neo": {"attention_types": [[["global", "local", "global"], 1]]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"]},
    "longcat_flash": {"num_layers": 3, "num_key_value_heads": 4},
    "mamba2": {"num_heads": 8, "head_dim": 8},
    "moshi": {"audio_vocab_size": VOCABULARY},
    "moss_transcribe_diarize": {"text_config": {"model_type": "qwen3", **SIZES}},
    "reformer": {"axial_pos_embds": False},
    "roc_bert": {"shape_vocab_size": 16, "pronunciation_vocab_size": 16},
    "xlnet": {"d_head": 8},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"layers_block_type": ["linear_attention", "hybrid", "hybrid"]},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid", "hybrid"]},
    "zaya": {"num_experts_per_tok": 1},
}


def config(kind: str, **changes: Any) -> PreTrainedConfig:
    """Returns a tiny config of a model type, without dropout."""
    made = AutoConfig.for_model(kind, **{**sizes(kind), **changes})
    for each in (made, *(getattr(made, key) for key in made.sub_configs)):
        for key, value in vars(each).items():
            if isinstance(value, float) and re.search("drop|jitter", key):
                setattr(each, key, 0.0)
    return made


@functools.cache
def model_of(kind: str = "llama", **changes: Any) -> HuggingFaceModel:
    """Returns the model of a tiny config. A process makes it once."""
    return from_pretrained(config(kind, **changes))


def sizes(kind: str) -> dict[str, Any]:
    return _keys(CONFIG_MAPPING[kind], kind)


def _keys(of: Any, kind: str) -> dict[str, Any]:
    """Returns the sizes that a config has, and those of the configs in it."""
    known = {*of.__dataclass_fields__, *of.attribute_map}
    found = {key: value for key, value in SIZES.items() if key in known}
    extra = EXTRA.get(kind, {})
    for key, each in of.sub_configs.items():
        if issubclass(each, PreTrainedConfig) and "model_type" in vars(each):
            found[key] = {**_keys(each, each.model_type), **extra.get(key, {})}
    return {**extra, **found, **{key: extra[key] for key in extra if key not in of.sub_configs}}
