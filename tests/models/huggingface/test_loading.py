"""Every rank reads the values of its own layers from a folder, and no others."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM

from dynmo.errors import ConfigError
from dynmo.models.huggingface.building import give_memory
from dynmo.models.huggingface.model import HuggingFaceModel, disk_bytes, from_pretrained
from dynmo.models.huggingface.shells import Shell
from dynmo.models.huggingface.weight_files import Reader
from dynmo.models.model import named_tensors
from tests.models.huggingface.saved_models import change, config_of, save
from tests.pool import Pool


def values_of(model: HuggingFaceModel) -> dict[str, Tensor]:
    """Returns the parameters and buffers of all layers, and of the modules that they share."""
    layers = model.build(range(model.layers))
    made = {name: tensor for layer in layers for _, name, tensor in named_tensors(layer)}
    assert isinstance(layers[0], Shell)
    for path, module in layers[0].frame.shared.items():
        made |= {f"{path}.{name}": tensor for _, name, tensor in named_tensors(module)}
    return made


def of_transformers(folder: Path) -> dict[str, Tensor]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }


def check_same(folder: Path) -> None:
    made, wanted = values_of(from_pretrained(folder)), of_transformers(folder)
    assert made.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert made[name].dtype == tensor.dtype, name
        assert torch.equal(made[name], tensor), name


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The keys that are read from files."""
    keys = list[str]()
    original = Reader.tensor

    def noted(self: Reader, file: Path, key: str) -> Tensor:
        keys.append(key)
        return original(self, file, key)

    monkeypatch.setattr(Reader, "tensor", noted)
    return keys


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """A Llama in one file."""
    save("llama", tmp_path, shard="1GB")
    return tmp_path


@pytest.mark.parametrize("kind", ["llama", "mixtral", "deepseek_v3", "gemma", "gpt2"])
def test_every_tensor_is_the_one_that_transformers_loads(kind: str, tmp_path: Path) -> None:
    save(kind, tmp_path)
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    check_same(tmp_path)


def test_a_file_of_the_base_model_gets_its_prefix(tmp_path: Path) -> None:
    model: Any = save("gpt2", tmp_path)
    model.base_model.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        assert "wte.weight" in file.keys()  # noqa: SIM118
    check_same(tmp_path)


def test_only_own_layers_are_read(tmp_path: Path, read: list[str]) -> None:
    save("mixtral", tmp_path)
    model = from_pretrained(tmp_path)
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


def test_fake_tensors_read_nothing(llama: Path, read: list[str]) -> None:
    model = from_pretrained(llama)
    (first, *_), weights = model.build(()), model.weights
    assert weights is not None
    read.clear()
    with FakeTensorMode():
        give_memory(first)
        weights.fill(0, first)
    assert not read


def test_bytes_in_files_add_up(tmp_path: Path) -> None:
    save("mixtral", tmp_path)
    model = from_pretrained(tmp_path)
    by_layer = [
        sum(x.numel() * 2 for x in layer.parameters()) for layer in model.build(range(model.layers))
    ]
    assert list(disk_bytes(model)) == by_layer
    assert disk_bytes(from_pretrained(config_of("mixtral"))) == (0,) * model.layers


def test_both_uses_of_a_tied_weight_read_the_key_that_is_there(tmp_path: Path) -> None:
    save("gemma", tmp_path, shard="1GB")

    def rename(tensors: dict[str, Tensor]) -> None:
        tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")

    check_same(tmp_path)
    before = values_of(from_pretrained(tmp_path))
    change(tmp_path, rename)
    check_same(tmp_path)
    after = values_of(from_pretrained(tmp_path))
    assert torch.equal(before["lm_head.weight"], after["model.embed_tokens.weight"])


@pytest.mark.parametrize("differ", [False, True])
def test_a_tied_weight_with_two_values_is_not_tied(tmp_path: Path, differ: bool) -> None:
    save("gemma", tmp_path, shard="1GB")

    def add(tensors: dict[str, Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + differ

    change(tmp_path, add)
    check_same(tmp_path)
    assert bool(from_pretrained(tmp_path).tied) is not differ


def test_a_buffer_that_the_files_lack_is_the_models_own(tmp_path: Path) -> None:
    save("deepseek_v3", tmp_path, shard="1GB")
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


def test_the_first_rank_names_weights_that_are_left_out(
    llama: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    change(llama, lambda tensors: tensors.update({"value_head.weight": torch.ones(4)}))
    monkeypatch.setenv("RANK", "1")
    from_pretrained(llama)
    assert not caplog.records
    monkeypatch.setenv("RANK", "0")
    from_pretrained(llama)
    ((_, level, message),) = caplog.record_tuples
    assert level == logging.WARNING
    assert message.endswith("they are left out: value_head.weight")


def test_a_weight_of_another_shape_names_its_file(llama: Path) -> None:
    config_of("llama", intermediate_size=40).save_pretrained(llama)
    with pytest.raises(ConfigError) as caught:
        from_pretrained(llama)
    assert str(caught.value) == (
        f"{llama}/model.safetensors: model.layers.0.mlp.down_proj.weight has shape [32, 48], and "
        "by config.json it has [32, 40]; the config does not fit these weights"
    )


def test_missing_experts_are_refused(tmp_path: Path) -> None:
    save("mixtral", tmp_path, shard="1GB")
    expert = "model.layers.1.block_sparse_moe.experts.3.w3.weight"
    change(tmp_path, lambda tensors: tensors.pop(expert))
    with pytest.raises(ConfigError, match=r"experts\.gate_up_proj cannot be made of .*and 6 more"):
        from_pretrained(tmp_path)


def test_random_generators_are_left_alone(llama: Path) -> None:
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    from_pretrained(llama).build(range(3))
    assert torch.equal(before, torch.random.get_rng_state())


@pytest.mark.matrix
@pytest.mark.timeout(600)
def test_private_memory_is_the_own_part_and_less_than_one_shard(tmp_path: Path, pool: Pool) -> None:
    big: dict[str, Any] = {
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 9,
        "vocab_size": 16000,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
    }
    save("llama", tmp_path, shard="300MB", **big)
    shards = [file.stat().st_size for file in tmp_path.glob("*.safetensors")]
    assert len(shards) == 4
    job = "tests.models.huggingface.loading_jobs:memory"
    for found in pool.run(job, 2, timeout=500, folder=str(tmp_path)):
        print(found, max(shards))
        assert found["after"] < found["own"] + max(shards)
        assert found["peak"] < found["own"] + max(shards)


def test_parameters_keep_no_mark_of_transformers(llama: Path) -> None:
    (layer,) = [x for x in from_pretrained(llama).build({1}) if not _is_meta(x)]
    assert not any(vars(parameter) for parameter in layer.parameters())


def _is_meta(layer: nn.Module) -> bool:
    return next(layer.parameters()).is_meta
