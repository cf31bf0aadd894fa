"""Decisions are functions of what is known, without ranks."""

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
from dynmo.plan.decide import Decision, DecisionRecord, read_records
from dynmo.plan.evaluate import evaluate
from dynmo.plan.options import Balance, Elastic
from dynmo.plan.partition import MeshRule, Partition
from dynmo.plan.problem import Choice, Mesh, Rules
from dynmo.plan.replay import question as known_at
from dynmo.plan.replay import replay
from dynmo.plan.workload import LayerSection, Moment, Policy, Workload
from dynmo.schedule.bounds import Objective
from dynmo.schedule.catalogue import SHAPES
from dynmo.train.run_log import RunLog
from tests.equality import RANDOM_MOVES
from tests.plan.questions import question

ONE = LayerCost(0.01, 0.01, 0.01, 10, 100, 100, 200, 5, 2, 10)
FROZEN = replace(ONE, b=0.0, w=0.0)
# Six of eight layers no longer train, so rank 0 has a third of rank 1's work.
LAYERS = (FROZEN,) * 4 + (ONE,) * 4
# Two ranks cannot share 3 + 2 + 2 + 1 evenly in order. A V can: 3 + 1 and 2 + 2.
UNEVEN = tuple(
    LayerCost(0.01 * n, 0.01 * n, 0.01 * n, 10, 100, 100, 200, 5, 2, 10) for n in (3, 2, 2, 1)
)
NONE = LinkCost(0.0, 1e9)


def asked(**known: Any) -> DecisionRecord:
    """Two ranks with four layers each."""
    return question(
        LAYERS, Mesh(2, 1, 8, 1, "zb-auto"), Partition((4, 4)), first_trainable=4, **known
    )


def uneven(schedule: str, *counts: int, **known: Any) -> Decision:
    """Two ranks that may take another schedule, long before the end."""
    base = {"end": 1000, "schedules": SHAPES}
    mesh, partition = Mesh(2, 1, 8, 1, schedule), Partition(counts)
    return question(UNEVEN, mesh, partition, **base | known).again()


# -- placement -------------------------------------------------------------------------------------


def test_layers_move_to_the_rank_with_less_work() -> None:
    decision = asked().again()
    assert decision.verdict.pays
    assert decision.plan.partition.counts[0] > 4
    assert decision.answer["partition"] == list(decision.plan.partition.counts)


@pytest.mark.parametrize("balancer", ["exact", "diffusion"])
def test_layers_move_away_from_a_slow_link(balancer: str) -> None:
    links = {(0, 1): NONE, (1, 2): LinkCost(0.08, 1e9), (2, 3): NONE}
    mesh, partition = Mesh(4, 1, 8, 1, "zb-h1"), Partition((6, 6, 6, 6))
    balance = Balance(balancer=balancer)
    given = {"links": tuple(links.items()), "balance": balance}
    decision = question((ONE,) * 24, mesh, partition, **given).again()
    assert decision.verdict.pays
    assert decision.verdict.gain == pytest.approx(1 - 205 / 214, abs=1e-3)
    given |= {"links": tuple((pair, NONE) for pair in links)}
    stays = question((ONE,) * 24, mesh, partition, **given).again()
    assert stays.plan.partition == partition
    assert not stays.verdict.pays


def test_nothing_moves_without_a_second_reading_or_a_balancer() -> None:
    alone = asked(halves=()).again()
    assert (alone.verdict.pays, alone.verdict.uncertain, alone.remade) == (False, True, None)
    halves = (LAYERS, (FROZEN,) * 4 + (replace(ONE, f=1e-3, b=1e-3, w=1e-3),) * 4)
    assert asked(halves=halves).again().verdict.uncertain, "the halves disagree"
    still = asked(balance=Balance(balancer="none")).again()
    assert (still.plan.partition.counts, still.verdict.pays) == ((4, 4), False)


def test_a_gain_must_repay_the_move_and_be_believed() -> None:
    assert not asked(balance=Balance(hysteresis=0.9)).again().verdict.pays
    assert not asked(fixed_seconds=1e3).again().verdict.pays
    assert not asked(doubt=50.0).again().verdict.pays
    disturbed = asked(preempted=0.9).again().verdict
    assert (disturbed.pays, disturbed.uncertain) == (False, True)
    # A case expects the other half to freeze two steps later.
    later = Forecast(52, tuple(range(4, 8)), b=0.0, w=0.0)
    soon = asked(forecasts=((later,),), balance=Balance(margin=0.0)).again()
    assert not soon.verdict.pays


