"""Partial W runs before its place in the program, in order and with the same bits."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from dynmo.runtime.comm.clock import HostClock
from dynmo.runtime.layer.accumulation import AccumulationGroups
from dynmo.runtime.layer.split_backward import Layer
from dynmo.runtime.layer.stage import Stage
from dynmo.runtime.layer.weight_grad_queue import WeightGradQueue
from dynmo.schedule.lowering import Compute, lower
from dynmo.schedule.op import Kind, Op, from_text
from tests.combinations import mostly_matrix
from tests.pool import Pool
from tests.runtime.engine.test_executor import EXECUTE, LAYERS
from tests.runtime.layer.test_split_backward import no_collection

# -- a layer ---------------------------------------------------------------------------------------


class Two(nn.Module):
    """Two linears, whose gradients are W's, and a norm, whose gradient is B's."""

    def __init__(self, idle: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.one = nn.Linear(6, 6)
        self.norm = nn.LayerNorm(6)
        self.two = nn.Linear(6, 6, bias=False)
        self.idle = nn.Linear(6, 6) if idle else None

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.norm(torch.tanh(self.one(x))))


def gradients(order: str, groups: int, idle: bool = False) -> dict[str, Tensor | None]:
    """`order` has b and w (the next of each), x (both at once) and p (the next piece of W)."""
    module = Two(idle)
    ended: list[int] = []
    layer = Layer(
        0,
        module,
        HostClock(),
        1,
        groups=AccumulationGroups(list(module.parameters()), 4, groups, lambda: ended.append(1)),
    )
    random = torch.Generator().manual_seed(2)
    for j in range(4):
        layer.forward(j, (torch.randn(3, 6, generator=random),), 0, True, True, None)
    b = w = 0
    begun: Iterator[None] | None = None
    for kind in order:
        if kind == "p":
            begun = begun or layer.partial_weights(w)
            next(begun, None)
        elif kind == "w":
            for _ in begun or layer.partial_weights(w):
                pass
            begun = None
        else:
            layer.backward_input(
                b,
                (torch.randn(3, 6, generator=torch.Generator().manual_seed(b)),),
                deferred=kind == "b",
            )
        b, w = b + (kind in "bx"), w + (kind in "wx")
    assert (b, w, ended) == (4, 4, [1])
    assert not layer._weight_work
    assert not layer._ahead
    assert [mark[0] for mark in layer.marks].count(Kind.W) == order.count("w")
    return {name: p.grad for name, p in module.named_parameters()}


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("idle", [False, True])
@pytest.mark.parametrize(
    "order", ["bwbwbwbw", "bpbwbppwpbwpw", "bbpbbwpwppww", "bbbbpwpwpwpw", "xbpbpwbpww"]
)
def test_partial_w_gives_the_same_bits(order: str, idle: bool, groups: int) -> None:
    """B ends the slots of its own parameters only."""
    expected, got = gradients("xxxx", groups, idle), gradients(order, groups, idle)
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        actual = got[name]
        assert (value is None) == (actual is None) == name.startswith("idle"), name
        assert value is None or (actual is not None and torch.equal(actual, value)), name


def test_partial_w_releases_its_memory() -> None:
    """An early W needs less memory than the program allows."""
    layer = Layer(
        0, nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)), HostClock(), 1
    )
    with no_collection():
        layer.forward(0, (torch.randn(3, 6),), 0, True, True, None)
        layer.backward_input(0, (torch.randn(3, 6),), deferred=True)
        held = [
            [StorageWeakRef(t.untyped_storage()) for t in holds]
            for _, holds in layer._weight_work[0]
        ]
        seen: list[list[bool]] = []
        for _ in layer.partial_weights(0):
            seen.append([all(ref.expired() for ref in refs) for refs in held])
    assert seen == [[True, False, False], [True, True, False], [True, True, True]]


def test_partial_w_marks_belong_to_their_w() -> None:
    layer = Layer(
        0, nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)), HostClock(), 1
    )
    layer.forward(0, (torch.randn(3, 6),), 0, True, True, None)
    layer.backward_input(0, (torch.randn(3, 6),), deferred=True)
    assert sum(1 for _ in layer.partial_weights(0)) == 3
    kind, start, end, ahead = layer.marks[-1]
    assert kind is Kind.W
    times = [time for pair in (*ahead, (start, end)) for time in pair]
    assert len(ahead) == 2
    assert times == sorted(times)


# -- a program -------------------------------------------------------------------------------------

# One rank has two stages. Lowering makes BW of stage 0.
PROGRAM = """
# own  ranks=1 microbatches=3 placement=0,0
0 | 0F0 1F0 0F1 1F1 0F2 1F2 1B0 1B1 0B0 0W0 1W0 0B1 0W1 1W1 1B2 1W2 0B2 0W2
"""


class Recorded(Stage):
    """Says what it is told."""

    def __init__(self, number: int, told: list[str]) -> None:
        self._number, self._told = number, told

    def backward_weight(self, microbatch: int) -> None:
        self._told.append(f"{self._number}W{microbatch}")

    def partial_weights(self, microbatch: int) -> Iterator[None]:
        for piece in "abc":
            self._told.append(f"{self._number}w{microbatch}{piece}")
            yield


def run(ahead: dict[str, int]) -> tuple[list[str], list[str | None]]:
    """What ran, and what each wish for pieces before the ops named was told."""
    told: list[str] = []
    instructions = lower(from_text(PROGRAM))[0].instructions
    pieces = WeightGradQueue(instructions, {s: Recorded(s, told) for s in range(2)})
    wishes: list[str | None] = []
    for instruction in instructions:
        assert isinstance(instruction, Compute)
        op = instruction.op
        for _ in range(ahead.get(f"{op.stage}{op.kind}{op.microbatch}", 0)):
            got = pieces.run_one()
            wishes.append(got and f"{got.stage}{got.kind}{got.microbatch}")
        if op.kind is Kind.W:
            pieces.run_rest(op)
        elif op.kind is Kind.BW:
            told.append(f"{op.stage}BW{op.microbatch}")
        pieces.after(op)
    assert not pieces.any
    return told, wishes


def test_queue_without_idle_time_follows_the_program() -> None:
    assert run({}) == (["0BW0", "1W0", "0BW1", "1W1", "1W2", "0BW2"], [])


def test_partial_w_runs_after_its_b_and_in_order() -> None:
    """Two W of stage 1 are pending after its B, but BW of stage 0 comes first."""
    told, wishes = run({"0F1": 1, "0BW0": 2, "1W0": 2, "0BW1": 2, "1W1": 4, "0BW2": 1})
    assert wishes == [None, None, None, "1W0", "1W0", None, None, "1W1", "1W1", "1W1", None, None]
    assert told == ["0BW0", "1w0a", "1w0b", "1w0c", "0BW1", "1w1a", "1w1b", "1w1c", "1W2", "0BW2"]


def test_partial_w_of_several_stages_runs_in_order() -> None:
    text = (
        "# own  ranks=1 microbatches=3 placement=0,0\n"
        "0 | 0F0 1F0 0F1 1F1 1B0 1B1 0B0 1W0 1W1 0W0 0B1 0W1 0F2 1F2 1B2 1W2 0B2 0W2\n"
    )
    told: list[str] = []
    instructions = lower(from_text(text))[0].instructions
    pieces = WeightGradQueue(instructions, {s: Recorded(s, told) for s in range(2)})
    for op in (Op(Kind.B, 1, 0), Op(Kind.B, 1, 1), Op(Kind.B, 0, 0)):
        pieces.after(op)
    assert [pieces.run_one() for _ in range(7)] == [Op(Kind.W, 1, 0)] * 3 + [
        Op(Kind.W, 1, 1)
    ] * 3 + [Op(Kind.W, 0, 0)]
    for op in (Op(Kind.W, 1, 0), Op(Kind.W, 1, 1), Op(Kind.W, 0, 0)):
        pieces.run_rest(op)
    assert told == [f"{w}{piece}" for w in ("1w0", "1w1", "0w0") for piece in "abc"]


# -- ranks -----------------------------------------------------------------------------------------


def both(pool: Pool, ranks: int, schedule: Any, **options: Any) -> list[list[dict[str, Any]]]:
    """The schedule with every W in its place, and with pieces where a message may be late."""
    return [
        pool.run(EXECUTE, ranks, schedule=schedule, layers=LAYERS, late=late, **options)
        for late in (None, 1)
    ]


@pytest.mark.parametrize(
    ("placement", "groups"),
    mostly_matrix(
        product(((0, 1, 1, 0), (0, 0, 1, 1), (0, 1, 2, 3)), (1, 2, 4)),
        everyday=[((0, 1, 1, 0), 2), ((0, 0, 1, 1), 4), ((0, 1, 2, 3), 1)],
    ),
)
def test_late_messages_change_no_gradient(
    pool: Pool, placement: tuple[int, ...], groups: int
) -> None:
    """The order in which layers finish stays the same too, because replicas share it."""
    whole, pieces = both(pool, max(placement) + 1, [placement, 1], microbatches=4, groups=groups)
    assert sum(r.pop("ahead") for r in whole) == 0
    assert sum(r.pop("ahead") for r in pieces) > 0
    assert pieces == whole
