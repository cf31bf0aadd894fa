"""Runs of `dynmo train`, of which one serves many tests.

Starting ranks costs seconds of importing torch.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dynmo.cli import main
from tests.cli.runs import Base, Done, Run, end, events, fill, train
from tests.processes import gone, ranks


@pytest.fixture
def work(tmp_path: Path) -> Iterator[Path]:
    """A folder to train in.

    After the test no process works there, and no rendezvous folder is left.
    """
    fill(tmp_path)
    yield tmp_path
    left = not gone(tmp_path)
    for pid in ranks(tmp_path).values():
        os.kill(pid, signal.SIGKILL)
    assert not left
    assert not list((tmp_path / "tmp").glob("dynmo-*"))


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Base:
    """One whole run: two ranks, freezing, rebalancing, checkpoints, --json."""
    folder = tmp_path_factory.mktemp("base")
    fill(folder)
    done = end(train(folder, "--json"))
    return Base(folder, done, events(folder, "main"))


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """`dynmo train` in this process, for what ends before any rank is started."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "models", raising=False)

    def call(folder: Path, *arguments: str, sets: tuple[str, ...] = ()) -> Done:
        monkeypatch.chdir(folder)
        status = main(["train", *arguments, *(word for text in sets for word in ("--set", text))])
        out = capsys.readouterr()
        return Done(status, out.out, out.err)

    return call
