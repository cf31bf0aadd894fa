"""Collectives over a tree of ranks: what they yield, and how many messages and bytes they take."""

from __future__ import annotations

import queue
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from dynmo.runtime.comm.process_mesh import arrange
from dynmo.runtime.comm.tree import Tree
from tests.pool import Pool

TAG = 5
LIMIT = timedelta(seconds=10)


class Post:
    """Carries the messages of ranks that are threads, and counts them."""

    def __init__(self) -> None:
        self.boxes: Any = defaultdict(queue.Queue)
        self.messages, self.bytes = defaultdict[int, int](int), defaultdict[int, int](int)


class Rank:
    """A process group as one rank has it."""

    def __init__(self, post: Post, rank: int) -> None:
        self.post, self.rank = post, rank

    def send(self, tensors: list[Tensor], to: int, tag: int) -> Done:
        assert tag == TAG
        self.post.messages[self.rank] += 1
        self.post.bytes[self.rank] += tensors[0].nbytes
        self.post.boxes[self.rank, to].put(tensors[0].clone())
        return Done(lambda: None)

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> Done:
        assert tag == TAG
        box = self.post.boxes[source, self.rank]
        return Done(lambda: tensors[0].copy_(box.get(timeout=10)))


class Done:
    def __init__(self, finish: Callable[[], object]) -> None:
        self._finish = finish

    def wait(self, limit: timedelta) -> None:
        assert limit == LIMIT
        self._finish()


def on_all(size: int, act: Callable[[Tree, int], Tensor]) -> tuple[list[Tensor], Post]:
    """Calls `act` on ranks 0, 2, 4, ... of a group, each a thread."""
    post, ranks = Post(), range(0, 2 * size, 2)
    for source in ranks:  # a default dict is not safe among threads
        for to in ranks:
            post.boxes[source, to]

    def run(place: int) -> Tensor:
        group: Any = Rank(post, ranks[place])
        return act(Tree(group, ranks, place, TAG, LIMIT), place)

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size))), post


@pytest.mark.parametrize("size", [2, 3, 4, 5, 7, 8, 13, 24])
def test_all_ranks_have_the_whole(size: int) -> None:
    def act(tree: Tree, place: int) -> Tensor:
        entries = torch.zeros(size, dtype=torch.float64)
        entries[place] = 0.1 * place - 1
        largest, table = entries.clone() - 0.5, entries.new_zeros(size, 2)
        table[place] = entries[place]
        tree.sum(entries)
        tree.largest(largest)
        tree.gather(table)
        return torch.cat([entries, largest, table.flatten()])

    wholes, _ = on_all(size, act)
    entries = torch.arange(size, dtype=torch.float64) * 0.1 - 1
    largest = torch.maximum(entries - 0.5, torch.full_like(entries, -0.5))
    assert torch.equal(wholes[0], torch.cat([entries, largest, entries.repeat_interleave(2)]))
    assert all(torch.equal(each, wholes[0]) for each in wholes)


def sum_over_pipelines(world: Any) -> list[float]:
    """Two threads sum at once: one over the peers, and one over everyone."""
    with mock.patch("dynmo.runtime.comm.rank_group.FEW", 1), ThreadPoolExecutor(1) as pool:
        pipeline = arrange(world, 2)
        over_peers = pool.submit(pipeline.peers.gather, torch.tensor([world.rank]), "a row")
        all_ranks = pipeline.everyone.sum(torch.ones(1), "a sum")
        own = pipeline.largest(torch.tensor([world.rank]), "the last rank")
        return [*over_peers.result(10).flatten().tolist(), *own.tolist(), *all_ranks.tolist()]


def test_tree_over_gloo(pool: Pool) -> None:
    job = "tests.runtime.comm.test_tree:sum_over_pipelines"
    assert pool.run(job, 4) == [[0, 1, 2, 4], [0, 1, 3, 4], [2, 3, 2, 4], [2, 3, 3, 4]]


@pytest.mark.parametrize(("size", "rounds"), [(8, 3), (24, 6), (64, 6), (90, 8)])
def test_messages_of_a_rank_are_as_many_as_the_tree_is_deep(size: int, rounds: int) -> None:
    _, post = on_all(size, lambda tree, _: tree.sum(torch.ones(3)) or torch.ones(1))
    assert max(post.messages.values()) <= rounds
    assert max(post.bytes.values()) <= rounds * 12


@pytest.mark.parametrize("size", [8, 24, 90])
def test_bytes_of_gathering_grow_with_the_rows_alone(size: int) -> None:
    _, post = on_all(size, lambda tree, _: tree.gather(torch.ones(size, 4)) or torch.ones(1))
    # Rows of guests travel beside those of others, and a rank sends the whole to its guest.
    assert max(post.bytes.values()) < 2.5 * size * 16
