"""Experts that are sharded over replicas: owners, memory and refused models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import dynmo
from dynmo.cases.experts.layers import ExpertsHalf
from dynmo.config import parse
from dynmo.errors import ConfigError
from dynmo.kernels.grouped_linear import GroupedLinear
from dynmo.models.group_placement import GroupPlacement, even_placement
from dynmo.pipeline.options import PipelineOptions, grouped
from dynmo.pipeline.shape_costs import shape_costs, static_costs
from dynmo.runtime.comm.meeting import Meeting
from dynmo.runtime.comm.process_mesh import Sharers, arrange
from dynmo.runtime.layer.accumulation import Tree
from dynmo.runtime.optim.gradient_reduction import ReplicatedWeight, drop_missing, reduce_gradients
from dynmo.runtime.optim.optimizer import Share, share_ranges
from dynmo.runtime.state.spread_groups import SpreadGroups, arrivals
from dynmo.train.setup import model_of
from dynmo.train.trainer import Trainer
from tests.combinations import mostly_matrix
from tests.jobs import parsed
from tests.pool import Pool
from tests.runtime.alone import GPT
from tests.runtime.jobs import error_of, lose_patience
from tests.runtime.modules import draw


def holdings(world: Meeting, config: dict[str, Any]) -> dict[str, Any]:
    """The experts of each layer that are here after a run, and the bytes of all layers."""
    loaded = parsed(config)
    trainer = Trainer(loaded, world, model_of(loaded), None)
    trainer.run()
    held = {
        index: [expert for expert, weight in enumerate(half.gate_up.weights) if weight is not None]
        for index, (module, _) in trainer.pipeline._engine.store.own.items()
        for half in module.modules()
        if isinstance(half, ExpertsHalf)
    }
    costs = trainer.pipeline.measured.costs()
    return {
        "held": held,
        "bytes": [[c.weight_bytes, c.gradient_bytes, c.optimizer_bytes] for c in costs],
    }


class Beside(nn.Module):
    """Experts that spread, and a grouped linear of its own that does not."""

    varying_time = True

    def __init__(self, options: dynmo.ModelOptions) -> None:
        super().__init__()
        self.experts, self.own = ExpertsHalf(options), GroupedLinear(4, 16, 16, 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.experts(x)
        rows = x.reshape(-1, 16)
        return x + self.own(rows, [len(rows) // 4] * 4).view(x.shape)


def beside() -> dynmo.Sequential:
    options = dynmo.ModelOptions(kind="moe", experts=4, hidden=16, heads=2)
    torch.manual_seed(0)
    layers = [nn.Linear(16, 16), Beside(options), nn.Linear(16, 16)]
    return dynmo.Sequential(layers, loss=nn.functional.mse_loss)


def beside_digest(world: Meeting, **options: Any) -> str:
    pipeline = dynmo.Pipeline(beside(), world, microbatches=2 // world.size, **grouped(options))
    for step in range(2):
        data = torch.randn(4, 8, 16, generator=torch.Generator().manual_seed(step))
        own = data.chunk(world.size)[world.rank]
        pipeline.step(own, own.sin())
    return pipeline.digest()


def peer_is_late(world: Meeting) -> list[Any]:
    """Rank 1 sends no rows: the wait of rank 0 has an end and a name."""
    group = Sharers(arrange(world, 2), 2)
    lose_patience(group.world)
    if world.rank == 1:
        world.store.wait(["named"])
        said = []
    else:
        said = error_of(lambda: group.rows(torch.zeros(2, 4), [1, 1], [1, 1]))
        world.store.set("named", "1")
    world.close()
    return said


def rows(world: Meeting, dtype: str) -> list[list[float]]:
    """Rank r sends s + 1 rows of r to rank s. Returns what arrived."""
    group = Sharers(arrange(world, world.size), world.size)
    sent = [rank + 1 for rank in range(world.size)]
    own = torch.full((sum(sent), 2), float(world.rank), dtype=getattr(torch, dtype))
    taken = group.counts([[count] for count in sent], [1] * world.size)
    return group.rows(own, sent, [count for (count,) in taken]).tolist()


def reduced(world: Meeting, bucket: int, absent: list[int]) -> list[Any]:
    """Two experts: one on replicas 0 and 2, one on replica 1. True for each correct local sum."""
    peers, size = arrange(world, 4).peers, 40_000
    spread_over: Any = [((0, 1), (), (2, 3), ()), ((), (0, 1, 2, 3), (), ())]
    experts: list[ReplicatedWeight] = []
    for number, sources in enumerate(spread_over):
        holders = [replica for replica, of in enumerate(sources) if of]
        ranges = [(0, 0)] * 4
        for place, replica in enumerate(holders):
            (ranges[replica],) = share_ranges([size], Share(place, len(holders)))
        copies = {source: nn.Parameter(torch.zeros(size)) for source in sources[peers.rank]}
        for source, copy in copies.items():
            copy.grad = None if source in absent else _gradient(number, source, size)
        own = next(iter(copies.values()), nn.Parameter(torch.zeros(size)))
        experts.append(
            ReplicatedWeight(f"e{number}", own, tuple(ranges), sources, gradients=copies)
        )
    drop_missing(reduce_gradients(peers, 0, experts, bucket=bucket))
    out: list[Any] = []
    for number, expert in enumerate(experts):
        tree = Tree()
        for source in range(4):
            tree.put(source, None if source in absent else _gradient(number, source, size))
        total = tree.total(4)
        grad = expert.parameter.grad
        if expert.sources[peers.rank]:
            out.append(grad is total if grad is None or total is None else torch.equal(grad, total))
    return out


def _gradient(expert: int, source: int, size: int) -> torch.Tensor:
    return draw(10 * expert + source, size)


JOBS = "tests.runtime.state.test_spread_groups:"


def tables(**parallel: int) -> dict[str, Any]:
    return {
        "model": {"kind": "moe", "experts": 4} | GPT,
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
    assert first["held"] == {"2": [0, 1], "4": [0, 1]}
    assert second["held"] == {"2": [2, 3], "4": [2, 3]}
    told = [
        [c.weight_bytes, c.gradient_bytes, c.optimizer_bytes]
        for c in shape_costs(parse(wanted).options, model_of(parse(wanted)))
    ]
    # A counter of 4 bytes each parameter. ZeRO-1 cuts at whole norm blocks.
    room = 3000 if zero else 200
    for layer in (2, 4):
        assert first["bytes"][layer] == pytest.approx(told[layer], rel=0.01, abs=room), layer
    whole = tables(expert=1, zero=zero)
    alone = pool.run(f"{JOBS}holdings", 2, config=whole)[0]["bytes"]
    weights, gradients, state = (
        now / before for now, before in zip(first["bytes"][2], alone[2], strict=True)
    )
    assert weights < 0.55
    assert gradients == 1.0
    assert state < (0.55 if not zero else 1.1)


def test_grouped_linear_beside_the_experts_is_whole_everywhere(pool: Pool) -> None:
    job = f"{JOBS}beside_digest"
    assert pool.run(job, 2, replicas=2, expert=2) == pool.run(job, 1) * 2


def test_only_the_experts_count_as_spread() -> None:
    own = GroupedLinear(4, 16, 16, 0.1)
    model = dynmo.Sequential([nn.Linear(16, 16), own], loss=nn.functional.mse_loss)
    with_experts, without = (
        static_costs(PipelineOptions(microbatches=2, replicas=2, expert=expert, zero=1), model)[
            1
        ].optimizer_bytes
        for expert in (2, 1)
    )
    assert with_experts == without


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
    told = pool.run(f"{JOBS}reduced", 4, bucket=bucket, absent=absent)
    assert told == [[True], [True], [True], []]


def test_a_late_peer_is_named(pool: Pool) -> None:
    kind, message = pool.run(f"{JOBS}peer_is_late", 2)[0]
    assert kind == "WaitTimeout"
    assert message.startswith("rank 0 (replica 0) waited 0.5 s for rank 1 (replica 1)")


def test_moved_expert_comes_from_one_holder() -> None:
    before = even_placement(4, 2)
    after = GroupPlacement(((0, 1), (1,), (0,), (1,)), 2)
    assert arrivals(before, after, 0) == [(2, 1)]
    assert arrivals(before, after, 1) == [(0, 0), (1, 0)]


@pytest.mark.parametrize(
    ("layer", "holders", "ranks", "expected"),
    [
        (1, ((0,), (0,), (1,), (1,)), 2, r"^layer 1 has no groups, .* layers \[2, 4\] have groups"),
        (
            2,
            ((0,), (1,)),
            2,
            "^layer 2 has 4 groups on 2 replicas, so 2 groups on 2 replicas cannot",
        ),
        (2, ((0,), (1,), (2,), (3,)), 4, "so 4 groups on 4 replicas cannot be placed"),
        (4, ((0,),) * 4, 2, "as .* and each replica needs one or more$"),
    ],
)
def test_placements_that_replicas_cannot_have_are_refused(
    layer: int, holders: Any, ranks: int, expected: str
) -> None:
    groups = SpreadGroups(2, model_of(parse(tables())).build(()))
    groups.check({2: GroupPlacement(((0, 1), (0,), (1,), (1,)), 2)})
    with pytest.raises(ConfigError, match=expected):
        groups.check({layer: GroupPlacement(holders, ranks)})


@pytest.mark.parametrize(
    ("modules", "ranks", "expected"),
    [
        ([nn.Linear(2, 2)], 2, "no layer of the model has experts"),
        ("moe", 3, "parallel.expert = 3 does not divide the 4 experts of layer 2$"),
    ],
)
def test_experts_that_cannot_be_shared_are_refused(modules: Any, ranks: int, expected: str) -> None:
    if modules == "moe":
        modules = model_of(parse(tables())).build(())
    with pytest.raises(ConfigError, match=expected):
        SpreadGroups(ranks, modules)
