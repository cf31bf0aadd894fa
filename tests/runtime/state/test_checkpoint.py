"""Any placement loads any checkpoint bit for bit. A damaged checkpoint is never loaded."""

from __future__ import annotations

import contextlib
import json
import re
import sys
import zipfile
from pathlib import Path
from random import random
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from dynmo.config import parse
from dynmo.errors import CheckpointError, RankDied, RunError
from dynmo.models.model import Model
from dynmo.pipeline.actions import Actions
from dynmo.pipeline.saving import restore_layer
from dynmo.plan.partition import Partition
from dynmo.runtime.comm.meeting import Meeting
from dynmo.runtime.comm.store import ENDED
from dynmo.runtime.engine.engine import Engine
from dynmo.runtime.options import EngineOptions
from dynmo.runtime.state import checkpoint
from dynmo.runtime.state.exact_state import _sum_of_bits
from dynmo.runtime.state.layer_tensors import fit
from dynmo.runtime.state.save import save as save_checkpoint
from dynmo.train.setup import model_of
from dynmo.train.trainer import Trainer
from tests.equality import BALANCERS
from tests.equality import config as equal_config
from tests.full_disk import full_at
from tests.jobs import parsed
from tests.pool import JobFailed, Pool
from tests.runtime.alone import GPT, around, gpt, pipeline, run_step, tokens
from tests.runtime.jobs import error_of
from tests.runtime.modules import Net
from tests.runtime.optimizers import settings
from tests.runtime.state.test_migration import fingerprint

JOBS = "tests.runtime.state.test_checkpoint:"


def save(
    pipeline: Engine, folder: Path, step: int, keep: int = 9, state: dict[str, Any] | None = None
) -> Any:
    layers = [(i, (m, o.state())) for i, (m, o) in pipeline.store.own.items()]
    names, world = pipeline.model.names, pipeline.store.world
    return save_checkpoint(world, folder, step, names, layers, state or {}, keep)


def load(path: Path, index: int) -> Any:
    return checkpoint.load_layer(path, checkpoint.load_manifest(path, index), torch.device("cpu"))


def restore(pipeline: Engine, path: Path) -> None:
    for index in pipeline.store.own:
        restore_layer(pipeline, index, load(path, index))


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def flip(path: Path, at: int = -1) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(bytes(data))


@pytest.mark.parametrize(("saved", "loaded"), [([3, 3], [1, 2, 3]), ([2, 2, 2], [6])])
def test_any_placement_loads_a_checkpoint(
    pool: Pool, tmp_path: Path, saved: list[int], loaded: list[int]
) -> None:
    """Training continues with the same bits."""
    before = pool.run(JOBS + "save_and_go_on", len(saved), folder=str(tmp_path), counts=saved)
    after = pool.run(JOBS + "load_and_go_on", len(loaded), folder=str(tmp_path), counts=loaded)
    layers, loaded_layers = (
        {k: v for r in results for k, v in r["layers"].items()} for results in (before, after)
    )
    assert layers == loaded_layers
    assert len(layers) == 6
    assert any("optimizer" in name for name in layers["5"])
    assert not layers["1"]["trains qkv.weight"]
    assert before[0]["losses"] == after[0]["losses"]
    assert before[0]["digest"] == after[0]["digest"]
    files = [p for p in tmp_path.rglob("*") if p.is_file() and p.parent != tmp_path]
    written = sum(p.stat().st_size for p in files if p.name != "manifest.json")
    assert [result["bytes"] for result in before] == [written] * len(saved)


def test_files_named_like_partial_checkpoints_are_removed(tmp_path: Path) -> None:
    for name in ("step-000001.tmp", "step-000099.tmp", "step-notes.tmp"):
        (tmp_path / name).write_text("no folder")
    save(gpt(), tmp_path, 1)
    assert names(tmp_path) == ["latest", "step-000001"]


def test_checkpoint_has_no_pickles(tmp_path: Path) -> None:
    path = save(gpt(), tmp_path, 1).path
    files = [p for p in tmp_path.rglob("*") if p.is_file()]
    assert {p.suffix for p in files} == {"", ".json", ".safetensors"}
    for file in files:
        assert not zipfile.is_zipfile(file), "torch.save's files are zips of pickles"
        start = file.read_bytes()[:9]
        if file.suffix == ".safetensors":
            assert start[8:9] == b"{", "safetensors: a length, then JSON"
        elif file.suffix == ".json":
            json.loads(file.read_text())
        else:
            assert (file.name, file.read_text()) == ("latest", path.name)


