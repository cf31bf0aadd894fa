"""Replicas: any mesh gives the digest of one process with the same accumulation groups.

A reshape during the run keeps the digest. `test_equality_drawn.py` draws more meshes.
"""

from __future__ import annotations

from functools import cache
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.replicas import could_hide
from dynmo.change_events import ReshapeEvent
from dynmo.config import parse
from dynmo.cost import costs_file
from dynmo.event_log import read
from dynmo.models.emulated import EmulatedLayer
from dynmo.pipeline.actions import Actions
from dynmo.plan.partition import uniform
from dynmo.runtime.comm.meeting import Meeting
from dynmo.runtime.engine.engine import Engine
from dynmo.runtime.options import EngineOptions
from dynmo.train.setup import model_of
from dynmo.train.trainer import Trainer
from tests.combinations import mostly_matrix
from tests.equality import IN_EMULATED_TIME, RANDOM_MOVES, fields_of, resumed, run, same
from tests.jobs import parsed
from tests.pool import JobFailed, Pool
from tests.runtime.alone import run_step
from tests.runtime.fake_time import emulated_time

STEPS = 6
RANDOM = {"balancer": RANDOM_MOVES, "every": 1}
CLIPPED = {"lr": 1e-2, "warmup": 2, "max_grad_norm": 0.5}
WRITTEN = {"model": {"kind": "python:tests.runtime.written:layers", "sequence": 8}}


def config(
    pipeline: int,
    data: int,
    *,
    groups: int | None = 4,
    zero: int = 0,
    schedule: str = "zb-h1",
    balance: dict[str, Any] | None = None,
    reshape_at: list[list[int]] | None = None,
    cases: bool = True,
    **model: Any,
) -> dict[str, Any]:
    """Six layers and eight microbatches, with dropout, clipping and freezing.

    The embedding has several norm blocks, so that shares cut it.
    """
    sections: dict[str, Any] = {
        "seed": 7,
        "model": {"blocks": 2, "hidden": 96, "heads": 2, "sequence": 8, "dropout": 0.1} | model,
        "train": {"steps": STEPS, "global_batch": 8, "micro_batch": 1} | CLIPPED,
        "parallel": {"pipeline": pipeline, "replicas": data, "zero": zero, "timeout": 20.0},
        "pipeline": {"schedule": schedule},
        "balance": balance or {"balancer": "none"},
        "dynamism": {"cases": ["freezing"], "freezing": {"schedule": [[2, 1], [4, 3]]}}
        if cases
        else {},
        "elastic": {"reshape_at": reshape_at or []},
        "trace": {"steps": 0},
    }
    if groups is not None:
        sections["train"]["reduction_slots"] = groups
    return sections


@cache
def reference(pool: Pool, groups: int) -> dict[str, Any]:
    """One process, the same groups."""
    return run(pool, config(1, 1, groups=groups, schedule="1f1b"))[0]


def test_mesh_has_the_digest_of_one_process(pool: Pool) -> None:
    same(run(pool, config(2, 2, zero=1, balance=RANDOM)), reference(pool, 4), moving=True)


@pytest.mark.matrix  # eight processes
@pytest.mark.parametrize("zero", [0, 1])
def test_eight_ranks_have_the_same_digest(pool: Pool, zero: int) -> None:
    larger = Pool(8)
    try:
        for reshape_at in ([], [[2, 2, 4], [4, 4, 2]]):
            wanted = config(4, 2, zero=zero, balance=RANDOM, reshape_at=reshape_at)
            same(run(larger, wanted), reference(pool, 4))
    finally:
        larger.close()


def test_sharded_masters_have_one_digest_after_a_reshape(pool: Pool) -> None:
    """Replicas receive their layers in different orders.

    Together they hold the whole masters that the digest covers.
    """
    wanted = config(4, 1, zero=1, reshape_at=[[2, 2, 2]])
    wanted["train"]["precision"] = "bfloat16"
    assert len({r["digest"] for r in run(pool, wanted)}) == 1


@pytest.mark.matrix
def test_cases_decide_the_same_on_every_replica(pool: Pool) -> None:
    """Replicas measure different microbatches and times.

    The measurements of the first replica decide.
    """
    every_second = {"start": 1, "every": 2}
    freezing = {"policy": "egeria", "every": 1, "window": 2, "refresh": 100, "tolerance": 0.99}
    for name, options in (
        ("pruning", {"initial_sparsity": 0.5, "end": 5} | every_second),
        ("pruning", {"final_sparsity": 0.7, "end": 3, "dense_below": "measured"} | every_second),
        ("freezing", freezing),
    ):
        cases = {"cases": [name], name: options}
        wanted, alone = (
            config(*mesh, cases=False) | {"dynamism": cases} for mesh in ((2, 2), (1, 1))
        )
        down, up, steps = (7, 10, 14) if name == "freezing" else (2, 4, 7)
        wanted |= {"balance": RANDOM, "elastic": {"reshape_at": [[down, 1, 4], [up, 2, 2]]}}
        wanted["parallel"]["zero"], alone["pipeline"]["schedule"] = 1, "1f1b"
        wanted["train"]["steps"] = alone["train"]["steps"] = steps
        results = run(pool, wanted)
        assert len({r["digest"] for r in results}) == 1
        if name == "freezing":  # before the reshape and behind it
            assert 0 < results[0]["frozen"][6] < results[0]["frozen"][-1]
        # Where the threshold is timed, another run may prune otherwise.
        if options.get("dense_below") != "measured":
            same(results, run(pool, alone)[0])


