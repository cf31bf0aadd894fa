"""Commands in this process, and runs of `dynmo train`, of which one serves many tests."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch

from dynmo.cli import main
from dynmo.cost.costs_file import Profile, write
from dynmo.cost.layer_cost import LayerCost, LinkCost
from tests.cli.runs import CONFIG, Base, Done, Run, end, events, fill, free_port, train
from tests.pool import Pool
from tests.processes import gone, living, ranks


@pytest.fixture(autouse=True)
def _process_unchanged(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Commands in this process change its paths, its variables and its number of threads."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    with mock.patch.dict(os.environ):
        yield
    torch.set_num_threads(1)


@pytest.fixture
def filled(tmp_path: Path) -> Path:
    """A folder to train in."""
    fill(tmp_path)
    return tmp_path


@pytest.fixture
def work(filled: Path) -> Iterator[Path]:
    """After the test no process works in this folder, and no rendezvous folder is left."""
    yield filled
    left = {*living(filled)} - {os.getpid()}  # `run` works there in this process
    for pid in ranks(filled).values():
        os.kill(pid, signal.SIGKILL)
    assert not left
    assert not list((filled / "tmp").glob("dynmo-*"))


ENDS = """
import os, signal
from pathlib import Path
from dynmo.pipeline.case import Dynamism

class Ends(Dynamism):
    name = "ends"

    def act(self, step, layers):
        name = Path(f"step {step} of rank {os.environ['RANK']}")
        if name.exists():
            os.kill(os.getpid(), getattr(signal, name.read_text()))
"""


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory, pool: Pool) -> Base:
    """A run of two ranks with freezing, rebalancing and checkpoints, in three parts.

    A signal ends the first part, and the death of a rank the second. The processes of the second
    part are its own. Another launcher started the ranks of the others.
    """
    folder = tmp_path_factory.mktemp("base")
    fill(folder)
    (folder / "run.toml").write_text(
        CONFIG.replace('"freezing"]', '"freezing", "python:ends:Ends"]')
    )
    (folder / "ends.py").write_text(ENDS)
    (folder / "step 8 of rank 0").write_text("SIGTERM")
    (folder / "step 23 of rank 1").write_text("SIGKILL")

    def in_pool(*arguments: str) -> Done:
        lines = [["train", "run.toml", *arguments]] * 2
        given = {"lines": lines, "folder": str(folder), "port": free_port()}
        return Done(*pool.run("command", 2, **given)[0])

    asked = in_pool()
    killed = end(train(folder, "--resume"))
    left = gone(folder)
    (folder / "step 23 of rank 1").unlink()
    done = in_pool("--resume", "--json")
    return Base(folder, asked, killed, left, done, events(folder, "main"))


@pytest.fixture
def dynmo(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs the command line in this process, and returns exit status, stdout and stderr."""

    def call(*arguments: object) -> Done:
        status = main([str(argument) for argument in arguments])
        out = capsys.readouterr()
        return Done(status, out.out, out.err)

    return call


@pytest.fixture
def plan(dynmo: Run) -> Run:
    """`dynmo plan` in this process."""
    return partial(dynmo, "plan")


@pytest.fixture
def costs_file(tmp_path: Path) -> Path:
    """Costs of an embedding, four blocks of two halves, and a head as slow as two halves."""
    halves = [f"blocks.{i}.{half}" for i in range(4) for half in ("attention", "feed_forward")]
    one = LayerCost(1e-3, 1e-3, 1e-3, 1000, 4 << 20, 4 << 20, 8 << 20, 4 << 20, 2 << 20, 1 << 20)
    profile = Profile(
        layers=(one,) * 9 + (replace(one, f=2e-3, b=2e-3, w=2e-3),),
        names=("embedding", *halves, "head"),
        links=(((0, 1), LinkCost(1e-5, 1e10)),),
        microbatch=2,
        microbatches=8,
        ranks=2,
        schedule="1f1b",
        partition=(5, 5),
    )
    path = tmp_path / "costs.json"
    write(path, profile)
    return path


@pytest.fixture
def run(dynmo: Run, monkeypatch: pytest.MonkeyPatch) -> Run:
    """`dynmo train` in this process, for what ends before any rank is started."""
    monkeypatch.delitem(sys.modules, "models", raising=False)

    def call(folder: Path, *arguments: str, sets: Sequence[str] = ()) -> Done:
        monkeypatch.chdir(folder)
        return dynmo("train", *arguments, *(word for text in sets for word in ("--set", text)))

    return call


@pytest.fixture
def rank(run: Run) -> Run:
    """`dynmo train` in this process, as the only rank of another launcher."""
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    return run