def test_flipped_bit_in_any_file_is_detected(tmp_path: Path) -> None:
    """The error names the file, and the previous checkpoint is used."""
    pipeline = gpt()
    save(pipeline, tmp_path, 1)
    newest = save(pipeline, tmp_path, 2).path
    assert checkpoint.find(tmp_path)[0] == newest
    for file in sorted(p for p in newest.rglob("*") if p.is_file()):
        flip(file)
        with pytest.raises(CheckpointError, match=f"{file.name}") as caught:
            checkpoint.verify(newest)
        assert str(file) in str(caught.value)
        path, manifest, problems = checkpoint.find(tmp_path)
        assert (path.name, manifest.step) == ("step-000001", 1)
        assert [str(file) in problem for problem in problems] == [True]
        flip(file)
    assert checkpoint.find(tmp_path)[1].step == 2


@pytest.mark.parametrize("ranks", [2, 3])
def test_each_file_is_verified_by_one_rank(pool: Pool, ranks: int, tmp_path: Path) -> None:
    """All ranks learn the result of every rank."""
    pipeline = gpt()
    first, second = (save(pipeline, tmp_path, step).path for step in (1, 2))
    files = sorted(str(p.relative_to(tmp_path)) for p in second.glob("layer-*/*"))
    rows = pool.run(JOBS + "look_together", ranks, folder=str(tmp_path))
    assert sorted(name for row in rows for name in row["read"]) == files, "each file once"
    for row in rows:
        assert {Path(name).name for name in row["read"]} == {"layer.json", "tensors.safetensors"}
    flip(tmp_path / files[-1])
    damaged = f"{tmp_path / files[-1]} is damaged or cannot be read"
    for row in pool.run(JOBS + "look_together", ranks, folder=str(tmp_path)):
        assert row["path"] == first.name
        assert row["problems"] == [f"{damaged}: its SHA-256 is not the manifest's"]


