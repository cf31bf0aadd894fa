"""The batches of calls that are made again, also in another mesh. Ranks are threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from dynmo.pipeline.journal import Part, Training, on_host, packed, share_parts, unpacked


class Ranks:
    """A world of threads that gathers rows."""

    def __init__(self, size: int) -> None:
        self._rows = [torch.empty(0)] * size
        self._barrier = threading.Barrier(size, timeout=10)
        self.gathered = 0

    def gather(self, rank: int, row: Tensor) -> Tensor:
        self._rows[rank] = row
        self._barrier.wait()
        table = torch.stack(self._rows)
        self.gathered += rank == 0
        self._barrier.wait()
        return table


class Rank:
    def __init__(self, ranks: Ranks, rank: int) -> None:
        self._ranks, self.rank = ranks, rank

    @property
    def everyone(self) -> Rank:
        return self

    def gather(self, row: Tensor, what: str) -> Tensor:
        return self._ranks.gather(self.rank, row)


def share(
    calls: Sequence[Sequence[Training]], replica_of: Callable[[int], int], replicas: int
) -> int:
    """Has ranks share the parts of their calls. Returns how often they have gathered."""
    ranks = Ranks(len(calls))

    def run(rank: int) -> None:
        world: Any = Rank(ranks, rank)
        share_parts(world, calls[rank], replica_of(rank), replicas)

    with ThreadPoolExecutor(len(calls)) as threads:
        list(threads.map(run, range(len(calls))))
    return ranks.gathered


def training(number: int, replicas: int, **parts: Part) -> Training:
    """A call with parts by replica: `of_0=...`."""
    own = {int(name.removeprefix("of_")): part for name, part in parts.items()}
    return Training(number, lambda: None, True, replicas=replicas, parts=own)


def rows(*numbers: int) -> Tensor:
    return torch.tensor(numbers)[:, None]


def test_a_batch_travels_with_its_structure_and_bits() -> None:
    batch = [
        {"input_ids": torch.tensor([[1, 2]]), "mask": torch.tensor([[True, False]]), "none": None},
        {"input_ids": torch.empty(0, 3, dtype=torch.bfloat16), "x": torch.tensor(float("nan"))},
    ]
    came = unpacked(packed(batch))
    assert [sorted(each) for each in came] == [sorted(each) for each in batch]
    for before, after in zip(batch, came, strict=True):
        for name, value in before.items():
            if value is None:
                assert after[name] is None
            else:
                assert (after[name].dtype, after[name].shape) == (value.dtype, value.shape)
                bits = [x.reshape(-1).view(torch.uint8) for x in (after[name], value)]
                assert bits[0].equal(bits[1])
    turned = torch.arange(6).view(2, 3).t()
    assert unpacked(packed(turned)).equal(turned)


def test_a_kept_batch_is_a_copy() -> None:
    given = {"x": torch.zeros(2, requires_grad=True), "y": [torch.zeros(2)]}
    kept = on_host(given)
    given["y"][0].fill_(1)
    assert kept["y"][0].tolist() == [0, 0]
    assert not kept["x"].requires_grad
    assert on_host(None) is None


@pytest.mark.parametrize("listed", [False, True])
def test_parts_are_joined_in_the_order_of_their_replicas(listed: bool) -> None:
    parts = [Part([rows(at)] if listed else rows(at), {"y": rows(-at)}) for at in range(4)]
    call = training(3, 4, **{f"of_{at}": part for at, part in enumerate(parts)})
    same = call.part(2, 4)
    assert same is not None
    assert same is parts[2]
    second = call.part(1, 2)
    assert second is not None
    joined = second.inputs if listed else [second.inputs]
    assert torch.cat(joined).tolist() == [[2], [3]]
    assert second.targets["y"].tolist() == [[-2], [-3]]


@pytest.mark.parametrize("listed", [False, True])
def test_parts_are_cut_where_replicas_do_not_divide(listed: bool) -> None:
    """From 3 to 2 replicas and back, of 6 rows."""

    def three(*numbers: int) -> Part:
        return Part([rows(at) for at in numbers] if listed else rows(*numbers))

    def of(call: Training, replicas: int) -> list[list[int]]:
        parts = [call.part(at, replicas) for at in range(replicas)]
        given = [each.inputs for each in parts if each is not None]
        return [(torch.cat(each) if listed else each).flatten().tolist() for each in given]

    call = training(0, 3, of_0=three(0, 1), of_1=three(2, 3), of_2=three(4, 5))
    assert of(call, 2) == [[0, 1, 2], [3, 4, 5]]
    assert of(call, 1) == [[0, 1, 2, 3, 4, 5]]
    assert of(training(0, 1, of_0=three(0, 1, 2, 3, 4, 5)), 3) == [[0, 1], [2, 3], [4, 5]]


def test_a_part_that_is_not_here_is_none() -> None:
    assert training(0, 2, of_0=Part(rows(1))).part(1, 2) is None
    assert training(0, 2, of_0=Part(rows(1))).part(0, 1) is None


def test_ranks_get_the_parts_that_their_replica_needs_now() -> None:
    """Two replicas become one. The first stage had the inputs, the last one the targets."""
    calls = [
        [training(4, 2, of_0=Part(rows(0), None)), training(5, 2, of_0=Part(rows(10)))],
        [training(4, 2, of_1=Part(rows(1), None)), training(5, 2, of_1=Part(rows(11)))],
        [training(4, 2, of_0=Part(None, rows(-0)))],  # it has not come to the second call
        [training(4, 2, of_1=Part(None, rows(-1)))],
    ]
    share(calls, lambda _: 0, 1)
    for own in calls:
        part = own[0].part(0, 1)
        assert part is not None
        assert (part.inputs.tolist(), part.targets.tolist()) == ([[0], [1]], [[0], [-1]])
    for own in calls[:2]:
        part = own[1].part(0, 1)
        assert part is not None
        assert part.inputs.tolist() == [[10], [11]]
        assert part.targets is None, "the inputs may have them"


def test_only_those_get_a_part_that_lack_it() -> None:
    """The ranks of a replica hold the same. A dead replica's part is nowhere, and is left out."""
    calls = [
        [training(4, 3, of_0=Part(rows(0), rows(0)))],
        [training(4, 3, of_1=Part(rows(1), rows(1)))],
    ]
    assert share(calls, lambda rank: rank, 3) == 2, "nobody lacks a part"
    share(calls, lambda _: 0, 1)
    assert sorted(calls[0][0].parts) == sorted(calls[1][0].parts) == [0, 1]
    assert calls[0][0].part(0, 1) is None
