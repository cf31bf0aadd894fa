"""The race of `benchmarks.cases`: every side of a case, a step of each in turn.

It returns what each side did, as plain JSON.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from benchmarks.baselines.placements import balanced_bounds
from benchmarks.cost_traces import best
from benchmarks.harness import OPTIMIZER
from dynmo.cases.pruning.sparse_linear import linears
from dynmo.change_events import ChangeEvent, RebalanceEvent, TokensEvent
from dynmo.config import Config, parse
from dynmo.cost.layer_cost import LayerCost
from dynmo.events import EndEvent, Event, StepResult
from dynmo.models.model import Model
from dynmo.pipeline.actions import Actions
from dynmo.plan.partition import Partition, uniform
from dynmo.runtime.comm.meeting import Meeting
from dynmo.runtime.engine.batch_check import StepBatch, StepSettings
from dynmo.runtime.engine.engine import Engine, StepRecord
from dynmo.runtime.engine.executor import SEND, WAIT
from dynmo.train.setup import model_of
from dynmo.train.trainer import Trainer

RANKS, MICROBATCHES = 2, 16
SCHEDULE = "zb-h2"  # its slack keeps an op that is held up from holding up the other rank
CASES = (
    "freezing",
    "autofreeze",
    "egeria",
    "pruning",
    "sparse_attention",
    "early_exit",
    "mixture_of_depths",
    "moe",
)
# Cases of the paper that some cases here are variants of.
_VARIANTS = {"autofreeze": "freezing", "egeria": "freezing"}
# A model of so few steps is unsure of most tokens. The default of 0.9 would let none exit.
_EXIT_THRESHOLD = 0.02
_EXPERTS = {"kind": "moe", "experts": 8, "top_k": 2, "moe_every": 2}
TECHNIQUE = ("uniform", "parameters", "dynmo")  # the same numbers


def published_case(case: str) -> str:
    """Returns the paper's case that a case is."""
    return _VARIANTS.get(case, case)


def section_of(case: str) -> str:
    """Returns the case's section of the configuration, below `dynamism`."""
    return "experts" if case == "moe" else published_case(case)


def settings(case: str, steps: int, sizes: dict[str, Any] | None = None) -> dict[str, Any]:
    """Returns the config of the side `uniform`."""
    model, section = model_section(case) | (sizes or {}), section_of(case)
    return {
        "model": model,
        "train": {
            **OPTIMIZER,
            "steps": steps,
            "global_batch": MICROBATCHES,
            "micro_batch": 1,
            "decay": "constant",
        },
        "parallel": {"pipeline": RANKS},
        "pipeline": {"schedule": SCHEDULE},
        "balance": {"balancer": "none"},
        "dynamism": {"cases": [section], section: case_options(case, steps, model["blocks"])},
        "trace": {"steps": 0},
    }


def model_section(case: str) -> dict[str, Any]:
    """Returns the section `model` that is measured."""
    model = {"blocks": 8, "hidden": 256, "heads": 4, "sequence": 128}
    if case == "pruning":
        model |= {"blocks": 6, "sequence": 256}
    if case == "sparse_attention":
        model |= {"blocks": 6, "hidden": 64, "heads": 2, "sequence": 2048}
    if case in ("mixture_of_depths", "moe"):
        model["blocks"] = 6
    if case == "moe":
        model |= _EXPERTS
    return model