@pytest.mark.parametrize(
    ("before", "after"),
    mostly_matrix(
        [
            *permutations([(2, 2, 1), (1, 1, 0)]),
            ((1, 4, 1), (1, 2, 1)),
            ((4, 1, 0), (1, 4, 0)),
        ],
        everyday=[((1, 4, 1), (1, 2, 1))],
    ),
)
def test_run_resumes_in_another_mesh(
    pool: Pool, tmp_path: Path, before: tuple[int, int, int], after: tuple[int, int, int]
) -> None:
    parts = (
        config(pipeline, data, zero=zero, balance=RANDOM)
        for pipeline, data, zero in (before, after)
    )
    ended = resumed(pool, tmp_path, *parts, stop_after=2)
    assert {e["weights_digest"] for e in ended} == {reference(pool, 4)["digest"]}
    assert ended[0]["loss"] == reference(pool, 4)["loss"]


def test_a_reshaped_run_resumes_in_its_shape(pool: Pool, tmp_path: Path) -> None:
    wanted = config(4, 1, balance=RANDOM, reshape_at=[[2, 2, 2], [5, 1, 4]], zero=1)
    ended = resumed(pool, tmp_path, wanted, wanted, stop_after=2)
    assert {e["weights_digest"] for e in ended} == {reference(pool, 4)["digest"]}
    told = list(read(tmp_path / "events.jsonl"))
    reshapes = [(e.step, e.source, e.target) for e in told if isinstance(e, ReshapeEvent)]
    assert reshapes == [(2, (4, 1), (2, 2)), (5, (2, 2), (1, 4))]
    written = costs_file.read(tmp_path / costs_file.IN_RUN)  # of the mesh that it ended in
    assert (written.ranks, written.microbatches) == (1, 2)
    # No run tells it, but shapes do.
    assert all(layer.workspace_bytes > 0 for layer in written.layers)


def test_written_buffers_of_replicas_are_refused(pool: Pool) -> None:
    wanted = config(1, 2, groups=2, cases=False) | WRITTEN
    with pytest.raises(JobFailed, match="buffer 'mean'"):
        run(pool, wanted)
    wanted["parallel"]["replicas"] = 1
    run(pool, wanted)


def test_counts_in_a_buffer_that_is_not_saved_are_refused(pool: Pool) -> None:
    wanted = config(1, 2, groups=2, cases=False)
    wanted["model"] = {"kind": "python:tests.fuzz.models:modules__counted_aside", "sequence": 8}
    with pytest.raises(JobFailed, match="buffer 'count'"):
        run(pool, wanted)
    wanted["model"] = {"kind": "python:tests.models.odd_layers:cached_aside", "sequence": 8}
    run(pool, wanted)


