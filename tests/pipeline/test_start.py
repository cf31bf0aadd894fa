"""`dynmo.init` in a program that has process groups of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from dynmo.errors import ConfigError
from dynmo.pipeline.start import init

ROOT = Path(__file__).parents[2]


def test_process_groups_meshes_and_the_default_group_train_the_same() -> None:
    script = ROOT / "tests" / "pipeline" / "adopting.py"
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4", str(script)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    rows = re.findall(r"(\w+) (\d) of (\d): (\w{64})", done.stdout)
    of = {where: [(rank, digest) for place, rank, _, digest in sorted(rows) if place == where] for where in ("middle", "mesh", "all")}
    assert [[rank for rank, _ in of[where]] for where in of] == [["0", "1"], ["0", "1", "2", "3"], ["0", "1", "2", "3"]]
    assert len({digest for _, digest in of["middle"] + of["all"]}) == 1
    assert len({digest for _, digest in of["mesh"]}) == 1
    assert done.stdout.count("a process group that it is not in") == 2
    # The program's own group outlives dynmo's worlds.
    assert done.stdout.count("total 4") == 4


def test_a_group_needs_torch_distributed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    with pytest.raises(ConfigError, match=r"torch\.distributed is not initialized"):
        init(dist.group.WORLD or object(), device="cpu")  # type: ignore[arg-type]
