"""Tiny configs of transformers' causal language models."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

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
    "glm_moe_dsa",
    "minicpm3",
    "youtu",
)

EXTRA: dict[str, dict[str, Any]] = {
    **dict.fromkeys(MLA, {"num_key_value_heads": 4}),
    "mamba2": {"num_heads": 8, "head_dim": 8},
    "qwen3_5": {"tie_word_embeddings": False},
}


def config(kind: str) -> PreTrainedConfig:
    """Returns a tiny config of a model type."""
    return AutoConfig.for_model(kind, **_keys(CONFIG_MAPPING[kind], kind))


def _keys(of: type[PreTrainedConfig], kind: str) -> dict[str, Any]:
    """Returns the sizes that a config has, and those of the configs in it."""
    known = {*of.__dataclass_fields__, *of.attribute_map}
    found = {key: value for key, value in SIZES.items() if key in known}
    for key, each in of.sub_configs.items():
        if issubclass(each, PreTrainedConfig) and "model_type" in vars(each):
            found[key] = _keys(each, each.model_type)
    return {**found, **EXTRA.get(kind, {})}
