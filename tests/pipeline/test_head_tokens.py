"""The last layer in pieces, on several ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.models.huggingface.saved_models import save
from tests.pipeline.head_pieces import WORDS
from tests.pool import Pool

JOB = "tests.pipeline.head_pieces:train"


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (2, {"schedule": "zb-h1"}),
        (3, {"schedule": "zb-v"}),
        (2, {"schedule": "zb-auto", "w_granularity": "linear", "recompute": "all"}),
        (4, {"schedule": "zb-h1", "replicas": 2, "zero": 1}),
        (2, {"schedule": "zb-h1", "post_validation": True}),
    ],
)
def test_any_ranks_have_the_bits_of_one(pool: Pool, ranks: int, options: dict[str, Any]) -> None:
    """Each step clips, so post-validation takes each back."""
    (alone,) = pool.run(JOB, 1, max_grad_norm=0.05)
    assert pool.run(JOB, ranks, max_grad_norm=0.05, **options) == [alone] * ranks


def test_model_of_transformers_has_one_digest(pool: Pool, tmp_path: Path) -> None:
    save("llama", tmp_path, vocab_size=WORDS, tie_word_embeddings=True)
    (alone,) = pool.run(JOB, 1, folder=str(tmp_path))
    for schedule in ("zb-h1", "zb-v"):
        assert pool.run(JOB, 2, folder=str(tmp_path), schedule=schedule) == [alone] * 2
