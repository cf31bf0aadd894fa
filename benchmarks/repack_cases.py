"""Fewer ranks in all six cases, and PipeTransformer's halving on freezing.

The simulator replays the cost traces (24 moments of a run) on 8 ranks by ZB-H1 with 16 microbatches
of constant size. A placement is the best one of half blocks. Costs are known at once, and moves are
free.

cases
    throughput     on 8, 6, 4 and 2 ranks at the last moment, over the dense model's on 8 ranks
    per_rank       the same for throughput per rank
    average        mean number of ranks, the fewest on which a step takes no longer than a step of
                   the dense model on 8 ranks. All 8 where no number of ranks is fast enough.
    as_static      the same, with the even placement of the same moment instead of the dense model
    speedup        the best placement on 8 ranks over the even one on 8 ranks
    gain           speed-ups per GPU in use: balanced, and also repacked (`average`)
    share          the part of what a run saves over the even placement on 8 ranks that balancing
                   without repacking does not save. In `gpu_seconds`, freed GPUs are given back. In
                   `seconds`, they stay unused, and a step has as many ranks as make it fastest.
                   `seconds_with_links` has messages as long as a block's F. None where a run saves
                   less than 1 %.

pipetransformer
    The same 8 GPUs throughout. Freed ranks become replicas, which divide the microbatches. The
    reductions take no time. A rank holds no more than the fullest rank of the dense model, by
    parameters. A frozen layer counts as a sixth, as PipeTransformer estimates it.

    static         whole blocks, evenly
    halving        PipeTransformer: layers placed by these parameters at every moment. The pipeline
                   is halved whenever the fullest rank then has room.
    balanced       the best placement on 8 ranks, whatever its memory
    reshaped       the best placement and mesh in the same room, as `elastic.reshape` decides
    in full        the same if frozen layers count in full, as a run of dynmo counts them; also with
                   twice the room

emulated
    Processes whose layers sleep, at the last moment: `throughput` and `per_rank` again, over the
    dense model on 8 such processes. `simulated` are the seconds that the simulator predicts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from statistics import fmean, median
from typing import Any

from benchmarks import cost_traces
from benchmarks.cost_traces import Layers, best, dense, in_blocks, name_of, timeline, trace
from benchmarks.harness import train
from benchmarks.output import markdown
from benchmarks.reshape import decided as decided_now
from dynmo.cost.costs_file import Profile
from dynmo.plan.bisection import exact
from dynmo.plan.partition import Partition, stage_loads, uniform
from dynmo.plan.problem import Choice, Mesh, Problem, Work
from dynmo.schedule.bounds import Objective

CASES = (
    *cost_traces.CASES,
    ("early_exit", 2048),
    ("mixture_of_depths", 2048),
    ("moe", 2048),
)
RANKS, MICROBATCHES, STEPS = 8, 16, 50
SHOWN = (8, 6, 4, 2)
ROUNDED = 1.00001  # the traces have five digits
LINK = 1.0  # 8 MiB over 25 GB/s take about as long as a block's F at 40 % of an H100
FROZEN = 6  # a layer that trains counts so many times a frozen one
UNIT = 0.02  # seconds of a dense block's F on processes
EMULATED = tuple(case for case, sequence in CASES if sequence == 2048)

Progress = Callable[[str], None]


# -- all cases -------------------------------------------------------------------------------------


@cache
def step_of(layers: Layers, ranks: int, link: float = 0.0) -> float:
    """Returns the seconds of a step on the best placement."""
    placement = best(layers, ranks, MICROBATCHES, link=link)
    return timeline(layers, placement, MICROBATCHES, link=link).makespan


@cache
def even_step(layers: Layers, link: float = 0.0) -> float:
    """Returns the seconds of a step on the even placement on all ranks."""
    return timeline(layers, uniform(len(layers), RANKS), MICROBATCHES, link=link).makespan


def fewest(layers: Layers, limit: float) -> int:
    """Returns the fewest ranks that are fast enough. All if none are."""
    fast = (ranks for ranks in range(1, RANKS) if step_of(layers, ranks) <= ROUNDED * limit)
    return next(fast, RANKS)


def row(case: str, sequence: int, blocks: int, stride: int = 1) -> dict[str, Any]:
    """Measures one line of the tables of all cases."""
    moments = trace(case, blocks, sequence)[::stride]
    limit, last = even_step(dense(blocks, sequence)), moments[-1]
    ranks = [fewest(layers, limit) for layers in moments]
    static = math.fsum(map(even_step, moments))
    balanced = math.fsum(step_of(layers, RANKS) for layers in moments)
    used = math.fsum(n * step_of(layers, n) for n, layers in zip(ranks, moments, strict=True))
    throughput = {n: limit / step_of(last, n) for n in SHOWN}
    return {
        "case": case,
        "sequence": sequence,
        "blocks": blocks,
        "throughput": {str(n): x for n, x in throughput.items()},
        "per_rank": {str(n): RANKS / n * x for n, x in throughput.items()},
        "ranks": ranks,
        "average": fmean(ranks),
        "as_static": fmean(fewest(layers, even_step(layers)) for layers in moments),
        "speedup": static / balanced,
        "gain": {"balanced": static / balanced, "repacked": RANKS * static / used},
        "share": {
            "gpu_seconds": share_of(RANKS * static, RANKS * balanced, used),
            "seconds": share_of(static, balanced, fastest(moments)),
            "seconds_with_links": share_of(
                math.fsum(even_step(layers, LINK) for layers in moments),
                math.fsum(step_of(layers, RANKS, LINK) for layers in moments),
                fastest(moments, LINK),
            ),
        },
    }


def fastest(moments: Sequence[Layers], link: float = 0.0) -> float:
    """Returns the seconds of a run that has the fastest number of ranks at each moment."""
    return math.fsum(
        min(step_of(layers, ranks, link) for ranks in range(1, RANKS + 1)) for layers in moments
    )


def share_of(static: float, balanced: float, repacked: float) -> float | None:
    """Returns the part of a saving that balancing alone lacks."""
    saved = static - repacked
    return (balanced - repacked) / saved if saved > 0.01 * static else None


def cases(depths: Sequence[int], progress: Progress, stride: int = 1) -> list[dict[str, Any]]:
    """Measures all cases at each depth."""
    rows: list[dict[str, Any]] = []
    for case, sequence in CASES:
        for blocks in depths:
            progress(f"{name_of(case, sequence)}, {blocks} blocks")
            rows.append(row(case, sequence, blocks, stride))
    return rows


# -- PipeTransformer -------------------------------------------------------------------------------


def sized(layers: Layers, frozen: int = 1) -> Layers:
    """Returns the layers with sizes, in eighteenths of a block that trains.

    A frozen layer counts `frozen` sixths of one that trains.
    """
    return tuple(
        replace(x, weight_bytes=(2 if i % 2 else 1) * (FROZEN if x.w else frozen))
        for i, x in enumerate(layers)
    )


def halved(layers: Layers, ranks: int, room: int) -> Partition:
    """Returns PipeTransformer's placement: on half the ranks again and again, while they fit."""
    weights = [float(x.weight_bytes) for x in sized(layers)]
    placement = exact(weights, ranks)
    while ranks > 1:
        ranks //= 2
        shorter = exact(weights, ranks)
        if max(stage_loads(weights, shorter)) > room:
            break
        placement = shorter
    return placement


