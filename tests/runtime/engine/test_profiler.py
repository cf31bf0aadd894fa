"""Measured costs are accurate, robust to outliers, and equal on every rank."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from dynmo.cases.pruning.crossover import make_pruned
from dynmo.cost.layer_cost import LayerCost
from dynmo.models.emulated import make_layers
from dynmo.pipeline.actions import Actions
from dynmo.plan.partition import Partition
from dynmo.runtime.comm.clock import HostClock, Mark
from dynmo.runtime.comm.meeting import Meeting
from dynmo.runtime.engine import profiler as profiler_module
from dynmo.runtime.engine.batch_check import StepBatch
from dynmo.runtime.engine.engine import Engine
from dynmo.runtime.engine.executor import Interval
from dynmo.runtime.engine.profiler import Profiler, measure_links, weight_bytes
from dynmo.runtime.layer.layer import Layer
from dynmo.runtime.options import EngineOptions
from dynmo.schedule.op import Kind
from tests.pool import Pool
from tests.runtime.alone import alone, emulated, ids, run_step
from tests.runtime.fake_time import emulated_time


def profile(
    world: Meeting, f: list[float], b: list[float], w: list[float], counts: list[int]
) -> list[dict[str, Any]]:
    """The costs of emulated layers after a step."""
    model = make_layers(f, b, w, size=64)
    pipeline = Engine(
        world, model, Partition(tuple(counts)), EngineOptions("zb-h1", microbatches=3)
    )
    ids = torch.zeros(3, 1, dtype=torch.int64)
    with emulated_time():
        run_step(pipeline, 0, ids, ids, lr=0.0)
    return [vars(cost) for cost in pipeline.costs()]


def links(world: Meeting) -> list[list[float]]:
    pairs = [(rank, rank + 1) for rank in range(world.size - 1)]
    return [[link.latency, link.bytes_per_second] for link in measure_links(world, pairs).values()]


def test_measured_costs_are_exact_and_equal_on_all_ranks(pool: Pool) -> None:
    f, b, w = [3, 5, 3, 4], [4, 6, 5, 3], [5, 3, 7, 4]
    ranks = pool.run("tests.runtime.engine.test_profiler:profile", 2, f=f, b=b, w=w, counts=[1, 3])
    assert ranks[0] == ranks[1]
    for kind, truth in zip("fbw", (f, b, w), strict=True):
        assert [measured[kind] for measured in ranks[0]] == pytest.approx(truth)
    # There is one weight of 4 bytes, with its gradient, two moments and a counter. Messages have 64
    # numbers. W needs the messages and their gradients. The gradient of the loss is one number. The
    # workspaces come from shapes alone, a step ends with a barrier, and a replica has one group.
    state = {"parameters": 1, "weight_bytes": 4, "gradient_bytes": 4, "optimizer_bytes": 12}
    zeros = ("workspace", "forward_workspace", "weight_workspace", "rollback", "pending_gradient")
    state |= {f"{name}_bytes": 0 for name in zeros}
    for index, row in enumerate(ranks[0]):
        inner, out = (260, 4) if index == 3 else (512, 256)
        sizes = {"activation_bytes": inner, "stash_bytes": inner, "output_bytes": out}
        assert {key: row[key] for key in row if key not in "fbw"} == state | sizes


class Tape:
    """A clock that only counts what it is asked, and marks that are numbers."""

    def __init__(self) -> None:
        self.asked = 0

    def mark(self) -> float:
        return 0.0

    def settle(self) -> None:
        pass

    def seconds(self, start: float, end: float) -> float | None:
        self.asked += 1
        return end - start

    def elapsed(self, start: float, end: float) -> float:
        return end - start


def marked(clock: Any, *marks: tuple[Any, ...]) -> Layer:
    layer = Layer(3, nn.Linear(2, 2), clock, 0)
    layer.marks = [(kind, start, end, list(inside)) for kind, start, end, *inside in marks]
    return layer


def test_costs_are_medians_over_a_window() -> None:
    clock = Tape()
    profiler = Profiler(clock)
    assert profiler.seconds(3) == (0.0, 0.0, 0.0)
    # Microbatches of 2, 3, 4 s forward, and one that was held up. BW: W is what ran inside, B the
    # rest.
    step: list[tuple[Any, ...]] = [
        (Kind.F, 0.0, seconds) for seconds in (2.0, 3.0, 4.0, 900.0, 3.0)
    ]
    step += [(Kind.B, 0.0, 5.0), (Kind.W, 0.0, 6.0), (Kind.BW, 0.0, 12.0, (1.0, 3.0), (4.0, 8.0))]
    layer = marked(clock, *step)
    profiler.observe([layer])
    assert profiler.seconds(3) == (3.0, 5.5, 6.0)
    assert layer.marks == []
    # A step that was held up as a whole, among others.
    for seconds in (3.0, 1000.0, 3.0):
        profiler.observe([marked(clock, (Kind.F, 0.0, seconds))])
    assert profiler.seconds(3)[0] == 3.0
    # Only the last steps count.
    for _ in range(8):
        profiler.observe([marked(clock, (Kind.F, 0.0, 7.0))])
    assert profiler.seconds(3) == (7.0, 0.0, 0.0)
    profiler.forget([3, 4])
    assert profiler.seconds(3) == (0.0, 0.0, 0.0)


class Doubting(Tape):
    """Readings of more than 100 s are doubtful."""

    def seconds(self, start: float, end: float) -> float | None:
        return end - start if end - start <= 100 else None


def test_doubtful_readings_count_only_without_others() -> None:
    clock = Doubting()
    profiler = Profiler(clock)
    step: list[tuple[Any, ...]] = [(Kind.F, 0.0, seconds) for seconds in (3.0, 900.0, 900.0)]
    step += [(Kind.BW, 0.0, 300.0, (1.0, 3.0)), (Kind.BW, 0.0, 50.0, (1.0, 5.0))]
    profiler.observe([marked(clock, *step, (Kind.BW, 0.0, 400.0, (1.0, 300.0)))])
    assert profiler.seconds(3) == (3.0, 46.0, 3.0)
    alone = Profiler(clock)
    alone.observe([marked(clock, (Kind.W, 0.0, 200.0), (Kind.W, 0.0, 301.0))])
    assert alone.seconds(3) == (0.0, 0.0, 250.5)


def test_w_share_longer_than_its_bw_is_doubtful() -> None:
    """The thread lost its core: the BW takes its CPU time, and its W the elapsed time."""

    def mark(elapsed: float, cpu: float, preempted: int) -> Mark:
        at = Mark(elapsed)
        at.cpu, at.preempted, at.waited = cpu, preempted, 0
        return at

    odd = (Kind.BW, mark(0, 0, 0), mark(20, 6, 1), (mark(1, 1, 0), mark(13, 3, 0)))
    plain = (Kind.BW, mark(20, 6, 1), mark(25, 11, 1), (mark(21, 7, 1), mark(23, 9, 1)))
    for marks, b in (([odd], 8.0), ([odd, plain], 3.0)):
        profiler = Profiler(HostClock())
        profiler.observe([marked(HostClock(), *marks)])
        assert profiler.seconds(3).b == b


def test_costs_by_half_of_the_readings() -> None:
    """Costs that scale are divided in proportion. One count of bytes is exact."""
    clock = Tape()
    profiler = Profiler(clock)
    last = LayerCost(f=4.0, b=0.0, w=6.0, weight_bytes=7)
    costs = (*[LayerCost(0, 0, 0)] * 3, last)
    for f in (1.0, 2.0, 9.0):
        profiler.observe([marked(clock, (Kind.F, 0.0, f), (Kind.W, 0.0, 3.0))])
        halves = profiler.gather_halves(alone(), [3], costs)
        assert bool(halves) == (f > 1.0)
    assert [half[3] for half in halves] == [replace(last, f=2.0), replace(last, f=18.0)]
    assert profiler.gather_halves(alone(), [2, 3], costs) == (), "nothing is known of layer 2"


def ops(*seconds: tuple[str, float]) -> list[Interval]:
    return [Interval(kind, 0, 0, 0.0, each) for kind, each in seconds]


def timed(profiler: Profiler, clock: Tape, f: float, b: float, w: float) -> None:
    """A step in which layer 3 was timed."""
    layer = marked(clock, (Kind.F, 0.0, f), (Kind.B, 0.0, b), (Kind.W, 0.0, w))
    profiler.observe([layer])


@pytest.mark.parametrize(
    ("whole", "seconds"),
    [
        pytest.param([("F", 2.0), ("B", 1.0), ("W", 9.0)], (2.0, 1.0, 9.0), id="all kinds"),
        pytest.param([("F", 1.0), ("BW", 10.0)], (1.0, 4.0, 6.0), id="B and W together"),
        pytest.param([("F", 1.5)], (1.5, 2.0, 3.0), id="F alone"),
    ],
)
def test_layers_times_are_scaled_to_their_stages(
    whole: list[tuple[str, float]], seconds: tuple[float, ...]
) -> None:
    clock = Tape()
    profiler, layer = Profiler(clock), marked(clock)
    for _ in range(profiler_module.APART):
        profiler.begin([layer])
        assert layer.is_timed
        timed(profiler, clock, 1.0, 2.0, 3.0)
    profiler.begin([layer])
    assert not layer.is_timed
    for _ in range(2):  # scales do not add up
        profiler.observe_stages({0: [layer]}, ops(*whole, ("wait", 50.0)))
        profiler.observe([layer])
        assert profiler.seconds(3) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("totals", "noticed"),
    [
        pytest.param([1.0] * 9, None, id="as before"),
        pytest.param([1.0, 1.02, 0.98, 1.02, 1.02, 1.02, 1.02], None, id="nearly"),
        pytest.param([1.0] * 4 + [1.3], 4, id="at once"),
        pytest.param([1.0] * 4 + [1.05] * 3, 5, id="a little, in two of three steps"),
        pytest.param([1.0] * 4 + [1.1, 1.0, 1.0, 1.0], None, id="one step of three"),
    ],
)
def test_layers_are_timed_again_if_their_stage_takes_another_time(
    totals: list[float], noticed: int | None
) -> None:
    clock = Tape()
    profiler, layer = Profiler(clock), marked(clock)
    for _ in range(profiler_module.APART):
        timed(profiler, clock, 0.5, 0.25, 0.25)
    found = None
    for at, total in enumerate(totals):
        profiler.begin([layer])
        if layer.is_timed:
            break
        profiler.observe_stages({0: [layer]}, ops(("F", total / 2), ("BW", total / 2)))
        profiler.begin([layer])
        found = at if layer.is_timed else None
    assert found == noticed
    if noticed is None:
        profiler.forget([7])
        profiler.begin([layer])
        assert layer.is_timed, "after any change"


def test_stage_that_scatters_is_not_timed_again() -> None:
    clock = Tape()
    profiler, layer = Profiler(clock), marked(clock)
    for _ in range(profiler_module.APART):
        timed(profiler, clock, 0.5, 0.25, 0.25)
    for step in range(12):
        scattered = [("F", 1 + 0.4 * ((step + j) % 3)) for j in range(4)]
        profiler.begin([layer])
        assert not layer.is_timed
        profiler.observe_stages({0: [layer]}, ops(*scattered))


def test_preempted_share_is_measured() -> None:
    profiler = Profiler(Halving())
    assert profiler.preempted == 0.0
    ops = (("F", 0.0, 2.0), ("wait", 2.0, 50.0), ("B", 50.0, 54.0))
    profiler.observe_ops([Interval(kind, 0, 0, start, end) for kind, start, end in ops])
    assert profiler.preempted == 0.5


class Halving(Tape):
    """Other processes take half of all time."""

    def seconds(self, start: float, end: float) -> float | None:
        return (end - start) / 2


def test_observing_reads_the_clock_once_per_mark() -> None:
    """And once for each W inside a BW. A step costs no more after many steps."""
    clock = Tape()
    profiler = Profiler(clock)
    for step in range(3):
        profiler.observe([marked(clock, (Kind.F, 0.0, 1.0), (Kind.BW, 0.0, 1.0, (0.0, 0.5)))])
        assert clock.asked == 3 * (step + 1)


def test_frozen_layers_have_no_time_for_skipped_ops() -> None:
    """The frozen prefix runs F only. Frozen layers above a trainable one run F and B."""
    pipeline = emulated(f=[1] * 4, b=[2] * 4, w=[3] * 4)
    Actions(pipeline).freeze([0, 1, 3])
    with emulated_time():
        run_step(pipeline, 0, ids(), ids(), lr=0.0)
    costs = pipeline.costs()
    assert [(c.f, c.b, c.w) for c in costs] == [(1, 0, 0), (1, 0, 0), (1, 2, 3), (1, 2, 0)]
    assert [c.activation_bytes > 0 for c in costs][:3] == [False, False, True]
    assert [c.stash_bytes > 0 for c in costs] == [False, False, True, False]
    assert [c.gradient_bytes for c in costs] == [0, 0, 4, 0]
    assert [c.weight_bytes for c in costs] == [4] * 4


def test_measurements_follow_freezing() -> None:
    """Layer 1 joins the frozen prefix with layer 0. Its old costs are dropped then."""
    pipeline = emulated(f=[0] * 3, b=[1] * 3, w=[0] * 3)
    Actions(pipeline).freeze([1])
    for frozen, b in (((), [1, 1, 1]), ((0,), [0, 0, 1])):
        Actions(pipeline).freeze(frozen)
        with emulated_time():
            run_step(pipeline, 0, ids(), ids(), lr=0.0)
        assert [cost.b for cost in pipeline.costs()] == b
    Actions(pipeline).unfreeze([0, 1])
    with emulated_time():
        run_step(pipeline, 1, ids(), ids(), lr=0.0)
    assert all(cost.b == 1 and cost.activation_bytes > 0 for cost in pipeline.costs())


def test_evaluation_leaves_measurements_unchanged() -> None:
    pipeline = emulated(f=[0] * 3, b=[0] * 3, w=[0] * 3)
    run_step(pipeline, 0, ids(), ids(), lr=0.0)
    before = pipeline.costs()
    pipeline.evaluate(StepBatch(ids(), ids()), 3)
    assert pipeline.costs() == before
    assert all(cost.activation_bytes for cost in before)


def test_links_are_equal_on_all_ranks(pool: Pool) -> None:
    """Links are measured between neighbours."""
    first, *others = pool.run("tests.runtime.engine.test_profiler:links", 3)
    assert others == [first] * 2
    assert len(first) == 2
    assert all(latency >= 0 and speed > 0 for latency, speed in first)


def test_weight_bytes_include_buffers() -> None:
    """The indices of a pruned linear take memory."""
    pruned = make_pruned(64, 64, 0.95)
    values = sum(p.nbytes for p in pruned.parameters())
    held = sum(b.nbytes for b in pruned.buffers())
    assert held > 0
    assert weight_bytes(pruned) == values + held
