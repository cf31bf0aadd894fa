"""Moving layers between ranks, also to another mesh: every bit arrives, or no layer moves."""

from __future__ import annotations

import json
from itertools import product
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from dynmo.config import parse
from dynmo.errors import RunError
from dynmo.kernels.seeds import mix
from dynmo.plan.partition import Move, Partition, moves_between_ranks, uniform
from dynmo.runtime.comm.headers import TAG_MIGRATE
from dynmo.runtime.comm.meeting import Meeting
from dynmo.runtime.optim.optimizer import LayerOptimizer
from dynmo.runtime.state.layer_tensors import contents, fill
from dynmo.runtime.state.migration import (
    Arrival,
    Packed,
    _receive_text,
    exchange,
    holders,
    pack,
    transfers,
    unpack,
)
from dynmo.train.setup import model_of
from tests.combinations import mostly_matrix
from tests.pool import Pool
from tests.runtime.jobs import error_of
from tests.runtime.modules import Net, assert_same, bits_of
from tests.runtime.optimizers import optimizer_of
from tests.runtime.optimizers import step as step_of


def fingerprint(
    module: nn.Module, optimizer: LayerOptimizer, gradients: bool = True
) -> dict[str, Any]:
    """Dtype, shape and bits of each tensor of a layer, and which parameters train."""
    out: dict[str, Any] = {}
    for (section, name), t in contents(module, optimizer.state()).items():
        if gradients or section != "gradient":
            out[f"{section} {name}"] = [str(t.dtype), list(t.shape), bits_of(t)]
    return out | {f"trains {name}": p.requires_grad for name, p in module.named_parameters()}


class Held:
    """The layers of one rank, as little as moving them needs."""

    def __init__(self, world: Meeting, kind: dict[str, Any], partition: Partition) -> None:
        self.world, self.partition = world, partition
        self.model = model_of(parse({"model": kind}))
        own = partition.range_of(world.rank)
        self.modules = self.model.build(frozenset(own))
        for index in range(0, self.model.layers, 3):
            self.modules[index].requires_grad_(False)
        self.optimizers = {i: optimizer_of(self.modules[i]) for i in own}

    def train(self, step: int) -> None:
        """Gradients from nowhere, one update, and gradients left behind."""
        for index, optimizer in self.optimizers.items():
            for last in (False, True):
                random = torch.Generator().manual_seed(mix(step, index, last))
                for p in self.modules[index].parameters():
                    p.grad = torch.randn(p.shape, generator=random) if p.requires_grad else None
                if not last:
                    step_of(optimizer, 0.1)
                    optimizer.drop_gradients()

    def fingerprints(self) -> dict[int, Any]:
        return {i: fingerprint(self.modules[i], o) for i, o in self.optimizers.items()}

    def leaving(self, index: int) -> tuple[nn.Module, dict[str, Tensor]]:
        return self.modules[index], self.optimizers[index].state()

    def move(self, target: Partition, leaving: Any = None) -> int:
        plan = moves_between_ranks(self.partition, target)

        def give(move: Move) -> Packed:
            module, state = (leaving or self.leaving)(move.layer)
            return pack(move.layer, module, state)

        def adopt(arrivals: list[Arrival]) -> None:
            for move in plan:
                if move.source == self.world.rank:
                    self.modules[move.layer].zero_grad()
                    self.modules[move.layer] = self.modules[move.layer].to("meta")
                    del self.optimizers[move.layer]
            for arrival in arrivals:
                module = self.modules[arrival.layer]
                state = fill(module, arrival.tensors, arrival.flags)
                self.optimizers[arrival.layer] = optimizer_of(module)
                self.optimizers[arrival.layer].load(state)

        migration = exchange(
            self.world,
            plan,
            give,
            lambda *_: None,
            adopt,
        )
        self.partition = target
        return migration.moved_bytes


def any_partition(layers: int, ranks: int, random: Random) -> Partition:
    return Partition.from_bounds([0, *sorted(random.sample(range(1, layers), ranks - 1)), layers])


def migrate(world: Meeting, kind: dict[str, Any], seed: int, rounds: int) -> dict[str, Any]:
    """Moves layers between random placements, with an update and gradients before each move."""
    random = Random(seed)
    layers = model_of(parse({"model": kind})).layers
    held = Held(world, kind, any_partition(layers, world.size, random))
    moved = 0
    for step in range(rounds):
        held.train(step)
        moved += held.move(any_partition(layers, world.size, random))
        assert sorted(held.optimizers) == list(held.partition.range_of(world.rank))
    return {"layers": held.fingerprints(), "moved": moved}


