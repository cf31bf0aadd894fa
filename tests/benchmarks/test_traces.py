"""The benchmark of the cost traces on small sizes.

The tests check assumptions about the traces, and the published figures.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.cost_traces import CASES, dense, in_blocks, pruned, timeline, trace
from benchmarks.traces import row
from benchmarks.traces_stepwise import CASES as STEPWISE
from benchmarks.traces_stepwise import Placements, pilot
from benchmarks.traces_stepwise import row as stepwise_row
from tests.pool import Pool

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("blocks", [24, 48])
def test_recovered_densities_match_the_trace(blocks: int) -> None:
    """Sparse kernels are faster from a sparsity of 75 %.

    The W of a half takes its dense time multiplied by density / 0.25, and at most the dense time.
    """
    densities = pruned(blocks, 2048, 1, 24)
    for moment, layers in enumerate(trace("pruning", blocks, 2048)):
        for layer, (cost, whole) in enumerate(zip(layers, dense(blocks, 2048), strict=True)):
            share = min(1.0, densities[moment][layer] / 0.25)
            assert cost.w == pytest.approx(whole.w * share, abs=2e-5)
        left = sum(x.parameters for x in layers) / sum(x.parameters for x in dense(blocks, 2048))
        assert left == pytest.approx(1 - (0.0, 0.52, 0.79, 0.90)[moment // 6], abs=1e-6)


@pytest.mark.parametrize(("case", "sequence"), CASES)
def test_dense_block_costs_match_the_trace(case: str, sequence: int) -> None:
    block = in_blocks(dense(24, sequence))[-1]
    if case != "sparse_attention":  # some moment has a block that trains and is not pruned
        first = in_blocks(trace(case, 24, sequence)[0])[-1]
        assert (first.f, first.b, first.w) == pytest.approx((block.f, block.b, block.w), abs=3e-5)
    assert block.f == pytest.approx(1.0)
    for layers in trace(case, 24, sequence):
        assert all(x.f <= block.f + 3e-5 for x in in_blocks(layers))


@pytest.mark.parametrize(("case", "sequence"), CASES)
def test_dynmo_is_near_optimal_and_beats_the_baselines(case: str, sequence: int) -> None:
    result = row(case, sequence, 32, 16, stride=12)
    gain = result["gain"]
    assert result["share_of_optimum"] >= 0.98
    others = ("uniform", "parameters, static", "partition, time", "diffusion, time")
    assert gain["ours"] >= 0.99 * max(gain[name] for name in others)
    blocks, halves = gain["optimum of blocks"], gain["optimum of halves"]
    assert blocks <= halves * (1 + 1e-9) <= gain["perfect"] * (1 + 2e-9)
    assert blocks <= result["bound"]
    assert result["seconds"]["optimum of halves"] >= result["least_of_halves"]


@pytest.mark.parametrize("case", STEPWISE)
def test_pilot_is_drawn_like_the_trace(case: str) -> None:
    for drawn, layers in zip(pilot(case, 32, seed=1), trace(case, 32, 2048), strict=True):
        for ours, theirs in zip(drawn, layers, strict=True):
            assert (ours.f, ours.b, ours.w, ours.parameters) == pytest.approx(
                (theirs.f, theirs.b, theirs.w, theirs.parameters), abs=1e-5
            )


def test_compiled_replay_equals_the_simulator() -> None:
    """The simulator runs the schedule that was made for the costs."""
    on, layers = Placements(24, 16), trace("mixture_of_depths", 24, 2048)[3]
    for placement in (on.even, on.place(layers)):
        seconds = timeline(layers, placement, 32).makespan
        assert on.seconds(layers, placement) == pytest.approx(seconds)


@pytest.mark.parametrize("case", STEPWISE)
def test_small_stepwise_row_is_consistent(case: str) -> None:
    result = stepwise_row(case, 24, 16, steps=2, pilot_steps=4)
    gain = result["gain"]
    assert gain["uniform"] == 1.0
    assert gain["best static"] >= max(gain["uniform"], gain["pilot"])
    assert gain["optimum"] * (1 + 1e-9) >= gain["best static"]
    for name in ("last step", "ours", "from uniform"):
        assert gain["optimum"] * 1.01 >= gain[name]
    assert gain["perfect"] >= gain["optimum"]
    assert 0 <= result["idle"]["balanced"] < result["idle"]["static"] < 1


@pytest.mark.matrix
def test_small_emulated_run_is_no_faster_than_simulated(pool: Pool) -> None:
    """Two ranks run a few long ops at a moment with a frozen prefix."""
    given = {"case": "freezing", "sequence": 2048, "blocks": 24, "moment": 18, "shortest": 0.003}
    given |= {"pairs": 1, "steps": 1, "size": 16, "with_dense": True}
    result = pool.run("benchmarks.traces_emulated:emulated", 2, **given)[0]
    assert result["frozen_layers"] > 0
    assert result["layers"][0] == [24, 24]
    assert result["layers"][1][0] > 24, "the rank that holds the frozen layers takes more"
    measured = (result["uniform_seconds"], result["our_seconds"])
    for ours, simulated in zip(measured, result["simulated_seconds"], strict=True):
        assert ours > 0.98 * simulated, "sleeping cannot be faster"
    assert result["simulated_gain"] > 1.1
    assert result["op_seconds"]["least"] == pytest.approx(0.003)
    assert result["op_seconds"]["least"] <= result["op_seconds"]["median"]
    dense_seconds = 0.98 * result["simulated_dense_seconds"]
    assert result["dense_seconds"] > dense_seconds > result["simulated_seconds"][0]
    assert result["simulated_over_dense"] > 1.3
