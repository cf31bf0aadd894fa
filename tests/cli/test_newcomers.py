"""Processes that want to join a run, from a folder with other code."""

from __future__ import annotations

import signal
import sys
from functools import partial
from pathlib import Path

import pytest

from tests.cli.runs import Run, assert_refused, end, events, fill, free_port, train
from tests.processes import catches, end_all, wait_until

MODEL = """
from torch import nn
import shifts

class Gain(nn.Module):
    def forward(self, x):
        return x * 1.0 + shifts.SHIFT

def make():
    width = 8
    first = [nn.Embedding(256, width), nn.Linear(width, width)]
    return [*first, nn.Dropout(0.0), Gain(), nn.Linear(width, 256)]
"""
# For each newcomer: the file in which it has another text, the text, and what the refusal names.
NEWCOMERS = {
    "same": ("own.py", "width = 8", "width = 8  # the same", []),
    "constant": ("own.py", "x * 1.0", "x * 1.5", ["own.py"]),
    "helper": ("shifts.py", "0.0", "0.5", ["shifts.py"]),
    "dropout": ("own.py", "Dropout(0.0)", "Dropout(0.5)", ["own.py", "p (0.5, not 0.0)"]),
    "width": ("own.py", "width = 8", "width = 9", ["own.py", "[256, 9], trains, not"]),
    "names": ("own.py", "nn.Dropout(0.0)", "nn.Identity()", ["own.py", "2.Identity, not 2.Drop"]),
}
SETS = ("model.kind=python:own:make", "dynamism.cases=[]", "checkpoint.every=0", "balance.margin=9")


def make_folder(root: Path, name: str, run: Path | None = None) -> Path:
    """A working folder with the code of a newcomer, beside the same run."""
    folder = root / name
    folder.mkdir()
    fill(folder)
    texts = {"own.py": MODEL, "shifts.py": "SHIFT = 0.0\n"}
    file, old, new, _ = NEWCOMERS[name]
    texts[file] = texts[file].replace(old, new) if run is not None else texts[file]
    for path, text in texts.items():
        (folder / path).write_text(text)
    if run is not None:
        (folder / "runs").symlink_to(run / "runs")
    return folder


def told(folder: Path, mentions: list[str]) -> bool:
    faults = [event["what"] for event in events(folder, "main") if event["event"] == "fault"]
    return any(all(mention in fault for mention in mentions) for fault in faults)


@pytest.mark.matrix
def test_newcomer_with_other_code_is_refused(tmp_path: Path) -> None:
    """The refusal names what differs, in the newcomer's line and in the run's event."""
    folder = make_folder(tmp_path, "same")
    # The run never takes a newcomer, whatever it measures.
    sets = (*SETS, "elastic.target_ranks=2", "train.steps=100000", "train.eval_every=0")
    run = train(folder, sets=sets)
    started = [run]
    try:
        wait_until(lambda: (folder / "runs/main/rendezvous.json").is_file(), 120)
        waiting = {
            name: train(make_folder(tmp_path, name, folder), "--join")
            for name in NEWCOMERS
            if name != "same"
        }
        alike = train(make_folder(tmp_path / "same", "same", folder), "--join")
        started += [*waiting.values(), alike]
        for name, process in waiting.items():
            mentions = NEWCOMERS[name][3]
            assert_refused(end(process, 100), "refused", *mentions)
            wait_until(partial(told, folder, mentions), 20)
        assert alike.poll() is None, "it has the same code, and waits"
        wait_until(partial(catches, alike, signal.SIGTERM), 60)
        alike.send_signal(signal.SIGTERM)
        assert end(alike).status == 0
        run.send_signal(signal.SIGTERM)
        assert end(run).status == 130
    finally:
        end_all(started)


def test_resume_with_other_code_warns_and_names_the_file(
    tmp_path: Path, rank: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_folder(tmp_path, "same")
    sets = (*SETS, "checkpoint.every=2", "train.eval_every=0", "parallel.pipeline=1")
    for module in ("own", "shifts"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    assert rank(folder, "run.toml", sets=(*sets, "train.steps=2")).status == 0
    (folder / "shifts.py").write_text("SHIFT = 0.25\n")
    for module in ("own", "shifts"):
        del sys.modules[module]
    monkeypatch.setenv("MASTER_PORT", free_port())
    done = rank(folder, "run.toml", "--resume", sets=(*sets, "train.steps=4"))
    assert done.status == 0, done.err
    assert "shifts.py" in done.err
    assert "own.py" not in done.err
