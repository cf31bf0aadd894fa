"""Tiny causal language models of transformers."""

from __future__ import annotations

import functools
import re
from typing import Any

from transformers import AutoConfig, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from dynmo.models.huggingface.model import HuggingFaceModel, from_pretrained

VOCABULARY = 96

# Widths, depths, heads and experts by their size.
_NAMES: dict[int, str] = {
    VOCABULARY: "vocab_size vocab_size_per_layer_input",
    0: "pad_token_id",
    1: (
        "bos_token_id encoder_layers num_encoder_layers n_group topk_group num_expert_group "
        "n_shared_experts mamba_n_groups n_groups num_kv_shared_layers"
    ),
    64: "max_position_embeddings max_seq_len mamba_d_ssm",
    32: "hidden_size n_embd d_model",
    48: "intermediate_size encoder_ffn_dim decoder_ffn_dim ffn_hidden_size intermediate_size_mlp",
    16: (
        "shared_intermediate_size q_lora_rank kv_lora_rank moe_intermediate_size "
        "expert_ffn_hidden_size shared_expert_intermediate_size "
        "moe_shared_expert_intermediate_size router_hidden_size mamba_d_head mamba_head_dim"
    ),
    3: "num_hidden_layers n_layers decoder_layers num_decoder_layers num_layers_per_stack",
    4: (
        "num_attention_heads encoder_attention_heads decoder_attention_heads "
        "num_encoder_attention_heads num_decoder_attention_heads rotary_dim index_topk "
        "swa_num_attention_heads num_experts num_local_experts n_routed_experts moe_num_experts "
        "linear_num_value_heads linear_num_heads mamba_n_heads mamba_num_heads sliding_window"
    ),
    2: (
        "eos_token_id num_key_value_heads index_n_heads swa_num_key_value_heads "
        "num_experts_per_tok num_experts_per_token moe_topk moe_k linear_num_key_heads"
    ),
    8: (
        "head_dim v_head_dim qk_nope_head_dim qk_rope_head_dim index_head_dim swa_head_dim "
        "swa_v_head_dim linear_key_head_dim linear_value_head_dim linear_head_dim mamba_d_state "
        "mamba_chunk_size ssm_state_size state_size chunk_size hidden_size_per_layer_input "
        "laurel_rank global_head_dim"
    ),
}
SIZES: dict[str, Any] = {name: size for size, names in _NAMES.items() for name in names.split()}
SIZES["is_decoder"] = True

MLA = (
    "axk1 axk2 deepseek_v2 deepseek_v3 deepseek_v32 dots3_note dots3_note_text glm4_moe_lite "
    "glm_moe_dsa minicpm3 youtu"
)

_VISION: dict[str, Any] = {
    **{"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1},
    **{"num_attention_heads": 2, "image_size": 28, "patch_size": 14},
}
_THREE = ["full_attention"] * 3
_DOTS = {
    "layer_types": ["indexed_attention", "sliding_attention", "indexed_attention"],
    "num_key_value_heads": 4,
    **{"swa_num_attention_heads": 4, "swa_num_key_value_heads": 4},
    **{"swa_head_dim": 16, "swa_qk_nope_head_dim": 8, "swa_v_head_dim": 8},
}

# What a model type needs beside the sizes.
EXTRA: dict[str, dict[str, Any]] = {
    **{kind: {"num_key_value_heads": 4} for kind in MLA.split()},
    "blt": {"encoder_hash_byte_group_vocab": 50},
    "cohere_compass_text": {
        "layer_types": _THREE,
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}},
    },
    "dots3_note": {
        **_DOTS,
        "vision_config": {
            "mlp_layer_types": ["dense"] * 3,
            "adapter_in_dim": 32,
            "adapter_out_dim": 32,
        },
        "audio_config": {
            "num_hidden_layers": 1,
            "downsample_hidden_size": 16,
            "adapter_input_size": 32,
            "adapter_out_dim": 32,
        },
    },
    "dots3_note_text": _DOTS,
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8},
        "ffn_config": {"ffn_hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "emu3": {
        "vocabulary_map": {"<image>": 60, "<|extra_200|>": 61},
        "vq_config": {
            "base_channels": 32,
            "channel_multiplier": [1],
            "num_res_blocks": 1,
            "codebook_size": 16,
        },
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
    known = {*of.__dataclass_fields__, *of.attribute_map}
    found = {key: value for key, value in SIZES.items() if key in known}
    extra = EXTRA.get(kind, {})
    for key, each in of.sub_configs.items():
        if issubclass(each, PreTrainedConfig) and "model_type" in vars(each):
            found[key] = {**_keys(each, each.model_type), **extra.get(key, {})}
    return {**extra, **found, **{key: extra[key] for key in extra if key not in of.sub_configs}}
