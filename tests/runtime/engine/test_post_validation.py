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
from dynmo.pipeline.cases import CaseContext
from dynmo.plan.partition import uniform
from dynmo.runtime.comm.meeting import Meeting
from dynmo.runtime.engine.batch_check import StepBatch
from dynmo.runtime.engine.engine import Engine, StepRecord
from dynmo.runtime.engine.optimizer_step import CLIPPED, NON_FINITE
from dynmo.runtime.engine.post_validation import PostValidation
from dynmo.runtime.engine.step_reduction import Switch
from dynmo.runtime.optim.precision import LossScaler
from dynmo.runtime.options import EngineOptions
from dynmo.schedule.catalogue import SCHEDULES, make, stage_ranks_of
from dynmo.schedule.simulator import simulate
from dynmo.train.setup import model_of
from tests.combinations import mostly_matrix
from tests.pool import Pool
from tests.runtime.alone import advance, end_step, pipeline, run_half, run_step, tokens
from tests.runtime.jobs import error_of
from tests.runtime.optimizers import settings
from tests.runtime.state.test_migration import any_partition

STEPS, LAYERS, MICROBATCHES = 7, 8, 6
GPT = {"blocks": 3, "hidden": 16, "heads": 2, "sequence": 4}


def _spoiled(pipeline: Engine, faults: list[list[Any]], now: list[int]) -> None:
    """Spoils gradients as they are looked at. Faults are [step, layer, "inf" or a factor]."""
    table = pipeline.optimizer_step.table  # pyright: ignore[reportPrivateUsage]
    entries = table.entries

    def spoil(*args: Any) -> Tensor:
        for step, layer, what in faults:
            if step == now[0] and layer in pipeline.store.own:
                module, _ = pipeline.store.own[layer]
                gradients = [p.grad for p in module.parameters() if p.grad is not None]
                if gradients and what == "inf":
                    gradients[0].view(-1)[0] = float("inf")
                elif gradients:  # or it is frozen
                    torch._foreach_mul_(gradients, what)
        return entries(*args)

    table.entries = spoil  # pyright: ignore[reportAttributeAccessIssue]


def _batch(step: int) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(step)
    tokens = torch.randint(256, (MICROBATCHES, 1, 5), generator=random)
    return tokens[..., :-1], tokens[..., 1:]


def _made(world: Meeting, schedule: str, kind: str, **options: Any) -> Engine:
    """Makes a pipeline with a loss scale, so that an overflow skips its step."""
    gpt = GPT | {"dropout": 0.1}
    model = model_of(parse({"model": gpt if kind == "gpt" else {"kind": f"python:{kind}"}}))
    places = uniform(model.layers, len(stage_ranks_of(schedule, world.size)))
    pipeline = Engine(world, model, places, EngineOptions(schedule, MICROBATCHES, **options))
    pipeline.optimizer_step.scaler = LossScaler(2.0**16, window=1 << 30)
    return pipeline


def validated(
    world: Meeting,
    schedule: str,
    faults: list[list[Any]],
    changes: bool = False,
    kind: str = "gpt",
    limit: float = 20.0,
    **update: Any,
) -> dict[str, Any]:
    """Some steps with spoiled gradients. With `changes`, layers freeze and move in between."""
    pipeline = _made(world, schedule, kind, **update)
    layers, stages = pipeline.model.layers, len(pipeline.store.layout.stage_ranks)
    now = [0]
    _spoiled(pipeline, faults, now)
    random = Random(stages)
    results: list[StepRecord] = []
    seen: list[Any] = []
    for step in range(STEPS):
        if changes and step % 3 == 2:
            if step == 5:
                Actions(pipeline).freeze([0, 1])
            Actions(pipeline).move(any_partition(layers, stages, random))
            seen.append(pipeline.digest())
        now[0] = step
        batch = _batch(step)
        results += advance(pipeline, step, *batch, lr=0.01, max_norm=limit)
        if changes and step % 3 == 1:
            seen.append(pipeline.evaluate(StepBatch(*batch), MICROBATCHES))
    results += pipeline.drain()
    failed = pipeline.optimizer_step.failed  # pyright: ignore[reportPrivateUsage]
    return {
        "steps": [r.step for r in results],
        "losses": [r.loss for r in results],
        "norms": [r.squared_norms for r in results],
        "rollbacks": [[r.step, r.rollback.what] for r in results if r.rollback],
        # The failure of each step, as the pipeline itself sees it afterwards. A skipped step tells
        # no norms.
        "failed": [
            NON_FINITE if r.skipped else failed(r.loss, r.squared_norms, limit) for r in results
        ],
        "digest": pipeline.digest(),
        "seen": seen,
    }


