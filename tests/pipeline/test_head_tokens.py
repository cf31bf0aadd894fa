"""The output layer and the loss in pieces, on several ranks: the bits of one rank."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.combinations import mostly_matrix
from tests.models.huggingface.saved_models import save
from tests.pool import Pool
from tests.train.hugging_face_jobs import prepare

TWO_GROUPS = {"reduction_slots": 2}
CLIPPED = {"max_grad_norm": 0.05}  # each step is, so post-validation takes each back


def config(ranks: int, schedule: str, **sections: Any) -> dict[str, Any]:
    """Four microbatches of 2 x 16 tokens, in pieces of 2 x 5. The last piece is shorter."""
    given: dict[str, dict[str, Any]] = {
        "model": {"blocks": 2, "hidden": 16, "heads": 2, "sequence": 16},
        "train": {"steps": 3, "global_batch": 8, "micro_batch": 2, "head_tokens": 10},
        "parallel": {"pipeline": ranks},
        "pipeline": {"schedule": schedule},
        "trace": {"steps": 0},
    }
    for name, options in sections.items():
        given[name] = given[name] | options
    return given


def result(pool: Pool, ranks: int, config: dict[str, Any]) -> tuple[list[float], str]:
    first, *others = pool.run("train", ranks, config=config)
    assert {told["digest"] for told in others} <= {first["digest"]}
    return first["losses"], first["digest"]


@cache
def alone(pool: Pool, **train: Any) -> tuple[list[float], str]:
    return result(pool, 1, config(1, "1f1b", train=train))


@pytest.mark.parametrize("schedule", mostly_matrix(["1f1b", "zb-h1", "zb-v"], ["zb-v"]))
def test_two_ranks_have_the_bits_of_one(pool: Pool, schedule: str) -> None:
    assert result(pool, 2, config(2, schedule)) == alone(pool)


def test_pieces_change_the_bits_alone(pool: Pool) -> None:
    """So the other tests compare pieces with pieces."""
    whole = result(pool, 1, config(1, "1f1b", train={"head_tokens": 32}))
    assert alone(pool)[1] != whole[1]
    assert alone(pool)[0] == pytest.approx(whole[0], rel=1e-5)


@pytest.mark.parametrize("pipeline", mostly_matrix([1, 2], [2]))
def test_replicas_have_the_bits_of_one_rank(pool: Pool, pipeline: int) -> None:
    replicas = config(pipeline, "zb-h1", train=TWO_GROUPS, parallel={"replicas": 2})
    assert result(pool, 2 * pipeline, replicas) == alone(pool, **TWO_GROUPS)


@pytest.mark.parametrize("schedule", mostly_matrix(["zb-h1", "zb-v"], ["zb-h1"]))
def test_steps_that_are_taken_back_have_the_same_bits(pool: Pool, schedule: str) -> None:
    late = config(2, schedule, train=CLIPPED, pipeline={"post_validation": True})
    assert result(pool, 2, late) == alone(pool, **CLIPPED)


def check_two_ranks(pool: Pool, **model: Any) -> None:
    one, two = (config(ranks, "zb-h1") for ranks in (1, 2))
    assert result(pool, 1, one | {"model": model}) == result(pool, 2, two | {"model": model})


def test_tied_weights_have_the_bits_of_one_rank(pool: Pool) -> None:
    check_two_ranks(pool, **config(1, "1f1b")["model"], tied=True)


@pytest.mark.parametrize("tied", mostly_matrix([False, True], [True]))
def test_models_of_transformers_have_the_bits_of_one_rank(
    pool: Pool, tmp_path: Path, tied: bool
) -> None:
    prepare(pool)
    save("llama", tmp_path, torch.float32, vocab_size=256, tie_word_embeddings=tied)
    check_two_ranks(pool, kind="hf", path=str(tmp_path), sequence=16)
