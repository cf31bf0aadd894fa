"""A process joins a training loop of its user's own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from torch import nn

import dynmo
from dynmo.errors import ConfigError, RunError
from tests.runtime import alone

LOOP = Path(__file__).with_name("joining.py")
ROOT = Path(__file__).parents[2]
RANKS = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")


def started(*command: str) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, *command],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_new_process_joins_a_loop_and_gets_its_bits(tmp_path: Path) -> None:
    file = tmp_path / "rendezvous.json"
    with started(*RANKS, str(LOOP), str(file)) as ranks:
        end = time.monotonic() + 60
        while not file.exists() and time.monotonic() < end:
            time.sleep(0.05)
        assert file.stat().st_mode & 0o777 == 0o600
        with started(str(LOOP), str(file), "join") as newcomer:
            joined = newcomer.communicate(timeout=120)[0]
        said = ranks.communicate(timeout=120)[0]
    with started(str(LOOP)) as one:
        expected = one.communicate(timeout=120)[0]
    (digest,) = {*re.findall(r"weights (\w{64})", expected + said + joined)}
    assert f"rank 2 of 3: weights {digest}" in joined
    assert len(re.findall(digest, said)) == 2
    assert not file.exists(), "rank 0 removes it at its end"


def test_process_outside_has_left_and_says_what_to_do() -> None:
    world = alone.alone()
    world.leave()
    model = dynmo.Sequential([nn.Linear(4, 4)], loss=nn.functional.mse_loss)
    pipeline = dynmo.Pipeline(model, world, microbatches=1)
    assert pipeline.left
    assert pipeline.steps == 0
    assert pipeline.adapt() == ()
    with pytest.raises(RunError, match=r"call join\(\)"):
        pipeline.digest()
    pipeline.close()


def test_rank_cannot_join_again() -> None:
    model = dynmo.Sequential([nn.Linear(4, 4)], loss=nn.functional.mse_loss)
    pipeline = dynmo.Pipeline(model, alone.alone(), microbatches=1)
    with pytest.raises(RunError, match="a rank already"):
        pipeline.join()


def test_join_needs_a_file() -> None:
    with pytest.raises(ConfigError, match="rendezvous=FILE"):
        dynmo.init(device="cpu", join=True)