def test_a_forced_balancer_moves_without_a_gain() -> None:
    forced = question(
        LAYERS, Mesh(2, 1, 8, 1, "zb-h1"), Partition((6, 2)), balance=Balance(balancer="uniform")
    ).again()
    assert forced.verdict.pays
    assert forced.verdict.gain < 0
    assert forced.verdict.reason == "uniform: forced"
    assert forced.plan.partition.counts == (4, 4)


def test_layers_stay_if_no_placement_fits() -> None:
    decision = asked(memory_limit=100).again()
    assert not decision.verdict.pays
    assert decision.refusal is not None
    assert "bytes" in decision.refusal
    assert "\n" not in decision.refusal
    # The first placement of Megatron's kind needs whole blocks.
    own = "python:benchmarks.baselines.placements:megatron_uniform"
    wrong = question(
        (ONE,) * 5, Mesh(2, 1, 8, 1, "zb-h1"), Partition((3, 2)), balance=Balance(balancer=own)
    )
    assert "multiple of 2 blocks" in str(wrong.again().refusal)


def test_schedule_is_made_anew_if_costs_have_changed() -> None:
    still = {"balance": Balance(balancer="none"), "is_measured": True}
    assert asked(**still).again().remade is None, "costs are the same"
    times = [(4e-3, 4e-3, 8e-3)] * 4 + [(8e-3, 8e-3, 1e-3)] * 4
    costs = tuple(replace(ONE, f=f, b=b, w=w) for f, b, w in times)
    mesh, partition = Mesh(2, 1, 8, 1, "zb-auto"), Partition((4, 4))
    other = question(costs, mesh, partition, **still | {"scheduled": (ONE,) * 8}).again()
    assert other.remade is not None
    assert other.remade > 0
    assert not other.verdict.pays
    guessed = question(costs, mesh, partition, **still | {"scheduled": None}).again()
    assert guessed.remade is not None
    fixed = question(costs, replace(mesh, schedule="zb-h1"), partition, **still).again()
    assert fixed.remade is None


# -- another schedule ------------------------------------------------------------------------------


def test_a_run_goes_to_a_v_and_back() -> None:
    there = uneven("zb-auto", 1, 3)
    assert there.verdict.pays
    assert (there.plan.mesh.schedule, there.plan.partition.counts) == ("v-auto", (1, 1, 1, 1))
    slow = (((0, 1), LinkCost(0.2, 1e9)),)
    back = uneven("v-auto", 1, 1, 1, 1, links=slow)
    assert (back.verdict.pays, back.plan.mesh.schedule) == (True, "zb-auto")
    assert not uneven("v-auto", 1, 1, 1, 1).verdict.pays


def test_another_schedule_must_pay_like_any_move() -> None:
    for known in (
        {"end": 60, "fixed_seconds": 9.0},
        {"halves": ()},
        {"balance": Balance(hysteresis=0.5)},
        {"doubt": 50.0},
        {"balance": Balance(balancer="none")},
    ):
        assert not uneven("zb-auto", 2, 2, **known).verdict.pays
    assert uneven("zb-auto", 1, 3, schedules=()).plan.mesh.schedule == "zb-auto"


def test_another_schedule_keeps_to_the_memory() -> None:
    """Whatever the limit is, a schedule is only taken if it fits."""
    taken = set[str]()
    for limit in range(250, 3001, 250):
        decision = uneven("zb-auto", 1, 3, memory_limit=limit)
        if decision.verdict.pays:
            assert max(decision.plan.memory) <= limit
            taken.add(decision.plan.mesh.schedule)
    assert "v-auto" in taken


def test_ranks_that_never_met_are_as_far_apart_as_others() -> None:
    chain = tuple(((i, i + 1), LinkCost(1e-4, 1e9)) for i in range(3))
    mesh = Mesh(4, 1, 8, 1, "interleaved-1f1b")
    asked = question((ONE,) * 8, mesh, Partition((1,) * 8), links=chain)
    plan = evaluate(asked.problem, Choice(mesh, Partition((1,) * 8)))
    assert plan.replica.links[3] == LinkCost(1e-4, 1e9), "from rank 3 to rank 0"


