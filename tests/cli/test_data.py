"""`dynmo data`: tokens that are made ahead, and what a batch looks like."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tomli_w
from transformers import AutoTokenizer

from dynmo.config import load
from dynmo.cost.costs_file import read
from dynmo.data.batches import padding_of
from dynmo.data.corpus import TokenFile
from dynmo.train import look_ahead
from dynmo.train.data import open_batches, open_text
from dynmo.train.setup import model_of
from tests.cli.runs import Run, assert_refused, end
from tests.combinations import mostly_matrix
from tests.processes import start, wait_until

RECORDS = 300
ROWS = [
    {"prompt": "import", "completion": "return x\n" * (number % 9 + 1)} for number in range(RECORDS)
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_llama: Path) -> Path:
    """The working folder, with a model, samples and run.toml."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").symlink_to(small_llama)
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    write(tmp_path, source="jsonl:rows.jsonl", answers_only=True, batching="grouped")
    return tmp_path


def write(folder: Path, **data: Any) -> None:
    config = {
        "model": {"kind": "hf", "path": "model", "sequence": 32},
        "data": data,
        "train": {"global_batch": 8, "micro_batch": 2},
    }
    (folder / "run.toml").write_text(tomli_w.dumps(config))


@pytest.mark.matrix
def test_samples_that_are_encoded_ahead_give_the_same_batches(folder: Path, dynmo: Run) -> None:
    done = dynmo("data", "run.toml", "--out", "rows.parquet", "--workers", "2", "--json")
    assert done.status == 0, done.err
    told = json.loads(done.out)
    assert told["file"]["source"] == "parquet:rows.parquet"
    assert told["file"]["samples"] == told["records"] == RECORDS
    assert told["file"]["tokens"] == told["tokens"]
    assert sum(told["histogram"].values()) == RECORDS
    live = load(folder / "run.toml", [])
    write(folder, source="parquet:rows.parquet", batching="grouped")
    ahead = load(folder / "run.toml", [])
    wanted, found = (open_batches(config, model_of(config)) for config in (live, ahead))
    for step in range(3):
        one, other = (
            [{name: x.tolist() for name, x in each.items()} for each in batches.train(step)]
            for batches in (wanted, found)
        )
        assert one == other


@pytest.mark.matrix
def test_profile_measures_with_samples(folder: Path) -> None:
    with (folder / "run.toml").open("a") as file:
        file.write('[parallel]\npipeline = 2\ndevice = "cpu"\n')
    line = [sys.executable, "-m", "dynmo", "profile", "run.toml", "--steps", "1", "--out", "c.json"]
    done = end(start(line, folder), 120)
    assert done.status == 0, done.err
    assert len(read(folder / "c.json").layers) > 3


def test_text_that_is_tokenised_ahead_has_the_same_tokens(folder: Path, dynmo: Run) -> None:
    (folder / "text").write_text("def f(x):\n    return x\n" * 500)
    write(folder, source="file:text")
    done = dynmo("data", "run.toml", "--out", "text.bin")
    assert done.status == 0, done.err
    config = load(folder / "run.toml", [])
    live, ahead = open_text("file:text", model_of(config).options or config.model), "text.bin"
    tokens = TokenFile(Path(ahead))
    assert np.array_equal(tokens[:], live[:])
    assert tokens.vocab == 300
    assert json.loads((folder / "text.bin.json").read_text())["dtype"] == "uint16"
    assert 'train on it with data.source = "tokens:text.bin"' in done.out


def test_view_marks_what_counts(folder: Path, dynmo: Run) -> None:
    done = dynmo("data", "run.toml")
    assert done.status == 0, done.err
    assert "import«return x" in done.out
    assert "held out for evaluations: 15 samples of jsonl:rows.jsonl" in done.out
    assert "microbatches of the first step, rows x tokens: " in done.out
    assert "\n cut " in done.out
    wide = dynmo("data", "run.toml", "--json", "--set", "model.sequence=128")
    whole = json.loads(wide.out)
    shorter = f"model.sequence={whole['longest'] - 1}"
    told = json.loads(dynmo("data", "run.toml", "--json", "--set", shorter).out)
    assert (whole["cut"], told["longest"]) == (0, whole["longest"] - 1)
    config = load(folder / "run.toml", ["model.sequence=128"])
    batches = open_batches(config, model_of(config))
    padding = padding_of([x for step in range(config.train.steps) for x in batches.train(step)])
    assert whole["padding"] == padding.padded / padding.tokens, "as the report of the run has it"
    assert told["cut"] > 0


