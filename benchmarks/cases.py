"""The dynamic cases end to end: whole training runs on two real ranks, one thread each, with everything that balancing costs.

Sides of a case, all of one model, data and seed; each is the trainer's own loop (the case acts, layers are profiled, the balancer decides,
layers move, a step trains):

    dense        without the technique, uniform
    uniform      the technique, layers spread evenly for good: what it brings by itself (for freezing: Egeria, AutoFreeze unbalanced)
    parameters   the technique, spread once by parameters as DeepSpeed does (left out where that is the uniform placement)
    mask         pruning alone: weights are zeroed under a mask and the work stays dense, as frameworks do that prune by mask
    dynmo        the technique, starting uniform, balanced by measured time when the work has changed (`balance.every = "auto"`)

One step of each in turn, so that all meet the same machine; the order turns with the step. Seconds are of the whole turn of the loop, from
barrier to barrier; what is compiled once per process (the planner's loops, 0.3 s) is loaded before. The sides with the technique end with
the same weights to the last bit (but mask, whose sums run in another order): `same_weights` says so.

`ideal` is the simulator's, from the layer costs measured in the same run, without links, phase by phase (a phase lasts until the technique
changes the model again): the uniform placement's time over the best placement's, had it been known at once. `ideal_as_placed` takes the
placements as they were, step by step: what deciding late costs is what lies between. `same_work_takes`: the layers' seconds in the balanced
run over those in the uniform one, in the last phase: the same work, but on cores that no longer idle and share caches, memory and, on some
machines, their arithmetic; the simulator knows nothing of that. share_of_ideal = (speedup - 1) / (ideal - 1), not
given where the ideal is under 1.03. Overhead is what the run's own account (the `end` event) says.

Aims, written before measuring: 95 % of the ideal in the last phase; overhead under 1 % of the run.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Collection, Sequence
from dataclasses import fields, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

from benchmarks.cost_traces import best, timeline
from benchmarks.harness import machine, run_ranks
from dynmo.api import Pipeline, StepResult
from dynmo.balance.baselines import deepspeed_balanced
from dynmo.balance.partition import Partition, uniform
from dynmo.config import Config, parse
from dynmo.costs import LayerCost
from dynmo.events import ChangeEvent, EndEvent, Event, RebalanceEvent, StepEvent
from dynmo.kernels.sparse_linear import linears
from dynmo.models.model import Model, load_model
from dynmo.runtime.executor import SEND, WAIT
from dynmo.runtime.world import World
from dynmo.trainer import Trainer

RANKS, MICROBATCHES = 2, 16
SCHEDULE = "zb-h2"  # its slack keeps an op that is held up from holding up the other rank
LEAST_IDEAL = 1.03
CASES = ("freezing", "autofreeze", "egeria", "pruning", "sparse_attention")
TECHNIQUE = ("uniform", "parameters", "dynmo")  # the same numbers


# -- what runs -------------------------------------------------------------------------------------------------------------------


def settings(case: str, steps: int, sizes: dict[str, int] | None = None) -> dict[str, Any]:
    """The config of the side `uniform`. The policies that decide for themselves are hurried, to act within so few steps. sizes: of the
    model, instead of those that are measured."""
    model = {"blocks": 8, "hidden": 256, "heads": 4, "sequence": 128}
    if case == "pruning":
        model |= {"blocks": 6, "sequence": 256}
    if case == "sparse_attention":
        model |= {"blocks": 6, "hidden": 64, "heads": 2, "sequence": 2048}
    model |= sizes or {}
    most = model["blocks"] + 1  # of the 2 blocks + 2 layers
    tenth, half = steps // 10, steps // 2
    dynamism = {
        "freezing": {"schedule": [[tenth, most // 2], [4 * tenth, most]]},
        "autofreeze": {"policy": "autofreeze", "every": max(1, steps // 20), "unit": "block", "max_layers": most},
        "egeria": {
            "policy": "egeria",
            "every": 1,
            "window": 2,
            "refresh": 2 * tenth,
            "tolerance": 0.9,
            "unit": "block",
            "max_layers": most,
        },
        "pruning": {"start": tenth, "end": half, "every": max(1, (half - tenth) // 4)},
        "sparse_attention": {"start": 2 * tenth, "blocks": list(range(model["blocks"] // 2))},
    }[case]
    section = case if case in ("pruning", "sparse_attention") else "freezing"
    return {
        "model": model,
        "train": {"steps": steps, "global_batch": MICROBATCHES, "micro_batch": 1, "decay": "constant"},
        "parallel": {"pipeline": RANKS},
        "pipeline": {"schedule": SCHEDULE},
        "balance": {"balancer": "none"},
        "dynamism": {"cases": [section], section: dynamism},
        "trace": {"steps": 0},
    }


def sides(case: str, steps: int, sizes: dict[str, int] | None = None) -> dict[str, dict[str, Any]]:
    base = settings(case, steps, sizes)
    model = model_of(case, parse(base))
    found = {"uniform": base}
    by_parameters = placed_by_parameters(model)
    if by_parameters != uniform(model.layers, RANKS):
        found["parameters"] = base | {"balance": {"balancer": "none", "initial": list(by_parameters.counts)}}
    # Sparse attention shares queries and keys, so its dense side must too: there the case is named, and acts in the last step alone.
    shared = {"cases": ["sparse_attention"], "sparse_attention": {"start": steps - 1, "blocks": [0]}}
    found["dense"] = base | {"dynamism": shared if case == "sparse_attention" else {}}
    if case == "pruning":
        section = base["dynamism"] | {"pruning": base["dynamism"]["pruning"] | {"dense_below": 1.0}}
        found["mask"] = base | {"dynamism": section}
    found["dynmo"] = base | {"balance": {"balancer": "schedule-aware", "every": "auto"}}
    return found


def model_of(case: str, config: Config) -> Model:
    """The config's model. For pruning its linears differ in scale, from 0.6 at the front to 1.6 at the end, so that one threshold for all
    prunes the front more, as it does trained models (untrained ones are alike everywhere, which hides the case)."""
    model = load_model(config)
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
    weights = [float(sum(p.numel() for p in layer.parameters())) for layer in model.build(frozenset())]
    return Partition.from_bounds(deepspeed_balanced(weights, RANKS))


def race(world: World, case: str, steps: int, rounds: int, sizes: dict[str, int] | None = None) -> list[dict[str, Any]]:
    """Runs on each rank: every side trains `steps` steps, a step of each in turn; so many times. Per round and side: what happened."""
    out: list[dict[str, Any]] = []
    best((LayerCost(1.0, 1.0, 1.0),) * 2 * RANKS, RANKS, MICROBATCHES, schedule=SCHEDULE)  # loads the planner
    for _ in range(rounds):
        trainers: dict[str, Trainer] = {}
        events: dict[str, list[Event]] = {}
        for name, given in sides(case, steps, sizes).items():
            config = parse(given)
            events[name] = []
            trainers[name] = Trainer(config, world, model_of(case, config), None, listen=events[name].append)
        names = list(trainers)
        seconds: dict[str, list[float]] = {name: [] for name in names}
        noted_steps = {name: noted(trainers[name].pipeline) for name in names}
        costs: dict[str, list[tuple[LayerCost, ...]]] = {name: [] for name in names}
        for step in range(steps):
            turn = step % len(names)
            for name in names[turn:] + names[:turn]:
                world.barrier("the step to start")
                start = time.perf_counter()
                trainers[name].advance(step)
                world.barrier("the step to end")
                seconds[name].append(time.perf_counter() - start)
                costs[name].append(trainers[name].pipeline.costs())  # for the ideal alone: nobody's time
        for name, trainer in trainers.items():
            trainer.finish(steps, sum(seconds[name]))
            trainer.pipeline.changed(())  # closes its channels
        slowest = torch.tensor([[program for program, _ in noted_steps[name]] for name in names], dtype=torch.float64)
        world.largest(slowest, "what the programs took")
        ops = torch.tensor([[ops for _, ops in noted_steps[name]] for name in names], dtype=torch.float64)
        world.sum(ops, "what the ops took")
        if world.rank == 0:
            out.append(
                {
                    name: account(seconds[name], costs[name], events[name]) | {"program": slowest[i].tolist(), "ops": ops[i].tolist()}
                    for i, name in enumerate(names)
                }
            )
    return out


def noted(pipeline: Pipeline) -> list[tuple[float, float]]:
    """From now on, of each step on this rank: seconds from its program's first op or wait to its last, and of its ops together."""
    advance, seconds = pipeline.advance, list[tuple[float, float]]()

    def noting(*args: Any, **options: Any) -> tuple[StepResult, ...]:
        results = advance(*args, **options)
        for result in results:
            slices = result.outcome.slices
            busy = math.fsum(x.end - x.start for x in slices if x.kind not in (WAIT, SEND))
            seconds.append((slices[-1].end - slices[0].start, busy))
        return results

    pipeline.advance = noting
    return seconds