# -- mesh ------------------------------------------------------------------------------------------


def of_weights(*weights: float) -> tuple[LayerCost, ...]:
    return tuple(LayerCost(x, x, x, 1, 10, 10, 20) for x in weights)


# Heavy and light layers alternate, so two stages are better balanced than four.
ALTERNATING = of_weights(3.0, 1.0, 1.0, 1.0, 3.0, 1.0, 1.0, 1.0)


def reshaped(limit: int | None = None, **known: Any) -> Decision:
    mesh, partition = Mesh(4, 1, 16, 1, "zb-h1"), Partition((2, 2, 2, 2))
    base = {"kind": "mesh", "memory_limit": limit, "bandwidth": float("inf"), "step": 0}
    base |= {"accumulation_groups": None, "links": (), "seconds_per_byte": 0.0}
    return question(ALTERNATING, mesh, partition, **base | known).again()


def test_fewer_stages_need_enough_memory() -> None:
    # Four layers of 40 bytes, and 20 to sum the gradients of one over two replicas.
    short, roomy, tight = map(reshaped, (179, 180, 120))
    assert not short.verdict.pays
    assert roomy.verdict.pays
    mesh = roomy.plan.mesh
    assert (mesh.pipeline, mesh.replicas, mesh.microbatches) == (2, 2, 8)
    assert not tight.verdict.pays
    # Two layers of 30 bytes arrive: the copies of a stage are neighbours.
    assert reshaped(190, seconds_per_byte=0.1).verdict.price == pytest.approx(6.0)
    dear = reshaped(seconds_per_byte=10.0, end=2)
    assert not dear.verdict.pays
    only = reshaped(replicas=(1,))
    assert (only.verdict.pays, only.plan.mesh.replicas) == (False, 1)
    assert reshaped(halves=()).verdict.uncertain
    light = {"halves": (ALTERNATING, of_weights(*[1e-3] * 8)), "seconds_per_byte": 1.0}
    assert reshaped(**light).verdict.uncertain, "the halves disagree"


def test_limits_and_speeds_of_single_ranks_do_not_hold_on_another_mesh() -> None:
    own = reshaped(speeds=(1.0, 1.0, 1.0, 0.5), memory_limit=(400, 400, 400, 190))
    assert own.plan == reshaped(190).plan or own.plan.choice == reshaped(190).plan.choice


def test_a_reshape_is_refused_if_nothing_fits() -> None:
    decision = reshaped(10)
    assert not decision.verdict.pays
    assert decision.verdict.reason.startswith("stay: none of ")


# -- any question ----------------------------------------------------------------------------------

seconds = st.floats(0.001, 1.0, allow_nan=False)
sizes = st.integers(0, 10**9)


@st.composite
def questions(draw: st.DrawFn) -> DecisionRecord:
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
    meshes = MeshRule(schedule, None, 4 * replicas, replicas, count).shapes(pipeline * replicas)
    return question(
        layers,
        Mesh(pipeline, replicas, 4, 1, schedule),
        Partition.from_bounds((0, *sorted(cuts), count)),
        kind=draw(st.sampled_from(("placement", "mesh", "ranks"))),
        step=draw(st.integers(0, 90)),
        halves=draw(st.sampled_from(((), (layers, layers), (layers, scaled)))),
        links=tuple(((i, i + 1), link) for i in range(pipeline - 1)),
        bandwidth=link.bytes_per_second,
        scheduled=draw(st.sampled_from((None, layers))),
        objective=draw(st.sampled_from(Objective)),
        zero=draw(st.sampled_from((0, 1))),
        accumulation_groups=replicas,
        replicas=tuple(each for _, each in meshes),
        machines=("a",) * (pipeline * replicas),
        doubt=draw(st.sampled_from((1.0, 2.0))),
        preempted=draw(st.sampled_from((0.0, 0.3))),
        balance=Balance(balancer=draw(st.sampled_from(("exact", "diffusion", RANDOM_MOVES)))),
        elastic=Elastic(repack=draw(st.booleans())),
    )


