"""`save_pretrained`: transformers loads what a pipeline has."""

from __future__ import annotations

import json
import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import dynmo
from dynmo.cases.pruning.sparse_linear import prune
from dynmo.errors import ConfigError, RunError
from dynmo.huggingface import save_pretrained
from dynmo.huggingface.checkpoint import in_shards
from dynmo.huggingface.export import in_files
from dynmo.models.huggingface.model import from_pretrained
from dynmo.runtime.comm.meeting import Meeting
from dynmo.runtime.state.exact_state import exact_state, shapes_of_state
from dynmo.runtime.state.tensor_file import TensorFile
from tests.combinations import mostly_matrix
from tests.full_disk import full_at
from tests.huggingface.jobs import MICROBATCHES, equal, plain_of, trained
from tests.models.huggingface.tiny import model_of
from tests.pool import Pool

JOBS = "tests.huggingface.jobs:"
MESHES: dict[str, Any] = {
    "1 rank": {"ranks": 1, "schedule": "1f1b"},
    "zb-v": {"ranks": 2, "schedule": "zb-v"},
    "zero": {"ranks": 4, "replicas": 2, "zero": 1, "schedule": "zb-h1"},
    "bfloat16": {"ranks": 2, "schedule": "1f1b", "precision": "bfloat16"},
}
MESHES["zero, bfloat16"] = MESHES["zero"] | MESHES["bfloat16"] | {"ranks": 4}
KINDS = ("mixtral", "llama", "gemma", "gpt2", "qwen3_moe", "gpt_oss", "ernie4_5_moe")
EVERYDAY = [("gpt2", "1 rank"), ("mixtral", "zb-v")]


@pytest.fixture(scope="module")
def pipeline(world: Meeting) -> dynmo.Pipeline:
    """A Llama after a step. It stays as it is."""
    return trained(world, "llama", schedule="1f1b")


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {k: t for path in folder.glob("*.safetensors") for k, t in load_file(path).items()}


@pytest.mark.parametrize(("kind", "mesh"), mostly_matrix(product(KINDS, MESHES), EVERYDAY))
def test_transformers_loads_any_mesh(pool: Pool, tmp_path: Path, kind: str, mesh: str) -> None:
    """Names, shapes and values are those of transformers' own `save_pretrained`."""
    options = dict(MESHES[mesh])
    ranks = options.pop("ranks")
    folder, again = tmp_path / "model", tmp_path / "again"
    for seen in pool.run(f"{JOBS}exported", ranks, kind=kind, folder=str(folder), **options):
        assert seen["keys"] == []
        assert all(value for key, value in seen.items() if key != "keys")
    plain_of(str(folder)).save_pretrained(again)
    ours = weights(folder)
    assert equal(ours, weights(again))
    for name in ("config.json", "generation_config.json"):
        assert json.loads((folder / name).read_text()) == json.loads((again / name).read_text())
    shards = sorted(path.name for path in folder.glob("*.safetensors"))
    count = ranks // options.get("replicas", 1)
    if count == 1:
        assert shards == ["model.safetensors"]
        assert not (folder / "model.safetensors.index.json").exists()
        return
    assert shards == [f"model-{at:05}-of-{count:05}.safetensors" for at in range(1, count + 1)]
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == {k: n for n in shards for k in load_file(folder / n)}
    size, count = index["metadata"]["total_size"], plain_of(str(folder)).num_parameters()
    assert index["metadata"] == {"total_size": size, "total_parameters": count}
    assert size == sum(each.nbytes for each in ours.values())


def test_weights_get_the_type_that_is_asked_for(pipeline: dynmo.Pipeline, tmp_path: Path) -> None:
    save_pretrained(pipeline, tmp_path, dtype="bfloat16")
    state = {name: each.to(torch.bfloat16) for name, each in pipeline.state_dict().items()}
    assert equal(weights(tmp_path), state)
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"


def test_files_stay_and_old_weights_go(pipeline: dynmo.Pipeline, tmp_path: Path) -> None:
    stale = ("model.safetensors.index.json", "model-00001-of-00002.safetensors")
    names = (*stale, "README.md", "model.safetensors", "config.json")
    for name in names:
        (tmp_path / name).write_text("before")
    with full_at(0), pytest.raises(RunError, match=r"No space left .* are as before"):
        save_pretrained(pipeline, tmp_path)
    assert files(tmp_path) == dict.fromkeys(names, b"before")
    save_pretrained(pipeline, tmp_path)
    left = {"config.json", "generation_config.json", "model.safetensors", "README.md"}
    assert {*files(tmp_path)} == left
    assert (tmp_path / "README.md").read_text() == "before"
    assert weights(tmp_path).keys() == pipeline.state_dict().keys()