def account(seconds: list[float], costs: list[tuple[LayerCost, ...]], events: Sequence[Event]) -> dict[str, Any]:
    """One side of one round as plain JSON. costs: at the end of every phase, f, b, w per layer."""
    changes = sorted({e.step for e in events if isinstance(e, ChangeEvent)})
    steps = [e for e in events if isinstance(e, StepEvent)]
    end = next(e for e in events if isinstance(e, EndEvent))
    return {
        "seconds": seconds,
        "changes": changes,
        "what": [e.what for e in events if isinstance(e, ChangeEvent)],
        "costs": [[[x.f, x.b, x.w] for x in costs[stop - 1]] for _, stop in phases(changes, len(seconds))],
        "layers": [list(e.layers) for e in steps],
        "idle": [e.idle_ratio for e in steps],
        "moves": [
            {"step": e.step, "to": list(e.target), "bytes": e.moved_bytes, "seconds": e.seconds - e.decide_seconds}
            for e in events
            if isinstance(e, RebalanceEvent)
        ],
        "overhead": {"measure": end.measure_seconds, "decide": end.decide_seconds, "move": end.move_seconds},
        "digest": end.weights_digest,
        "loss": end.loss,
    }


# -- what comes of it ------------------------------------------------------------------------------------------------------------


def phases(changes: Sequence[int], steps: int) -> list[tuple[int, int]]:
    """[start, stop) of the stretches of steps between the changes."""
    return list(pairwise(sorted({0, *changes, steps})))


