"""Partial W runs before its place in the program, in order and with the same bits."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from dynmo.runtime.layer.split_backward import Layer
from dynmo.runtime.layer.stage import Stage
from dynmo.runtime.layer.weight_grad_queue import WeightGradQueue
from dynmo.schedule.lowering import Compute, lower
from dynmo.schedule.op import Kind, Op, from_text
from tests.combinations import mostly_matrix
from tests.pool import Pool
from tests.runtime.engine.test_executor import EXECUTE
from tests.runtime.layer.test_accumulation import gradients
from tests.runtime.layer.test_split_backward import no_collection
from tests.runtime.modules import Net, assert_same, layer_of

# -- a layer ---------------------------------------------------------------------------------------


def two(idle: bool) -> nn.Module:
    """Two linears, whose gradients are W's, and a norm, whose gradient is B's."""
    torch.manual_seed(3)
    parts = {"one": nn.Linear(6, 6), "norm": nn.LayerNorm(6), "two": nn.Linear(6, 6, bias=False)}
    if idle:
        parts["idle"] = nn.Linear(6, 6)
    return Net(lambda m, x: m.two(m.norm(torch.tanh(m.one(x)))), **parts)


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("idle", [False, True])
@pytest.mark.parametrize(
    "order", ["bwbwbwbw", "bpbwbppwpbwpw", "bbpbbwpwppww", "bbbbpwpwpwpw", "xbpbpwbpww"]
)
def test_partial_w_gives_the_same_bits(order: str, idle: bool, groups: int) -> None:
    """B ends the slots of its own parameters only."""
    got = gradients(two(idle), order, groups)
    assert_same(got, gradients(two(idle), "xxxx", groups))
    assert all((g is None) == name.startswith("idle") for name, g in got.items())


def before_w() -> Layer:
    """A layer of three linears after its B."""
    layer = layer_of(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)))
    layer.forward(0, (torch.randn(3, 6),), 0, True, True, None)
    layer.backward_input(0, (torch.randn(3, 6),), deferred=True)
    return layer


def test_partial_w_releases_its_memory() -> None:
    """An early W needs less memory than the program allows."""
    with no_collection():
        layer = before_w()
        held = [
            [StorageWeakRef(t.untyped_storage()) for t in holds]
            for _, holds in layer._weight_work[0]
        ]
        seen: list[list[bool]] = []
        for _ in layer.partial_weights(0):
            seen.append([all(ref.expired() for ref in refs) for refs in held])
    assert seen == [[True, False, False], [True, True, False], [True, True, True]]


def test_partial_w_marks_belong_to_their_w() -> None:
    layer = before_w()
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


def queue(program: str) -> tuple[WeightGradQueue, Any, list[str]]:
    """The queue of a program, its instructions, and what its stages will be told."""
    told: list[str] = []
    instructions = lower(from_text(program))[0].instructions
    return WeightGradQueue(instructions, {s: Recorded(s, told) for s in (0, 1)}), instructions, told


def run(ahead: dict[str, int]) -> tuple[list[str], list[str | None]]:
    """What ran, and what each wish for pieces before the ops named was told."""
    pieces, instructions, told = queue(PROGRAM)
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
    pieces, _, told = queue(
        "# own  ranks=1 microbatches=3 placement=0,0\n"
        "0 | 0F0 1F0 0F1 1F1 1B0 1B1 0B0 1W0 1W1 0W0 0B1 0W1 0F2 1F2 1B2 1W2 0B2 0W2\n"
    )
    places = ((1, 0), (1, 1), (0, 0))
    for place in places:
        pieces.after(Op(Kind.B, *place))
    w = [Op(Kind.W, *place) for place in places]
    assert [pieces.run_one() for _ in range(7)] == [w[0]] * 3 + [w[1]] * 3 + [w[2]]
    for op in w:
        pieces.run_rest(op)
    assert told == [f"{op}{piece}" for op in ("1w0", "1w1", "0w0") for piece in "abc"]


# -- ranks -----------------------------------------------------------------------------------------


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
    schedule: dict[str, Any] = {"schedule": [placement, 1], "groups": groups}
    whole, pieces = (  # with every W in its place, and with pieces where a message may be late
        pool.run(EXECUTE, max(placement) + 1, layers=8, microbatches=4, late=late, **schedule)
        for late in (None, 1)
    )
    assert sum(r.pop("ahead") for r in whole) == 0
    assert sum(r.pop("ahead") for r in pieces) > 0
    assert pieces == whole
