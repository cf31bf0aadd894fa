"""Decisions are functions of a record: without ranks, and the same again after it was written."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynmo.config import parse
from dynmo.cost.input_file import Link
from dynmo.cost.layer_cost import Forecast, LayerCost, LinkCost
from dynmo.errors import InputError
from dynmo.plan.decisions import (
    ask_again,
    decide_mesh,
    decide_move,
    decide_ranks,
    decide_schedule,
)
from dynmo.plan.mesh_plan import Mesh
from dynmo.plan.meshes import MeshRule
from dynmo.plan.options import Balance, Elastic
from dynmo.plan.partition import Partition
from dynmo.plan.situation import DecisionRecord, Kind, Situation, read_records
from dynmo.plan.workload import LayerSection, Moment, Policy, Workload, replay
from dynmo.plan.workload import situation as known_at
from dynmo.schedule.bounds import Objective
from dynmo.train.run_log import RunLog
from tests.equality import RANDOM_MOVES

ONE = LayerCost(0.01, 0.01, 0.01, 10, 100, 100, 200, 5, 2, 10)
FROZEN = replace(ONE, b=0.0, w=0.0)
# Six of eight layers no longer train, so rank 0 has a third of rank 1's work.
LAYERS = (FROZEN,) * 4 + (ONE,) * 4
KINDS: tuple[Kind, ...] = ("move", "schedule", "mesh", "ranks")


def situation(**known: object) -> Situation:
    """Two ranks with four layers each, fifty steps before the end."""
    base = Situation(
        step=50,
        end=100,
        layers=LAYERS,
        halves=(LAYERS, LAYERS),
        names=tuple(map(str, range(8))),
        first_trainable=4,
        links=(((0, 1), LinkCost(1e-4, 1e9)),),
        mesh=Mesh(2, 1, 8, 1, "zb-auto"),
        partition=Partition((4, 4)),
        scheduled=LAYERS,
        objective=Objective.MAKESPAN,
        shapes=((2, 1), (1, 2)),
        nodes=("a", "a"),
        there=2,
        most=2,
        elastic=Elastic(repack=True),
    )
    return replace(base, **known)


def of_layers(layers: tuple[LayerCost, ...]) -> dict[str, Any]:
    """What a situation knows of layers that all train, and whose costs do not change."""
    names = tuple(map(str, range(len(layers))))
    known = {"layers": layers, "scheduled": layers, "halves": (layers, layers)}
    return known | {"names": names, "first_trainable": 0}


def test_layers_move_to_the_rank_with_less_work() -> None:
    choice = decide_move(situation())
    assert choice is not None
    assert choice.decision.move
    assert choice.target.counts[0] > 4


@pytest.mark.parametrize("balancer", ["exact", "diffusion"])
def test_layers_move_away_from_a_slow_link(balancer: str) -> None:
    layers, none = (ONE,) * 24, LinkCost(0.0, 1e9)
    known = situation(
        **of_layers(layers),
        links=(((0, 1), none), ((1, 2), LinkCost(0.08, 1e9)), ((2, 3), none)),
        mesh=Mesh(4, 1, 8, 1, "zb-h1"),
        partition=Partition((6, 6, 6, 6)),
        shapes=((4, 1),),
        nodes=("a",) * 4,
        balance=Balance(balancer=balancer),
    )
    choice = decide_move(known)
    assert choice is not None
    assert choice.decision.predicted_gain == pytest.approx(1 - 205 / 214, abs=1e-3)
    assert decide_move(replace(known, links=tuple((pair, none) for pair, _ in known.links))) is None


def test_nothing_moves_without_a_second_reading_or_a_balancer() -> None:
    choice = decide_move(situation(halves=()))
    assert choice is not None
    assert not choice.decision.move
    assert choice.decision.uncertain
    assert decide_move(situation(balance=Balance(balancer="none"))) is None
    assert decide_schedule(situation(halves=()), Partition((4, 4))) is None


def test_a_gain_that_ends_soon_moves_nothing() -> None:
    """A case expects the other half to freeze two steps later."""
    later = Forecast(52, tuple(range(4, 8)), b=0.0, w=0.0)
    choice = decide_move(situation(forecasts=((later,),), balance=Balance(margin=0.0)))
    assert choice is None or not choice.decision.move


def test_mesh_and_ranks_change_if_that_pays() -> None:
    """A reduction over a fast link costs nothing, and a pipeline of one rank has no bubble."""
    fast = (((0, 1), LinkCost(0.0, 1e15)),)
    mesh = decide_mesh(situation(links=fast, accumulation_groups=2))
    assert mesh.mesh is not None
    assert (mesh.mesh.pipeline, mesh.mesh.replicas) == (1, 2)
    # One rank is as fast as two were at first.
    wish = decide_ranks(situation(reference=10.0))
    assert (wish.ranks, wish.choice.decision.move) == (1, True)


def test_record_that_is_damaged_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "decisions.jsonl"
    path.write_text('{"kind": "move"}\n')
    with pytest.raises(InputError, match="line 1 is no decision"):
        list(read_records(path))
    with pytest.raises(InputError, match="cannot be read"):
        list(read_records(tmp_path / "none"))
    record = DecisionRecord("move", situation(), {"move": False})
    path.write_text(record.to_text() + "\n" + record.to_text()[:100])
    assert list(read_records(path)) == [record]


def test_decisions_in_a_row_that_change_nothing_are_written_once(tmp_path: Path) -> None:
    """So a run of 2,000 steps writes less than a megabyte."""
    stay = DecisionRecord("move", situation(), {"move": False})
    move, kept = replace(stay, answer={"move": True}), replace(stay, kind="schedule")
    log = RunLog(parse({}), tmp_path, None)
    for records in ([stay, kept], [stay, kept], [move], [stay, kept], [stay]):
        log.record_decisions(records)
    log.close()
    assert list(read_records(tmp_path / "decisions.jsonl")) == [stay, kept, move, stay]


seconds = st.floats(0.001, 1.0, allow_nan=False)
sizes = st.integers(0, 10**9)


@st.composite
def situations(draw: st.DrawFn) -> Situation:
    """A pipeline of one to four ranks, one or two replicas, with any costs, links and rules."""
    pipeline, replicas = draw(st.integers(1, 4)), draw(st.sampled_from((1, 2)))
    count = draw(st.integers(pipeline, 8))
    schedule = draw(st.sampled_from(("1f1b", "zb-h1", "zb-auto")))
    layers = tuple(
        LayerCost(draw(seconds), draw(seconds), draw(seconds), *(draw(sizes) for _ in range(4)))
        for _ in range(count)
    )
    scaled = tuple(replace(x, f=x.f * draw(st.sampled_from((1.0, 1.5)))) for x in layers)
    cuts = draw(st.permutations(range(1, count)))[: pipeline - 1]
    link = LinkCost(draw(st.sampled_from((0.0, 1e-4))), draw(st.sampled_from((1e6, 1e12))))
    return Situation(
        step=draw(st.integers(0, 90)),
        end=100,
        layers=layers,
        halves=draw(st.sampled_from(((), (layers, layers), (layers, scaled)))),
        names=tuple(map(str, range(count))),
        first_trainable=0,
        links=tuple(((i, i + 1), link) for i in range(pipeline - 1)),
        mesh=Mesh(pipeline, replicas, 4, 1, schedule),
        partition=Partition.from_bounds((0, *sorted(cuts), count)),
        scheduled=draw(st.sampled_from((None, layers))),
        objective=draw(st.sampled_from(Objective)),
        zero=draw(st.sampled_from((0, 1))),
        accumulation_groups=replicas,
        shapes=MeshRule(schedule, None, 4 * replicas, replicas, count).shapes(pipeline * replicas),
        nodes=("a",) * (pipeline * replicas),
        there=pipeline * replicas,
        most=pipeline * replicas,
        doubt=draw(st.sampled_from((1.0, 2.0))),
        preempted=draw(st.sampled_from((0.0, 0.3))),
        balance=Balance(balancer=draw(st.sampled_from(("exact", "diffusion", RANDOM_MOVES)))),
        elastic=Elastic(repack=draw(st.booleans())),
    )


@given(situations(), st.sampled_from(KINDS))
def test_a_written_record_gives_the_same_decision(now: Situation, kind: Kind) -> None:
    record = DecisionRecord(kind, now, {"partition": list(now.partition.counts)})
    answer, reason = ask_again(record)
    assert reason
    copy = DecisionRecord.from_text(record.to_text())
    assert copy == record, "floats read back exactly"
    assert ask_again(copy) == (answer, reason)


@given(situations())
def test_a_replay_decides_as_a_run(now: Situation) -> None:
    """`dynmo simulate` on a workload asks with the same costs, and gets the same placement."""
    mesh, layers = now.mesh, now.layers
    policy = {"balancer": now.balance.balancer, "every": 50, "margin": 0.0, "hysteresis": 0.0}
    workload = Workload(
        steps=100,
        ranks=mesh.pipeline,
        microbatches=mesh.microbatches,
        schedule=mesh.schedule,
        layers=LayerSection(moments=[Moment.of(0, layers)]),
        policy=Policy(**policy, initial=now.partition.counts),
        link=Link(latency=1e-4, bytes_per_second=1e9),
    )
    decided = replay(workload).rebalances
    choice = decide_move(known_at(workload, 50, layers, (layers, layers), now.partition))
    assert (not decided) == (choice is None)
    if choice is not None:
        (once,) = decided
        assert (once.moved, once.target) == (choice.decision.move, choice.target.counts)
