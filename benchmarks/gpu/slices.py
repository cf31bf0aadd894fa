"""Schedules on slices of one GPU, beside torch's orders and runtime.

The sides take turns. A step is forward and backward without an optimizer. For each schedule:

    measured_over_predicted   against the simulator's makespan for the layers' costs on the slices
    overlap                   the slices' busy seconds over the step's: how many compute at once
    over_whole                the step over that of the same model as one stage on all SMs
    gain                      1f1b's step over this one's
    peak_activation_bytes     what microbatches under way hold, on the slice that holds most (the
                              simulator's figure)

torch's own runtime needs a process and a GPU for each rank, so it cannot run on slices. Two
comparisons stand in for that:

    torch zero-bubble, torch zbv   the orders of torch's schedules, on dynmo's executor and the same
                                   slices
    whole                          one rank holds all stages, on all SMs: torch's interleaved
                                   zero-bubble schedule in torch's runtime, and the same order in
                                   dynmo's executor, which may fuse a B with the W behind it

torch's stages are in the low precision and sum gradients in it. dynmo sums them in float32. Overlap
on slices is not several GPUs: slices share memory bandwidth, and the SMs that a split leaves over
are idle. `over_whole` says what that costs. `sms` is the number of SMs of each slice.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import ScheduleInterleavedZeroBubble

from benchmarks.gpu.device import Option, Shape, Verdict, built_on, main, progress, seconds
from benchmarks.harness import alternate, medians
from benchmarks.torch_orders import torch_order
from benchmarks.torch_peer import PEERS, PeerSchedule, TorchPeer
from dynmo.config import parse
from dynmo.models.loss import next_token_loss
from dynmo.models.model import Model
from dynmo.pipeline.actions import Actions
from dynmo.plan.partition import Partition, uniform
from dynmo.runtime.comm.meeting import Meeting
from dynmo.runtime.comm.signed_store import SignedStore
from dynmo.runtime.engine.batch_check import StepBatch
from dynmo.runtime.engine.engine import Engine
from dynmo.runtime.engine.stage_streams import cut
from dynmo.runtime.options import EngineOptions
from dynmo.schedule.catalogue import make
from dynmo.schedule.op import Schedule
from dynmo.schedule.simulator import peak_memory, simulate
from dynmo.train.setup import model_of

FLAT = ("1f1b", "zb-h1", "zb-auto", "torch zero-bubble")  # one stage a slice
V_SHAPED = ("zb-v", "torch zbv")  # two stages a slice


class Sides:
    """Pipelines on the same slices, each with several schedules.

    A placement holds weights once.

    Attributes:
        inputs: Inputs of a step, [microbatches, batch, sequence].
        targets: Targets of a step, of the same shape.
        steps: Functions that run a step and return its seconds, by name of the side.
    """

    def __init__(self, device: torch.device, inputs: Tensor, targets: Tensor) -> None:
        self._device, self.inputs, self.targets = device, inputs, targets
        self.steps: dict[str, Callable[[], float]] = {}

    def add(self, name: str, pipeline: Engine, schedule: Schedule | None = None) -> None:
        """Adds a side."""

        def step() -> float:
            if schedule is not None:
                pipeline.programs.relower()
                pipeline.programs.executor(schedule)
            return seconds(self._device, lambda: self.run(pipeline))

        self.steps[name] = step

    def run(self, pipeline: Engine) -> None:
        pipeline.programs.train(StepBatch(self.inputs, self.targets), 0, 1.0)
        pipeline.optimizer_step.discard()


def on_slices(
    sides: Sides, world: Meeting, model: Model, count: int, dtype: torch.dtype
) -> dict[str, tuple[Engine, Schedule]]:
    """Adds the schedules on so many slices to `sides`."""
    microbatches = len(sides.inputs)
    rows: dict[str, tuple[Engine, Schedule]] = {}
    for own, stages, names in (("zb-auto", count, FLAT), ("zb-v", 2 * count, V_SHAPED)):
        partition = uniform(model.layers, stages)
        pipeline = Engine(
            world,
            model,
            partition,
            EngineOptions(own, microbatches=microbatches, slices=count, dtype=dtype),
        )
        for _ in range(2):  # the first loads kernels
            sides.run(pipeline)
        Actions(pipeline).replan(pipeline.costs())
        for name in names:
            if name.startswith("torch "):
                schedule = torch_order(
                    PEERS[name.removeprefix("torch ")], count, microbatches, name
                )
            elif name == own:
                schedule = pipeline.schedule_maker.on(partition)
            else:
                schedule = make(name, count, microbatches)
            rows[name] = (pipeline, schedule)
            sides.add(f"{count} {name}", pipeline, schedule)
    return rows


def torch_stages(
    model: Model, device: torch.device, dtype: torch.dtype
) -> Callable[[int, int], nn.Module]:
    """Returns a function that makes torch's stages: the same layers, placed evenly."""

    def build(stage: int, stages: int) -> nn.Module:
        own = uniform(model.layers, stages).range_of(stage)
        return nn.Sequential(
            *(
                layer.to(device, dtype)
                for index, layer in enumerate(model.build(own))
                if index in own
            )
        )

    return build