def migrate_fails(world: Meeting, how: str) -> dict[str, Any]:
    """One rank fails while layers move from (3, 1, 2) to (1, 2, 3)."""
    kind = {"kind": "gpt", "blocks": 2, "hidden": 16, "heads": 2, "sequence": 4}
    held = Held(world, kind, Partition((3, 1, 2)))
    held.train(0)
    before = held.fingerprints()

    def leaving(index: int) -> tuple[nn.Module, dict[str, Tensor]]:
        if index == 2 and how == "source":
            raise RunError("layer 2 will not go")
        module, state = held.leaving(index)
        if index == 2 and how == "dtype":
            module = nn.Linear(2, 2)
            module.register_buffer("odd", torch.zeros(2).to(torch.float8_e5m2))
        if index == 3 and how == "memory":
            state = {"huge": torch.zeros(1).expand(1 << 50)}
        return module, state

    error = error_of(lambda: held.move(Partition((1, 2, 3)), leaving))
    untouched = held.fingerprints() == before and held.partition == Partition((3, 1, 2))
    held.move(Partition((1, 2, 3)))  # and the world is as good as before
    return {"error": error, "untouched": untouched, "after": sorted(held.optimizers)}


def announces(world: Meeting, length: int) -> list[str]:
    """Rank 0 announces a manifest of this length to rank 1. Returns what that says."""
    if world.rank == 0:
        world.wait(world.send(torch.tensor([length]), 1, TAG_MIGRATE), 1, "room to send")
        return []
    return error_of(lambda: _receive_text(world, Move(2, 0, 1)))


JOBS = "tests.runtime.state.test_migration:"
KINDS: dict[str, dict[str, Any]] = {
    "gpt": {"kind": "gpt", "blocks": 3, "hidden": 16, "heads": 2, "sequence": 4},
    "own": {"kind": "python:tests.models.user_model:layers"},
}
CPU = torch.device("cpu")
MOVE = Move(2, 0, 1)


@pytest.mark.parametrize(
    ("kind", "ranks", "seed"),
    mostly_matrix(product(KINDS, (2, 4), (0, 1)), everyday=[("gpt", 4, 0), ("own", 4, 0)]),
)
def test_random_moves_change_no_bits(pool: Pool, kind: str, ranks: int, seed: int) -> None:
    """Layers train between moves, as in a run without moves."""
    moved = pool.run(JOBS + "migrate", ranks, kind=KINDS[kind], seed=seed, rounds=4)
    (stayed,) = pool.run(JOBS + "migrate", 1, kind=KINDS[kind], seed=seed, rounds=4)
    layers = {index: layer for result in moved for index, layer in result["layers"].items()}
    assert layers == stayed["layers"]
    assert stayed["moved"] == 0
    (moved_bytes,) = {result["moved"] for result in moved}  # every rank knows the bytes of all
    assert moved_bytes > 0
    sections = {name.split()[0] for layer in stayed["layers"].values() for name in layer}
    assert sections == {"parameter", "buffer", "gradient", "optimizer", "trains"}
    trains = [value for layer in stayed["layers"].values() for value in layer.items()]
    assert {value for name, value in trains if name.startswith("trains")} == {True, False}


@pytest.mark.parametrize(
    ("how", "rank", "reason"),
    [
        ("source", 0, "layer 2 will not go"),
        (
            "dtype",
            1,
            "layer 2: buffer odd is of float8_e5m2, which cannot travel; known are float32",
        ),
        ("memory", 1, "allocate"),
    ],
)
def test_failed_move_leaves_all_layers_in_place(
    pool: Pool, how: str, rank: int, reason: str
) -> None:
    """All ranks raise at once, no layer has moved, and the next move succeeds."""
    results = pool.run(JOBS + "migrate_fails", 3, how=how)
    for each, result in enumerate(results):
        kind, text = result["error"]
        assert kind == "NotMoved"
        assert text.startswith(f"layers could not be moved (rank {rank})")
        assert text.endswith("all stay where they were")
        assert (reason in text) or each != rank
        assert result["untouched"]
    assert [result["after"] for result in results] == [[0], [1, 2], [3, 4, 5]]


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"dtype": "float128"}, "layer 2: parameter weight is of float128, which cannot travel"),
        ({"dtype": "__class__"}, "cannot travel"),
        ({"shape": "12"}, "the manifest of layer 2 from rank 0 cannot be read"),
        ({"extra": 1}, "cannot be read"),
        ({"name": None}, "cannot be read"),
        ({"shape": [1 << 44]}, r"from rank 0: it announces \d+"),
        ({"shape": [-2, -3]}, "cannot be read"),
    ],
)
def test_bad_manifests_are_refused(changes: dict[str, Any], match: str) -> None:
    """Of a linear, with something changed, or left out where there is None."""
    manifest = json.loads(pack(2, nn.Linear(3, 2), {})[0])
    for key, value in changes.items():
        manifest["tensors"][0][key] = value
    if "name" in changes:
        del manifest["tensors"][0]["name"]
    with pytest.raises(RunError, match=match):
        unpack(json.dumps(manifest).encode(), MOVE, CPU)


