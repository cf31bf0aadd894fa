"""Low precision, loss scaling and recompute.

All ranks and schedules give one digest. The loss is close to that of float32.
"""

from __future__ import annotations

from functools import cache
from itertools import cycle, pairwise
from pathlib import Path
from typing import Any

import pytest

from dynmo.schedule.catalogue import SCHEDULES
from tests.combinations import mostly_matrix
from tests.equality import BALANCERS, deeper, pruned
from tests.pool import JobFailed, Pool


def wanted(
    ranks: int, schedule: str, precision: str, recompute: str | list[int] = "none", **train: Any
) -> dict[str, Any]:
    """Layers move at every step, the front freezes and gradients are clipped.

    Dropout is on.
    """
    config = deeper(ranks, schedule, BALANCERS["random" if ranks > 1 else "none"], freezing=True)
    config["train"] |= {"precision": precision, "recompute": recompute, "steps": 5, **train}
    return config


@cache
def _reference(pool: Pool, precision: str) -> dict[str, Any]:
    return pool.run("train", 1, config=wanted(1, "1f1b", precision))[0]


@pytest.mark.parametrize(
    ("ranks", "schedule"),
    mostly_matrix(
        zip(cycle([2, 3, 4]), SCHEDULES),
        everyday=[(3, "1f1b")],
    ),
)  # a processor may multiply bfloat16 very slowly
def test_bfloat16_has_the_same_digest_on_any_ranks(pool: Pool, ranks: int, schedule: str) -> None:
    """With an odd number of ranks all layers recompute. Otherwise three layers do."""
    expected = _reference(pool, "bfloat16")
    results = pool.run(
        "train", ranks, config=wanted(ranks, schedule, "bfloat16", [[1, 4, 7], "all"][ranks % 2])
    )
    assert results[0]["losses"] == expected["losses"]
    assert {r["digest"] for r in results} == {expected["digest"]}
    assert all(a != b for a, b in pairwise(results[0]["layers"])), (
        "the layers did not move at every step"
    )


@pytest.mark.parametrize(
    ("ranks", "schedule"),
    mostly_matrix(
        [(1, "1f1b"), (2, "zb-h2"), (3, "zb-v"), (4, "zb-auto")],
        everyday=[(3, "zb-v")],
    ),
)
def test_recompute_leaves_the_digest_unchanged(pool: Pool, ranks: int, schedule: str) -> None:
    expected = _reference(pool, "float32")
    results = pool.run("train", ranks, config=wanted(ranks, schedule, "float32", "all"))
    assert results[0]["losses"] == expected["losses"]
    assert {r["digest"] for r in results} == {expected["digest"]}


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_low_precision_loss_is_close_to_float32(pool: Pool, precision: str) -> None:
    """The loss is within 1 %, but not equal."""
    low, wide = (_reference(pool, name) for name in (precision, "float32"))
    assert low["losses"] == pytest.approx(wide["losses"], rel=1e-2)
    assert low["losses"] != wide["losses"]
    assert low["digest"] != wide["digest"]


@pytest.mark.parametrize("precision", mostly_matrix(["bfloat16", "float16"], ["float16"]))
def test_pruning_in_low_precision_has_one_digest(pool: Pool, precision: str) -> None:
    """Weights change from masked to CSR form, and their float32 masters move along.

    Some runs recompute all layers.
    """
    digests: set[str] = set()
    for ranks, schedule, recompute in (
        (1, "1f1b", "none"),
        (2, "zb-h1", "all"),
        (3, "zb-h2", "none"),
    ):
        config = pruned(ranks, schedule, BALANCERS["random" if ranks > 1 else "none"])
        config["train"] |= {"precision": precision, "recompute": recompute}
        digests |= {r["digest"] for r in pool.run("train", ranks, config=config)}
    assert len(digests) == 1


@pytest.mark.matrix
@pytest.mark.parametrize("kind", mostly_matrix(["hash", "drop"], everyday=["hash"]))
def test_sparse_attention_in_bfloat16_has_one_digest(pool: Pool, kind: str) -> None:
    """The hash directions are drawn for each step. Recompute in B draws the same ones."""
    results: dict[str, dict[str, Any]] = {}
    for key, ranks, precision, recompute in (
        ("one", 1, "bfloat16", "none"),
        ("two", 2, "bfloat16", "all"),
        ("wide", 1, "float32", "none"),
    ):
        config = wanted(ranks, "zb-h1", precision, recompute)
        config["dynamism"] = {
            "cases": ["sparse_attention"],
            "sparse_attention": {"kind": kind, "buckets": 4, "start": 1},
        }
        results[key] = pool.run("train", ranks, config=config)[0]
    assert results["one"]["digest"] == results["two"]["digest"]
    assert results["one"]["losses"] == pytest.approx(results["wide"]["losses"], rel=1e-2)


