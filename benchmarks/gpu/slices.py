"""A pipeline on slices of one GPU: 2 to 4 stages, zb-h1 against 1f1b and what the simulator says, and the whole GPU without a pipeline.

The sides take turns; a step is forward and backward without an optimizer. Of each number of slices and schedule:

    measured_over_predicted   against the simulator's makespan for the layers' costs as measured on the slices
    overlap                   the slices' busy seconds over the step's: how many compute at once (1: they only take turns)
    over_whole                the step over that of the same model and microbatches as one stage on all SMs

`zb_h1_gain` is 1f1b's step over zb-h1's. Overlap on slices is not several GPUs: slices share memory bandwidth, and the SMs that a split
leaves over idle; `over_whole` says what that costs. `sms`: of each slice.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.gpu.device import main, turns
from dynmo.api import Pipeline
from dynmo.balance.partition import uniform
from dynmo.config import parse
from dynmo.models.model import load_model
from dynmo.runtime.slices import cut
from dynmo.runtime.world import World
from dynmo.simulator import Timeline

SCHEDULES = ("1f1b", "zb-h1")


def step(pipeline: Pipeline, inputs: Tensor, targets: Tensor) -> Callable[[], None]:
    def run() -> None:
        pipeline.forward_backward(0, inputs, targets)
        pipeline.discard()

    return run


def pipelines(
    device: torch.device,
    dtype: torch.dtype,
    slices: tuple[int, ...],
    *,
    blocks: int,
    hidden: int,
    sequence: int,
    batch: int,
    microbatches: int,
    rounds: int,
) -> dict[str, Any]:
    shape = {"blocks": blocks, "hidden": hidden, "heads": max(1, hidden // 64), "sequence": sequence}
    model = load_model(parse({"model": shape}))
    world = World(0, 1, device, 120.0, 0, dist.HashStore())
    tokens = torch.randint(0, 256, (2, microbatches, batch, sequence), generator=torch.Generator().manual_seed(0)).to(device)
    made = {"whole": Pipeline(world, model, uniform(model.layers, 1), schedule="1f1b", microbatches=microbatches, dtype=dtype)}
    for count in slices:
        for name in SCHEDULES:
            placed = uniform(model.layers, count)
            made[f"{count} {name}"] = Pipeline(world, model, placed, schedule=name, microbatches=microbatches, slices=count, dtype=dtype)
    found = turns(device, {name: step(pipeline, tokens[0], tokens[1]) for name, pipeline in made.items()}, rounds)
    out: dict[str, Any] = {"whole_seconds": found["whole"]}
    for count in slices:
        both: dict[str, Any] = {}
        for name in SCHEDULES:
            taken, said = found[f"{count} {name}"], predicted(made[f"{count} {name}"])
            both[name] = {
                "seconds": taken,
                "measured_over_predicted": taken / said.makespan,
                "overlap": sum(said.busy) / taken,
                "over_whole": taken / found["whole"],
            }
        both["zb_h1_gain"] = both["1f1b"]["seconds"] / both["zb-h1"]["seconds"]
        both["sms"] = [each.sms for each in cut(device.index or 0, count)] if device.type == "cuda" else []
        out[f"{count} slices"] = both
    return out


def predicted(pipeline: Pipeline) -> Timeline:
    """`busy` is of the layers' measured costs: what every slice has computed."""
    return pipeline.predict(pipeline.costs(), pipeline.partition)


def measure(device: torch.device, options: argparse.Namespace) -> dict[str, Any]:
    shape = {key: getattr(options, key) for key in ("blocks", "hidden", "sequence", "batch", "microbatches", "rounds")}
    return {**shape, **pipelines(device, torch.bfloat16, tuple(range(2, options.slices + 1)), **shape)}


if __name__ == "__main__":
    main(
        __doc__ or "",
        measure,
        [
            ("slices", 4, "most slices"),
            ("blocks", 12, "blocks"),
            ("hidden", 1024, "width"),
            ("sequence", 2048, "tokens"),
            ("batch", 2, "sequences of a microbatch"),
            ("microbatches", 8, "microbatches of a step"),
            ("rounds", 7, "counted turns"),
        ],
    )
