"""Low precision, loss scaling and recompute.

All ranks and schedules give one digest. The loss is close to that of float32.
`test_equality_drawn.py` draws precision, recompute and pruning together.
"""

from __future__ import annotations

from functools import cache
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

from dynmo.schedule.catalogue import SCHEDULES
from tests.combinations import mostly_matrix
from tests.equality import BALANCERS, deeper, fields_of, resumed, run, same
from tests.pool import JobFailed, Pool


def wanted(
    ranks: int, schedule: str, precision: str, recompute: str | list[int] = "none", **train: Any
) -> dict[str, Any]:
    """Layers move at every step, the front freezes and gradients are clipped."""
    config = deeper(ranks, schedule, BALANCERS["random" if ranks > 1 else "none"], freezing=True)
    config["train"] |= {"precision": precision, "recompute": recompute, "steps": 5, **train}
    return config


@cache
def _reference(pool: Pool, precision: str) -> dict[str, Any]:
    return run(pool, wanted(1, "1f1b", precision))[0]


@pytest.mark.parametrize(
    ("ranks", "schedule"), mostly_matrix(zip(cycle([2, 3, 4]), SCHEDULES), everyday=[(3, "1f1b")])
)  # a processor may multiply bfloat16 very slowly
def test_bfloat16_has_the_same_digest_on_any_ranks(pool: Pool, ranks: int, schedule: str) -> None:
    """With an odd number of ranks all layers recompute. Otherwise three layers do."""
    results = run(pool, wanted(ranks, schedule, "bfloat16", [[1, 4, 7], "all"][ranks % 2]))
    same(results, _reference(pool, "bfloat16"), moving=True)


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_low_precision_loss_is_close_to_float32(pool: Pool, precision: str) -> None:
    """The loss is within 1 %, but not equal."""
    low, wide = (_reference(pool, name) for name in (precision, "float32"))
    assert low["losses"] == pytest.approx(wide["losses"], rel=1e-2)
    assert low["losses"] != wide["losses"]
    assert low["digest"] != wide["digest"]


def overflowing(ranks: int, afterwards: bool = False, **sections: Any) -> dict[str, Any]:
    """The scale doubles after every good step, until float16 overflows."""
    config = wanted(ranks, "zb-h1", "float16", steps=12, loss_scale_window=1, reduction_slots=2)
    config["train"] |= {"global_batch": 4}
    config["pipeline"]["post_validation"] = afterwards
    config["parallel"] |= sections
    return config


def test_overflow_skips_the_step_on_every_rank(pool: Pool) -> None:
    """Two ranks without a barrier take the step back first.

    The next step's B starts from the scale that the verdict leaves.
    """
    (told,) = run(pool, overflowing(1), "events")
    skipped = fields_of(told, "skipped", "step", "loss_scale", "next_scale")
    assert skipped, "nothing overflowed"
    assert all(after == before / 2 for _, before, after in skipped)
    assert skipped[0][1] == 2.0 ** (16 + skipped[0][0])
    steps = fields_of(told, "step", "step", "gradient_norm", "loss")
    assert len(steps) == 12
    assert [step for step, norm, _ in steps if norm is None] == [step for step, *_ in skipped]
    assert steps[-1][2] < steps[0][2]
    later = run(pool, overflowing(2, afterwards=True), "events")[0]
    assert fields_of(later, "skipped", "step", "loss_scale", "next_scale") == skipped
    assert fields_of(later, "end", "weights_digest") == fields_of(told, "end", "weights_digest")


@pytest.mark.matrix
def test_replicas_skip_the_same_steps(pool: Pool) -> None:
    """Replicas with ZeRO-1 skip the same steps as one process, also without a barrier."""
    told = [
        run(pool, config, "events")[0]
        for config in (
            overflowing(1),
            overflowing(1, replicas=2, zero=1),
            overflowing(2, afterwards=True, replicas=2, zero=1),
        )
    ]
    skipped = [fields_of(events, "skipped", "step", "loss_scale") for events in told]
    assert skipped[0], "nothing overflowed"
    assert skipped == skipped[:1] * 3
    assert len({events[-1]["weights_digest"] for events in told}) == 1


def test_frozen_layer_may_have_its_masters_on_one_replica(pool: Pool, tmp_path: Path) -> None:
    """With ZeRO-1 one replica holds the embedding's master, and both compute the digest."""
    config: dict[str, Any] = {
        "model": {"blocks": 1, "hidden": 8, "heads": 2, "sequence": 8},
        "train": {"steps": 4, "global_batch": 4, "micro_batch": 1, "precision": "bfloat16"},
        "parallel": {"replicas": 2, "zero": 1},
        "dynamism": {"cases": ["freezing"], "freezing": {"schedule": [[1, 1]]}},
    }
    config["train"]["reduction_slots"] = 2
    expected = run(pool, config | {"parallel": {}})[0]
    ended = resumed(pool, tmp_path, config, config, stop_after=1)
    assert {result["weights_digest"] for result in ended} == {expected["digest"]}


@pytest.mark.matrix
def test_loss_scale_continues_after_a_restart(pool: Pool, tmp_path: Path) -> None:
    """The run stops while the loss scale changes and resumes on other ranks."""
    expected = run(pool, overflowing(1))[0]
    ended = resumed(pool, tmp_path, overflowing(2), overflowing(3), stop_after=6)[0]
    assert (ended["weights_digest"], ended["loss"]) == (expected["digest"], expected["loss"])


def test_resume_with_another_precision_is_refused(pool: Pool, tmp_path: Path) -> None:
    config = wanted(1, "1f1b", "bfloat16", steps=1) | {"checkpoint": {"every": 1}}
    config["dynamism"] = {}
    run(pool, config, "train_in", folder=str(tmp_path))
    config["train"] |= {"precision": "float32", "steps": 2}
    with pytest.raises(JobFailed, match=r"CheckpointError: .* bfloat16 .* train.precision"):
        run(pool, config, "train_in", folder=str(tmp_path), resume=True)


def test_fixed_loss_scale_that_overflows_fails(pool: Pool) -> None:
    with pytest.raises(JobFailed, match=r"NotFiniteError: .* in 2 steps in a row .* loss_scale"):
        run(pool, wanted(1, "1f1b", "float16", loss_scale=2.0**40, stop_after=2))
