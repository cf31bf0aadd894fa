"""Every rank reads the values of its own layers from a folder, and no others."""

from __future__ import annotations

import functools
import json
import logging
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM

import dynmo
from dynmo.errors import ConfigError
from dynmo.models.huggingface.layers import HuggingFaceLayer
from dynmo.models.huggingface.load import Reader
from dynmo.models.huggingface.model import HuggingFaceModel, disk_bytes, from_pretrained
from dynmo.models.huggingface.stubs import marked, retensored
from dynmo.models.model import named_tensors
from tests.combinations import mostly_matrix
from tests.models.huggingface.saved_models import (
    change,
    config_of,
    copy_of,
    folder_of,
    refusal,
    save,
)
from tests.models.huggingface.tiny import model_of
from tests.pool import Pool

EVERYDAY = ("llama", "mixtral", "gpt2")
EMBEDDING = "model.embed_tokens.weight"


@functools.cache
def loaded(kind: str) -> HuggingFaceModel:
    return from_pretrained(folder_of(kind))


def values_of(model: HuggingFaceModel) -> dict[str, Tensor]:
    """Returns the parameters and buffers of all layers, and of the modules that they share."""
    layers = model.build(range(model.layers))
    made = {name: tensor for layer in layers for _, name, tensor in named_tensors(layer)}
    assert isinstance(layers[0], HuggingFaceLayer)
    for path, module in layers[0].shared_model.weightless.items():
        made |= {f"{path}.{name}": tensor for _, name, tensor in named_tensors(module)}
    return made


def of_transformers(folder: Path) -> dict[str, Tensor]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    named = (model.named_parameters, model.named_buffers)
    return {name: each for those in named for name, each in those(remove_duplicate=False)}


def check_same(folder: Path) -> HuggingFaceModel:
    model = from_pretrained(folder)
    made, wanted = values_of(model), of_transformers(folder)
    assert made.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert made[name].dtype == tensor.dtype, name
        assert torch.equal(made[name], tensor), name
    return model


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    keys = list[str]()
    original = Reader.tensor

    def noted(self: Reader, file: Path, key: str) -> Tensor:
        keys.append(key)
        return original(self, file, key)

    monkeypatch.setattr(Reader, "tensor", noted)
    return keys


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return copy_of("llama", tmp_path)


