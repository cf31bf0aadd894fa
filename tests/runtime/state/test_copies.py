"""Copies of layers in the memory of another rank."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from dynmo.errors import RankDied, RunError, WaitTimeout
from dynmo.plan.partition import Move
from dynmo.runtime.comm.headers import TAG_COPY
from dynmo.runtime.comm.meeting import Meeting
from dynmo.runtime.state.copies import Copies
from dynmo.runtime.state.migration import unpack
from dynmo.runtime.state.shared_rooms import OtherRooms
from tests.pool import Pool

JOBS = "tests.runtime.state.test_copies:"
# More than a piece, and no multiple of one.
WIDE = 300_001


class Layer(nn.Module):
    """Weights that train, a buffer, and a weight that is frozen."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((WIDE,), value))
        self.frozen = nn.Parameter(torch.full((3,), value), requires_grad=False)
        self.register_buffer("mean", torch.tensor(value))


def moments(value: float) -> dict[str, Tensor]:
    return {"weight/exp_avg": torch.full((WIDE,), float(value)), "case:mask": torch.tensor([True])}


def take(copies: Copies, step: int, layers: dict[int, Layer], state: str = "{}") -> None:
    copies.take(step, state, 0, ((i, each, moments(step + i)) for i, each in layers.items()))


def change(layers: dict[int, Layer]) -> None:
    """What a step does to a layer."""
    with torch.no_grad():
        for layer in layers.values():
            layer.weight.add_(1)
            layer.get_buffer("mean").add_(1)


def values(copies: Copies, step: int) -> list[list[Any]]:
    """The layers of the copies of a step here: index, weight, frozen, mean and moment."""
    out = list[list[Any]]()
    for copy in copies.complete().get(step, []):
        for (index, _), (text, tensors) in sorted(copy.layers.items()):
            arrival = unpack(text, Move(index, 0, 0), torch.device("cpu"))
            named = dict(zip(arrival.tensors, tensors, strict=True))
            keys = [("parameter", "weight"), ("parameter", "frozen"), ("buffer", "mean")]
            keys.append(("optimizer", "weight/exp_avg"))
            assert all((named[key] == named[key].view(-1)[0]).all() for key in keys)
            out.append([index, *(named[key].view(-1)[0].item() for key in keys)])
    return sorted(out)


def keeps(world: Meeting, shares: bool) -> dict[str, Any]:
    """Three steps. Rank r has layer r, whose weights begin with 10 r."""
    other, layers = 1 - world.rank, {world.rank: Layer(10.0 * world.rank)}
    copies = Copies(world, other, other, None)
    if shares:
        copies.share_memory()
    found = dict[str, Any]()
    for step in range(3):
        with mock.patch.object(world, "send", wraps=world.send) as send:
            take(copies, step, layers, f"before step {step}")
            copies.wait_copied()
            change(layers)
            copies.wait()
        world.barrier("the step to end")
        found[f"steps {step}"] = sorted(copies.complete())
        found[f"sent {step}"] = sum(sent.args[0].nbytes for sent in send.call_args_list)
        found[f"values {step}"] = values(copies, step)
    found["before"] = values(copies, 1)
    found["states"] = sorted(each.state for x in copies.complete().values() for each in x)
    found["nbytes"] = copies.nbytes
    copies.close()
    return found


@pytest.mark.parametrize("shares", [False, True])
def test_a_rank_keeps_its_own_layers_and_those_of_another(pool: Pool, shares: bool) -> None:
    """Of the two newest steps, as they were before these. What is the same is not sent again."""
    for found in pool.run(JOBS + "keeps", 2, shares=shares):
        assert [found[f"steps {step}"] for step in range(3)] == [[0], [0, 1], [1, 2]]
        for step in range(3):
            assert found[f"values {step}"] == [
                [at, 10.0 * at + step, 10.0 * at, 10.0 * at + step, step + at] for at in (0, 1)
            ]
        assert found["before"] == found["values 1"]
        assert found["states"] == ["", "", "before step 1", "before step 2"]
        new, same = 2 * 4 * WIDE + 4, 3 * 4 + 1  # bytes of a layer
        if shares:
            assert max(found["sent 0"], found["sent 1"]) < 4096
        else:
            assert new <= found["sent 1"] < found["sent 0"]
        ranks = 1 if shares else 2
        assert found["nbytes"] == ranks * (2 * new + same), "what is the same is kept once"