@given(questions())
def test_a_written_record_gives_the_same_decision(asked: DecisionRecord) -> None:
    decision = asked.again()
    assert decision.verdict.reason
    copy = DecisionRecord.from_text(asked.to_text())
    assert copy == asked, "floats read back exactly"
    assert copy.again() == decision
    assert (decision.plan.choice == asked.now) <= (not decision.verdict.pays)
    assert decision.plan.mesh.global_batch == asked.now.mesh.global_batch


@given(questions())
def test_a_replay_decides_as_a_run(asked: DecisionRecord) -> None:
    """`dynmo simulate` on a workload asks with the same costs, and gets the same placement."""
    mesh, partition, layers = asked.now.mesh, asked.now.partition, asked.problem.layers
    policy = {"balancer": asked.rules.balance.balancer, "every": 50}
    workload = Workload(
        steps=100,
        ranks=mesh.pipeline,
        microbatches=mesh.microbatches,
        schedule=mesh.schedule,
        layers=LayerSection(moments=[Moment.of(0, layers)]),
        policy=Policy(**policy, margin=0.0, hysteresis=0.0, initial=partition.counts),
        link=Link(latency=1e-4, bytes_per_second=1e9),
    )
    decided = replay(workload).rebalances
    decision = known_at(workload, 50, layers, (layers, layers), partition).again()
    assert (not decided) == (decision.plan.partition == partition)
    for once in decided:
        found = decision.verdict.pays, decision.plan.partition.counts
        assert (once.moved, once.target) == found


# -- records: written, read, and asked again -------------------------------------------------------

STAY = {"change": False, "remade": False}


def record() -> DecisionRecord:
    return replace(asked(), answer=STAY)


def test_record_that_is_damaged_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "decisions.jsonl"
    path.write_text('{"problem": {}}\n')
    with pytest.raises(InputError, match="line 1 is no decision"):
        list(read_records(path))
    with pytest.raises(InputError, match="cannot be read"):
        list(read_records(tmp_path / "none"))
    text = record().to_text()
    path.write_text(text + "\n" + text[:100])
    assert list(read_records(path)) == [record()]


@pytest.mark.parametrize(
    "line", ['{"kind":"move","situation":{"step":4}}', '{"kind":"ranks","situation":{"st']
)
def test_records_of_an_earlier_version_are_named_so(tmp_path: Path, line: str) -> None:
    path = tmp_path / "decisions.jsonl"
    path.write_text(line)
    with pytest.raises(
        InputError, match=r"decisions.jsonl is of an earlier version of dynmo"
    ) as told:
        list(read_records(path))
    assert "\n" not in str(told.value)


def test_torn_record_is_cut_before_the_next_is_added(tmp_path: Path) -> None:
    path, text = tmp_path / "decisions.jsonl", record().to_text()
    path.write_text(text + "\n" + text[:100])
    log = RunLog(parse({}), tmp_path, None)
    log.record_decisions([record()])
    log.close()
    assert list(read_records(path)) == [record()] * 2


def test_decisions_in_a_row_that_change_nothing_are_written_once(tmp_path: Path) -> None:
    """So a run of 2,000 steps writes less than a megabyte."""
    stay = record()
    move = replace(stay, answer={"change": True, "remade": False})
    mesh = replace(stay, rules=replace(stay.rules, kind="mesh"))
    log = RunLog(parse({}), tmp_path, None)
    for records in ([stay, mesh], [stay, mesh], [move], [stay, mesh], [stay]):
        log.record_decisions(records)
    log.close()
    assert list(read_records(tmp_path / "decisions.jsonl")) == [stay, mesh, move, stay]


def test_names_of_earlier_records_are_read() -> None:
    rules = Rules("ranks", available_ranks=3, most_ranks=4)
    written = replace(record(), rules=rules)
    text = written.to_text().replace("available_ranks", "there").replace("most_ranks", "most")
    assert '"there":3,"most":4' in text
    assert DecisionRecord.from_text(text) == written


def test_a_change_is_decided_again_from_its_record() -> None:
    decision = asked(is_measured=True).again()
    written = replace(asked(is_measured=True), answer=decision.answer)
    copy = DecisionRecord.from_text(written.to_text())
    assert copy.again().answer == copy.answer
    assert copy.answer["change"]
