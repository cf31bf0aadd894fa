"""A process joins a training loop of its user's own."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from torch import nn

import dynmo
from dynmo.errors import ConfigError, RunError
from dynmo.runtime.comm.meeting import Meeting
from tests.cli.runs import free_port
from tests.jobs import script
from tests.pool import Pool
from tests.processes import wait_until
from tests.runtime import alone

LOOP = str(Path(__file__).with_name("joining.py"))


def loop(world: Meeting, file: str, port: str) -> str:
    """The loop on ranks 0 and 1. The third process finds them through the file and joins."""
    if world.rank < 2:
        return script(world, LOOP, port, [file], size=2)
    wait_until(Path(file).exists)
    assert Path(file).stat().st_mode & 0o777 == 0o600
    return script(world, LOOP, port, [file, "join"], size=1)


def test_new_process_joins_a_loop_and_gets_its_bits(pool: Pool, tmp_path: Path) -> None:
    file = tmp_path / "rendezvous.json"
    *said, joined = pool.run(
        "tests.pipeline.test_joining:loop", 3, file=str(file), port=free_port()
    )
    (expected,) = pool.run("script", 1, path=LOOP, port=free_port())
    (digest,) = {*re.findall(r"weights (\w{64})", "".join([expected, *said, joined]))}
    assert f"rank 2 of 3: weights {digest}" in joined
    assert all(digest in text for text in said)
    # The first step of all three ranks, the last one, and the last one of two.
    events = json.loads(Path(f"{file}.trace").read_text())["traceEvents"]
    passes = [e for e in events if e.get("cat") in ("F", "BW", "planned F", "planned BW")]
    assert all(e["ts"] >= 0 for e in passes)
    ranks = {step: set[int]() for step in (2, 3, 5)}
    for e in passes:
        ranks[e["args"]["step"]].add(e["tid"])
    assert [len(found) for found in ranks.values()] == [4, 6, 6], "measured and planned"


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