def case_options(case: str, steps: int, blocks: int) -> dict[str, Any]:
    """Returns the case's options.

    The policies that decide for themselves are hurried, to act within so few steps.
    """
    tenth, half = steps // 10, steps // 2
    most = blocks + 1  # of the 2 blocks + 2 layers
    units = {"unit": "block", "max_layers": most}
    match case:
        case "freezing":
            return {"schedule": [[tenth, most // 2], [4 * tenth, most]]}
        case "autofreeze":
            return {"policy": "autofreeze", "every": max(1, steps // 20), **units}
        case "egeria":
            waits = {"every": 1, "window": 2, "refresh": 2 * tenth}
            return {"policy": "egeria", **waits, "tolerance": 0.9, **units}
        case "pruning":
            return {"start": tenth, "end": half, "every": max(1, (half - tenth) // 4)}
        case "sparse_attention":
            return {"start": 2 * tenth, "blocks": list(range(blocks // 2))}
        case "early_exit":
            exits = [blocks // 4 - 1, blocks // 2 - 1]
            return {"start": tenth, "threshold": _EXIT_THRESHOLD, "exits": exits}
        case "mixture_of_depths":
            return {"capacity": 0.125, "every": 2}
        case _:
            return {}


def sides(case: str, steps: int, sizes: dict[str, Any] | None = None) -> dict[str, dict[str, Any]]:
    """Returns the config of each side."""
    base = settings(case, steps, sizes)
    model = model_for(case, parse(base))
    configs = {"uniform": base}
    by_parameters = placed_by_parameters(model)
    if by_parameters != uniform(model.layers, RANKS):
        configs["parameters"] = base | {
            "balance": {"balancer": "none", "initial": list(by_parameters.counts)}
        }
    plain = {key: value for key, value in base["model"].items() if key not in _EXPERTS}
    configs["dense"] = base | {"dynamism": dense(case, base["dynamism"], steps), "model": plain}
    if case == "pruning":
        section = base["dynamism"] | {"pruning": base["dynamism"]["pruning"] | {"dense_below": 1.0}}
        configs["mask"] = base | {"dynamism": section}
    configs["dynmo"] = base | {"balance": {"balancer": "exact", "every": "auto"}}
    return configs


def dense(case: str, dynamism: dict[str, Any], steps: int) -> dict[str, Any]:
    """The section `dynamism` of the side `dense`.

    Sparse attention shares queries and keys, and early exit adds exit heads. Their dense sides have
    the same model: the case is named, but acts in the last step only.
    """
    if case == "sparse_attention":
        return dynamism | {case: {"start": steps - 1, "blocks": [0]}}
    if case == "early_exit":
        return dynamism | {case: dynamism[case] | {"start": steps - 1}}
    return {}


def model_for(case: str, config: Config) -> Model:
    """Returns the config's model.

    For pruning the model's linears differ in scale, from 0.6 at the front to 1.6 at the end. One
    threshold for all then prunes the front more, as it does in trained models. Untrained linears
    are alike everywhere, which hides the case.
    """
    model = model_of(config)
    if case != "pruning":
        return model

    def build(owned: Collection[int]) -> list[nn.Module]:
        layers = model.build(owned)
        with torch.no_grad():
            for index in owned:
                for _, linear in linears(layers[index]):
                    linear.weight.mul_(0.6 * (1.6 / 0.6) ** (index / (model.layers - 1)))
        return layers

    return replace(model, build=build)


def placed_by_parameters(model: Model) -> Partition:
    weights = [
        float(sum(p.numel() for p in layer.parameters())) for layer in model.build(frozenset())
    ]
    return Partition.from_bounds(balanced_bounds(weights, RANKS))


class RacingSide:
    """One side in one round: its trainer, and what each of its steps took.

    Attributes:
        trainer: The trainer.
        seconds: Seconds of each step, from barrier to barrier.
        programs: Seconds of each step's program, and of its ops (`noted`).
    """

    def __init__(self, world: Meeting, case: str, config: Config) -> None:
        self._world, self._costs = world, list[tuple[LayerCost, ...]]()
        self._events: list[Event] = []
        model = model_for(case, config)
        self.trainer = Trainer(config, world, model, None, listen=self._events.append)
        self.seconds: list[float] = []
        self.programs = noted(self.trainer.pipeline._engine)

    def advance(self, step: int) -> None:
        """Runs one step on all ranks."""
        self._world.barrier("the step to start")
        start = time.perf_counter()
        self.trainer.turn()
        self._world.barrier("the step to end")
        self.seconds.append(time.perf_counter() - start)
        self._costs.append(
            self.trainer.pipeline.measured.costs()
        )  # for the ideal alone: nobody's time

    def finish(self) -> None:
        """Ends the run, and closes its channels."""
        self.trainer.finish(sum(self.seconds))
        Actions(self.trainer.pipeline._engine).on_workload_change(())

    def account(self, drifts: Sequence[int]) -> dict[str, Any]:
        """See `account`."""
        return account(self.seconds, self._costs, self._events, drifts)


def race(
    world: Meeting, case: str, steps: int, rounds: int, sizes: dict[str, Any] | None = None
) -> list[dict[str, Any]]:
    """Runs on each rank: every side trains, a step of each in turn."""
    out: list[dict[str, Any]] = []
    best(
        (LayerCost(1.0, 1.0, 1.0),) * 2 * RANKS, RANKS, MICROBATCHES, schedule=SCHEDULE
    )  # loads the planner
    for _ in range(rounds):
        racing = {
            name: RacingSide(world, case, parse(config))
            for name, config in sides(case, steps, sizes).items()
        }
        names = list(racing)
        for step in range(steps):
            turn = step % len(names)
            for name in names[turn:] + names[:turn]:
                racing[name].advance(step)
        for side in racing.values():
            side.finish()
        programs, ops = (
            torch.tensor(
                [[seconds[i] for seconds in side.programs] for side in racing.values()],
                dtype=torch.float64,
            )
            for i in (0, 1)
        )
        world.largest(programs, "what the programs took")
        world.sum(ops, "what the ops took")
        if world.rank == 0:
            out.append(
                {
                    name: side.account(drifts(case, steps))
                    | {"program": programs[i].tolist(), "ops": ops[i].tolist()}
                    for i, (name, side) in enumerate(racing.items())
                }
            )
    return out


def phases(changes: Sequence[int], steps: int) -> list[tuple[int, int]]:
    """Returns [start, stop) of the stretches of steps between the changes."""
    return list(pairwise(sorted({0, *changes, steps})))


def noted(pipeline: Engine) -> list[tuple[float, float]]:
    """Records the seconds of each step on this rank from now on."""
    train, seconds = pipeline.train, list[tuple[float, float]]()

    def noting(batch: StepBatch, settings: StepSettings) -> tuple[StepRecord, ...]:
        results = train(batch, settings)
        for result in results:
            slices = result.step_output.intervals
            busy = math.fsum(x.end - x.start for x in slices if x.kind not in (WAIT, SEND))
            seconds.append((slices[-1].end - slices[0].start, busy))
        return results

    pipeline.train = noting
    return seconds


def drifts(case: str, steps: int) -> tuple[int, ...]:
    """Returns the steps that start a phase although nothing changes there.

    The share of tokens that exit drifts, because the model learns. It drifts most at the start.
    """
    tenth = steps // 10
    return (2 * tenth, 4 * tenth) if case == "early_exit" else ()


def account(
    seconds: list[float],
    costs: list[tuple[LayerCost, ...]],
    events: Sequence[Event],
    drifts: Sequence[int],
) -> dict[str, Any]:
    """Describes one side of one round as plain JSON."""
    changes = sorted({e.step for e in events if isinstance(e, ChangeEvent)} | set(drifts))
    steps = [e for e in events if isinstance(e, StepResult)]
    end = next(e for e in events if isinstance(e, EndEvent))
    return {
        "seconds": seconds,
        "changes": changes,
        "what": [e.what for e in events if isinstance(e, ChangeEvent)],
        "costs": [
            [[x.f, x.b, x.w] for x in costs[stop - 1]] for _, stop in phases(changes, len(seconds))
        ],
        "tokens": [
            {"step": e.step, "layers": list(e.layers), **e.shares}
            for e in events
            if isinstance(e, TokensEvent)
        ],
        "layers": [list(e.layers) for e in steps],
        "idle": [e.idle_ratio for e in steps],
        "moves": [
            {
                "step": e.step,
                "to": list(e.target),
                "bytes": e.moved_bytes,
                "seconds": e.seconds - e.decide_seconds,
            }
            for e in events
            if isinstance(e, RebalanceEvent)
        ],
        "overhead": {
            "measure": end.measure_seconds,
            "decide": end.decide_seconds,
            "move": end.move_seconds,
        },
        "digest": end.weights_digest,
        "loss": end.loss,
    }
