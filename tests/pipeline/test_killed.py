"""A loop over a streamed, shuffled dataset that is killed again and again."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.cli.runs import free_port
from tests.models.huggingface.saved_models import folder_of
from tests.pipeline.loading import COUNT, HELD_OUT, records

STEPS, KILLS = 20, 4


def start(
    folder: Path, attempt: int, ranks: int, kill: tuple[int, ...]
) -> list[subprocess.Popen[bytes]]:
    port = str(free_port())
    return [
        subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tests.pipeline.killed_loop",
                str(folder_of("llama", vocab_size=256)),
                f"hf:{folder}/rows",
                str(folder / "saved"),
                str(STEPS),
                str(folder / f"journal-{attempt}"),
                *map(str, kill),
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
def test_each_sample_comes_once_in_the_steps_of_a_killed_run(tmp_path: Path) -> None:
    """Two replicas and three take turns."""
    draws = random.Random(42)
    (tmp_path / "rows").mkdir()
    rows = "\n".join(json.dumps(row) for row in records())
    (tmp_path / "rows" / "data.jsonl").write_text(rows)
    done: dict[int, list[int]] = {}
    begun = list[int]()
    for attempt in range(KILLS + 1):
        kill = (draws.randint(3, 6), draws.randint(1, 300)) if attempt < KILLS else ()
        ranks = start(tmp_path, attempt, 2 + attempt % 2, kill)
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
