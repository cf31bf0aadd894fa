"""Tokens that a run reads: bytes of a file, or the same as token ids."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dynmo.config import parse
from dynmo.errors import ConfigError
from dynmo.train.setup import plan_run
from tests.data.test_corpus import write
from tests.pool import Pool

TEXT = b"the quick brown fox jumps over the lazy dog\n" * 20


def settings(source: str, vocab: int = 256) -> dict[str, Any]:
    model = {"blocks": 2, "hidden": 16, "heads": 2, "sequence": 16, "vocab": vocab}
    train = {"steps": 2, "global_batch": 4, "micro_batch": 2}
    return {"name": "run", "data": {"source": source}, "model": model, "train": train}


def test_token_ids_train_like_the_bytes_that_they_are(pool: Pool, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(TEXT)
    tokens = write(tmp_path / "a.bin", np.frombuffer(TEXT, np.uint8).tolist(), vocab=256)
    found: list[str] = []
    for source, ranks in ((f"file:{tmp_path}/a.txt", 1), (f"tokens:{tokens}", 2)):
        config = settings(source) | {"parallel": {"pipeline": ranks}}
        told = pool.run("train_in", ranks, config=config, folder=str(tmp_path))
        found.append(told[0]["weights_digest"])
    assert found[0] == found[1]


def test_model_with_fewer_tokens_is_refused(tmp_path: Path) -> None:
    tokens = write(tmp_path / "a.bin", [1] * 200, vocab=65)
    plan_run(parse(settings(f"tokens:{tokens}", vocab=65)))
    with pytest.raises(ConfigError, match="its tokens go up to 64, and the model has 64"):
        plan_run(parse(settings(f"tokens:{tokens}", vocab=64)))
