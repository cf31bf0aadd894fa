"""Missing and damaged files are named before anything is read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from dynmo.errors import ConfigError
from dynmo.models.huggingface.model import from_pretrained
from tests.models.huggingface.saved_models import change, copy_of, refusal

INDEX = "model.safetensors.index.json"


@pytest.fixture
def shards(tmp_path: Path) -> list[Path]:
    copy_of("llama", tmp_path, shard="8KB")
    return sorted(tmp_path.glob("*.safetensors"))


def test_a_missing_shard_is_named(shards: list[Path]) -> None:
    shards[1].unlink()
    wanted = f"{shards[1]} is missing, but {INDEX} lists it; download it again"
    assert refusal(shards[1].parent) == wanted


@pytest.mark.parametrize("length", [0, 4, 40, -1, None])
def test_a_truncated_or_damaged_shard_is_named(shards: list[Path], length: int | None) -> None:
    content = bytearray(shards[1].read_bytes())
    if length is None:
        content[8:24] = b"\xff" * 16
    shards[1].write_bytes(content[:length])
    assert refusal(shards[1].parent).startswith(f"{shards[1]} cannot be read (")


def test_a_shard_that_is_lost_after_the_start_is_named(shards: list[Path]) -> None:
    model = from_pretrained(shards[0].parent)
    for shard in shards:
        shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(ConfigError, match=r"\.safetensors cannot be read \("):
        model.build({1})


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"weight_map": 3}'])
def test_a_damaged_index_is_named(shards: list[Path], content: str) -> None:
    index = shards[0].parent / INDEX
    index.write_text(content)
    assert refusal(index.parent) == f"{index} is no index of weights; download it again"


@pytest.mark.parametrize("name", ["../a.safetensors", "/a", "..", "", "a" * 256, 5])
def test_index_names_files_of_its_folder_only(shards: list[Path], name: object) -> None:
    index = shards[0].parent / INDEX
    index.write_text(json.dumps({"weight_map": {"a": name}}))
    assert "which is no name of a file in that folder" in refusal(index.parent)


def test_pickled_weights_are_refused(tmp_path: Path) -> None:
    copy_of("llama", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    assert "has no model.safetensors and no" in refusal(tmp_path)
    torch.save({}, tmp_path / "pytorch_model.bin")
    assert "has its weights in pytorch_model.bin" in refusal(tmp_path)


def test_the_config_may_name_the_file(tmp_path: Path) -> None:
    copy_of("llama", tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "other.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    named = json.dumps({**config, "transformers_weights": "other.safetensors"})
    (tmp_path / "config.json").write_text(named)
    assert from_pretrained(tmp_path).weights is not None


def test_an_empty_file_lacks_all_weights(tmp_path: Path) -> None:
    copy_of("llama", tmp_path)
    change(tmp_path, lambda tensors: tensors.clear())
    assert " lacks lm_head.weight and 20 more; its config.json is of " in refusal(tmp_path)
