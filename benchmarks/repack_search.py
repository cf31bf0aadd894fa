"""Searches all contiguous placements for one whose ZB-H1 step is short enough.

A branch and bound. The layers of rank 0 are chosen first, then those of rank 1, and so on. A branch
is left as soon as a lower bound on the step of all its placements is over the limit.

Bound of a window. Suppose that the layers of the ranks low .. high are known, and only these. ZB-H1
without a frozen prefix has a fixed order of ops on each rank, so a step is the longest path through
its ops. The window is replayed with its own order of ops. The other ranks are free at all times:

    ranks before    F(low, 0) starts after the F of all layers before the window. A microbatch runs
                    through these layers in order, whatever their ranks.
    ranks behind    B(high, j) starts after F(high, j), the F of all layers behind the window and
                    their B. Microbatch j runs through all of them and back.
    after the step  Behind the last B of rank low, the last microbatch runs the B of all layers
                    before the window. The W of rank 0, and so of layer 0, follows its B.

Each of these is a path through ops that must run in this order. So no start in the replay is later
than in the step itself. The replay of all ranks is the step.

Two kinds of windows are used. A window of one rank does not depend on the other ranks' layers. A
table of these says which layers each rank can have. From it follows which of the last layers the
last ranks can hold. The window of ranks 0 .. r is the bound of a branch.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from benchmarks.cost_traces import Layers, timeline
from benchmarks.noise import in_order
from dynmo.jit import jit
from dynmo.plan.partition import Partition
from dynmo.schedule.catalogue import make
from dynmo.schedule.op import Kind, Schedule

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

_KINDS = {Kind.F: 0, Kind.B: 1, Kind.W: 2}
_SLACK = 1e-9  # sums in another order differ by less, as a share
_REPLAYS = 20_000_000  # the most windows replayed in one search
_DONE, _PLACED, _STOPPED = 0, 1, 2


@dataclass(frozen=True)
class PlacementSearch:
    """The result of a search.

    Attributes:
        placement: A placement whose step is within the limit. None if none was found.
        complete: Whether a placement was found or every placement was ruled out.
        replays: Branches whose bound was computed, without the tables of single ranks.
        simulated: Placements that were simulated.
    """

    placement: Partition | None
    complete: bool
    replays: int
    simulated: int


def search_placements(
    layers: Layers,
    ranks: int,
    microbatches: int,
    limit: float,
    most: int = _REPLAYS,
) -> PlacementSearch:
    """Searches a placement on `ranks` ranks whose step takes at most `limit` seconds."""
    if layers[0].b == layers[0].w == 0:
        raise ValueError("layer 0 is frozen; the search is for schedules without a frozen prefix")
    if not 1 <= ranks <= len(layers):
        return PlacementSearch(None, True, 0, 0)
    works, schedule = sums_of(layers), make("zb-h1", ranks, microbatches)
    allowed = limit * (1 + _SLACK)

    def single(rank: int) -> Bools:
        rows = rows_of(schedule, rank, rank)
        return _single(rows, works, rank, ranks, microbatches, allowed)

    fits = np.stack([single(rank) for rank in range(ranks)])
    prefixes = [rows_of(schedule, 0, rank) for rank in range(ranks)]
    ends = np.array([0, *accumulate(map(len, prefixes))], np.int64)
    rows, suffix = np.concatenate(prefixes), _suffixes(fits)
    bounds = np.zeros(ranks + 1, np.int64)
    state = np.zeros(2, np.int64)  # the rank whose layers are chosen; windows replayed
    given = rows, ends, works, fits, suffix, microbatches, allowed, most
    simulated = 0
    while (status := _advance(*given, bounds, state)) == _PLACED:
        simulated += 1
        placement = Partition.from_bounds([int(x) for x in bounds])
        if timeline(layers, placement, microbatches).makespan <= limit:
            return PlacementSearch(placement, True, int(state[1]), simulated)
    return PlacementSearch(None, status == _DONE, int(state[1]), simulated)


def window_seconds(
    layers: Layers,
    placement: Partition,
    microbatches: int,
    low: int,
    high: int,
) -> float:
    """Returns the lower bound on a step that knows only the layers of the window."""
    ranks = placement.stages
    rows = rows_of(make("zb-h1", ranks, microbatches), low, high)
    bounds, ended = np.array(placement.bounds, np.int64), np.empty((ranks, 2, microbatches))
    return _replay(rows, sums_of(layers), bounds, low, high, ranks, ended)


def sums_of(layers: Layers) -> Floats:
    """Returns the seconds of F, B and W (rows) of the layers before each (columns)."""
    times = [(x.f, x.b, x.w) for x in layers]
    return np.array([(0.0, 0.0, 0.0), *times]).cumsum(0).T.copy()


def rows_of(schedule: Schedule, low: int, high: int) -> Ints:
    """Returns the ops of some ranks as rows, each behind what it needs."""
    ops = [(rank, op) for rank, op, _ in in_order(schedule) if low <= rank <= high]
    return np.array([(rank, _KINDS[op.kind], op.microbatch) for rank, op in ops], np.int64)


@jit()
def _replay(
    rows: Ints,
    works: Floats,
    bounds: Ints,
    low: int,
    high: int,
    ranks: int,
    ended: Floats,
) -> float:
    """Returns the bound of a window.

    `ended` is scratch, by rank, F or B, and microbatch.
    """
    layers = works.shape[1] - 1
    before, stop = bounds[low], bounds[high + 1]
    behind = works[0, layers] - works[0, stop] + works[1, layers] - works[1, stop]  # F and B
    clock = np.zeros(ranks)
    last = 0.0
    for i in range(rows.shape[0]):
        rank, kind, microbatch = rows[i, 0], rows[i, 1], rows[i, 2]
        start = clock[rank]
        if kind == 0:
            start = max(start, works[0, before] if rank == low else ended[rank - 1, 0, microbatch])
        elif kind == 1 and rank == high:
            start = max(start, ended[rank, 0, microbatch] + behind)
        elif kind == 1:
            start = max(start, ended[rank + 1, 1, microbatch])
        end = start + works[kind, bounds[rank + 1]] - works[kind, bounds[rank]]
        clock[rank] = end
        if kind < 2:
            ended[rank, kind, microbatch] = end
        if kind == 1 and rank == low:
            last = end
    seconds = clock.max()
    return max(seconds, last + works[1, before] + works[2, 1]) if low > 0 else seconds


@jit()
def _single(
    rows: Ints,
    works: Floats,
    rank: int,
    ranks: int,
    microbatches: int,
    allowed: float,
) -> Bools:
    """Says by [start, stop] whether `rank` can have the layers start .. stop - 1."""
    layers = works.shape[1] - 1
    fits = np.zeros((layers + 1, layers + 1), np.bool_)
    bounds = np.zeros(ranks + 1, np.int64)
    ended = np.empty((ranks, 2, microbatches))
    behind = ranks - 1 - rank
    for start in range(rank, layers):
        if (start == 0) != (rank == 0):
            continue
        for stop in range(start + 1, layers - behind + 1):
            if (stop == layers) != (behind == 0):
                continue
            bounds[rank], bounds[rank + 1] = start, stop
            fits[start, stop] = _replay(rows, works, bounds, rank, rank, ranks, ended) <= allowed
    return fits


@jit()
def _suffixes(fits: Bools) -> Bools:
    """Says by [rank, start] whether the last ranks can have the last layers.

    The ranks are `rank` and those behind, the layers those from `start` on.
    """
    ranks, layers = fits.shape[0], fits.shape[1] - 1
    can = np.zeros((ranks + 1, layers + 1), np.bool_)
    can[ranks, layers] = True
    for rank in range(ranks - 1, -1, -1):
        for start in range(layers):
            for stop in range(start + 1, layers + 1):
                if fits[rank, start, stop] and can[rank + 1, stop]:
                    can[rank, start] = True
                    break
    return can


@jit()
def _advance(  # noqa: PLR0913
    rows: Ints,
    ends: Ints,
    works: Floats,
    fits: Bools,
    suffix: Bools,
    microbatches: int,
    allowed: float,
    most: int,
    bounds: Ints,
    state: Ints,
) -> int:
    """Goes on from `bounds` and `state` to the next placement within the bound.

    It takes ten arguments because Numba passes arrays one by one.
    """
    ranks, layers = fits.shape[0], fits.shape[1] - 1
    ended = np.empty((ranks, 2, microbatches))
    rank = state[0]
    if rank == 0 and bounds[1] == 0 and not suffix[0, 0]:
        return _DONE
    while rank >= 0:
        bounds[rank + 1] = max(bounds[rank + 1], bounds[rank]) + 1
        stop = bounds[rank + 1]
        if stop > layers:
            bounds[rank + 1] = 0
            rank -= 1
            continue
        if not fits[rank, bounds[rank], stop] or not suffix[rank + 1, stop]:
            continue
        if state[1] >= most:
            return _STOPPED
        state[1] += 1
        own = rows[ends[rank] : ends[rank + 1]]
        if _replay(own, works, bounds, 0, rank, ranks, ended) > allowed:
            continue
        if rank == ranks - 1:
            state[0] = rank
            return _PLACED
        rank += 1
        bounds[rank + 1] = 0
    return _DONE