def test_other_files_are_copied(world: Meeting, pipeline: dynmo.Pipeline, tmp_path: Path) -> None:
    source, folder = tmp_path / "source", tmp_path / "tuned"
    save_pretrained(pipeline, source)
    beside = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "chat_template.jinja")
    for name in (*beside, "generation_config.json", "pytorch_model.bin"):
        (source / name).write_text('{"max_length": 7}')
    tuned = dynmo.Pipeline(from_pretrained(source), world, microbatches=MICROBATCHES)
    save_pretrained(tuned, folder)
    written = ("config.json", "generation_config.json", "model.safetensors")
    assert {*files(folder)} == {*beside, *written}
    assert (folder / "generation_config.json").read_text() == '{"max_length": 7}'


@pytest.mark.parametrize("sparse", [True, False])
def test_pruned_weights_are_dense(sparse: bool) -> None:
    model = model_of()
    layer = model.build(range(model.layers))[1]
    name = "model.layers.0.self_attn.q_proj"
    linear = layer.get_submodule(name)
    assert isinstance(linear, nn.Linear)
    wanted = linear.weight.detach() * (linear.weight > 0)
    prune(linear, linear.weight.detach().flatten() > 0, sparse, {})
    state = exact_state(layer, {})
    assert torch.equal(in_files(model, state, None)[f"{name}.weight"], wanted)
    shapes = shapes_of_state(layer)
    assert {k: t.shape for k, t in state.items()} == {k: t.shape for k, t in shapes.items()}


def test_a_rank_that_fails_fails_all(pool: Pool, tmp_path: Path) -> None:
    """Nothing of the folder is left, wherever the disk is full."""
    folder = tmp_path / "model"
    files = ((0, 1), (0, 0), (1, 0))
    one, other = pool.run(f"{JOBS}save_on_a_full_disk", 2, folder=str(folder), files=files)
    assert one == other
    for said, (_, full) in zip(one, files, strict=True):
        reason = rf"\(rank {full}: No space left on device\)"
        wanted = rf"\S+ could not be written {reason}; the files of \S+ are as before"
        assert re.fullmatch(wanted, said)
    assert list(tmp_path.iterdir()) == []


def test_bad_calls_are_refused(world: Meeting, pipeline: dynmo.Pipeline, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    own = dynmo.Sequential([nn.Linear(4, 4)], loss=nn.functional.mse_loss)
    other = dynmo.Pipeline(own, world, microbatches=2)
    calls: list[tuple[dynmo.Pipeline, str, dict[str, Any], str]] = [
        (pipeline, "file", {}, "file is a file; give a folder"),
        (pipeline, "file/model", {}, "Not a directory"),
        (other, "", {}, "not one of transformers; make it with"),
        (pipeline, "", {"dtype": "int8"}, "dtype = 'int8'; known are float32"),
    ]
    for each, name, options, message in calls:
        with pytest.raises((ConfigError, RunError), match=message):
            save_pretrained(each, tmp_path / name, **options)
    assert files(tmp_path) == {"file": b"mine"}


def test_tensors_of_any_type_are_written_in_any_order(tmp_path: Path) -> None:
    tensors = {
        "b": torch.tensor([True, False, True]),
        "c": torch.arange(3, dtype=torch.bfloat16),
        "a": torch.tensor(5),
        "e": torch.empty(0, 3),
        "d": torch.arange(6.0).view(2, 3).t(),
    }
    path = tmp_path / "file.safetensors"
    with TensorFile(path, {name: each.to("meta") for name, each in tensors.items()}) as file:
        for name, each in tensors.items():
            file.write({name: each})
    assert equal(load_file(path), tensors)


def test_a_file_lacks_nothing_of_its_header(tmp_path: Path) -> None:
    shapes = {"a": torch.empty(2, device="meta")}
    missing, unknown = r"a was not written to \S+x.safetensors", "a is not in the header"
    with pytest.raises(RunError, match=missing), TensorFile(tmp_path / "x.safetensors", shapes):
        pass
    with pytest.raises(RunError, match=unknown), TensorFile(tmp_path / "y", shapes) as file:
        file.write({"a": torch.empty(3)})


def test_shards_are_consecutive_layers() -> None:
    assert in_shards([3, 3, 3, 9, 1], 6) == [[0, 1], [2], [3], [4]]
    assert in_shards([1, 1], 6) == [[0, 1]]


def test_names_are_loaded_when_they_are_used() -> None:
    assert dynmo.huggingface.save_pretrained is save_pretrained
    assert dir(dynmo.huggingface) == ["from_pretrained", "generate", "save_pretrained"]
    with pytest.raises(AttributeError, match="'load'; its names are from_pretrained"):
        dynmo.huggingface.load  # noqa: B018  # pyright: ignore[reportAttributeAccessIssue]
