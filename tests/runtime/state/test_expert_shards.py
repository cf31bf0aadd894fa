"""Experts that are sharded over replicas: owners, memory and refused models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from dynmo.balance.expert_placement import ExpertPlacement, even_placement
from dynmo.config import parse
from dynmo.errors import ConfigError
from dynmo.pipeline.shape_costs import shape_costs
from dynmo.runtime.comm.world import World
from dynmo.runtime.state.expert_moves import arrivals
from dynmo.runtime.state.expert_shards import ExpertShards
from dynmo.train.setup import model_of
from tests.combinations import mostly_matrix
from tests.pool import Pool

JOBS = "tests.runtime.jobs.experts:"


def tables(**parallel: int) -> dict[str, Any]:
    return {
        "model": {
            "kind": "moe",
            "experts": 4,
            "blocks": 2,
            "hidden": 16,
            "heads": 2,
            "sequence": 8,
        },
        "train": {"steps": 3, "global_batch": 8, "micro_batch": 1, "reduction_slots": 4},
        "parallel": {"pipeline": 1, "replicas": 2, "expert": 2, "timeout": 20.0, **parallel},
        "balance": {"balancer": "none"},
        "trace": {"steps": 0},
    }


@pytest.mark.parametrize("zero", mostly_matrix([0, 1], everyday=[1]))
def test_replica_holds_its_share_of_the_experts(pool: Pool, zero: int) -> None:
    """The bytes predicted from shapes are those of the run."""
    wanted = tables(zero=zero)
    first, second = pool.run(f"{JOBS}holdings", 2, config=wanted)
    assert (first["held"], second["held"]) == (
        {"2": [0, 1], "4": [0, 1]},
        {"2": [2, 3], "4": [2, 3]},
    )
    told = [
        [c.weight_bytes, c.gradient_bytes, c.optimizer_bytes]
        for c in shape_costs(parse(wanted).options, model_of(parse(wanted)))
    ]
    for layer in (2, 4):
        # A counter of 4 bytes each parameter. ZeRO-1 cuts at whole norm blocks.
        assert first["bytes"][layer] == pytest.approx(
            told[layer], rel=0.01, abs=3000 if zero else 200
        ), f"layer {layer}"
    whole = tables(expert=1, zero=zero)
    alone = pool.run(f"{JOBS}holdings", 2, config=whole)[0]["bytes"]
    weights, gradients, state = (
        now / before for now, before in zip(first["bytes"][2], alone[2], strict=True)
    )
    assert weights < 0.55
    assert gradients == 1.0
    assert state < (0.55 if not zero else 1.1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_reach_their_target_ranks(pool: Pool, dtype: str) -> None:
    arrived = pool.run(f"{JOBS}rows", 3, dtype=dtype)
    for rank, each in enumerate(arrived):
        assert each == [[source, source] for source in range(3) for _ in range(rank + 1)]


@pytest.mark.parametrize(
    ("bucket", "absent"), [(40_000, []), (1 << 25, [1]), (40_000, [0, 1, 2, 3]), (1 << 25, [])]
)
def test_expert_gradients_are_summed_in_replica_order(
    pool: Pool, bucket: int, absent: list[int]
) -> None:
    assert pool.run(f"{JOBS}reduced", 4, bucket=bucket, absent=absent) == [
        [True],
        [True],
        [True],
        [],
    ]


def test_a_late_peer_is_named(pool: Pool) -> None:
    kind, message = pool.run(f"{JOBS}peer_is_late", 2)[0]
    assert kind == "WaitTimeout"
    assert message.startswith("rank 0 (replica 0) waited 0.5 s for rank 1 (replica 1)")


def test_moved_expert_comes_from_one_holder() -> None:
    before = even_placement(4, 2)
    after = ExpertPlacement(((0, 1), (1,), (0,), (1,)), 2)
    assert arrivals(before, after, 0) == [(2, 1)]
    assert arrivals(before, after, 1) == [(0, 0), (1, 0)]


@pytest.mark.parametrize(
    ("modules", "ranks", "expected"),
    [
        ([nn.Linear(2, 2)], 2, "no layer of the model has experts"),
        ("moe", 3, "does not divide parallel.replicas = 2"),
    ],
)
def test_experts_that_cannot_be_shared_are_refused(modules: Any, ranks: int, expected: str) -> None:
    device, store = torch.device("cpu"), torch.distributed.HashStore()
    world = World(0, 1, device, 1.0, 0, store).with_peers(World(0, 2, device, 1.0, 0, store))
    if modules == "moe":
        modules = model_of(parse(tables())).build(())
    with pytest.raises(ConfigError, match=expected):
        ExpertShards(world, ranks, modules)