def after_a_reshape(world: Meeting, data: int) -> None:
    """A loop of one's own, whose pipeline was not told that it may become replicas."""
    model = model_of(parse(WRITTEN))
    pipeline = Engine(
        world,
        model,
        uniform(model.layers, world.size),
        EngineOptions("zb-h1", microbatches=4, accumulation_groups=2),
    )
    ids = torch.zeros(4, 1, 8, dtype=torch.int64)
    run_step(pipeline, 0, ids, ids, lr=0.0)
    Actions(pipeline).reshape(pipeline=2 // data, data=data)
    run_step(pipeline, 1, ids[::data], ids[::data], lr=0.0)


def test_reshape_to_replicas_with_written_buffers_is_refused(pool: Pool) -> None:
    pool.run("tests.test_replicas:after_a_reshape", 2, data=1)
    with pytest.raises(JobFailed, match="buffer 'mean'"):
        pool.run("tests.test_replicas:after_a_reshape", 2, data=2)


def test_only_the_number_of_reduction_slots_changes_the_bits(pool: Pool) -> None:
    """The number of groups fixes the order of the sum.

    Four groups of two microbatches add up in the order of eight groups of one.
    """
    digests = {groups: reference(pool, groups)["digest"] for groups in (1, 2, 4, 8)}
    assert len(set(digests.values())) == 3
    assert digests[4] == digests[8]
    assert run(pool, config(2, 2, groups=None))[0]["digest"] == digests[2]


def emulated(seconds: list[float], **sections: Any) -> dict[str, Any]:
    """A run of emulated layers with these seconds of F, B and W."""
    return {
        "model": {"kind": "emulated", "layers": len(seconds), **dict.fromkeys("fbw", seconds)},
        "train": {"steps": 7, "global_batch": 4, "micro_batch": 1, "reduction_slots": 2},
        "trace": {"steps": 0},
    } | sections


@pytest.mark.parametrize("balancer", mostly_matrix(["exact", "none"], everyday=["exact"]))
def test_run_reshapes_if_another_mesh_is_faster(pool: Pool, balancer: str) -> None:
    """One layer is half of the work, so only two replicas can be even, not two stages.

    The digest is that of the run without a reshape.
    """
    balance = {"balancer": balancer, "every": 2}
    wanted = emulated([0.4, 2.0, 0.4], parallel={"pipeline": 2}, balance=balance)
    still, told = (
        run(pool, wanted | {"elastic": {"reshape": on}}, IN_EMULATED_TIME)[0]
        for on in (False, True)
    )
    assert fields_of(still, "reshape", "step") == []
    ((step, *meshes),) = fields_of(told, "reshape", "step", "from", "to")
    assert meshes == [[2, 1], [1, 2]]
    assert step in (2, 4)
    for kind, key in (("end", "weights_digest"), ("step", "loss")):
        assert fields_of(told, kind, key) == fields_of(still, kind, key)


def test_replicas_of_an_even_model_keep_their_mesh(pool: Pool) -> None:
    """Pipelines of one rank have no link between stages, so the run measures one.

    Gradients of 4 bytes cost almost no time, so the replicas of an even model stay.
    """
    wanted = emulated([0.2] * 4, parallel={"replicas": 2}, balance={"balancer": "none", "every": 2})
    told = run(pool, wanted | {"elastic": {"reshape": True}}, IN_EMULATED_TIME)[0]
    assert fields_of(told, "reshape", "step") == []
    assert len(fields_of(told, "step", "step")) == 7


def test_reduction_overlaps_with_later_layers() -> None:
    assert could_hide([1.0, 1.0, 1.0], [1.0, 1.0, 1.0]) == pytest.approx(2 / 3)
    # The second starts late: the first is still under way.
    assert could_hide([1.0, 1.0], [2.0, 2.0]) == pytest.approx(1 / 4)
    assert could_hide([1.0], [3.0]) == 0


def costs_beside_a_slow_replica(world: Meeting, config: dict[str, Any]) -> list[float]:
    """Seconds of each layer's F, as all ranks know them.

    The last rank's first emulated layer takes ten times as long.
    """
    loaded = parsed(config)
    with emulated_time():
        trainer = Trainer(loaded, world, model_of(loaded), None)
        if world.rank == world.size - 1:
            (module, _), *_ = trainer.pipeline._engine.store.own.values()
            assert isinstance(module, EmulatedLayer)
            module.f *= 10
        for _ in range(3):
            trainer.turn()
        return [cost.f for cost in trainer.pipeline.measured.costs()]


def test_layer_cost_is_that_of_the_slowest_replica(pool: Pool) -> None:
    """One placement serves all replicas, so the slowest replica decides each cost."""
    wanted = emulated([0.4, 0.4], parallel={"replicas": 2})
    for costs in run(pool, wanted, "tests.test_replicas:costs_beside_a_slow_replica"):
        assert costs == pytest.approx([4.0, 0.4])


def test_profile_counts_the_whole_optimizer_state(pool: Pool, tmp_path: Path) -> None:
    """The profile has the bytes of a whole replica, also with ZeRO-1.

    A planner divides them by the replicas of its mesh. Pending gradients are included.
    """
    profiles: dict[int, costs_file.Profile] = {}
    for zero in (0, 1):
        folder = tmp_path / str(zero)
        folder.mkdir()
        pool.run("train_in", 2, config=config(1, 2, zero=zero, groups=8), folder=str(folder))
        profiles[zero] = costs_file.read(folder / costs_file.IN_RUN)
    for whole, shared in zip(profiles[0].layers, profiles[1].layers, strict=True):
        if whole.gradient_bytes:  # all but AdamW's counters
            assert 0 <= whole.optimizer_bytes - shared.optimizer_bytes < 100
        assert shared.optimizer_bytes >= 0.9 * whole.optimizer_bytes
        # Of four groups on a replica two wait while the last is summed.
        assert whole.pending_gradient_bytes == 2 * whole.gradient_bytes


def test_weight_tied_over_two_ranks_keeps_the_barrier(pool: Pool) -> None:
    wanted = config(2, 1, reshape_at=[[3, 1, 2]], tied=True)
    wanted["pipeline"]["post_validation"] = True
    told = pool.run("events", 2, config=wanted)[0]
    switches = [(e["step"], e["on"], e["reason"]) for e in told if e["event"] == "post_validation"]
    where = "the layers of a tied weight are on"
    assert switches[:2] == [(0, False, f"{where} two ranks"), (3, True, f"{where} one rank")]
