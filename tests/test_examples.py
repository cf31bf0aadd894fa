"""Examples end with one digest alone, on several ranks, and from a file."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
LOOP = ROOT / "examples" / "two_cases.py"


def run(folder: Path, *command: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_loop_with_two_cases_gives_one_digest_on_any_ranks_and_from_a_file(tmp_path: Path) -> None:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4")
    alone, spread = run(tmp_path, str(LOOP)), run(tmp_path, *launcher, str(LOOP), "2")
    (digest,) = {*re.findall(r"weights (\w{64})", alone + spread)}
    assert len(re.findall(digest, spread)) == 4
    config = str(LOOP.with_suffix(".toml"))
    from_file = json.loads(run(tmp_path, "-m", "dynmo", "train", config, "--json"))
    assert from_file["weights_digest"] == digest
    assert len(LOOP.read_text().splitlines()) <= 35


def test_ranks_leave_and_come_back_in_a_loop(tmp_path: Path) -> None:
    """4 ranks, 2, and 4 again end with the bits of one rank."""
    loop = ROOT / "examples" / "elastic_loop.py"
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4")
    alone, spread = run(tmp_path, str(loop)), run(tmp_path, *launcher, str(loop))
    (digest,) = {*re.findall(r"weights (\w{64})", alone + spread)}
    assert len(re.findall(digest, spread)) == 4
    sizes = {int(step): size for step, size in re.findall(r"step (\d+): rank 0 of (\d)", spread)}
    assert sizes == {step: "2" if 4 <= step < 8 else "4" for step in range(12)}
