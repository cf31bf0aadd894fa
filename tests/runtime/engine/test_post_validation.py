"""Post-validation has the bits of a barrier, for any rollback on any rank."""

from __future__ import annotations

import math
from functools import cache
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from dynmo.config import parse
from dynmo.cost.layer_cost import uniform_costs
from dynmo.errors import RunError
from dynmo.pipeline.actions import Actions
from dynmo.pipeline.case_context import CaseContext
from dynmo.runtime.engine.engine import Engine, StepRecord
from dynmo.runtime.engine.norm_ring import CLIPPED, NON_FINITE, BarrierPolicy, Switch
from dynmo.runtime.engine.options import UpdateOptions
from dynmo.runtime.optim.optimizer import OptimizerSettings
from dynmo.schedule.automatic.make import make
from dynmo.schedule.catalogue import SCHEDULES
from dynmo.schedule.simulator import simulate
from dynmo.train.setup import model_of
from tests.combinations import mostly_matrix
from tests.pool import Pool
from tests.runtime.alone import pipeline, tokens
from tests.runtime.jobs.post_validation import MICROBATCHES

VALIDATED = "tests.runtime.jobs.post_validation:validated"
STEPS, LAYERS = 7, 8


def faults(seed: int) -> tuple[tuple[int, int, Any], ...]:
    """Overflows and gradients to be clipped, at random steps in random layers."""
    random = Random(seed)
    faults_ = [
        (step, random.randrange(LAYERS), random.choice(["inf", 1000.0]))
        for step in range(STEPS)
        if random.random() < 0.5
    ]
    return (*faults_, (2, random.randrange(LAYERS), "inf"), (4, random.randrange(LAYERS), 1000.0))


@cache
def reference(pool: Pool, seed: int, changes: bool) -> dict[str, Any]:
    """One rank with a barrier at every step's end."""
    return pool.run(
        VALIDATED, 1, schedule="1f1b", faults=faults(seed), post_validation=False, changes=changes
    )[0]


def same(results: list[dict[str, Any]], expected: dict[str, Any]) -> None:
    for result in results:
        assert result["steps"] == list(range(STEPS)), "every step's result, in order"
        for key in ("losses", "norms", "digest", "seen"):
            assert str(result[key]) == str(expected[key]), key
        assert result["rollbacks"] == [
            [step, what] for step, what in enumerate(expected["failed"]) if what
        ]


@pytest.mark.parametrize(
    ("schedule", "ranks"),
    mostly_matrix(
        [
            (schedule, ranks)
            for schedule, ranks in product(SCHEDULES, (1, 2, 3, 4))
            if schedule != "interleaved-1f1b" or MICROBATCHES % ranks == 0
        ],
        everyday=[("v-half", 4)],
    ),
)
def test_post_validation_has_the_bits_of_a_barrier(pool: Pool, schedule: str, ranks: int) -> None:
    seed = (ranks + list(SCHEDULES).index(schedule)) % 3
    expected = reference(pool, seed, False)
    assert {NON_FINITE, CLIPPED} <= {*expected["failed"]}
    same(
        pool.run(VALIDATED, ranks, schedule=schedule, faults=faults(seed), post_validation=True),
        expected,
    )


@pytest.mark.parametrize(
    ("schedule", "ranks"),
    mostly_matrix(
        [("zb-h2", 4), ("zb-auto", 3), ("zb-v", 3), ("interleaved-1f1b", 2)], everyday=[("zb-v", 3)]
    ),
)
def test_freezing_moves_and_evaluations_see_final_weights(
    pool: Pool, schedule: str, ranks: int
) -> None:
    """If all ranks run forward only, there is still a verdict."""
    same(
        pool.run(
            VALIDATED,
            ranks,
            schedule=schedule,
            faults=faults(1),
            post_validation=True,
            changes=True,
        ),
        reference(pool, 1, True),
    )


def test_a_rollback_restores_buffers(pool: Pool) -> None:
    kind = "tests.runtime.written:layers"
    expected = pool.run(
        VALIDATED, 1, schedule="1f1b", faults=faults(0), post_validation=False, kind=kind
    )[0]
    options: dict[str, Any] = {"faults": faults(0), "kind": kind, "post_validation": True}
    same(pool.run(VALIDATED, 3, schedule="zb-v", **options), expected)


