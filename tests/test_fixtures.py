"""What users have from an earlier version still works: tests/fixtures/README.md says what it is."""

from __future__ import annotations

import gzip
import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from dynmo import Pipeline, init
from dynmo.huggingface import from_pretrained, save_pretrained
from tests.cli.runs import Done, free_port
from tests.combinations import mostly_matrix
from tests.plan import old_records
from tests.pool import Pool

FIXTURES = Path(__file__).with_name("fixtures")
ENDS: dict[str, Any] = json.loads((FIXTURES / "ends.json").read_text())
MACHINE = ENDS.pop("machine")


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """The folder of a user, who has changed the balancer as its error says."""
    folder = Path(shutil.copytree(FIXTURES / "files", tmp_path / "files"))
    own = folder / "my_choices.py"
    text = own.read_text()
    for old, new in (
        ("from dynmo.balance.partition import Partition", "from dynmo import Partition"),
        ("backwards(request)", "backwards(problem, now)"),
        ("request.current", "now.partition"),
    ):
        assert old in text
        text = text.replace(old, new)
    own.write_text(text)
    return folder


@pytest.mark.parametrize(
    ("module", "says"),
    [
        ("dynmo.balance.partition", "what users need is in dynmo and dynmo.extend, such as"),
        ("dynmo", "write (problem, now) -> Partition"),
    ],
)
def test_balancer_of_an_earlier_version_is_told_in_a_line(
    pool: Pool, files: Path, module: str, says: str
) -> None:
    text = (FIXTURES / "files" / "my_choices.py").read_text()
    old = files / "old_choices.py"
    old.write_text(text.replace("dynmo.balance.partition", module))
    way = "balance.balancer=python:old_choices:backwards"
    done = dynmo(pool, files, 2, "train", "pruned.toml", "--set", way, "--resume", "--json")
    assert done.status == 2
    line = done.err.splitlines()[-1]
    assert "python:old_choices:backwards" in line
    assert says in line


def dynmo(pool: Pool, files: Path, ranks: int, *arguments: str) -> Done:
    given = {"lines": [arguments] * ranks, "folder": str(files), "port": free_port()}
    return Done(*pool.run("command", ranks, **given)[0])


def check_end(done: Done, name: str) -> None:
    """The run ends as it did then. Bits depend on the processor and on torch."""
    assert done.status == 0, done.err
    end, known = json.loads(done.out), ENDS[name]
    assert end["loss"] == pytest.approx(known[0]["loss"], rel=1e-3)
    if bits_of_machine() == MACHINE:
        assert {key: end[key] for key in known[0]} in known


def bits_of_machine() -> str:
    """SHA-256 of products as models have them, which libraries compute by the processor."""
    draw = torch.Generator().manual_seed(0)
    digest = hashlib.sha256(torch.__version__.encode())
    for size in (8, 16, 32, 64):
        left, right = torch.randn(2, size, size, generator=draw)
        each = (left @ right, left.softmax(1), torch.nn.functional.gelu(left), left.exp().sum(0))
        for value in each:
            digest.update(value.numpy().tobytes())
    return digest.hexdigest()


@pytest.mark.parametrize("name", mostly_matrix(ENDS, ["plain", "pruned", "frozen", "experts"]))
def test_run_goes_on(pool: Pool, files: Path, name: str) -> None:
    check_end(dynmo(pool, files, 2, "train", f"{name}.toml", "--resume", "--json"), name)


@pytest.mark.matrix
@pytest.mark.parametrize("name", ENDS)
def test_run_goes_on_by_the_file_in_its_folder(pool: Pool, files: Path, name: str) -> None:
    file, changed = f"runs/{name}/config.toml", "pipeline.schedule=1f1b"
    check_end(dynmo(pool, files, 2, "train", file, "--set", changed, "--resume", "--json"), name)


def test_adapters_load_and_are_exported_as_they_were(pool: Pool, files: Path) -> None:
    tuned = (files / "tuned" / "adapter_model.safetensors").read_bytes()
    done = dynmo(pool, files, 1, "checkpoint", "export", "runs/adapters", "exported")
    assert done.status == 0, done.err
    with init(device="cpu") as world:
        model = from_pretrained(files / "llama", lora=files / "tuned")
        save_pretrained(Pipeline(model, world, microbatches=1), files / "loaded")
    for made in ("exported", "loaded"):
        assert (files / made / "adapter_model.safetensors").read_bytes() == tuned


def test_costs_file_gives_the_same_plan(pool: Pool, files: Path) -> None:
    for costs in ("runs/plain/costs.json", "runs/plain"):
        done = dynmo(pool, files, 1, "plan", "--costs", costs, "--ranks", "2", "--json")
        assert json.loads(done.out)["partition"] == [3, 3], done.err


def test_log_is_reported(pool: Pool, files: Path) -> None:
    done = dynmo(pool, files, 1, "report", "runs/frozen", "--json")
    (run,) = json.loads(done.out)["runs"]
    assert [phase["frozen"] for phase in run["phases"]] == [0, 1, 2, 4]


# Placements that are decided now in place of the recorded ones. The simulator finds a step shorter.
FASTER = {("drawn-0-changed", (3, 1, 3, 1)): (1, 3, 2, 2)}  # 9.436 s in place of 9.973 s


def test_records_decide_the_same_or_a_faster_placement() -> None:
    """A converter belongs here if the form of records changes."""
    changed = list[str]()
    for line in gzip.decompress((FIXTURES / "decisions.jsonl.gz").read_bytes()).splitlines():
        row = json.loads(line)
        record, expected = row["record"], expected_answer(row["record"])
        decision = old_records.question(record).again()
        answer = old_records.answer(record["kind"], decision)
        if faster := FASTER.get((row["run"], tuple(expected.get("to", ())))):
            expected = expected | {"to": list(faster)}
        if answer != expected:
            reason = decision.verdict.reason
            changed.append(f"{row['run']} {record['kind']}: {answer}, not {expected} ({reason})")
    assert changed == []


def expected_answer(record: dict[str, Any]) -> dict[str, Any]:
    """What must be the same. A run that stays needs no mesh to say so."""
    answer = record["answer"]
    if record["kind"] == "ranks" and not answer["move"]:
        return {key: answer[key] for key in ("move", "uncertain", "ranks") if key in answer}
    return answer