def on_all_sms(sides: Sides, world: Meeting, model: Model, count: int, dtype: torch.dtype) -> None:
    """Adds the sides that run on the whole GPU to `sides`.

    They are the model as one stage, and as so many stages of one rank in both runtimes.
    """
    microbatches = len(sides.inputs)
    one = Partition((model.layers,))
    options = EngineOptions("1f1b", microbatches, dtype=dtype)
    sides.add("whole", Engine(world, model, one, options))
    kind = PeerSchedule(ScheduleInterleavedZeroBubble, stages_per_rank=count)
    partition = uniform(model.layers, count)
    options = EngineOptions("interleaved-1f1b", microbatches, chunks=count, dtype=dtype)
    chunked = Engine(world, model, partition, options)
    order = torch_order(kind, 1, microbatches, "torch zero-bubble")
    sides.add("whole dynmo zero-bubble", chunked, order)
    flat = sides.inputs.flatten(0, 1), sides.targets.flatten(0, 1)
    stages = torch_stages(model, world.device, dtype)
    peer = TorchPeer(kind, microbatches, stages, *flat, next_token_loss)
    sides.steps["whole torch zero-bubble"] = peer.step


def pipelines(
    device: torch.device, dtype: torch.dtype, shape: Shape, slices: int, rounds: int
) -> dict[str, Any]:
    """Measures all schedules and runtimes in one precision."""
    model = built_on(device, model_of(parse({"model": shape.model})))
    sides = Sides(device, *shape.tokens(device))
    with tempfile.TemporaryDirectory() as folder:
        store = SignedStore(dist.FileStore(str(Path(folder) / "store"), 1))
        with Meeting.join(store, 0, 1, device=device) as world:
            rows = on_slices(sides, world, model, slices, dtype)
            on_all_sms(sides, world, model, slices, dtype)
            progress("all sides are built")
            measured = medians(alternate(sides.steps, rounds, warmup=1))
            schedules = {
                name: figures(pipeline, schedule, measured[f"{slices} {name}"])
                for name, (pipeline, schedule) in rows.items()
            }
    for row in schedules.values():
        row["over_whole"] = row["seconds"] / measured["whole"]
        row["gain"] = measured[f"{slices} 1f1b"] / row["seconds"]
    ours, theirs = (measured[f"whole {runtime} zero-bubble"] for runtime in ("dynmo", "torch"))
    on_gpu = device.type == "cuda"
    return {
        "whole_seconds": measured["whole"],
        "runtime_gain": theirs / ours,
        "sms": [each.sms for each in cut(device.index or 0, slices)] if on_gpu else [],
        "schedules": schedules,
    }


def figures(pipeline: Engine, schedule: Schedule, seconds: float) -> dict[str, float]:
    """Compares a step with the simulator."""
    costs = pipeline.schedule_maker.plan(pipeline.store.layout.partition, pipeline.costs()).costs
    simulated = simulate(schedule, costs)
    return {
        "seconds": seconds,
        "measured_over_predicted": seconds / simulated.makespan,
        "overlap": sum(simulated.busy) / seconds,
        "peak_activation_bytes": max(peak_memory(schedule, costs)),
    }


def measure(device: torch.device, options: argparse.Namespace) -> dict[str, Any]:
    """Measures all schedules and runtimes in bfloat16."""
    shape = Shape.of(options)
    sizes = {"slices": options.slices, **shape._asdict(), "rounds": options.rounds}
    return sizes | pipelines(device, torch.bfloat16, shape, options.slices, options.rounds)


def assess(result: dict[str, Any]) -> Verdict:
    """Requires that ours gain over 1f1b.

    torch's orders and runtime must not be faster (2 % for noise).
    """
    gains = {name: row["gain"] for name, row in result["schedules"].items()}
    torchs = max(gain for name, gain in gains.items() if name.startswith("torch "))
    ours = max(gain for name, gain in gains.items() if name in ("zb-h1", "zb-auto", "zb-v"))
    told = ", ".join(f"{name} x{gain:.3f}" for name, gain in gains.items() if name != "1f1b")
    told = f"over 1f1b: {told}; over torch's runtime x{result['runtime_gain']:.3f}"
    return Verdict(ours > 1 and ours >= 0.98 * torchs and result["runtime_gain"] >= 0.98, told)


OPTIONS = (
    Option("slices", 4, 2, "slices"),
    Option("blocks", 8, 3, "blocks"),
    Option("hidden", 2048, 64, "width"),
    Option("sequence", 2048, 16, "tokens"),
    Option("batch", 4, 1, "sequences of a microbatch"),
    Option("microbatches", 8, 4, "microbatches of a step"),
    Option("rounds", 5, 1, "counted turns"),
)

if __name__ == "__main__":
    main(__doc__ or "", measure, assess, OPTIONS)
