"""What `schedule = "auto"` stands for, in a plan and in a run."""

from __future__ import annotations

from dynmo.cost.layer_cost import LayerCost, LinkCost
from dynmo.errors import PartitionError
from dynmo.plan.decisions import ask_again, decide_move, decide_schedule, move_answer
from dynmo.plan.mesh_plan import Mesh
from dynmo.plan.options import Balance
from dynmo.plan.partition import Partition
from dynmo.plan.situation import DecisionRecord, Situation
from dynmo.plan.stage_plan import plan_stages
from dynmo.schedule.catalogue import SHAPES
from tests.plan import test_decisions as decisions
from tests.plan.test_decisions import ONE

EVEN = (ONE,) * 8
# Two ranks cannot share 3 + 2 + 2 + 1 evenly in order. A V can: 3 + 1 and 2 + 2.
UNEVEN = tuple(
    LayerCost(0.01 * n, 0.01 * n, 0.01 * n, 10, 100, 100, 200, 5, 2, 10) for n in (3, 2, 2, 1)
)


def situation(schedule: str, partition: tuple[int, ...], **known: object) -> Situation:
    base = decisions.of_layers(UNEVEN) | {"end": 1000, "schedules": SHAPES}
    base |= {"mesh": Mesh(2, 1, 8, 1, schedule), "partition": Partition(partition)}
    return decisions.situation(**base | known)


def test_a_run_goes_to_a_v_and_back() -> None:
    there = decide_move(situation("zb-auto", (1, 3)))
    assert there is not None
    assert there.decision.move
    assert (there.schedule, there.target.counts) == ("v-auto", (1, 1, 1, 1))
    assert move_answer(there)["schedule"] == "v-auto"
    slow = (((0, 1), LinkCost(0.2, 1e9)),)
    back = decide_move(situation("v-auto", (1, 1, 1, 1), links=slow))
    assert back is not None
    assert (back.decision.move, back.schedule) == (True, "zb-auto")
    settled = decide_move(situation("v-auto", (1, 1, 1, 1)))
    assert settled is None or not settled.decision.move


def test_a_change_must_pay_like_any_move() -> None:
    for known in (
        {"end": 60, "fixed_seconds": 9.0},
        {"halves": ()},
        {"balance": Balance(hysteresis=0.5)},
        {"doubt": 50.0},
    ):
        choice = decide_move(situation("zb-auto", (2, 2), **known))
        assert choice is None or not choice.decision.move
    assert decide_move(situation("zb-auto", (2, 2), balance=Balance(balancer="none"))) is None
    alone = decide_move(situation("zb-auto", (1, 3), schedules=()))
    assert alone is None or alone.schedule is None


def test_a_change_keeps_to_the_memory() -> None:
    """Whatever the limit is, a schedule is only taken if it fits."""
    taken: set[str | None] = set()
    for limit in range(250, 3001, 250):
        now = situation("zb-auto", (1, 3), memory_limit=limit)
        try:
            choice = decide_move(now)
        except PartitionError:
            taken.add(None)
            continue
        if choice is not None and choice.schedule is not None and choice.decision.move:
            there = now.under(choice.schedule)
            plan = plan_stages(there.stages, UNEVEN, choice.target, there.boundary_links, 0)
            assert max(plan.memory) <= limit
            taken.add(choice.schedule)
    assert taken == {None, "v-auto"}


def test_a_change_is_decided_again_from_its_record() -> None:
    now = situation("zb-auto", (1, 3), is_measured=True)
    record = DecisionRecord("move", now, move_answer(decide_move(now)))
    copy = DecisionRecord.from_text(record.to_text())
    assert ask_again(copy)[0] == record.answer
    same = decide_schedule(now.under("v-auto"), Partition((1, 1, 1, 1)))
    assert same is None, "costs are the same"


def test_ranks_that_never_met_are_as_far_apart_as_others() -> None:
    chain = tuple(((i, i + 1), LinkCost(1e-4, 1e9)) for i in range(3))
    now = situation(
        "zb-auto", (2, 2, 2, 2), layers=EVEN, links=chain, mesh=Mesh(4, 1, 8, 1, "zb-auto")
    )
    assert dict(now.under("interleaved-1f1b").links)[0, 3] == LinkCost(1e-4, 1e9)
    assert now.under("v-auto").links == chain
