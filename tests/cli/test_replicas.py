"""`dynmo train` with replicas, as processes.

A rank that is killed is named, and nobody is left waiting.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from tests.processes import gone, ranks, start, wait_until

CONFIG = """
name = "main"
[model]
kind = "emulated"
layers = 8
f = 0.001
b = 0.001
w = 0.001
sequence = 16
bytes = 1024
[data]
source = "file:text"
[train]
steps = 100000
global_batch = 8
micro_batch = 1
lr = 1e-2
[parallel]
pipeline = 2
data = 2
zero = 1
timeout = 60.0
[balance]
balancer = "none"
"""


def test_a_rank_of_another_replica_dies(tmp_path: Path) -> None:
    """The message names the failed rank by its global rank.

    The others wait for it in pipelines and reductions. Their own messages do not count.
    """
    work = tmp_path
    (work / "text").write_bytes(bytes(range(256)) * 40)
    (work / "run.toml").write_text(CONFIG)
    process = start([sys.executable, "-m", "dynmo", "train", "run.toml", "--json"], work)
    log = work / "runs/main/events.jsonl"
    wait_until(lambda: log.exists() and log.read_text().count("step") > 2, 200)
    os.kill(ranks(work)[3], signal.SIGKILL)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 1
    assert error.splitlines()[-1] == "dynmo: rank 3 was ended by SIGKILL; out of memory?"
    assert gone(work)
