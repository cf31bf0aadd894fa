"""The compute model of early exit and mixture of depths, and the limit of speed that follows."""

from __future__ import annotations

import pytest

from benchmarks.exit_thresholds import BLOCKS, EXITS, limit
from benchmarks.learning import RUNS, compute_of, step_flops
from benchmarks.quality import config_of
from dynmo.change_events import TokensEvent
from dynmo.models.gpt import feed_forward_size

STEPS = 20


def test_dense_compute_matches_the_flop_formula() -> None:
    """6 FLOPs per weight and token, and attention over half of the pairs."""
    config = config_of(STEPS, 0, {}, 1, 1, 64)
    weights = 4 * (4 * 64**2 + 3 * 64 * feed_forward_size(64)) + 256 * 64
    assert step_flops(config, ()) == 6 * weights + 4 * 3 * 2 * 128 * 64


def test_exit_shares_change_the_compute() -> None:
    exits = config_of(STEPS, 0, RUNS["tokens"]["early exit, ADP-C 0.9"][0], 1, 1, 64)
    dense = step_flops(config_of(STEPS, 0, {}, 1, 1, 64), ())
    kept, gone = step_flops(exits, [0.0, 0.0]), step_flops(exits, [1.0, 0.0])
    assert kept == dense + 2 * 3 * 2 * 256 * 64, "two heads more"
    assert gone < 0.75 * kept
    records = [TokensEvent(10, "early_exit", (5, 8), {"exited": [1.0, 0.0]})]
    compute = compute_of(exits, records)
    start = exits.dynamism.early_exit.start_of(STEPS)
    assert compute[start - 1] == pytest.approx(start * kept / dense)
    assert compute[-1] == pytest.approx((start * kept + (STEPS - start) * gone) / dense)
    routed = config_of(STEPS, 0, RUNS["tokens"]["depths, 12.5 %, mlp"][0], 1, 1, 64)
    assert 0.5 < step_flops(routed, ()) / dense < 0.7


def test_expert_flops_match_the_formula() -> None:
    one, two = (
        config_of(STEPS, 0, RUNS["experts"][f"experts, {k} of 8, loss"][0], 1, 1, 64, model)
        for k in (1, 2)
        for model in [{"kind": "moe", "top_k": k}]
    )
    dense = step_flops(config_of(STEPS, 0, {}, 1, 1, 64), ())
    assert step_flops(one, ()) == dense + 4 * 6 * 8 * 64, "four routers"
    assert step_flops(two, ()) - step_flops(one, ()) == 4 * 6 * 3 * 64 * feed_forward_size(64)


def test_speed_limit_follows_the_exit_shares() -> None:
    case = {"cases": ["early_exit"], "early_exit": {"exits": list(EXITS)}}
    config = config_of(10, 0, case, 1, 1, 64, {"blocks": BLOCKS})
    assert limit(config, [0.0, 0.0]) < 1, "exits alone cost"
    shares = [limit(config, [share, 0.0]) for share in (0.2, 0.5, 1.0)]
    assert shares == sorted(shares)
    # Keys and values of five of eight blocks remain.
    assert shares[-1] == pytest.approx(1.75, abs=0.5)
