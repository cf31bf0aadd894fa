"""Finds the copy from which the ranks that are left go on, and hands it to where it belongs."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from dynmo.errors import InputError, RunError
from dynmo.pipeline.assembly import first_partition
from dynmo.pipeline.options import PipelineOptions
from dynmo.plan.partition import Layout, Move, Partition
from dynmo.runtime.comm.agreement import share_texts
from dynmo.runtime.comm.rank_group import RankGroup
from dynmo.runtime.engine.engine import Engine
from dynmo.runtime.state.copies import Copies, Key, LayerCopy
from dynmo.runtime.state.migration import Arrival, Packed, exchange, holders, unpack


class Cannot(RunError):
    """A fault from which only a restart goes on."""


@dataclass(frozen=True)
class Goal:
    """A copy to go back to, as all ranks know it.

    Attributes:
        number: Number of the call that began with it.
        state: The run's own part, before the step.
        givers: Ranks that have each layer, by the replica whose part it is.
        behind: Lowest number of a call that some rank was in at the fault.
        ahead: Highest one.
        able: Number of ranks that can make the calls since then again. A newcomer cannot, if it has
            joined later.
    """

    number: int
    state: dict[str, Any]
    givers: dict[Key, list[int]]
    behind: int
    ahead: int
    able: int


def find_goal(world: RankGroup, copies: Copies, layers: int, current: int, first: int) -> Goal:
    """Finds the newest copy that is complete on the ranks that are left. All call it together.

    Args:
        layers: Number of the model's layers.
        current: Number of the call that this rank was in.
        first: Number of the first call that it knows.

    Raises:
        Cannot: There is none.
    """
    complete, what = copies.complete(), "the copies that are left"
    mine = {
        "current": current,
        "first": first,
        "layers": [[n, *key] for n, each in complete.items() for x in each for key in x.layers],
        "states": [n for n, each in complete.items() if any(x.state for x in each)],
    }
    tables = [json.loads(text) for text in share_texts(world, json.dumps(mine), what)]
    calls, lacking = [table["current"] for table in tables], list[list[int]]()
    for number in sorted({n for table in tables for n in table["states"]}, reverse=True):
        givers = dict[Key, list[int]]()
        for rank, table in enumerate(tables):
            for at, layer, replica in table["layers"]:
                if at == number and rank not in givers.setdefault((layer, replica), []):
                    givers[layer, replica].append(rank)
        teller = next(r for r, table in enumerate(tables) if number in table["states"])
        state = next((each.state for each in complete.get(number, ()) if each.state), "")
        told = share_texts(world, state if world.rank == teller else "", what)[teller]
        known = json.loads(told)
        parts = range(known["shape"][1]) if known["spread"] else (0,)
        wanted = [(layer, part) for layer in range(layers) for part in parts]
        missing = {layer for layer, part in wanted if (layer, part) not in givers}
        if not missing:
            able = [table["first"] <= number for table in tables]
            if not able[0] or able != sorted(able, reverse=True):
                raise Cannot("the ranks that are left have joined after the copies were made")
            return Goal(number, known, givers, min(calls), max(calls), sum(able))
        lacking.append(sorted(missing))
    which = ", ".join(map(str, min(lacking, key=len, default=())))
    raise Cannot(
        f"the ranks that are left have no copy of layers {which}; the run can go on from its last "
        "checkpoint"
    )


def layout_of(goal: Goal, size: int, options: PipelineOptions, engine: Engine) -> Layout:
    """Returns the layout of so many ranks, of which it leaves out as few as possible.

    Raises:
        Cannot: None fits the run.
    """
    state, layouts, layers = goal.state, engine.layouts, engine.model.layers
    counts, batch, schedule = tuple(state["partition"]), state["microbatches"], state["schedule"]
    pipeline, replicas = state["shape"]
    if size == pipeline * replicas:
        return layouts.make(pipeline, replicas, batch // replicas, Partition(counts), schedule)
    rule = options.mesh_rule(layers)
    for count in range(size, 0, -1):
        for ranks, each in sorted(rule.shapes(count), key=lambda shape: -shape[1]):
            fits = each == replicas if state["spread"] else each <= replicas
            if not fits or batch % each:
                continue
            partition = first_partition(options, layers, ranks, schedule)
            if ranks == pipeline:
                partition = Partition(counts)
            try:
                return layouts.make(ranks, each, batch // each, partition, schedule)
            except InputError:  # of the schedule
                continue
    raise Cannot(
        f"no mesh of {size} ranks has the replicas, microbatches and accumulation groups of the "
        f"run ({pipeline} x {replicas}); it can go on from its last checkpoint"
    )


def hand_over(world: RankGroup, goal: Goal, copies: Copies, layout: Layout) -> list[Arrival]:
    """Hands copies to where their layers belong. Returns this rank's layers.

    All ranks that are left call it together.
    """
    spread, moves, own = bool(goal.state["spread"]), list[Move](), list[Key]()
    after = holders(layout.partition, layout.stage_ranks, layout.replicas)
    for layer, ranks in enumerate(after):
        turn = 0
        for replica, rank in enumerate(ranks):
            key = layer, replica if spread else 0
            givers = goal.givers[key]
            if rank in givers:
                own += [key] * (rank == world.rank)
                continue
            moves.append(Move(layer, givers[turn % len(givers)], rank))
            turn += 1
    kept = dict[Key, LayerCopy]()
    for copy in copies.complete().get(goal.number, ()):
        kept |= copy.layers

    def leaving(move: Move) -> Packed:
        replica = after[move.layer].index(move.target) if spread else 0
        text, tensors = kept[move.layer, replica]
        return text, [tensor.to(world.device) for tensor in tensors]

    arrivals = list[Arrival]()
    exchange(world, moves, leaving, lambda *_: None, arrivals.extend)
    for key in own:
        arrival = unpack(kept[key].text, Move(key[0], world.rank, world.rank), world.device)
        for tensor, value in zip(arrival.tensors.values(), kept[key].tensors, strict=True):
            tensor.copy_(value)
        arrivals.append(arrival)
    return arrivals
