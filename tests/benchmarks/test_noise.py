"""Replays with varying op times and slow links."""

import pytest

from benchmarks.noise import CALM, Disturbance, Replay
from dynmo.cost.layer_cost import Costs, StageCost, split_costs, uniform_costs
from dynmo.schedule.catalogue import make, stage_ranks_of
from dynmo.schedule.simulator import simulate


def replay(name: str, node: int = 2, chunks: int = 1) -> tuple[Replay, float]:
    placement = stage_ranks_of(name, 4, chunks)
    costs = split_costs(uniform_costs(4, 3, 4, 2, 0.5), placement)
    schedule = make(name, 4, 8, chunks=chunks)
    return Replay(schedule, costs, node), simulate(schedule, costs).span


@pytest.mark.parametrize(("name", "chunks"), [("1f1b", 1), ("zb-h1", 1), ("interleaved-1f1b", 2)])
def test_a_calm_replay_is_the_simulator(name, chunks):
    plain, span = replay(name, chunks=chunks)
    assert plain.span() == pytest.approx(span)
    assert plain.span(CALM, draws=3) == pytest.approx(span)


def test_disturbances_make_a_step_longer():
    plain, span = replay("zb-h1")
    assert plain.span(Disturbance(spread=0.3), 20) > span
    assert plain.span(Disturbance(delay=0.1), 20) > span
    assert plain.span(Disturbance(spread=0.3), 20) == plain.span(Disturbance(spread=0.3), 20)


def test_only_links_between_nodes_are_slower():
    plain, span = replay("1f1b", node=4)
    assert plain.span(Disturbance(slower_links=9)) == pytest.approx(span)
    plain, span = replay("1f1b", node=2)
    # One boundary lies between nodes. The first microbatch crosses it twice, and 1F1B waits again
    # for every microbatch that follows.
    assert plain.span(Disturbance(slower_links=9)) >= span + 2 * 8 * 0.5


def test_a_busy_receiver_works_longer_instead_of_waiting_for_a_link():
    plain, _ = replay("zb-h1")
    stages = [StageCost(3 + 0.5 * (r > 0), 4 + 0.5 * (r < 3), 2) for r in range(4)]
    costs = Costs(tuple(stages), (0.0,) * 3)
    span = simulate(make("zb-h1", 4, 8), costs).span
    assert plain.span(Disturbance(busy=True)) == pytest.approx(span)