def test_missing_or_torn_checkpoint_is_skipped(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint to resume from"):
        checkpoint.find(tmp_path / "nowhere")
    pipeline = gpt()
    first, second, third = (save(pipeline, tmp_path, step).path for step in (1, 2, 3))
    # A save that was cut off, one that lost its manifest, and what `latest` names is not there.
    third.rename(third.with_suffix(".tmp"))
    (second / "manifest.json").unlink()
    lost = f"{second}/manifest.json cannot be read: No such file or directory"
    missing = f"{tmp_path}/latest names 'step-000003', which is missing"
    assert checkpoint.find(tmp_path)[::2] == (first, [lost, missing])
    (first / "layer-0003" / "layer.json").unlink()
    with pytest.raises(CheckpointError, match=r"/layer-0003/layer.json is missing$"):
        checkpoint.verify(first)
    with pytest.raises(CheckpointError, match=r"no checkpoint is whole; .*step-000002"):
        checkpoint.find(tmp_path)


@pytest.mark.skipif(sys.platform != "linux", reason="needs a file whose every read fails")
def test_unreadable_file_falls_back_to_the_previous_checkpoint(tmp_path: Path) -> None:
    pipeline = gpt()
    first, second = (save(pipeline, tmp_path, step).path for step in (1, 2))
    file = second / "layer-0003" / "tensors.safetensors"
    file.unlink()
    file.symlink_to("/proc/self/mem")  # of this process's memory nothing is at address 0
    path, _, problems = checkpoint.find(tmp_path)
    assert path == first
    assert [f"{file} is damaged or cannot be read" in problem for problem in problems] == [True]


def test_only_the_latest_checkpoints_are_kept(tmp_path: Path) -> None:
    """Checkpoints are ordered by step. Partial ones do not count."""
    pipeline = gpt()
    (tmp_path / "step-000007.tmp").mkdir()
    (tmp_path / "notes").mkdir()
    for step in (5, 999_999, 1_000_000, 1_000_001):
        save(pipeline, tmp_path, step, keep=2)
    assert names(tmp_path) == ["latest", "notes", "step-1000000", "step-1000001"]
    assert checkpoint.find(tmp_path)[1].step == 1_000_001
    assert (tmp_path / "latest").read_text() == "step-1000001"


def test_damaged_checkpoint_does_not_evict_a_valid_checkpoint(tmp_path: Path) -> None:
    pipeline = gpt()
    save(pipeline, tmp_path, 4)
    flip(save(pipeline, tmp_path, 8).path / "manifest.json", 3)
    assert checkpoint.find(tmp_path)[1].step == 4  # so the run went on from there
    save(pipeline, tmp_path, 6, keep=1)
    assert names(tmp_path) == ["latest", "step-000006"]


def test_full_disk_at_any_file_keeps_the_old_checkpoint(tmp_path: Path) -> None:
    """The error is one line for any file. The next save works."""
    pipeline = gpt(blocks=1)
    with full_at(-1) as synced:
        save(pipeline, tmp_path, 1, keep=2)
    assert len(synced) >= 4 * 3 + 4, "layers (description, tensors, folder), manifest, latest"
    for number in range(len(synced)):
        with full_at(number), pytest.raises(RunError) as caught:
            save(pipeline, tmp_path, 2, keep=2)
        assert re.fullmatch(
            r"\S+/step-000002.tmp could not be written \(rank 0: No space left on device\); "
            "earlier checkpoints are untouched",
            str(caught.value),
        )
        assert checkpoint.verify(tmp_path / "step-000001").step == 1
        assert checkpoint.find(tmp_path)[2] == []
    save(pipeline, tmp_path, 2, keep=2)
    assert names(tmp_path) == ["latest", "step-000001", "step-000002"]


def test_rank_that_the_others_left_behind_names_no_checkpoint(tmp_path: Path) -> None:
    """Others that have met anew write to a folder of their own."""
    pipeline = gpt(blocks=1)
    save(pipeline, tmp_path, 1)
    everyone = pipeline.store.world.everyone
    everyone.store.set(ENDED, "1")
    with pytest.raises(RankDied, match="step-000002 got no name: the other ranks went on without"):
        save(pipeline, tmp_path, 2)
    assert names(tmp_path) == ["latest", "step-000001", "step-000002.tmp"]
    everyone.generation, everyone.store = 1, everyone.store.within("again/1")
    with full_at(0), pytest.raises(RunError, match=r"step-000002\.g1\.tmp could not be written"):
        save(pipeline, tmp_path, 2)
    save(pipeline, tmp_path, 2)
    assert names(tmp_path) == ["latest", "step-000001", "step-000002"]


def test_full_disk_on_one_rank_fails_on_all_ranks(pool: Pool, tmp_path: Path) -> None:
    """All ranks raise the same error, and no rank waits for the failed one."""
    said = pool.run(JOBS + "save_on_a_full_disk", 2, folder=str(tmp_path), full=1)
    what = (
        r"\S+/step-000001(\.g\d+)?\.tmp could not be written \(rank 1: No space left on device\);"
    )
    assert [(kind, bool(re.match(what, text))) for kind, text in said] == [("NotWritten", True)] * 2
    assert names(tmp_path) == []


def test_folder_that_ranks_do_not_share_is_named(pool: Pool, tmp_path: Path) -> None:
    first, second = pool.run(JOBS + "save_apart", 2, folder=str(tmp_path))
    for rank, (kind, text) in enumerate((first, second)):
        assert kind == "NotWritten"
        what = r"/step-000001(\.g\d+)?\.tmp could not be written \(rank 1: "
        assert re.match(re.escape(str(tmp_path / str(rank))) + what, text)
        assert "is not on this machine; give a folder that all machines share" in text
    assert names(tmp_path / "0") == []


def test_second_save_of_a_step_replaces_the_first(tmp_path: Path) -> None:
    pipeline = gpt()
    save(pipeline, tmp_path, 2)
    run_step(pipeline, 0, *tokens(0), lr=0.1)
    path = save(pipeline, tmp_path, 2).path
    tensors = load(path, 5)
    weight = pipeline.store.own[5][0].get_parameter("logits.weight")
    assert torch.equal(tensors["parameter", "logits.weight"], weight)
    assert tensors["optimizer", "logits.weight/step"] == 1


def test_state_reads_back_exactly(tmp_path: Path) -> None:
    numbers = [random() * 10 ** (600 * place / 499 - 300) for place in range(500)]
    nested = {"frozen": [0, 1], "text": "é\n", "none": None, "flag": True}
    state = {"numbers": numbers, "nested": nested}
    save(gpt(), tmp_path, 1, state=state)
    assert checkpoint.find(tmp_path)[1].state == state


def test_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    path = save(gpt(), tmp_path, 1).path
    other = gpt(hidden=24)
    before = other.digest()
    with pytest.raises(CheckpointError, match=r"layer 0 \(embedding\): tokens.weight is .*16.*24"):
        restore_layer(other, 0, load(path, 0))
    assert other.digest() == before


def test_buffer_made_in_a_forward_is_restored(tmp_path: Path) -> None:
    """A model without the module that makes the buffer does not get it."""

    def forward(module: Any, x: Tensor) -> Tensor:
        module._buffers["seen"] = torch.ones(1)
        return module.linear(x)

    def model(inside: bool, registers: bool = True) -> Model:
        def middle() -> nn.Module:
            pipe = Net(forward, linear=nn.Linear(8, 8, bias=False))
            if registers:
                pipe.register_buffer("seen", None)
            return nn.Sequential(nn.Identity(), pipe) if inside else pipe

        return around(middle)

    pipe = pipeline(model(True))
    run_step(pipe, 0, *tokens(0), lr=0.1)
    arrived = load(save(pipe, tmp_path, 1).path, 1)
    for registers in (True, False):
        other = pipeline(model(True, registers))
        restore_layer(other, 1, arrived)
        assert dict(other.store.own[1][0].named_buffers())["1.seen"].tolist() == [1.0]
    inner = {key: key[1].removeprefix("1.") if key[0] == "parameter" else key[1] for key in arrived}
    tensors = {(section, inner[section, key]): t for (section, key), t in arrived.items()}
    with pytest.raises(CheckpointError, match=r"layer 1 \(middle\): .*buffer 1.seen"):
        fit(1, "middle", model(False).build([1])[1], tensors)


def manifest(path: Path, **changes: Any) -> None:
    """Gives the manifest of a checkpoint other fields."""
    made = checkpoint.read(path).model_copy(update=changes)
    (path / "manifest.json").write_text(checkpoint.sealed(made))


def test_checkpoint_of_a_later_version_is_refused(tmp_path: Path) -> None:
    path = save(gpt(), tmp_path, 1).path
    manifest(path, version=3)
    with pytest.raises(CheckpointError, match="version 3"):
        checkpoint.verify(path)


def test_every_flipped_bit_of_a_manifest_is_detected(tmp_path: Path) -> None:
    """The bit may be in white space, in the hash, or in the version."""
    file = save(gpt(), tmp_path, 1, state={"partition": [6], "loss": 0.5}).path / "manifest.json"
    text = bytearray(file.read_bytes())
    unnoticed: list[int] = []
    with file.open("r+b", buffering=0) as handle:
        for bit in range(8 * len(text)):
            handle.seek(bit // 8)
            handle.write(bytes([text[bit // 8] ^ 1 << bit % 8]))
            with contextlib.suppress(CheckpointError):
                checkpoint.verify(file.parent)
                unnoticed.append(bit)
            handle.seek(bit // 8)
            handle.write(text[bit // 8 :][:1])
    assert unnoticed == []
    assert checkpoint.verify(file.parent).step == 1


def test_manifest_of_another_folder_is_refused(tmp_path: Path) -> None:
    path = save(gpt(), tmp_path, 1).path
    manifest(path, step=2)
    with pytest.raises(CheckpointError, match="step-000001 has the manifest of step 2"):
        checkpoint.verify(path)


@pytest.mark.parametrize("text", ["", "[]", '{"version": 2, "step": 1}'])
def test_manifest_without_its_hash_is_refused(tmp_path: Path, text: str) -> None:
    path = save(gpt(), tmp_path, 1).path
    (path / "manifest.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"manifest\.json is damaged, or of an earlier"):
        checkpoint.verify(path)
    (path / "manifest.json").write_text('{\n "version": 1,\n "step": 1\n}')
    with pytest.raises(CheckpointError, match="is of an earlier version of dynmo"):
        checkpoint.verify(path)
    (path / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"manifest.json cannot be read"):
        checkpoint.verify(path)


@pytest.mark.parametrize("function", ["bare", "layers"])
def test_layers_with_no_or_complex_tensors_are_restored(tmp_path: Path, function: str) -> None:
    config = parse({"model": {"kind": f"python:tests.models.user_model:{function}"}})
    pipe, other = pipeline(model_of(config)), pipeline(model_of(config))
    run_step(pipe, 0, *tokens(0), lr=0.1)
    path = save(pipe, tmp_path, 1).path
    checkpoint.verify(path)
    restore(other, path)
    for index in other.store.own:
        assert fingerprint(*other.store.own[index]) == fingerprint(*pipe.store.own[index])


def test_restored_tied_weights_stay_tied(tmp_path: Path) -> None:
    """The checkpoint has two copies, and the model has one tensor."""
    pipeline = gpt(tied=True)
    run_step(pipeline, 0, *tokens(0), lr=0.1)
    path = save(pipeline, tmp_path, 1).path
    other = gpt(tied=True)
    restore(other, path)
    for each in (pipeline, other):
        for step in (1, 2):
            run_step(each, step, *tokens(step), lr=0.1)
    for index, (module, optimizer) in pipeline.store.own.items():
        assert fingerprint(*other.store.own[index]) == fingerprint(module, optimizer)
    weight = other.store.own[0][0].get_parameter("tokens.weight")
    assert torch.equal(weight, other.store.own[5][0].get_parameter("logits.weight"))


@pytest.mark.parametrize(("saved", "resumed"), [("adamw", "sgd"), ("sgd", "adamw")])
def test_checkpoint_of_another_optimizer_is_refused(
    tmp_path: Path, saved: str, resumed: str
) -> None:
    """Moments would be dropped, or would be missing in the next step."""

    def built(name: str) -> Engine:
        return pipeline(model_of(parse({"model": GPT})), optimizer=settings(name))

    first = built(saved)
    run_step(first, 0, *tokens(0), lr=0.1)
    path = save(first, tmp_path, 1).path
    with pytest.raises(CheckpointError, match=r"layer 0 \(embedding\): .*tokens.weight/"):
        restore_layer(built(resumed), 0, load(path, 0))


def test_weight_tied_after_the_save_is_refused(tmp_path: Path) -> None:
    first = gpt()
    run_step(first, 0, *tokens(0), lr=0.1)
    path = save(first, tmp_path, 1).path
    with pytest.raises(CheckpointError, match=r"layer 5 .*logits.weight/step .*model.tied"):
        restore_layer(gpt(tied=True), 5, load(path, 5))


def test_derived_buffers_of_another_shape_are_not_loaded(tmp_path: Path) -> None:
    """Rotary tables belong to the sequence's length. A resumed run may have another length."""
    path = save(gpt(), tmp_path, 1).path
    longer = gpt(sequence=16)
    tables = {name: buffer.clone() for name, buffer in longer.store.modules[1].named_buffers()}
    layer = load(path, 1)
    restore_layer(longer, 1, layer)
    for name, buffer in longer.store.modules[1].named_buffers():
        assert torch.equal(buffer, tables[name])
        assert buffer.shape != layer["buffer", name].shape, "the saved one is shorter"
    for name, parameter in longer.store.modules[1].named_parameters():
        assert torch.equal(parameter, layer["parameter", name])
    run_step(longer, 0, *tokens(0, sequence=16), lr=0.1)


def test_checkpoint_restores_known_and_extra_buffers(tmp_path: Path) -> None:
    """The model gets its own buffers, and persistent ones that a forward would make."""

    def built(names: list[str], value: float = 1.0) -> Engine:
        def middle() -> nn.Module:
            layer = nn.Linear(8, 8)
            for name in names:
                layer.register_buffer(name, torch.full((8,), value), persistent=name != "own")
            return layer

        return pipeline(around(middle))

    path = save(built(["mean", "own"], 3.0), tmp_path, 1).path
    layer = load(path, 1)
    same = built(["mean", "own"])
    restore_layer(same, 1, layer)
    assert all((buffer == 3).all() for buffer in same.store.modules[1].buffers())
    less = built([])
    restore_layer(less, 1, layer)
    assert dict(less.store.modules[1].named_buffers())["mean"].tolist() == [3.0] * 8
    with pytest.raises(CheckpointError, match="buffer scale"):
        restore_layer(built(["mean", "scale"]), 1, layer)


def engine(world: Meeting, counts: list[int]) -> Engine:
    model, places = model_of(parse({"model": GPT})), Partition(tuple(counts))
    return Engine(world, model, places, EngineOptions("zb-h1", microbatches=3))


def steps(pipeline: Engine, first: int, last: int) -> list[float]:
    """Losses of the steps from `first` to before `last`."""
    losses: list[float] = []
    for step in range(first, last):
        losses.append(run_step(pipeline, step, *tokens(step), lr=0.01).loss)
    return losses


def save_and_go_on(world: Meeting, folder: str, counts: list[int]) -> dict[str, Any]:
    """Four steps with a checkpoint after two. Layers 0 and 1 are frozen by then."""
    pipe = engine(world, counts)
    steps(pipe, 0, 1)
    Actions(pipe).freeze([0, 1])
    steps(pipe, 1, 2)
    saved = save(pipe, Path(folder), 2, keep=2, state={"frozen": sorted(pipe.store.frozen.layers)})
    layers = {i: fingerprint(m, o, gradients=False) for i, (m, o) in pipe.store.own.items()}
    result = {"layers": layers, "losses": steps(pipe, 2, 4), "digest": pipe.digest()}
    return result | {"bytes": saved.bytes}


def save_on_a_full_disk(world: Meeting, folder: str, full: int) -> list[str]:
    """The error if one rank can write nothing."""
    pipe = engine(world, [3, 3])
    with full_at(0 if world.rank == full else -1):
        return error_of(lambda: save(pipe, Path(folder), 1, keep=2))


def save_apart(world: Meeting, folder: str) -> list[str]:
    pipe, own = engine(world, [3, 3]), Path(folder) / str(world.rank)
    return error_of(lambda: save(pipe, own, 1, keep=2))


def load_and_go_on(world: Meeting, folder: str, counts: list[int]) -> dict[str, Any]:
    path, manifest, _ = checkpoint.find(Path(folder), world)
    pipe = engine(world, counts)
    Actions(pipe).freeze(manifest.state["frozen"])
    restore(pipe, path)
    layers = {i: fingerprint(m, o, gradients=False) for i, (m, o) in pipe.store.own.items()}
    return {"layers": layers, "losses": steps(pipe, manifest.step, 4), "digest": pipe.digest()}


def look_together(world: Meeting, folder: str) -> dict[str, Any]:
    """The checkpoint found, and the files that this rank has read to the end."""
    read: list[str] = []
    sha256 = checkpoint.sha256_of

    def watched(path: Path) -> bytes:
        read.append(str(path.relative_to(folder)))
        return sha256(path)

    with mock.patch.object(checkpoint, "sha256_of", watched):
        path, _, problems = checkpoint.find(Path(folder), world)
    return {"path": path.name, "problems": problems, "read": read}


def digest_after_a_flipped_bit(
    world: Meeting, config: dict[str, object], rank: int, folder: str | None = None
) -> str:
    """The digest of the weights, after this rank's first weight has changed in its last bit.

    With a folder the weights are saved before.
    """
    loaded = parsed(config)
    pipeline = Trainer(loaded, world, model_of(loaded), None).pipeline
    if world.rank == rank:
        module, _ = next(iter(pipeline._engine.store.own.values()))
        with torch.no_grad():
            next(module.parameters()).view(torch.int32).flatten()[0] ^= 1
    if folder is not None:
        pipeline.save(folder)
    return pipeline.digest()


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(7, dtype=torch.bfloat16),
        torch.arange(9.0)[1:],
        torch.arange(24.0).view(4, 6).t(),
        torch.tensor(3.5, dtype=torch.float64),
        torch.tensor([True, False, True]),
    ],
    ids=str,
)
def test_each_bit_counts_in_the_sum(tensor: Tensor) -> None:
    whole = int(_sum_of_bits(tensor))
    for at in range(8 * tensor.nbytes):
        other = tensor.clone(memory_format=torch.contiguous_format)
        other.view(-1).view(torch.uint8)[at // 8] ^= 1 << at % 8
        assert int(_sum_of_bits(other)) != whole
    assert int(_sum_of_bits(tensor.clone())) == whole


def test_replicas_with_other_weights_are_named(pool: Pool, tmp_path: Path) -> None:
    replicated = equal_config(1, "1f1b", BALANCERS["none"], freezing=False, clipping=False)
    replicated["parallel"]["replicas"], replicated["train"]["global_batch"] = 2, 12
    job = JOBS + "digest_after_a_flipped_bit"
    with pytest.raises(JobFailed, match="disagree on the weights"):
        pool.run(job, 2, config=replicated, rank=1)
    with pytest.raises(JobFailed, match="disagree on the weights"):
        pool.run(job, 2, config=replicated, rank=1, folder=str(tmp_path))
    assert not list(tmp_path.iterdir())
    first, second = pool.run(job, 2, config=replicated, rank=2, folder=str(tmp_path))
    assert first == second
