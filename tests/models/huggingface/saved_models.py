"""Folders of small transformers models, as `save_pretrained` writes them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

_SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
_EXTRA: dict[str, dict[str, Any]] = {
    "gemma": {"head_dim": 8},
    "mixtral": {"num_local_experts": 4},
    "deepseek_v3": {
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "num_key_value_heads": 4,
        "moe_intermediate_size": 24,
        "kv_lora_rank": 16,
        "q_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
    },
}


def config_of(kind: str, **changes: Any) -> PreTrainedConfig:
    return AutoConfig.for_model(kind, **{**_SIZES, **_EXTRA.get(kind, {}), **changes})


def save(
    kind: str, folder: Path, dtype: torch.dtype = torch.bfloat16, shard: str = "8KB", **changes: Any
) -> PreTrainedModel:
    """Saves a model of random values in small shards. Returns it."""
    model = AutoModelForCausalLM.from_config(config_of(kind, **changes), dtype=dtype)
    torch.manual_seed(1)
    for value in model.state_dict().values():
        value.normal_()
    model.save_pretrained(folder, max_shard_size=shard)
    return model


def change(folder: Path, edit: Callable[[dict[str, Tensor]], Any]) -> None:
    """Edits the tensors of a folder whose weights are in one file."""
    file = folder / "model.safetensors"
    tensors = {key: tensor.clone() for key, tensor in load_file(file).items()}
    edit(tensors)
    save_file(tensors, file, metadata={"format": "pt"})