def test_view_names_broken_lines_and_special_tokens(
    folder: Path, dynmo: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those that are not looked at for their lengths."""
    monkeypatch.setattr(look_ahead, "_MOST", 20)
    lines = [json.dumps(row) for row in ROWS]
    lines[0], lines[170], lines[172] = "[", "{", '{"prompt": 3, "completion": "x"}'
    end = AutoTokenizer.from_pretrained(folder / "model").eos_token
    lines[-1] = json.dumps({"prompt": f"import{end}", "completion": "x"})
    (folder / "rows.jsonl").write_text("\n".join(lines))
    done = dynmo("data", "run.toml", "--json")
    assert done.status == 0, done.err
    assert json.loads(done.out)["broken"] == 3
    assert "broken: rows.jsonl:1: not a line of JSON" in done.err
    assert "broken: rows.jsonl:171: not a line of JSON" in done.err
    assert "broken: rows.jsonl:173: prompt has the type int" in done.err
    assert 'a run ends at a broken sample; data.broken = "skip" leaves it out' in done.err
    assert "1 of 19 records have special tokens in their text" in done.err


def test_worker_ends_with_its_parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A parent that was killed cannot remove its file."""
    partial, ended = tmp_path / "rows.parquet.tmp", list[int]()
    partial.touch()
    parent = SimpleNamespace(join=lambda: None)
    monkeypatch.setattr(look_ahead, "parent_process", lambda: parent)
    monkeypatch.setattr(look_ahead.os, "_exit", ended.append)
    look_ahead._end_with_parent(partial)
    assert ended == [1]
    assert not partial.exists()


@pytest.mark.parametrize("source", ["jsonl:rows.jsonl", "file:text.txt"])
def test_sigterm_leaves_no_file(
    folder: Path, dynmo: Run, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "text.txt").write_text("import this\n" * 100)
    write(folder, source=source)

    def encoded(*_: Any) -> Iterator[tuple[int, Any]]:
        yield 0, ([], [])

    def told(count: int, whole: int) -> None:
        if list(folder.glob("out*")):
            os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(look_ahead, "_all_encoded", encoded)
    monkeypatch.setattr("dynmo.cli.data.progress", lambda _: nullcontext(told))
    done = dynmo("data", "run.toml", "--out", "out")
    assert (done.status, done.out) == (130, "")
    assert done.err.splitlines()[-1] == "dynmo: interrupted; out was not written"
    assert not list(folder.glob("out*"))
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.matrix
def test_sigterm_ends_the_workers(folder: Path) -> None:
    """At once, though their first samples are not encoded."""
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, ROWS * 100)))
    call = [sys.executable, "-m", "dynmo", "data", "run.toml", "--out", "out", "--workers", "2"]
    process = start(call, folder)
    wait_until(Path("out.tmp").exists, 60)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    wait_until(lambda: len(children.read_text().split()) > 2, 60)
    workers = children.read_text().split()
    process.send_signal(signal.SIGTERM)
    status, _, told = end(process)
    assert (status, told) == (130, "dynmo: interrupted; out was not written\n")
    wait_until(lambda: not any(Path("/proc", each).exists() for each in workers), 5)
    assert not list(folder.glob("out*"))


@pytest.mark.matrix
@pytest.mark.parametrize("broken", mostly_matrix(["stop", "skip"], ["stop"]))
def test_broken_sample_is_named_or_left_out(folder: Path, dynmo: Run, broken: str) -> None:
    lines = [json.dumps(row) for row in ROWS]
    lines[170] = "{"
    (folder / "rows.jsonl").write_text("\n".join(lines))
    write(folder, source="jsonl:rows.jsonl", broken=broken)
    done = dynmo("data", "run.toml", "--out", "rows.parquet")
    if broken == "skip":
        assert done.status == 0, done.err
        assert "299 samples" in done.out
        assert "1 left out" in done.out
        return
    assert done.status == 2
    assert "rows.jsonl:171: not a line of JSON" in done.err
    assert not list(folder.glob("rows.parquet*"))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["--out", "missing/rows.parquet"], "there is no folder missing"),
        (["--out", "rows.jsonl"], "exists; choose another name, or give --force"),
        (["--workers", "0"], "--workers 0: must be greater than or equal to 1"),
        (["--set", "data.source='jsonl:none'"], "cannot be read"),
    ],
)
def test_wrong_input_is_one_line(folder: Path, dynmo: Run, given: list[str], says: str) -> None:
    assert_refused(dynmo("data", "run.toml", *given), says)