def test_local_clipping_rolls_back_non_finite_steps_only(pool: Pool) -> None:
    """Each rank knows the norms of its own layers before it steps."""
    options: dict[str, Any] = {"faults": faults(0), "clip_scope": "local", "limit": 0.2}
    expected = pool.run(VALIDATED, 1, schedule="1f1b", post_validation=False, **options)[0]
    assert CLIPPED not in expected["failed"]
    assert expected["digest"] != reference(pool, 0, False)["digest"]
    same(pool.run(VALIDATED, 2, schedule="zb-h1", post_validation=True, **options), expected)


def test_in_place_rollback_is_close_to_a_barrier(pool: Pool) -> None:
    """Ranks undo a step by inverting the update."""
    expected = reference(pool, 0, False)
    for result in pool.run(
        VALIDATED, 2, schedule="zb-h2", faults=faults(0), post_validation=True, rollback="in-place"
    ):
        assert result["losses"] == pytest.approx(expected["losses"], rel=1e-4)
        assert [what for _, what in result["rollbacks"]] == [
            what for what in expected["failed"] if what
        ]


def own_pipeline(kind: str = "gpt", **update: Any) -> Engine:
    sizes = {"blocks": 1, "hidden": 16, "heads": 2} if kind == "gpt" else {}
    model = model_of(parse({"model": {"kind": kind, "sequence": 4, **sizes}}))
    return pipeline(model, update=UpdateOptions(**update))


def trained(pipeline: Engine, steps: int, max_norm: float) -> list[StepRecord]:
    results: list[StepRecord] = []
    for step in range(steps):
        results += pipeline.advance(step, *tokens(step, 4), lr=0.003, max_norm=max_norm)
    return [*results, *pipeline.drain()]


