"""A loop over a streamed, shuffled dataset that is killed again and again."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.cli.runs import free_port
from tests.pipeline.loading import COUNT, HELD_OUT, records

STEPS, KILLS = 40, 10


def start(folder: Path, model: Path, attempt: int, ranks: int) -> list[subprocess.Popen[bytes]]:
    port = str(free_port())
    return [
        subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tests.pipeline.killed_loop",
                str(model),
                f"hf:{folder}/rows",
                str(folder / "saved"),
                str(STEPS),
                str(folder / f"journal-{attempt}"),
            ],
            env=os.environ
            | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
            | {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)},
        )
        for rank in range(ranks)
    ]


def journal(folder: Path, attempt: int) -> dict[int, list[int]]:
    """The numbers of the samples of each step that an attempt began."""
    steps: dict[int, list[int]] = {}
    for path in folder.glob(f"journal-{attempt}-*"):
        # A kill may cut the last line off.
        for line in path.read_text().split("\n")[:-1]:
            row = json.loads(line)
            steps.setdefault(row["step"], []).extend(row["numbers"])
    return steps


@pytest.mark.matrix
@pytest.mark.timeout(1200)
def test_each_sample_comes_once_in_the_steps_of_a_killed_run(
    small_llama: Path, tmp_path: Path
) -> None:
    """Two replicas and three take turns."""
    draws = random.Random(42)
    (tmp_path / "rows").mkdir()
    rows = "\n".join(json.dumps(row) for row in records())
    (tmp_path / "rows" / "data.jsonl").write_text(rows)
    done: dict[int, list[int]] = {}
    begun = list[int]()
    for attempt in range(KILLS + 1):
        ranks = start(tmp_path, small_llama, attempt, 2 + attempt % 2)
        if attempt < KILLS:
            wanted, pause = draws.randint(1, 7), draws.uniform(0, 0.3)
            while len(journal(tmp_path, attempt)) < wanted:
                assert all(rank.poll() is None for rank in ranks)
                time.sleep(0.05)
            time.sleep(pause)
            for rank in ranks:
                rank.kill()
        for rank in ranks:
            assert (rank.wait(timeout=120) == 0) == (attempt == KILLS)
        steps = journal(tmp_path, attempt)
        begun.append(min(steps))
        # Later attempts have done these steps again.
        done = {step: numbers for step, numbers in done.items() if step < begun[-1]} | steps
    assert sorted(done) == list(range(STEPS))
    assert begun == sorted(begun)
    assert begun[-1] > 0
    counts = Counter(number for numbers in done.values() for number in numbers)
    assert STEPS * 12 % (COUNT - HELD_OUT) == 0
    passes = STEPS * 12 // (COUNT - HELD_OUT)
    assert counts == dict.fromkeys(range(HELD_OUT, COUNT), passes)