@pytest.mark.parametrize("kind", mostly_matrix([*EVERYDAY, "deepseek_v3", "gemma"], EVERYDAY))
def test_every_tensor_is_the_one_that_transformers_loads(kind: str) -> None:
    folder = folder_of(kind, shard="8KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    check_same(folder)


def test_a_file_of_the_base_model_gets_its_prefix(tmp_path: Path) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(folder_of("gpt2"))
    model.base_model.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        assert "wte.weight" in file.keys()  # noqa: SIM118
    check_same(tmp_path)


def test_only_own_layers_are_read(read: list[str]) -> None:
    model = loaded("mixtral")
    for own, pattern in [
        ({0}, r"model\.embed_tokens\."),
        ({1}, r"model\.layers\.0\.(input_layernorm|self_attn)\."),
        ({2, 3}, r"model\.layers\.(0\.(mlp|block_sparse|post)|1\.(input|self_attn))"),
        ({5}, r"(model\.norm|lm_head)\."),
    ]:
        read.clear()
        model.build(own)
        assert read
        assert len(read) == len({*read})
        assert all(re.match(pattern, key) for key in read), read
    read.clear()
    model.build(())
    assert not read


def test_fake_tensors_read_nothing(read: list[str]) -> None:
    model = loaded("llama")
    (first, *_), weights = model.build(()), model.weights
    assert weights is not None
    read.clear()
    with FakeTensorMode():
        retensored(first, marked)
        weights.fill(0, first)
    assert not read


def test_bytes_in_files_add_up() -> None:
    model = loaded("mixtral")
    layers = model.build(range(model.layers))
    by_layer = [sum(x.numel() * 2 for x in layer.parameters()) for layer in layers]
    assert list(disk_bytes(model)) == by_layer
    assert disk_bytes(model_of("mixtral")) == (0,) * 8


@pytest.mark.parametrize(
    ("edit", "tied"),
    [
        (lambda embedding: {"lm_head.weight": embedding}, True),
        (lambda embedding: {EMBEDDING: embedding, "lm_head.weight": embedding.clone()}, True),
        (lambda embedding: {EMBEDDING: embedding, "lm_head.weight": embedding + 1}, False),
    ],
    ids=["under the name of its use", "twice", "with two values"],
)
def test_a_tied_weight_may_be_in_a_file_once_or_twice(
    tmp_path: Path, edit: Callable[[Tensor], dict[str, Tensor]], tied: bool
) -> None:
    copy_of("llama", tmp_path, tie_word_embeddings=True)
    change(tmp_path, lambda tensors: tensors.update(edit(tensors.pop(EMBEDDING))))
    assert bool(check_same(tmp_path).tied) is tied


@pytest.mark.matrix
def test_a_buffer_that_the_files_lack_is_the_models_own(tmp_path: Path) -> None:
    copy_of("deepseek_v3", tmp_path, first_k_dense_replace=1)
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert values_of(from_pretrained(tmp_path))[name].any()
    change(tmp_path, lambda tensors: tensors.pop(name))
    assert not values_of(from_pretrained(tmp_path))[name].any()


def test_weights_that_transformers_ignores_may_be_missing_or_unknown(
    llama: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def edit(tensors: dict[str, Tensor]) -> None:
        del tensors["lm_head.weight"]
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)

    change(llama, edit)
    with pytest.raises(ConfigError, match=r"lacks lm_head\.weight"):
        from_pretrained(llama)
    kind = type(AutoModelForCausalLM.from_config(config_of("llama")))
    monkeypatch.setattr(kind, "_keys_to_ignore_on_load_missing", ["lm_head"])
    model = from_pretrained(llama, seed=3)
    assert not caplog.records
    drawn = [values_of(model)["lm_head.weight"] for _ in range(2)]
    assert torch.equal(*drawn)
    assert 0.01 < drawn[0].std() < 0.03


def test_the_first_rank_names_weights_that_do_not_train(
    llama: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    change(llama, lambda tensors: tensors.update({"value_head.weight": torch.ones(4)}))
    for rank in ("1", "0"):
        assert not caplog.records
        monkeypatch.setenv("RANK", rank)
        from_pretrained(llama)
    ((_, level, message),) = caplog.record_tuples
    assert level == logging.WARNING
    assert message.endswith("an export has them unchanged: value_head.weight")


def test_a_weight_of_another_shape_names_its_file(llama: Path) -> None:
    config_of("llama", intermediate_size=40).save_pretrained(llama)
    with pytest.raises(ConfigError) as caught:
        from_pretrained(llama)
    assert str(caught.value) == (
        f"{llama}/model.safetensors: model.layers.0.mlp.down_proj.weight has shape [32, 48], and "
        "by config.json it has [32, 40]; the config does not fit these weights"
    )


def test_missing_experts_are_refused(tmp_path: Path) -> None:
    copy_of("mixtral", tmp_path)
    expert = "model.layers.1.block_sparse_moe.experts.3.w3.weight"
    change(tmp_path, lambda tensors: tensors.pop(expert))
    with pytest.raises(ConfigError, match=r"experts\.gate_up_proj cannot be made of .*and 6 more"):
        from_pretrained(tmp_path)


def test_random_generators_are_left_alone() -> None:
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    from_pretrained(folder_of("llama")).build(range(3))
    assert torch.equal(before, torch.random.get_rng_state())


@pytest.mark.matrix
@pytest.mark.timeout(600)
def test_private_memory_is_the_own_part_and_less_than_one_shard(tmp_path: Path, pool: Pool) -> None:
    big: dict[str, Any] = {"hidden_size": 2048, "intermediate_size": 6144, "vocab_size": 16000}
    big |= {"num_attention_heads": 16, "num_key_value_heads": 16, "num_hidden_layers": 9}
    save("llama", tmp_path, shard="300MB", **big)
    shards = [file.stat().st_size for file in tmp_path.glob("*.safetensors")]
    assert len(shards) == 4
    job = "tests.models.huggingface.test_load:memory"
    for found in pool.run(job, 2, timeout=500, folder=str(tmp_path)):
        assert max(found["after"], found["peak"]) < found["own"] + max(shards), found


def test_parameters_keep_no_mark_of_transformers() -> None:
    parameters = [*loaded("llama").build({1})[1].parameters()]
    assert parameters
    assert not any(parameter.is_meta or vars(parameter) for parameter in parameters)


def private_bytes() -> int:
    """Returns the resident memory of this process that no file backs."""
    found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def memory(world: dynmo.World, folder: str) -> dict[str, Any]:
    """Returns the private memory that a pipeline took until it was made."""
    model, end, seen = from_pretrained(folder), threading.Event(), [0]

    def sample() -> None:
        while not end.is_set():
            seen[0] = max(seen[0], private_bytes())

    thread, before = threading.Thread(target=sample), private_bytes()
    thread.start()
    try:
        pipeline = dynmo.Pipeline(model, world, microbatches=2)
    finally:
        end.set()
        thread.join()
    after = private_bytes()
    own = sum(x.nbytes for layer in pipeline.mesh.modules.values() for x in layer.parameters())
    return {"after": after - before, "peak": seen[0] - before, "own": own}


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