@pytest.mark.parametrize(
    ("name", "steps"), mostly_matrix([("adamw", 40), ("adamw", 200), ("sgd", 200)], [("adamw", 40)])
)
def test_many_in_place_rollbacks_stay_close(
    name: Any, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every step is clipped, so it is made, rolled back and repeated."""
    monkeypatch.setattr(BarrierPolicy, "observe", lambda self, failed: None)
    settings = OptimizerSettings(name)
    small = "python:tests.models.user_model:with_a_loss"
    expected = own_pipeline(small, optimizer=settings)
    near = own_pipeline(small, optimizer=settings, post_validation=True, rollback="in-place")
    start = weights(expected)
    trained(expected, steps, 2e-6)
    # With one rank the prefix is the whole: it must not look, or no step would be made too early.
    step_anyway(near, monkeypatch)
    assert all(r.rollback is not None for r in trained(near, steps, 2e-6))
    assert near.digest() != expected.digest(), "else this shows nothing"
    way, off = (weights(expected) - start).norm(), (weights(near) - weights(expected)).norm()
    assert float(off) <= 1e-5 * float(way)


def weights(pipeline: Engine) -> Tensor:
    return torch.cat(
        [
            p.detach().flatten()
            for module, _ in pipeline.store.own.values()
            for p in module.parameters()
        ]
    )


def step_anyway(pipeline: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps as the first of many ranks does, whose own gradient is small."""
    step_end, pending = pipeline.optimizer_step, pipeline.pending  # pyright: ignore[reportPrivateUsage]
    failed, end = step_end.failed, pending.end

    def unseeing(*args: Any) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(step_end, "failed", lambda *_: None)
            end(*args)
        assert step_end.failed == failed

    monkeypatch.setattr(pending, "end", unseeing)


def test_results_arrive_one_step_late() -> None:
    late, early = own_pipeline(post_validation=True), own_pipeline()
    got: list[list[int]] = []
    for step in range(3):
        got.append([r.step for r in late.advance(step, *tokens(step, 4), lr=0.1)])
        assert [r.step for r in early.advance(step, *tokens(step, 4), lr=0.1)] == [step]
    assert got == [[], [0], [1]]
    assert late.digest() == early.digest(), "who looks waits"
    assert [r.step for r in late.drain()] == [2]
    assert late.drain() == early.drain() == ()
    assert late.step(3, *tokens(3, 4), lr=0.1).loss == early.step(3, *tokens(3, 4), lr=0.1).loss
    assert late.digest() == early.digest()


def test_non_finite_loss_raises_one_step_late() -> None:
    """The failed step and the step that has begun update no weight."""
    one, twin = own_pipeline(post_validation=True), own_pipeline()
    weight = one.store.own[3][0].get_parameter("logits.weight").data
    trained(one, 2, 0.0)
    trained(twin, 2, 0.0)
    kept = weight[0, 0].item()
    for drains in (False, True):
        weight[0, 0] = math.inf
        assert one.advance(2, *tokens(2, 4), lr=0.1) == ()
        weight[0, 0] = kept
        with pytest.raises(RunError, match="step 2: loss"):
            one.drain() if drains else one.advance(3, *tokens(3, 4), lr=0.1)
        assert one.digest() == twin.digest()
    assert [r.loss for r in trained(one, 3, 0.0)] == [r.loss for r in trained(twin, 3, 0.0)]
    assert one.digest() == twin.digest()


@pytest.mark.parametrize(
    ("fault", "said"),
    [("overflow", "step 2: loss "), ("batch", "step 2: ranks 0, 1, 2 passed different inputs and")],
)
def test_every_rank_raises_and_nothing_is_updated(pool: Pool, fault: str, said: str) -> None:
    job = "tests.runtime.jobs.post_validation:validated_raises"
    for result in pool.run(job, 3, schedule="zb-h2", fault=fault):
        assert result["error"].startswith(said)
        assert result["digests"][0] == result["digests"][1], "nothing was updated"
        assert result["digests"][1] != result["digests"][2], "and it goes on"


def test_unannounced_case_access_is_refused() -> None:
    """A call on one rank raises an error, because it cannot wait."""
    one = own_pipeline(post_validation=True)
    one.advance(0, *tokens(0, 4), lr=0.1)
    with pytest.raises(RunError, match=r"step 0 .*drain\(\)"):
        CaseContext(one).moments(0)
    Actions(one).freeze([0])
    assert CaseContext(one).moments(1)["qkv.weight/step"] == 1


def test_barrier_policy_returns_if_many_steps_fail() -> None:
    """It stays until almost no step fails."""
    policy = BarrierPolicy()
    assert [policy.observe(True) for _ in range(5)] == [None] * 5
    assert policy.on
    assert policy.observe(True) == Switch(False, "6 of the last 6 steps were taken back")
    said = [policy.observe(False) for _ in range(19)]
    assert said == [None] * 18 + [Switch(True, "1 of the last 20 steps would have been taken back")]
    seldom = BarrierPolicy()
    assert all(seldom.observe(i % 4 == 0) is None for i in range(100)), (
        "a quarter is not over a quarter"
    )


def test_many_rollbacks_switch_the_barrier_on() -> None:
    one, twin = own_pipeline(post_validation=True), own_pipeline()
    results = trained(one, 12, 0.1)
    assert [r.step for r in results] == list(range(12))
    assert [r.rollback is not None for r in results] == [True] * 7 + [False] * 5, (
        "the seventh had begun already"
    )
    assert [(r.step, r.switch.on) for r in results if r.switch] == [(5, False)]
    assert not one.pending.validates
    trained(twin, 12, 0.1)
    assert one.digest() == twin.digest()
    results = [r for step in range(12, 40) for r in one.advance(step, *tokens(step, 4), lr=0.003)]
    assert [(r.step, r.switch.on) for r in results if r.switch] == [(30, True)]
    assert one.pending.validates


def test_local_clipping_scales_each_layer_separately() -> None:
    """The result is compared with clipping by hand."""
    one, by_hand = own_pipeline(clip_scope="local"), own_pipeline()
    step_output = by_hand.forward_backward(0, *tokens(0, 4))
    norms: list[float] = []
    for module, _ in by_hand.store.own.values():
        norms.append(float(torch.nn.utils.clip_grad_norm_(module.parameters(), 0.3)))
    assert min(norms) < 0.3 < max(norms)
    by_hand.update(0, step_output, lr=0.1)
    result = one.step(0, *tokens(0, 4), lr=0.1, max_norm=0.3)
    assert [math.sqrt(n) for n in result.squared_norms] == pytest.approx(norms, rel=1e-5)
    for index, (module, _) in one.store.own.items():
        for a, b in zip(module.parameters(), by_hand.store.own[index][0].parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_document_drawing_matches_the_simulator() -> None:
    schedule = make("zb-h2", 4, 7)
    timeline = simulate(schedule, uniform_costs(4, 1, 1, 1))
    text = (Path(__file__).parents[3] / "docs" / "post-validation.md").read_text()
    for period in (timeline.makespan, timeline.span):
        for rank, row in enumerate(timeline.ranks):
            line = [" "] * 60
            for turn in (0, 1):
                start = round(turn * (period + 1))
                for span in row:
                    line[start + round(span.start)] = (
                        str(span.op.kind) if turn == 0 else str(span.op.kind).lower()
                    )
                line[start + round(period + (period == timeline.span) * row[0].start)] = "|"
            assert f"\n{rank} | {''.join(line).rstrip()}\n" in text