def validated_raises(world: Meeting, schedule: str, fault: str) -> dict[str, Any]:
    """A step that ends the run, after others. Then it runs again, without the fault."""
    options = EngineOptions(schedule, MICROBATCHES, post_validation=True, stop_after=1)
    model = model_of(parse({"model": GPT}))
    pipeline = Engine(world, model, uniform(LAYERS, world.size), options)
    now = [0]
    _spoiled(pipeline, [[2, 7, "inf"]] if fault == "overflow" else [], now)
    digests: list[str] = []
    said: list[str] = []
    for now[0] in range(6):
        if now[0] == 2:
            digests.append(pipeline.digest())
        differs = fault == "batch" and not said and now[0] == 2 and world.rank == 2
        batch = [x.roll(1) if differs else x for x in _batch(0)]
        caught = error_of(lambda batch=batch: advance(pipeline, now[0], *batch, lr=0.01))
        if caught:
            said = caught
            digests.append(pipeline.digest())
    return {"error": said[-1], "digests": [*digests, pipeline.digest()]}


VALIDATED = "tests.runtime.engine.test_post_validation:validated"


def faults(seed: int) -> tuple[tuple[int, int, Any], ...]:
    """Overflows and gradients to be clipped, at random steps in random layers."""
    random = Random(seed)
    faults_ = [
        (step, random.randrange(LAYERS), random.choice(["inf", 1000.0]))
        for step in range(STEPS)
        if random.random() < 0.5
    ]
    return (*faults_, (2, random.randrange(LAYERS), "inf"), (4, random.randrange(LAYERS), 1000.0))


def run(pool: Pool, ranks: int, schedule: str, seed: int = 0, **options: Any) -> Any:
    options = {"faults": faults(seed), "post_validation": True} | options
    return pool.run(VALIDATED, ranks, schedule=schedule, **options)


def barrier(pool: Pool, seed: int = 0, **options: Any) -> dict[str, Any]:
    """One rank with a barrier at every step's end."""
    return run(pool, 1, "1f1b", seed, post_validation=False, **options)[0]


reference = cache(barrier)


def undone(expected: dict[str, Any]) -> list[list[Any]]:
    return [[step, what] for step, what in enumerate(expected["failed"]) if what]


def same(results: list[dict[str, Any]], expected: dict[str, Any]) -> None:
    for result in results:
        assert result["steps"] == list(range(STEPS)), "every step's result, in order"
        for key in ("losses", "norms", "digest", "seen"):
            assert str(result[key]) == str(expected[key]), key
        assert result["rollbacks"] == undone(expected)


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
    expected = reference(pool, seed)
    assert {NON_FINITE, CLIPPED} <= {*expected["failed"]}
    same(run(pool, ranks, schedule, seed), expected)


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
    same(run(pool, ranks, schedule, 1, changes=True), reference(pool, 1, changes=True))


def test_a_rollback_restores_buffers(pool: Pool) -> None:
    kind = "tests.runtime.written:layers"
    same(run(pool, 3, "zb-v", kind=kind), barrier(pool, kind=kind))


