"""`dynmo checkpoint`: the files of `save_pretrained` of a checkpoint, and its hashes."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import dynmo
from dynmo.cases.pruning.sparse_linear import linears, prune
from dynmo.huggingface import checkpoint, from_pretrained, save_pretrained
from dynmo.kernels import packed_weight
from dynmo.kernels.packed_weight import PackedWeight
from dynmo.models.huggingface.model import BlockCut
from dynmo.pipeline.actions import Actions
from dynmo.pipeline.cases import CaseContext
from dynmo.pipeline.options import grouped
from dynmo.runtime.comm.meeting import Meeting
from tests.cli.runs import Run, assert_refused
from tests.full_disk import full_at
from tests.huggingface.jobs import plain_of
from tests.huggingface.saved import save_model
from tests.models.huggingface.small import make_batch


@pytest.fixture
def export(dynmo: Run) -> Run:
    return partial(dynmo, "checkpoint", "export")


@pytest.fixture
def world() -> Iterator[Meeting]:
    with dynmo.init(device="cpu") as world:
        assert isinstance(world, Meeting)
        yield world


def trained(world: Meeting, source: Path, cut: BlockCut = "auto", **options: Any) -> dynmo.Pipeline:
    """A pipeline of the model of a folder, after a step."""
    pipeline = dynmo.Pipeline(
        from_pretrained(source, cut=cut), world, microbatches=4, schedule="1f1b", **grouped(options)
    )
    pipeline.step(make_batch(0, padded=False))
    return pipeline


def in_run(pipeline: dynmo.Pipeline, run: Path, source: Path, kind: str = "hf") -> Path:
    """Saves a checkpoint as `dynmo train` does. Returns its folder."""
    path = pipeline.save(run / "checkpoints")
    model = {"hf": f'kind = "hf"\npath = "{source}"', "gpt": 'kind = "gpt"'}[kind]
    (run / "config.toml").write_text(f'name = "{run.name}"\n[model]\n{model}\n')
    return path


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize(
    ("kind", "cut", "precision"),
    [
        ("llama", "auto", "float32"),
        ("mixtral", "blocks", "bfloat16"),
        pytest.param("gemma", "auto", "bfloat16", marks=pytest.mark.matrix),
        pytest.param("llama", "auto", "bfloat16", marks=pytest.mark.matrix),
        pytest.param("gemma", "blocks", "float32", marks=pytest.mark.matrix),
        pytest.param("gpt2", "auto", "bfloat16", marks=pytest.mark.matrix),
    ],
)
def test_files_are_those_of_save_pretrained(
    world: Meeting, tmp_path: Path, export: Run, kind: str, cut: BlockCut, precision: str
) -> None:
    source, run = tmp_path / "source", tmp_path / "runs" / "tuned"
    save_model(source, kind)
    pipeline = trained(world, source, cut, precision=precision)
    step = in_run(pipeline, run, source)
    save_pretrained(pipeline, tmp_path / "wanted")
    wanted = files(tmp_path / "wanted")
    for at, given in enumerate((run, run / "checkpoints", step)):
        folder = tmp_path / f"made-{at}"
        done = export(given, folder)
        assert (done.status, done.err) == (0, ""), done
        assert done.out.startswith(f"{folder}: the weights after 1 steps, ")
        assert done.out.endswith(" KiB\n")
        assert files(folder) == wanted


def test_a_checkpoint_of_a_loop_needs_the_folder_of_the_model(
    world: Meeting, tmp_path: Path, export: Run
) -> None:
    source, other, out = tmp_path / "source", tmp_path / "other", tmp_path / "out"
    save_model(source)
    save_model(other, num_hidden_layers=2)
    step = trained(world, source).save(tmp_path / "saved")
    assert_refused(export(step, out), "--model FOLDER", "config.toml is missing")
    assert_refused(export(step, out, "--model", other), "of another model than", "--model")
    assert not out.exists()
    done = export(step, out, "--model", source, "--dtype", "float16", "--json")
    answer = json.loads(done.out)
    weights = load_file(out / "model.safetensors")
    assert {each.dtype for each in weights.values()} == {torch.float16}
    assert answer == {
        "checkpoint": str(step),
        "step": 1,
        "folder": str(out),
        "files": ["model.safetensors"],
        "bytes": sum(each.nbytes for each in weights.values()),
    }


def test_large_models_have_several_files(
    world: Meeting, tmp_path: Path, export: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    save_model(source, "mixtral")
    pipeline = trained(world, source)
    step = pipeline.save(tmp_path / "saved")
    monkeypatch.setattr(checkpoint, "_MOST", 50_000)
    answer = json.loads(export(step, out, "--model", source, "--json").out)
    assert answer["files"] == [f"model-{at:05}-of-00007.safetensors" for at in range(1, 8)]
    beside = {"config.json", "generation_config.json", "model.safetensors.index.json"}
    assert {*files(out)} == {*answer["files"], *beside}
    plain, state = plain_of(str(out)).state_dict(), pipeline.state_dict()
    assert plain.keys() == state.keys()
    assert all(torch.equal(plain[key], state[key]) for key in state)


@pytest.mark.parametrize("sparse", [True, False])
def test_pruned_weights_are_dense(
    world: Meeting, tmp_path: Path, export: Run, sparse: bool
) -> None:
    source = tmp_path / "source"
    save_model(source)
    pipeline = trained(world, source)
    engine = pipeline._engine
    name, linear = next(linears(engine.store.modules[1]))
    assert isinstance(linear, nn.Linear)
    moments = CaseContext(engine).moments(1)
    own = {key.rpartition("/")[2]: t for key, t in moments.items() if key.startswith(name)}
    rest = {key: t for key, t in moments.items() if not key.startswith(name)}
    left = prune(linear, linear.weight.detach().flatten() > 0, sparse, own)
    Actions(engine).rebuild(1, rest | {f"{name}.weight/{key}": t for key, t in left.items()})
    step = pipeline.save(tmp_path / "saved")
    assert export(step, tmp_path / "made", "--model", source).status == 0
    save_pretrained(pipeline, tmp_path / "wanted")
    assert files(tmp_path / "made") == files(tmp_path / "wanted")
    assert (load_file(tmp_path / "made" / "model.safetensors")[f"{name}.weight"] == 0).any()


OWN = """
import dynmo
from tests.kernels.test_packed_weight import Halved
from dynmo.pipeline.options import grouped

