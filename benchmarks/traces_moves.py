"""Moves between two steps, and during a step, on traces whose costs differ at every step.

Real ranks, whose layers sleep as long as the trace says and have weights of so many bytes. Before
each step, layers go to the best placement for the costs of the step before. Two sides take turns:

between   the ranks wait for weights and moments between two steps
ahead     weights and moments travel while the step runs, which still has the old placement. The
          ranks wait at its end for gradients and small state (`balance.move_ahead`)

`wait` is the mean of the seconds that a step waits for its move. `bytes` are those that move a
step. `over_simulated` is the mean time of a step without its wait, over the simulator's. It shows
whether what travels meanwhile holds up the step.

The limit: AdamW in float32 has two moments. A gradient has the bytes of its weight, so at least
1/3 of the bytes that move between steps are still waited for.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from statistics import fmean
from typing import Any

import torch
from torch import nn

from benchmarks.cost_traces import Layers, best, in_halves, name_of, timeline, trace
from benchmarks.harness import run_step
from benchmarks.output import markdown
from benchmarks.traces_stepwise import CASES, SEQUENCE
from dynmo.models.emulated import EmulatedLayer, precise_timers
from dynmo.models.model import from_factories
from dynmo.pipeline.actions import Actions
from dynmo.plan.partition import Partition, uniform
from dynmo.runtime.comm.agreement import maxima
from dynmo.runtime.comm.meeting import Meeting
from dynmo.runtime.engine.engine import Engine
from dynmo.runtime.options import EngineOptions

BLOCKS, RANKS, UNIT = 24, 4, 0.012  # seconds of a dense block's F
WEIGHTS = 1 << 20  # of a layer
SIDES = ("between", "ahead")


def moves(world: Meeting, steps: int) -> list[dict[str, Any]]:
    """Runs on each rank: all cases."""
    return [measure(world, case, steps) for case in CASES]


def measure(world: Meeting, case: str, steps: int) -> dict[str, Any]:
    """Runs the steps of a trace on both sides."""
    microbatches = 2 * world.size
    moments, even = trace(case, BLOCKS, SEQUENCE)[: steps + 1], in_halves(uniform(BLOCKS, RANKS))
    targets = [best(layers, world.size, microbatches, even) for layers in moments[:-1]]
    engines = {name: _pipeline(world, even, microbatches) for name in SIDES}
    data = torch.zeros(microbatches, 1, dtype=torch.int64)
    for engine in engines.values():
        _sleep(engine, moments[0])
        run_step(engine, 0, data, data)  # makes the moments
    rows: dict[str, list[list[float]]] = {name: [] for name in SIDES}
    for step, (layers, target) in enumerate(zip(moments[1:], targets, strict=True), 1):
        for name in SIDES[:: 1 if step % 2 else -1]:
            engine = engines[name]
            _sleep(engine, layers)
            if engine.store.layout.partition != target:
                rows[name].append(_step(engine, step, layers, target, name == "ahead", data))
    sides = {name: [fmean(part) for part in zip(*rows[name], strict=True)] for name in SIDES}
    between, ahead = (sides[name] for name in SIDES)
    same = engines["between"].digest() == engines["ahead"].digest()
    for engine in engines.values():
        Actions(engine).on_workload_change(())  # closes its channels
    return {
        "case": case,
        "blocks": BLOCKS,
        "ranks": world.size,
        "steps": steps,
        "moves": len(rows["ahead"]),
        "same": same,
        "wait": {name: each[0] for name, each in sides.items()},
        "bytes": {name: each[1] for name, each in sides.items()},
        "waits_for_bytes": {"between": between[1], "ahead": ahead[1] - between[1]},
        "step": {name: each[2] for name, each in sides.items()},
        "over_simulated": {name: each[2] / each[3] for name, each in sides.items()},
        "share_of_wait": ahead[0] / between[0],
        "least_share_of_wait": (ahead[1] - between[1]) / between[1],
    }


def _pipeline(world: Meeting, placement: Partition, microbatches: int) -> Engine:
    precise_timers()
    last = 2 * BLOCKS - 1
    factories = [partial(_layer, index == last) for index in range(last + 1)]
    model = from_factories([f"emulated.{i}" for i in range(last + 1)], factories, 0, _first)
    engine = Engine(world, model, placement, EngineOptions("zb-h1", microbatches=microbatches))
    store = engine.store

    def fill() -> None:
        for layer in store.layers.values():
            weight = layer.module.get_parameter("weight")
            weight.grad = torch.ones_like(weight)

    engine.before_update = fill
    return engine


def _layer(ends: bool) -> nn.Module:
    layer = EmulatedLayer(0.0, 0.0, 0.0, 1024, ends)
    layer.weight = nn.Parameter(torch.zeros(WEIGHTS))
    return layer


def _first(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    del targets
    return output.mean() if output.dim() else output


def _sleep(engine: Engine, layers: Layers) -> None:
    for module, cost in zip(engine.store.modules, layers, strict=True):
        assert isinstance(module, EmulatedLayer)
        module.f, module.b, module.w = UNIT * cost.f, UNIT * cost.b, UNIT * cost.w


def _step(
    engine: Engine, step: int, layers: Layers, target: Partition, ahead: bool, data: torch.Tensor
) -> list[float]:
    """Returns seconds of the wait, bytes, seconds of the rest of the step, and the simulated."""
    world, actions = engine.store.world, Actions(engine)
    world.barrier("the move to start")
    start = time.perf_counter()
    move = actions.ahead(target) if ahead else None
    done = None if ahead else actions.move(target)
    waited = time.perf_counter() - start
    simulated = UNIT * timeline(layers, engine.store.layout.partition, len(data)).makespan
    world.barrier("the step to start")
    start = time.perf_counter()
    if move is not None:
        move.begin()
    run_step(engine, step, data, data)
    seconds = time.perf_counter() - start
    if move is not None:
        done = move.migration
        waited = 0.0 if done is None else done.seconds
        seconds -= waited
    assert done is not None, "the layers have moved"
    wait, rest = maxima(world, (waited, seconds))
    return [wait, done.moved_bytes, rest, simulated]


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Returns the table in Markdown."""
    head = ["case", "moves", "MB between", "MB waited for ahead", "wait between, s"]
    head += ["wait ahead, s", "share", "least share", "step between", "step ahead"]
    lines: list[list[str]] = []
    for x in rows:
        megabytes = [f"{x['waits_for_bytes'][name] / 1e6:.0f}" for name in SIDES]
        waits = [f"{x['wait'][name]:.3f}" for name in SIDES]
        shares = [f"{x[key]:.2f}" for key in ("share_of_wait", "least_share_of_wait")]
        steps = [f"{x['over_simulated'][name]:.2f}" for name in SIDES]
        start = [name_of(x["case"], SEQUENCE), str(x["moves"])]
        lines.append([*start, *megabytes, *waits, *shares, *steps])
    return markdown(head, lines)