def test_local_clipping_rolls_back_non_finite_steps_only(pool: Pool) -> None:
    """Each rank knows the norms of its own layers before it steps."""
    options: dict[str, Any] = {"clip_scope": "local", "limit": 0.2}
    expected = barrier(pool, **options)
    assert CLIPPED not in expected["failed"]
    assert expected["digest"] != reference(pool, 0)["digest"]
    same(run(pool, 2, "zb-h1", **options), expected)


def test_in_place_rollback_is_close_to_a_barrier(pool: Pool) -> None:
    """Ranks undo a step by inverting the update."""
    expected = reference(pool, 0)
    for result in run(pool, 2, "zb-h2", rollback="in-place"):
        assert result["losses"] == pytest.approx(expected["losses"], rel=1e-4)
        assert [what for _, what in result["rollbacks"]] == [what for _, what in undone(expected)]


def own_pipeline(kind: str = "gpt", **update: Any) -> Engine:
    sizes = {"blocks": 1, "hidden": 16, "heads": 2} if kind == "gpt" else {}
    model = model_of(parse({"model": {"kind": kind, "sequence": 4, **sizes}}))
    return pipeline(model, **update)


def trained(pipeline: Engine, steps: int, max_norm: float) -> list[StepRecord]:
    results: list[StepRecord] = []
    for step in range(steps):
        results += advance(pipeline, step, *tokens(step, 4), lr=0.003, max_norm=max_norm)
    return [*results, *pipeline.drain()]