def settled(phase: tuple[int, int]) -> slice:
    """The second half of a phase: measured, decided, moved."""
    return slice((phase[0] + phase[1]) // 2, phase[1])


def middle_costs(accounts: Sequence[dict[str, Any]]) -> list[tuple[LayerCost, ...]]:
    """Per phase: each figure's median over the accounts."""
    found: list[tuple[LayerCost, ...]] = []
    for phase in zip(*(x["costs"] for x in accounts), strict=True):
        layers = zip(*phase, strict=True)
        found.append(tuple(LayerCost(*(median(figure) for figure in zip(*layer, strict=True))) for layer in layers))
    return found


def work(account: dict[str, Any]) -> float:
    """Seconds of all layers' F, B and W of a microbatch, in the last phase."""
    return math.fsum(seconds for layer in account["costs"][-1] for seconds in layer)


def simulated(spans: Sequence[tuple[int, int]], costs: Sequence[tuple[LayerCost, ...]], placed: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Seconds of each phase: placed uniformly, at its best, and as it was (`placed`, layer counts at each step)."""
    out: dict[str, list[float]] = {"uniform": [], "best": [], "as_placed": []}
    for (start, stop), layers in zip(spans, costs, strict=True):
        even = uniform(len(layers), len(placed[0]))

        def seconds(partition: Partition, layers: tuple[LayerCost, ...] = layers) -> float:
            return timeline(layers, partition, MICROBATCHES, SCHEDULE).makespan

        out["uniform"].append((stop - start) * seconds(even))
        out["best"].append((stop - start) * seconds(best(layers, even.ranks, MICROBATCHES, even, SCHEDULE)))
        as_placed = [Partition(tuple(counts)) for counts in placed[start:stop]]
        known = {partition: seconds(partition) for partition in set(as_placed)}
        out["as_placed"].append(math.fsum(known[partition] for partition in as_placed))
    return out


def share(speedup: float, ideal: float) -> float | None:
    return (speedup - 1) / (ideal - 1) if ideal >= LEAST_IDEAL else None


def judge(case: str, rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    first = rounds[0]
    names, steps = list(first), len(first["dynmo"]["seconds"])
    spans = phases(first["dynmo"]["changes"], steps)
    last = settled(spans[-1])
    whole = {name: median(math.fsum(r[name]["seconds"]) for r in rounds) for name in names}
    late = {name: median(median(r[name]["seconds"][last]) for r in rounds) for name in names}
    over = {
        name: {
            "run": median(math.fsum(r[name]["seconds"]) / math.fsum(r["dynmo"]["seconds"]) for r in rounds),
            "last_phase": median(median(r[name]["seconds"][last]) / median(r["dynmo"]["seconds"][last]) for r in rounds),
        }
        for name in names
        if name != "dynmo"
    }
    program = {name: median(median(r[name]["program"][last]) for r in rounds) for name in ("uniform", "dynmo")}
    costs = middle_costs([r[name] for r in rounds for name in ("uniform", "dynmo")])
    model = simulated(spans, costs, first["dynmo"]["layers"])
    ideal = {"run": sum(model["uniform"]) / sum(model["best"]), "last_phase": model["uniform"][-1] / model["best"][-1]}
    length = spans[-1][1] - spans[-1][0]
    overhead = {key: median(r["dynmo"]["overhead"][key] for r in rounds) for key in ("measure", "decide", "move")}
    return {
        "case": case,
        "steps": steps,
        "phases": [[start, stop] for start, stop in spans],
        "what": first["dynmo"]["what"],
        "seconds": whole,
        "last_phase_step_seconds": late,
        "speedup_over": over,
        "speedup_over_by_round": [
            math.fsum(r["uniform"]["seconds"]) / math.fsum(r["dynmo"]["seconds"]) for r in rounds
        ],  # of the whole run, over uniform
        "ideal": ideal,
        "ideal_as_placed": sum(model["uniform"]) / sum(model["as_placed"]),
        "by_phase": [
            {
                "steps": [start, stop],
                "speedup": median(
                    math.fsum(r["uniform"]["seconds"][start:stop]) / math.fsum(r["dynmo"]["seconds"][start:stop]) for r in rounds
                ),
                "ideal": even / known_at_once,
                "ideal_as_placed": even / as_placed,
            }
            for (start, stop), even, known_at_once, as_placed in zip(
                spans, model["uniform"], model["best"], model["as_placed"], strict=True
            )
        ],
        "share_of_ideal": {key: share(over["uniform"][key], ideal[key]) for key in ideal},
        "measured_over_simulated": {
            "uniform": late["uniform"] * length / model["uniform"][-1],
            "dynmo": late["dynmo"] * length / model["as_placed"][-1],
        },
        # Of that, what the step's program takes, which is all that the simulator knows of; the rest is the step's end and the loop's turn.
        "program_over_simulated": {
            "uniform": program["uniform"] * length / model["uniform"][-1],
            "dynmo": program["dynmo"] * length / model["as_placed"][-1],
        },
        "program_share": {name: program[name] / late[name] for name in program},
        # What the ops took, over what the layers' costs say: these are medians, which know nothing of an op that was held up.
        "ops_over_costs": {
            name: median(median(r[name]["ops"][last]) / (MICROBATCHES * work(r[name])) for r in rounds) for name in ("uniform", "dynmo")
        },
        "same_work_takes": median(work(r["dynmo"]) / work(r["uniform"]) for r in rounds),
        "idle_ratio": {name: median(median(r[name]["idle"][last]) for r in rounds) for name in ("uniform", "dynmo")},
        "simulated_idle_ratio": {
            name: timeline(costs[-1], Partition(tuple(first[name]["layers"][-1])), MICROBATCHES, SCHEDULE).idle_ratio
            for name in ("uniform", "dynmo")
        },
        "overhead": overhead | {"share_of_run": sum(overhead.values()) / whole["dynmo"]},
        "layers": {name: first[name]["layers"][-1] for name in names},
        "moves": [r["dynmo"]["moves"] for r in rounds],
        "same_weights": all(len({r[name]["digest"] for r in rounds}) == 1 for name in names)
        and len({first[name]["digest"] for name in TECHNIQUE if name in first}) == 1,
        "costs": [[[getattr(x, f.name) for f in fields(x)[:3]] for x in layers] for layers in costs],
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    """In Markdown, as docs/cases.md shows it: run / last phase."""
    head = [
        "case",
        "over dense",
        "over mask",
        "over parameters",
        "over uniform",
        "ideal",
        "share of ideal",
        "idle",
        "overhead",
    ]
    lines = [head, ["---", *["---:"] * (len(head) - 1)]]
    for row in rows:

        def over(name: str, row: dict[str, Any] = row) -> str:
            found = row["speedup_over"].get(name)
            return both(found, "{:.2f}") if found else "uniform" if name == "parameters" else ""

        idle = row["idle_ratio"]
        lines.append(
            [
                row["case"].replace("_", " "),
                *(over(name) for name in ("dense", "mask", "parameters", "uniform")),
                both(row["ideal"], "{:.2f}"),
                both(row["share_of_ideal"], "{:.0%}"),
                f"{idle['uniform']:.0%} to {idle['dynmo']:.0%}",
                f"{row['overhead']['share_of_run']:.1%}",
            ]
        )
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def both(values: dict[str, float | None], form: str) -> str:
    return " / ".join("-" if values[key] is None else form.format(values[key]) for key in ("run", "last_phase"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--read", type=Path, metavar="FILE", help="figures of an earlier --json, instead of measuring")
    parser.add_argument("--case", choices=CASES, action="append", help="this case alone; may be given several times (default all)")
    parser.add_argument("--pairs", type=int, default=3, help="rounds, each a whole run of every side (default 3)")
    parser.add_argument("--steps", type=int, default=80, help="of a run, 20 or more (default 80)")
    parser.add_argument("--quick", action="store_true", help="one round of 40 steps: to see that it works")
    options = parser.parse_args()
    if options.steps < 20:
        parser.error("--steps: the techniques need 20 steps to act and be answered; give 20 or more")
    if options.read:
        result = json.loads(options.read.read_text())
    else:
        steps, rounds = (40, 1) if options.quick else (options.steps, options.pairs)
        found = {case: run_ranks("benchmarks.cases:race", RANKS, case=case, steps=steps, rounds=rounds) for case in options.case or CASES}
        result = {"rows": [judge(case, rounds) for case, rounds in found.items()], "machine": machine()}
    print(json.dumps(result) if options.json else table(result["rows"]))


if __name__ == "__main__":
    main()