def loses(world: Meeting) -> dict[str, Any]:
    """Rank 1 is gone before it has the copies of step 1. Both look at what is left."""
    other, layers = 1 - world.rank, {world.rank: Layer(10.0 * world.rank)}
    copies = Copies(world, other, other, None)
    take(copies, 0, layers)
    copies.wait()
    change(layers)
    world.barrier("the step to end")
    error = ""
    if world.rank == 0:
        take(copies, 1, layers)
        copies.wait_copied()
        try:
            copies.wait()
        except (RankDied, WaitTimeout) as lost:
            error = type(lost).__name__
    else:
        world.give_up(RankDied("it is gone"), is_final=True)
    copies.close()
    after = Copies(world, None, None, copies)
    return {
        "error": error,
        "steps": {step: len(each) for step, each in after.complete().items()},
        "values": values(after, 0),
    }


def test_a_step_that_all_have_is_left_after_a_fault(pool: Pool) -> None:
    """The copies of a generation stay until those of the next one are complete."""
    first, second = pool.run(JOBS + "loses", 2)
    assert first["error"]
    assert (first["steps"], second["steps"]) == ({"0": 2, "1": 1}, {"0": 2})
    expected = [[at, 10.0 * at, 10.0 * at, 10.0 * at, at] for at in (0, 1)]
    assert first["values"] == second["values"] == expected


def falls_behind(world: Meeting) -> list[list[int]]:
    """Rank 1 reads the memory of rank 0, which goes on alone."""
    copies, found = Copies(world, 1 - world.rank, 1 - world.rank, None), list[list[int]]()
    copies.share_memory()
    for step in (0, 1):
        take(copies, step, {world.rank: Layer(1.0)})
        copies.wait()
    world.barrier("both copies")
    found.append(sorted(len(each) for each in copies.complete().values()))
    world.barrier("a look")
    if world.rank == 0:
        copies._forget()  # as a copy of step 2 would
    world.barrier("rank 0")
    found.append(sorted(len(each) for each in copies.complete().values()))
    copies.close()
    return found


def test_what_its_owner_may_overwrite_is_no_copy(pool: Pool) -> None:
    assert pool.run(JOBS + "falls_behind", 2) == [[[2, 2], [2]], [[2, 2], [1, 2]]]


def cannot_read(world: Meeting) -> str:
    """The other rank dies between its message and the look into its memory."""
    copies = Copies(world, 1 - world.rank, 1 - world.rank, None)
    copies.share_memory()
    gone, told = FileNotFoundError(2, "No such file or directory"), ""
    with mock.patch.object(OtherRooms, "tensor", side_effect=gone):
        take(copies, 0, {world.rank: Layer(1.0)})
        try:
            copies.wait()
        except RankDied as error:
            told = str(error)
    world.barrier("both")
    copies.close()
    return told


def test_memory_that_is_gone_is_a_dead_rank(pool: Pool) -> None:
    for told in pool.run(JOBS + "cannot_read", 2):
        assert told.endswith("cannot be read: No such file or directory")


def forgets(world: Meeting) -> list[list[int]]:
    """New copies without a peer: other replicas have the layers, too."""
    layers = {0: Layer(1.0)}
    former = Copies(world, None, None, None)
    take(former, 7, layers)
    former.wait()
    copies, found = Copies(world, None, None, former), list[list[int]]()
    for step in (7, 8, 9):
        take(copies, step, layers)
        copies.wait()
        found.append([len(each) for _, each in sorted(copies.complete().items())])
    copies.close()
    return found


def test_former_copies_go_once_there_are_complete_ones(pool: Pool) -> None:
    assert pool.run(JOBS + "forgets", 1) == [[[2], [1, 1], [1, 1]]]


def refuses(world: Meeting) -> str:
    """A peer that sends no copies, but something else."""
    if world.rank:
        for tensor in (torch.tensor([3]), torch.tensor([1, 2, 3], dtype=torch.uint8)):
            world.wait(world.send(tensor, 0, TAG_COPY), 0, "room")
        world.barrier("the copies to be refused")
        return ""
    copies = Copies(world, None, 1, None)
    take(copies, 0, {0: Layer(1.0)})
    try:
        copies.wait()
        return "taken"
    except RunError as error:
        return str(error)
    finally:
        world.barrier("the copies to be refused")
        copies.close()


def test_what_is_no_copy_is_refused(pool: Pool) -> None:
    said, _ = pool.run(JOBS + "refuses", 2)
    assert "ValidationError" in said, said