class Rows(Halved):
    form = ("rows",)

class Packs(dynmo.Dynamism):
    name = "packs"

    def act(self, step, layers):
        pass
"""


def test_forms_of_the_run_s_own_cases_are_imported(
    world: Meeting, tmp_path: Path, export: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, run = tmp_path / "source", tmp_path / "runs" / "tuned"
    save_model(source)
    (tmp_path / "own_rows.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    known = [*packed_weight._FORMS]
    monkeypatch.setattr(packed_weight, "_FORMS", [*known])
    rows: type[PackedWeight] = importlib.import_module("own_rows").Rows
    pipeline = trained(world, source)
    _, linear = next(linears(pipeline._engine.store.modules[1]))
    packed = rows.take_form(linear, {"rows": torch.arange(0, linear.out_features, 2)})
    linear.weight = nn.Parameter(torch.ones(packed.packed_shape("weight")))
    Actions(pipeline._engine).rebuild(1, {})
    in_run(pipeline, run, source)
    save_pretrained(pipeline, tmp_path / "wanted")
    del sys.modules["own_rows"]
    packed_weight._FORMS[:] = known
    assert_refused(export(run, tmp_path / "made"), "as own_rows:Rows, which is not imported here")
    with (run / "config.toml").open("a") as file:
        file.write('[dynamism]\ncases = ["python:own_rows:Packs"]\n')
    assert export(run, tmp_path / "made").status == 0
    assert files(tmp_path / "made") == files(tmp_path / "wanted")


def test_what_is_no_checkpoint_is_refused(world: Meeting, tmp_path: Path, export: Run) -> None:
    source, run, out = tmp_path / "source", tmp_path / "runs" / "tuned", tmp_path / "out"
    save_model(source)
    assert_refused(export(tmp_path / "none", out), "none is no folder; give a run")
    assert_refused(export(source, out), "has no checkpoint; give a run")
    step = in_run(trained(world, source), run, source)
    (tmp_path / "file").write_text("mine")
    assert_refused(export(run, tmp_path / "file"), "file is a file; give a folder")
    assert_refused(export(run, out, "--dtype", "int3"), "dtype = 'int3'; known are")
    tensors = step / "layer-0001" / "tensors.safetensors"
    whole = tensors.read_bytes()
    tensors.write_bytes(whole[:-1] + b"?")
    assert_refused(export(run, out), "tensors.safetensors is damaged", "SHA-256")
    assert_refused(export(step, out), "tensors.safetensors is damaged", "SHA-256")
    tensors.write_bytes(whole)
    with full_at(0):
        assert_refused(export(run, out), "out could not be written (No space left", status=1)
    assert not out.exists()
    config = run / "config.toml"
    config.write_text('name = "tuned"\n[model]\nkind = "gpt"\n')
    assert_refused(export(run, out), 'model.kind = "gpt"', "can be exported")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "runs", "source"]


def test_the_best_checkpoint_is_exported(world: Meeting, tmp_path: Path, export: Run) -> None:
    source, run = tmp_path / "source", tmp_path / "runs" / "tuned"
    save_model(source)
    pipeline = trained(world, source)
    in_run(pipeline, run, source)
    assert_refused(export(run, tmp_path / "made", "--best"), "no best checkpoint; a run has one")
    pipeline.save(run / "checkpoints", best=1)
    save_pretrained(pipeline, tmp_path / "wanted")
    pipeline.step(make_batch(1, padded=False))
    pipeline.save(run / "checkpoints")
    assert export(run, tmp_path / "made", "--best").status == 0
    assert files(tmp_path / "made") == files(tmp_path / "wanted")


def test_every_checkpoint_is_verified(world: Meeting, tmp_path: Path, dynmo: Run) -> None:
    source, run = tmp_path / "source", tmp_path / "runs" / "tuned"
    save_model(source)
    pipeline = trained(world, source)
    run.mkdir(parents=True)
    assert_refused(dynmo("checkpoint", "verify", run), "has no checkpoint")
    first = in_run(pipeline, run, source)
    pipeline.step(make_batch(1, padded=False))
    newest = in_run(pipeline, run, source)
    done = dynmo("checkpoint", "verify", run)
    assert (done.status, done.err) == (0, "")
    assert [line.partition(": whole, ")[0] for line in done.out.splitlines()] == [
        str(newest),
        str(first),
    ]
    (first / "layer-0001" / "layer.json").write_text("{}")
    done = dynmo("checkpoint", "verify", run, "--json")
    rows = json.loads(done.out)["checkpoints"]
    assert done.status == 2
    assert [row["checkpoint"] for row in rows] == [str(newest), str(first)]
    assert rows[0]["problem"] is None
    assert "layer-0001/layer.json is damaged" in rows[1]["problem"]
    assert dynmo("checkpoint", "verify", newest).status == 0
