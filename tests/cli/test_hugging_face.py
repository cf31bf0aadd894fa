"""`dynmo train` with a folder of transformers: the plan, and folders that are refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.runs import Run, assert_refused

CONFIG = """
[model]
kind = "hf"
path = "model"
sequence = 16
[data]
source = "file:text"
[train]
global_batch = 4
micro_batch = 2
[parallel]
pipeline = 2
"""


@pytest.fixture
def folder(small_llama: Path, tmp_path: Path) -> Path:
    """A working folder with a model, a text and a configuration."""
    shutil.copytree(small_llama, tmp_path / "model")
    (tmp_path / "text").write_text("some text\n" * 100)
    (tmp_path / "run.toml").write_text(CONFIG)
    return tmp_path


def edit(file: Path, **keys: object) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **keys}))


def test_dry_run_shows_bytes_on_disk_and_cut_blocks(folder: Path, run: Run) -> None:
    out = run(folder, "run.toml", "--dry-run").good
    assert "read from disk" in out
    assert "blocks 0-3 cut into an attention and a feed-forward half" in out
    done = run(folder, "run.toml", "--dry-run", "--json", sets=["model.cut=blocks"])
    plan = json.loads(done.out)
    assert plan["halves"] == []
    assert plan["whole"] == {str(block): "cut is 'blocks'" for block in range(4)}
    assert sum(plan["disk"]) == 4 * sum(plan["parameters"])


def test_dry_run_needs_no_weights(folder: Path, run: Run) -> None:
    with_weights = json.loads(run(folder, "run.toml", "--dry-run", "--json").out)
    (folder / "model" / "model.safetensors").unlink()
    done = run(folder, "run.toml", "--dry-run", "--json")
    assert json.loads(done.out) == with_weights | {"disk": [0, 0]}
    assert "model has no weights, and a plan needs none" in done.err


def test_a_plan_of_another_model_says_nothing_of_files(folder: Path, run: Run) -> None:
    sets = ["model.kind=gpt", "model.hidden=16", "model.heads=2", "model.blocks=1"]
    done = run(folder, "run.toml", "--dry-run", "--json", sets=sets)
    assert json.loads(done.out).keys().isdisjoint({"disk", "halves", "whole"})


GPTQ = {"quant_method": "gptq", "bits": 4}
OWN_CODE = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
REFUSALS: dict[str, tuple[Callable[[Path], object], tuple[str, ...]]] = {
    "no folder": (
        lambda model: model.rename(model.with_name("away")),
        ("model is no folder in ", "download the model, and give its folder"),
    ),
    "no config": (
        lambda model: (model / "config.json").unlink(),
        ("model has no config.json", "give the folder of a transformers model"),
    ),
    "other weights": (
        lambda model: edit(model / "config.json", vocab_size=280),
        ("model.safetensors", "[300, 64]", "[280, 64]"),
    ),
    "quantized": (
        lambda model: edit(model / "config.json", quantization_config=GPTQ),
        ("quantized weights",),
    ),
    "remote code": (
        lambda model: edit(model / "config.json", model_type="own", auto_map=OWN_CODE),
        ("model.trust_remote_code = true",),
    ),
    "text": (lambda model: model.with_name("text").unlink(), ('data.source = "file:text"',)),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_folders_that_cannot_be_trained_are_refused(folder: Path, run: Run, name: str) -> None:
    change, mentions = REFUSALS[name]
    change(folder / "model")
    assert_refused(run(folder, "run.toml", "--dry-run"), *mentions)
    assert not (folder / "runs").exists()


@pytest.mark.parametrize(
    ("change", "mentions"),
    [
        ("model.path=", ['model.kind = "hf" needs model.path']),
        ("model.sequence=200", ["model.sequence = 200", "128 positions"]),
        ("model.vocab=300", ["model.vocab", "leave it out"]),
    ],
)
def test_values_that_do_not_fit_the_folder_are_refused(
    folder: Path, run: Run, change: str, mentions: list[str]
) -> None:
    assert_refused(run(folder, "run.toml", "--dry-run", sets=[change]), *mentions)
    assert not (folder / "runs").exists()


def test_a_tokenizer_of_another_model_is_refused(folder: Path, run: Run) -> None:
    known = json.loads((folder / "model" / "tokenizer.json").read_text())
    known["added_tokens"].append({**known["added_tokens"][0], "id": 300, "content": "<more>"})
    (folder / "model" / "tokenizer.json").write_text(json.dumps(known))
    assert_refused(run(folder, "run.toml", "--dry-run"), "a tokenizer that does not match")