def decided(moments: Sequence[Layers], room: int, frozen: int) -> tuple[list[float], list[int]]:
    """Replays the decisions of `elastic.reshape`. Returns seconds and replicas by moment."""
    mesh = Mesh(RANKS, 1, MICROBATCHES, 1, "zb-h1")
    now = Choice(mesh, uniform(len(moments[0]), RANKS))
    seconds: list[float] = []
    replicas: list[int] = []
    for layers in moments:
        first = next(i for i, x in enumerate(layers) if x.b or x.w)
        names = tuple(str(i) for i in range(len(layers)))
        profile = Profile(sized(layers, frozen), names, first, microbatch=1)
        _, plan = decided_now(Problem(profile, Work(Objective.MAKESPAN), room), now, 0.0)
        now = plan.choice
        seconds.append(plan.seconds)
        replicas.append(now.mesh.replicas)
    return seconds, replicas


def pipetransformer(blocks: int, stride: int = 1) -> dict[str, Any]:
    """Compares PipeTransformer's halving with ours over the trace of freezing."""
    moments = trace("freezing", blocks, 2048)[::stride]
    room = 3 * FROZEN * -(-blocks // RANKS)
    halvings = [halved(layers, RANKS, room) for layers in moments]
    ours = {
        "reshaped": decided(moments, room, 1),
        "in full": decided(moments, room, FROZEN),
        "in full, room x2": decided(moments, 2 * room, FROZEN),
    }
    seconds = {
        "static": fmean(
            timeline(in_blocks(x), uniform(blocks, RANKS), MICROBATCHES).makespan for x in moments
        ),
        "halving": fmean(
            timeline(layers, x, MICROBATCHES * x.stages // RANKS).makespan
            for layers, x in zip(moments, halvings, strict=True)
        ),
        "balanced": fmean(step_of(layers, RANKS) for layers in moments),
        **{name: fmean(each) for name, (each, _) in ours.items()},
    }
    return {
        "blocks": blocks,
        "seconds": seconds,
        "speedup": {name: seconds["static"] / x for name, x in seconds.items()},
        "over_halving": seconds["halving"] / seconds["reshaped"],
        "replicas": {
            "halving": [RANKS // x.stages for x in halvings],
            **{name: replicas for name, (_, replicas) in ours.items()},
        },
    }


# -- emulated --------------------------------------------------------------------------------------


def emulated(names: Sequence[str], blocks: int, steps: int, unit: float) -> list[dict[str, Any]]:
    """Runs the last moment of some cases on processes whose layers sleep."""
    full = dense(blocks, 2048)
    rows: list[dict[str, Any]] = [
        {"case": "dense"} | sleep(full, uniform(2 * blocks, RANKS), steps, unit)
    ]
    for case in names:
        layers = trace(case, blocks, 2048)[-1]
        for ranks in SHOWN:
            placement = best(layers, ranks, MICROBATCHES)
            rows.append({"case": case} | sleep(layers, placement, steps, unit))
    for x in rows:
        x["throughput"] = rows[0]["seconds"] / x["seconds"]
        x["per_rank"] = x["throughput"] * RANKS / x["ranks"]
        x["simulated_throughput"] = rows[0]["simulated"] / x["simulated"]
    return rows


def sleep(layers: Layers, placement: Partition, steps: int, unit: float) -> dict[str, Any]:
    """Trains on sleeping layers, and returns the median seconds of a step."""
    frozen = next(i for i, x in enumerate(layers) if x.b or x.w)
    freezing = {"cases": ["freezing"], "freezing": {"schedule": [[0, frozen]]}}
    events = train(
        {
            "model": {
                "kind": "emulated",
                "layers": len(layers),
                **{key: [unit * getattr(x, key) for x in layers] for key in "fbw"},
            },
            "train": {"steps": steps, "global_batch": MICROBATCHES, "micro_batch": 1},
            "parallel": {"pipeline": placement.stages},
            "pipeline": {"schedule": "zb-h1"},
            "balance": {"balancer": "none", "initial": list(placement.counts)},
            "dynamism": freezing if frozen else {},
        }
    )
    seconds = [event["seconds"] for event in events if event["event"] == "step"]
    return {
        "ranks": placement.stages,
        "seconds": median(seconds[1:]),  # the first step opens channels
        "simulated": unit * timeline(layers, placement, MICROBATCHES).makespan,
    }


# -- output ----------------------------------------------------------------------------------------


def case_table(rows: Sequence[dict[str, Any]]) -> str:
    """Returns throughput and throughput per rank by number of ranks, in Markdown."""
    head = ["case", "blocks", *(f"on {n}" for n in SHOWN), *(f"per rank on {n}" for n in SHOWN[1:])]
    lines: list[list[str]] = []
    for x in rows:
        values = [x["throughput"][str(n)] for n in SHOWN]
        values += [x["per_rank"][str(n)] for n in SHOWN[1:]]
        lines.append([*_start(x), *(f"{value:.2f}" for value in values)])
    return markdown(head, lines)


def rank_table(rows: Sequence[dict[str, Any]]) -> str:
    """Returns the mean number of ranks and what repacking brings, in Markdown."""
    head = ["case", "blocks", "ranks as fast as dense", "ranks as fast as even"]
    head += ["per GPU balanced", "per GPU repacked"]
    head += ["repacking's share", "GPUs unused", "GPUs unused, with links"]
    lines: list[list[str]] = []
    for x in rows:
        averages = [f"{x[key]:.1f}" for key in ("average", "as_static")]
        gains = [f"{x['gain'][key]:.2f}" for key in ("balanced", "repacked")]
        shares = [
            "-" if value is None else f"{value:.0%}"
            for value in (x["share"][key] for key in _SHARES)
        ]
        lines.append([*_start(x), *averages, *gains, *shares])
    return markdown(head, lines)


_SHARES = ("gpu_seconds", "seconds", "seconds_with_links")


def _start(x: dict[str, Any]) -> list[str]:
    return [name_of(x["case"], x["sequence"]), str(x["blocks"])]


def pipetransformer_table(rows: Sequence[dict[str, Any]]) -> str:
    """Returns the speed-ups over static of PipeTransformer and ours, in Markdown."""
    names = {
        "halving": "PipeTransformer",
        "balanced": "balanced",
        "reshaped": "balanced and reshaped",
        "in full": "frozen layers in full",
        "in full, room x2": "in full, room x2",
    }
    lines = [
        [
            str(x["blocks"]),
            *(f"{x['speedup'][name]:.2f}" for name in names),
            *(f"{x['replicas'][name][-1]}" for name in ("halving", "reshaped")),
        ]
        for x in rows
    ]
    head = ["blocks", *names.values(), "replicas at the end: PipeTransformer", "reshaped"]
    return markdown(head, lines)


def emulated_table(rows: Sequence[dict[str, Any]]) -> str:
    """Returns measured and predicted throughput on sleeping ranks, in Markdown."""
    head = ["case", "ranks", "step, s", "over simulated", "throughput", "simulated", "per rank"]
    lines: list[list[str]] = []
    for x in rows:
        ratio = x["seconds"] / x["simulated"]
        figures = [x["seconds"], ratio, x["throughput"], x["simulated_throughput"], x["per_rank"]]
        lines.append(
            [name_of(x["case"], 2048), str(x["ranks"]), *(f"{value:.2f}" for value in figures)]
        )
    return markdown(head, lines)