@pytest.mark.parametrize(
    ("name", "steps"), mostly_matrix([("adamw", 40), ("adamw", 200), ("sgd", 200)], [("adamw", 40)])
)
def test_many_in_place_rollbacks_stay_close(
    name: Any, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every step is clipped, so it is made, rolled back and repeated."""
    monkeypatch.setattr(PostValidation, "observed", lambda self, result, failed: result)
    optimizer = settings(name, weight_decay=0.1)
    small = "python:tests.models.user_model:with_a_loss"
    expected = own_pipeline(small, optimizer=optimizer)
    near = own_pipeline(small, optimizer=optimizer, post_validation=True, rollback="in-place")
    start = weights(expected)
    trained(expected, steps, 2e-6)
    # With one rank the prefix is the whole: it must not look, or no step would be made too early.
    step_anyway(near, monkeypatch)
    assert all(r.rollback is not None for r in trained(near, steps, 2e-6))
    assert near.digest() != expected.digest(), "else this shows nothing"
    way, off = (weights(expected) - start).norm(), (weights(near) - weights(expected)).norm()
    assert float(off) <= 1e-5 * float(way)


def weights(pipeline: Engine) -> Tensor:
    modules = [module for module, _ in pipeline.store.own.values()]
    return torch.cat([p.detach().flatten() for module in modules for p in module.parameters()])


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
        got.append([r.step for r in advance(late, step, *tokens(step, 4), lr=0.1)])
        assert [r.step for r in advance(early, step, *tokens(step, 4), lr=0.1)] == [step]
    assert got == [[], [0], [1]]
    assert late.digest() == early.digest(), "who looks waits"
    assert [r.step for r in late.drain()] == [2]
    assert late.drain() == early.drain() == ()
    assert (
        run_step(late, 3, *tokens(3, 4), lr=0.1).loss
        == run_step(early, 3, *tokens(3, 4), lr=0.1).loss
    )
    assert late.digest() == early.digest()


def test_layers_are_measured() -> None:
    pipeline = own_pipeline(post_validation=True)
    trained(pipeline, 3, 1.0)
    assert not any(layer.marks for layer in pipeline.store.layers.values())
    for index in range(pipeline.model.layers):
        assert all(pipeline.profiler.seconds(index))


def test_non_finite_loss_raises_one_step_late() -> None:
    """The failed step and the step that has begun update no weight."""
    one, twin = own_pipeline(post_validation=True, stop_after=1), own_pipeline()
    weight = one.store.own[3][0].get_parameter("logits.weight").data
    trained(one, 2, 0.0)
    trained(twin, 2, 0.0)
    kept = weight[0, 0].item()
    for drains in (False, True):
        weight[0, 0] = math.inf
        assert advance(one, 2, *tokens(2, 4), lr=0.1) == ()
        weight[0, 0] = kept
        with pytest.raises(RunError, match="step 2: loss"):
            one.drain() if drains else advance(one, 3, *tokens(3, 4), lr=0.1)
        assert one.digest() == twin.digest()
    assert [r.loss for r in trained(one, 3, 0.0)] == [r.loss for r in trained(twin, 3, 0.0)]
    assert one.digest() == twin.digest()


@pytest.mark.parametrize(
    ("fault", "said"),
    [("overflow", "step 2: loss "), ("batch", "step 2: ranks 0, 1, 2 passed different inputs and")],
)
def test_every_rank_raises_and_nothing_is_updated(pool: Pool, fault: str, said: str) -> None:
    job = "tests.runtime.engine.test_post_validation:validated_raises"
    for result in pool.run(job, 3, schedule="zb-h2", fault=fault):
        assert result["error"].startswith(said)
        assert result["digests"][0] == result["digests"][1], "nothing was updated"
        assert result["digests"][1] != result["digests"][2], "and it goes on"


def test_unannounced_case_access_is_refused() -> None:
    """A call on one rank raises an error, because it cannot wait."""
    one = own_pipeline(post_validation=True)
    advance(one, 0, *tokens(0, 4), lr=0.1)
    with pytest.raises(RunError, match=r"step 0 .*drain\(\)"):
        CaseContext(one).moments(0)
    Actions(one).freeze([0])
    assert CaseContext(one).moments(1)["qkv.weight/step"] == 1


def test_many_rollbacks_switch_the_barrier_on() -> None:
    one, twin = own_pipeline(post_validation=True), own_pipeline()
    results = trained(one, 12, 0.1)
    assert [r.step for r in results] == list(range(12))
    # The seventh had begun already.
    assert [r.rollback is not None for r in results] == [True] * 7 + [False] * 5
    over = Switch(False, "6 of the last 6 steps were taken back")
    assert [(r.step, r.switch) for r in results if r.switch] == [(5, over)]
    assert not one.pending.validates
    trained(twin, 12, 0.1)
    assert one.digest() == twin.digest()
    results = [r for step in range(12, 40) for r in advance(one, step, *tokens(step, 4), lr=0.003)]
    again = Switch(True, "1 of the last 20 steps would have been taken back")
    assert [(r.step, r.switch) for r in results if r.switch] == [(30, again)]
    pending = one.pending
    assert pending.validates
    seldom = [pending.observed(results[0], CLIPPED if i % 4 == 0 else None) for i in range(100)]
    assert not any(r.switch for r in seldom), "not over a quarter"


def test_local_clipping_scales_each_layer_separately() -> None:
    """The result is compared with clipping by hand."""
    one, by_hand = own_pipeline(clip_scope="local"), own_pipeline()
    step_output = run_half(by_hand, 0, *tokens(0, 4))
    clip = torch.nn.utils.clip_grad_norm_
    norms = [float(clip(m.parameters(), 0.3)) for m, _ in by_hand.store.own.values()]
    assert min(norms) < 0.3 < max(norms)
    end_step(by_hand, 0, step_output, lr=0.1)
    result = run_step(one, 0, *tokens(0, 4), lr=0.1, max_norm=0.3)
    assert [math.sqrt(n) for n in result.squared_norms] == pytest.approx(norms, rel=1e-5)
    torch.testing.assert_close(weights(one), weights(by_hand), rtol=1e-4, atol=1e-6)


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
                    kind = str(span.op.kind)
                    line[start + round(span.start)] = kind.lower() if turn else kind
                line[start + round(period + (period == timeline.span) * row[0].start)] = "|"
            assert f"\n{rank} | {''.join(line).rstrip()}\n" in text