def test_overflow_skips_the_step_on_every_rank(pool: Pool) -> None:
    """The scale doubles after every good step, until float16 overflows."""
    alone = wanted(1, "zb-h1", "float16", steps=12, loss_scale_window=1)
    (told,) = pool.run("events", 1, config=alone)
    skipped = [e for e in told if e["event"] == "skipped"]
    assert skipped, "nothing overflowed"
    assert all(e["next_scale"] == e["loss_scale"] / 2 for e in skipped)
    first = skipped[0]
    assert first["loss_scale"] == 2.0 ** (16 + first["step"])
    steps = [e for e in told if e["event"] == "step"]
    assert len(steps) == 12
    assert [e["step"] for e in steps if e["gradient_norm"] is None] == [e["step"] for e in skipped]
    assert steps[-1]["loss"] < steps[0]["loss"]
    # Two ranks without a barrier: the step is taken back first, and the next one's B starts from
    # the scale that the verdict leaves.
    later = wanted(2, "zb-h1", "float16", steps=12, loss_scale_window=1)
    later["pipeline"]["post_validation"] = True
    resumed = pool.run("events", 2, config=later)[0]
    assert [(e["step"], e["loss_scale"]) for e in resumed if e["event"] == "skipped"] == [
        (e["step"], e["loss_scale"]) for e in skipped
    ]
    assert resumed[-1]["weights_digest"] == told[-1]["weights_digest"]


@pytest.mark.matrix
def test_replicas_skip_the_same_steps(pool: Pool) -> None:
    """Replicas with ZeRO-1 skip the same steps as one process, also without a barrier.

    Both have the same number of reduction slots.
    """
    results: dict[tuple[int, int, bool], tuple[list[tuple[int, float]], str]] = {}
    for pipeline, data, later in ((1, 1, False), (1, 2, False), (2, 2, True)):
        config = wanted(
            pipeline, "zb-h1", "float16", steps=12, loss_scale_window=1, reduction_slots=2
        )
        config["parallel"] |= {"replicas": data, "zero": int(data > 1)}
        config["pipeline"]["post_validation"] = later
        told = pool.run("events", pipeline * data, config=config)[0]
        skipped = [(e["step"], e["loss_scale"]) for e in told if e["event"] == "skipped"]
        results[pipeline, data, later] = skipped, told[-1]["weights_digest"]
    assert results[1, 1, False][0], "nothing overflowed"
    assert len({str(what) for what in results.values()}) == 1, results


def test_frozen_layer_may_have_its_masters_on_one_replica(pool: Pool, tmp_path: Path) -> None:
    """With ZeRO-1 one replica holds the embedding's master, and both compute the digest."""
    config: dict[str, Any] = {
        "model": {"blocks": 1, "hidden": 8, "heads": 2, "sequence": 8},
        "train": {
            "steps": 4,
            "global_batch": 4,
            "micro_batch": 1,
            "precision": "bfloat16",
            "reduction_slots": 2,
        },
        "dynamism": {"cases": ["freezing"], "freezing": {"schedule": [[1, 1]]}},
        "checkpoint": {"every": 100},
    }
    expected = pool.run("train", 1, config=config)[0]
    config["parallel"] = {"replicas": 2, "zero": 1}
    for resume in (False, True):
        ended = pool.run(
            "train_in",
            2,
            config=config,
            folder=str(tmp_path),
            resume=resume,
            stop_after=None if resume else 1,
        )[0]
    assert ended["weights_digest"] == expected["digest"]


@pytest.mark.matrix
def test_loss_scale_continues_after_a_restart(pool: Pool, tmp_path: Path) -> None:
    """The run stops while the loss scale changes and resumes on other ranks.

    The result is that of an uninterrupted run.
    """
    expected = pool.run(
        "train", 1, config=wanted(1, "1f1b", "float16", steps=10, loss_scale_window=1)
    )[0]
    for ranks, schedule, resume in ((2, "zb-h1", False), (3, "1f1b", True)):
        config = wanted(ranks, schedule, "float16", steps=10, loss_scale_window=1) | {
            "checkpoint": {"every": 100}
        }
        ended = pool.run(
            "train_in",
            ranks,
            config=config,
            folder=str(tmp_path),
            resume=resume,
            stop_after=None if resume else 6,
        )[0]
        assert ended["interrupted"] is not resume
    assert ended["weights_digest"] == expected["digest"]
    assert ended["loss"] == expected["loss"]


def test_resume_with_another_precision_is_refused(pool: Pool, tmp_path: Path) -> None:
    config = wanted(1, "1f1b", "bfloat16", steps=3) | {"checkpoint": {"every": 1}}
    pool.run("train_in", 1, config=config, folder=str(tmp_path))
    config["train"] |= {"precision": "float32", "steps": 4}
    with pytest.raises(JobFailed, match=r"CheckpointError: .* bfloat16 .* train.precision"):
        pool.run("train_in", 1, config=config, folder=str(tmp_path), resume=True)


def test_fixed_loss_scale_that_overflows_fails(pool: Pool) -> None:
    with pytest.raises(JobFailed, match=r"RunError: .* train.loss_scale"):
        pool.run("train", 1, config=wanted(1, "1f1b", "float16", loss_scale=2.0**40))
