"""The schedule of a pipeline before the first measurement and after a stale one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dynmo.config import parse
from dynmo.cost.costs_file import Profile
from dynmo.cost.layer_cost import LayerCost, elide
from dynmo.errors import ScheduleError
from dynmo.pipeline.actions import Actions
from dynmo.pipeline.assembly import make_engine
from dynmo.pipeline.shape_costs import shape_costs
from dynmo.plan.evaluate import Replica, evaluate
from dynmo.plan.partition import uniform
from dynmo.plan.problem import Choice
from dynmo.plan.recompute import recompute_as_workspace
from dynmo.runtime.comm.meeting import Meeting
from dynmo.runtime.engine import schedule_maker
from dynmo.runtime.engine.engine import Engine
from dynmo.schedule.catalogue import make
from dynmo.schedule.memory import rank_memory
from dynmo.schedule.op import Schedule
from dynmo.schedule.simulator import resident
from dynmo.train.setup import model_of, plan_run
from tests.combinations import mostly_matrix
from tests.plan.asked import ask
from tests.pool import Pool

JOBS = "tests.runtime.engine.test_schedule_maker:"
CONFIG: dict[str, Any] = {
    "model": {"blocks": 4, "hidden": 32, "heads": 2, "sequence": 32},
    "train": {"global_batch": 32, "micro_batch": 1},
    "parallel": {"pipeline": 2},
    "pipeline": {"schedule": "zb-auto"},
}


def engine_of(world: Meeting, config: dict[str, Any]) -> tuple[Engine, tuple[LayerCost, ...]]:
    """A pipeline of as many ranks as there are, and its costs from shapes."""
    loaded = parse(config)
    options, model = loaded.options, model_of(loaded)
    places = uniform(model.layers, world.size)
    pipeline = make_engine(options, world, model, places)
    return pipeline, recompute_as_workspace(shape_costs(options, model), ())


def schedule_of(pipeline: Engine) -> Schedule:
    return pipeline.schedule_maker.on(pipeline.store.layout.partition)


def schedules(world: Meeting, config: dict[str, Any]) -> list[list[Any]]:
    """What is kept and the bytes of every rank: at first, with a frozen prefix, and thawed."""
    pipeline, shapes = engine_of(world, config)

    def say(layers: tuple[LayerCost, ...]) -> list[Any]:
        schedule = schedule_of(pipeline)
        counts = pipeline.store.layout.partition.counts
        return [resident(schedule), rank_memory(layers, counts, schedule), str(schedule)]

    out = [say(shapes)]
    Actions(pipeline).freeze(range(3))
    out.append(say(elide(shapes, 3, range(3))))
    Actions(pipeline).unfreeze([0, 1, 2])
    out.append(say(shapes))
    return out


@pytest.mark.parametrize("over", mostly_matrix([1.0, 1.3], everyday=[1.0]))
def test_schedule_is_within_memory_from_the_first_step(pool: Pool, over: float) -> None:
    least = max(plan_run(parse(CONFIG | {"pipeline": {"schedule": "1f1b"}})).memory)
    config = CONFIG | {"pipeline": {"schedule": "zb-auto", "memory_limit": int(over * least)}}
    first, frozen, thawed = pool.run(JOBS + "schedules", 2, config=config)[0]
    for _, memory, _ in (first, frozen, thawed):
        assert max(memory) <= over * least
    assert first == thawed
    assert tuple(first[1]) == plan_run(parse(config)).memory, "what a dry run says"


@pytest.mark.matrix
def test_unlimited_schedule_keeps_at_most_twice_1f1b_memory(pool: Pool) -> None:
    first, _, last = pool.run(JOBS + "schedules", 2, config=CONFIG)[0]
    assert first == last
    most = max(alive for pairs in resident(make("1f1b", 2, 32)) for alive, _ in pairs)
    # A microbatch between B and W counts half.
    assert max(alive + stashed / 2 for pairs in first[0] for alive, stashed in pairs) <= 2 * most


def reshaped(world: Meeting, config: dict[str, Any]) -> list[str]:
    """The schedule after a reshape, without and with measured costs."""
    out: list[str] = []
    for measured in (False, True):
        pipeline, shapes = engine_of(world, config)
        if measured:
            Actions(pipeline).replan(
                tuple(replace(c, activation_bytes=2 * c.activation_bytes) for c in shapes)
            )
            out.append(str(schedule_of(pipeline)))
        Actions(pipeline).reshape(pipeline=2, data=2)
        out.append(str(schedule_of(pipeline)))
    return out


@pytest.mark.matrix
def test_bytes_after_a_reshape_are_those_of_the_new_mesh(pool: Pool) -> None:
    """Two replicas share the state, so the measured bytes no longer hold."""
    config = CONFIG | {
        "train": CONFIG["train"] | {"reduction_slots": 2},
        "parallel": {"pipeline": 4, "zero": 1},
    }
    mesh = {"pipeline": 2, "replicas": 2, "zero": 1}
    after = {"parallel": mesh, "pipeline": {"schedule": "1f1b"}}
    least = max(plan_run(parse(config | after)).memory)
    config["pipeline"] = {"schedule": "zb-auto", "memory_limit": int(1.3 * least)}
    for unmeasured, before, after in pool.run(JOBS + "reshaped", 4, config=config):
        assert after == unmeasured != before


def test_inherent_idle_is_computed_again_only_after_a_drift(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[tuple[float, ...]] = []

    def idle(replica: object, *shares: float) -> float:
        calls.append(shares)
        if shares[2] > 0.5:
            raise ScheduleError("no room")
        return shares[0]

    class Maker(schedule_maker.ScheduleMaker):
        def __init__(self) -> None:
            self._inherent = None

        @property
        def scheduled(self) -> None:
            return None

        def replica(self, layers: object, speeds: object) -> Any:
            return "replica"

    monkeypatch.setattr(schedule_maker, "inherent_idle", idle)
    maker = Maker()
    assert maker.inherent_idle((0.0, 0.0, 0.0)) is None
    steps = [(2.0, 1.0, 1.0), (2.1, 1.0, 1.0), (1.0, 1.0, 2.0), (1.0, 0.0, 3.0), (2.0, 1.0, 1.0)]
    assert [maker.inherent_idle(kinds) for kinds in steps] == [0.5, 0.5, 0.25, None, 0.5]
    assert len(calls) == 4


def test_inherent_idle_of_equal_stages() -> None:
    """1F1B waits for (p - 1)(F + B + W), ZB-H1 for (p - 1)(F + B - W)."""
    f, b, w, ranks, microbatches = 0.3, 0.4, 0.2, 4, 16
    idle, work = schedule_maker.inherent_idle, microbatches * (f + b + w)
    for name, waits in (("1f1b", 3 * (f + b + w)), ("zb-h1", 3 * (f + b - w))):
        problem, mesh, _ = ask(Profile((), ()), ranks, microbatches, name, memory_limit=1 << 20)
        assert idle(Replica(problem, mesh), f, b, w) == pytest.approx(waits / (work + waits))
    # In the least memory, a schedule made from costs waits longer.
    layer = LayerCost(1.0, 1.0, 1.0, 0, *(x << 20 for x in (1, 1, 2, 4, 2, 1, 3)))
    asked = Profile((layer,) * 8, tuple("abcdefgh")), ranks, microbatches
    problem, mesh, _ = ask(*asked, "1f1b")
    limit = min(evaluate(problem, Choice(mesh, uniform(8, 4))).memory)
    least, roomy = (
        idle(Replica(*ask(*asked, "zb-auto", memory_limit=bound)[:2]), f, b, w)
        for bound in (limit, None)
    )
    assert roomy < least < 1
