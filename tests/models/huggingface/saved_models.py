"""Folders of small transformers models, as `save_pretrained` writes them."""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from dynmo.errors import ConfigError
from dynmo.models.huggingface.model import from_pretrained
from tests.models.huggingface.tiny import sizes


def config_of(kind: str, **changes: Any) -> PreTrainedConfig:
    wanted = {**sizes(kind), "vocab_size": 64, "num_hidden_layers": 2, **changes}
    wanted.pop("sliding_window", None)
    if "head_dim" in wanted:
        wanted["head_dim"] = wanted["hidden_size"] // wanted["num_attention_heads"]
    return AutoConfig.for_model(kind, **wanted)


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


@functools.cache
def folder_of(kind: str, shard: str = "1GB", **changes: Any) -> Path:
    """Returns a folder that `save` has written. It serves the test run: nobody writes to it."""
    folder = Path(tempfile.mkdtemp(prefix="dynmo-test-model-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    save(kind, folder, shard=shard, **changes)
    return folder


def copy_of(kind: str, folder: Path, **options: Any) -> Path:
    """Writes files that a test may change."""
    return shutil.copytree(folder_of(kind, **options), folder, dirs_exist_ok=True)


def refusal(folder: Path) -> str:
    """Returns the one line that says what is wrong with a folder."""
    with pytest.raises(ConfigError) as caught:
        from_pretrained(folder)
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


def change(folder: Path, edit: Callable[[dict[str, Tensor]], Any]) -> None:
    file = folder / "model.safetensors"
    tensors = {key: tensor.clone() for key, tensor in load_file(file).items()}
    edit(tensors)
    save_file(tensors, file, metadata={"format": "pt"})