def test_layers_come_in_order() -> None:
    with pytest.raises(AssertionError, match="in one order"):
        unpack(pack(3, nn.Linear(3, 2), {})[0], MOVE, CPU)


@pytest.mark.parametrize("length", [-1, 1 << 50])
def test_manifest_length_is_bounded(pool: Pool, length: int) -> None:
    """The receiver does not allocate a size just because a peer announces it."""
    _, (_, told) = pool.run(JOBS + "announces", 2, length=length)
    assert told.startswith(f"the manifest of layer 2 from rank 0: it announces {length} bytes")


def test_truncated_manifest_is_refused() -> None:
    with pytest.raises(RunError, match="cannot be read"):
        unpack(pack(2, nn.Linear(3, 2), {})[0][:-5], MOVE, CPU)


def counting() -> nn.Module:
    """Has a buffer from its first forward on."""

    def forward(module: Any, x: Tensor) -> Tensor:
        module.seen = torch.ones(2) if module.seen is None else module.seen + 1
        return module.linear(x)

    module = Net(forward, linear=nn.Linear(2, 2))
    module.register_buffer("seen", None)
    return module


def test_buffer_made_in_a_forward_moves() -> None:
    here, there = counting(), counting().to("meta")
    here(here(torch.zeros(1, 2)))
    fill(there, contents(here, {}), dict.fromkeys(("linear.weight", "linear.bias"), True))
    assert there.get_buffer("seen").tolist() == [2.0, 2.0]


def test_unpacked_layer_equals_the_packed_layer() -> None:
    """`fill` builds the module from the tensors that the receiver allocated."""
    module = nn.BatchNorm1d(4)
    module.weight.requires_grad_(False)
    module.bias.grad = torch.randn(4)
    state = {"bias/step": torch.tensor(3.0), "bias/exp_avg": torch.randn(4)}
    text, tensors = pack(2, module, state)
    arrival = unpack(text, MOVE, CPU)
    made = [(t.dtype, t.shape) for t in arrival.tensors.values()]
    assert made == [(t.dtype, t.shape) for t in tensors]
    for ours, sent in zip(arrival.tensors.values(), tensors, strict=True):
        ours.copy_(sent)
    other = nn.BatchNorm1d(4).to("meta")
    assert fill(other, arrival.tensors, arrival.flags).keys() == state.keys()
    assert_same(contents(module, state), contents(other, state))
    assert not other.weight.requires_grad
    assert other.bias.requires_grad


SHAPES = [(pipeline, 12 // pipeline) for pipeline in (1, 2, 3, 4, 6, 12)]


def test_transfers_match_the_example_in_the_docstring() -> None:
    """The example is in the docstring of the module."""
    before, after = holders(Partition((4, 4)), (0, 1), 2), holders(Partition((8,)), (0,), 4)
    assert before == ((0, 1),) * 4 + ((2, 3),) * 4
    assert after == ((0, 1, 2, 3),) * 8
    assert transfers(before, after) == tuple(
        [Move(layer, *way) for layer in range(4) for way in ((0, 2), (1, 3))]
        + [Move(layer, *way) for layer in range(4, 8) for way in ((2, 0), (3, 1))]
    )
    assert transfers(before, before) == ()


@given(st.sampled_from(SHAPES), st.sampled_from(SHAPES), st.integers(12, 20))
def test_each_rank_receives_its_missing_layers_from_a_holder(
    old: tuple[int, int], new: tuple[int, int], layers: int
) -> None:
    before, after = (
        holders(uniform(layers, pipeline), range(pipeline), data) for pipeline, data in (old, new)
    )
    plan = transfers(before, after)
    assert [m.layer for m in plan] == sorted(m.layer for m in plan)
    for layer in range(layers):
        moves = [m for m in plan if m.layer == layer]
        assert {m.target for m in moves} == set(after[layer]) - set(before[layer])
        assert len({m.target for m in moves}) == len(moves), "once each"
        assert {m.source for m in moves} <= set(before[layer])
        given_by = [sum(m.source == rank for m in moves) for rank in before[layer]]
        assert max(given_by) - min(given_by) <= 1, "they take turns"
