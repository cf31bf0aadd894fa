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

from benchmarks.gpu.device import Option, Verdict, built_on, main, progress, seconds
from benchmarks.harness import alternate, medians
from benchmarks.torch_orders import torch_order
from benchmarks.torch_peer import PEERS, PeerSchedule, TorchPeer
from dynmo.balance.partition import Partition, uniform
from dynmo.config import parse
from dynmo.models.model import Model, next_token_loss
from dynmo.models.registry import load_model
from dynmo.pipeline.engine import Engine
from dynmo.runtime.comm.world import World
from dynmo.runtime.engine.sm_slices import cut
from dynmo.schedule.automatic.make import make
from dynmo.schedule.op import Schedule
from dynmo.schedule.simulator import peak_memory, simulate

FLAT = ("1f1b", "zb-h1", "zb-auto", "torch zero-bubble")  # one stage a slice
V_SHAPED = ("zb-v", "torch zbv")  # two stages a slice


class Sides:
    """Pipelines on the same slices, each with several schedules.

    A placement holds weights once.
    """

    def __init__(self, device: torch.device, inputs: Tensor, targets: Tensor) -> None:
        self._device, self._inputs, self._targets = device, inputs, targets
        self.steps: dict[str, Callable[[], float]] = {}

    def add(self, name: str, pipeline: Engine, schedule: Schedule | None = None) -> None:
        """Adds a side.

        Args:
            name: Name of the side.
            pipeline: The engine that runs it.
            schedule: Runs in place of the pipeline's own.
        """

        def step() -> float:
            if schedule is not None:
                pipeline._programs.relower()
                pipeline._programs.lower(schedule, None)
            return seconds(self._device, lambda: self.run(pipeline))

        self.steps[name] = step

    def run(self, pipeline: Engine) -> None:
        pipeline.forward_backward(0, self._inputs, self._targets)
        pipeline.discard()


def on_slices(
    sides: Sides, world: World, model: Model, count: int, microbatches: int, dtype: torch.dtype
) -> dict[str, Any]:
    """Adds the schedules on so many slices to `sides`.

    Args:
        sides: Takes the schedules.
        world: One rank.
        model: The model.
        count: Number of slices.
        microbatches: Microbatches of a step.
        dtype: The precision in which the model computes.

    Returns:
        For each schedule, the pipeline that runs it and the schedule.
    """
    rows: dict[str, Any] = {}
    for own, stages, names in (("zb-auto", count, FLAT), ("zb-v", 2 * count, V_SHAPED)):
        partition = uniform(model.layers, stages)
        pipeline = Engine(
            world,
            model,
            partition,
            schedule=own,
            microbatches=microbatches,
            slices=count,
            dtype=dtype,
        )
        for _ in range(2):  # the first loads kernels
            sides.run(pipeline)
        pipeline.actions.replan(pipeline.costs())
        for name in names:
            if name.startswith("torch "):
                schedule = torch_order(
                    PEERS[name.removeprefix("torch ")], count, microbatches, name
                )
            elif name == own:
                schedule = pipeline.schedule_for(partition)
            else:
                schedule = make(name, count, microbatches)
            rows[name] = (pipeline, schedule)
            sides.add(f"{count} {name}", pipeline, schedule)
    return rows


def torch_stages(
    model: Model, device: torch.device, dtype: torch.dtype
) -> Callable[[int, int], nn.Module]:
    """Returns a function that makes torch's stages: the same layers, placed evenly.

    Args:
        model: The model.
        device: The device of the stages.
        dtype: The precision of the stages.
    """

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


def pipelines(
    device: torch.device,
    dtype: torch.dtype,
    slices: int,
    *,
    blocks: int,
    hidden: int,
    sequence: int,
    batch: int,
    microbatches: int,
    rounds: int,
) -> dict[str, Any]:
    """Measures all schedules and runtimes in one precision.

    Args:
        device: The device.
        dtype: The precision.
        slices: Number of slices.
        blocks: Depth of the model.
        hidden: Width of the model.
        sequence: Tokens of a sequence.
        batch: Sequences of a microbatch.
        microbatches: Microbatches of a step.
        rounds: Number of counted turns.
    """
    shape = {
        "blocks": blocks,
        "hidden": hidden,
        "heads": max(1, hidden // 64),
        "sequence": sequence,
    }
    model = built_on(device, load_model(parse({"model": shape})))
    tokens = torch.randint(
        0, 256, (2, microbatches, batch, sequence), generator=torch.Generator().manual_seed(0)
    ).to(device)
    sides = Sides(device, tokens[0], tokens[1])
    with tempfile.TemporaryDirectory() as folder:
        store = dist.FileStore(str(Path(folder) / "store"), 1)
        with World.join(store, 0, 1, device=device) as world:
            rows = on_slices(sides, world, model, slices, microbatches, dtype)
            sides.add(
                "whole",
                Engine(
                    world,
                    model,
                    Partition((model.layers,)),
                    schedule="1f1b",
                    microbatches=microbatches,
                    dtype=dtype,
                ),
            )
            # Here one rank holds all stages, in both runtimes.
            kind = PeerSchedule(ScheduleInterleavedZeroBubble, stages_per_rank=slices)
            partition = uniform(model.layers, slices)
            chunked = Engine(
                world,
                model,
                partition,
                schedule="interleaved-1f1b",
                chunks=slices,
                microbatches=microbatches,
                dtype=dtype,
            )
            sides.add(
                "whole dynmo zero-bubble",
                chunked,
                torch_order(kind, 1, microbatches, "torch zero-bubble"),
            )
            flat = [part.flatten(0, 1) for part in tokens]
            peer = TorchPeer(
                kind,
                microbatches,
                torch_stages(model, device, dtype),
                flat[0],
                flat[1],
                next_token_loss,
            )
            sides.steps["whole torch zero-bubble"] = peer.step
            progress("all sides are built")
            measured = medians(alternate(sides.steps, rounds, warmup=1))
            out: dict[str, Any] = {
                "whole_seconds": measured["whole"],
                "runtime_gain": measured["whole torch zero-bubble"]
                / measured["whole dynmo zero-bubble"],
                "sms": [each.sms for each in cut(device.index or 0, slices)]
                if device.type == "cuda"
                else [],
                "schedules": {},
            }
            for name, (pipeline, schedule) in rows.items():
                costs = pipeline.schedule_keeper.stage_costs(pipeline.costs(), pipeline.partition)
                said = simulate(schedule, costs)
                taken = measured[f"{slices} {name}"]
                out["schedules"][name] = {
                    "seconds": taken,
                    "measured_over_predicted": taken / said.makespan,
                    "overlap": sum(said.busy) / taken,
                    "over_whole": taken / measured["whole"],
                    "peak_activation_bytes": max(peak_memory(schedule, costs)),
                    "gain": measured[f"{slices} 1f1b"] / taken,
                }
    return out


def measure(device: torch.device, options: argparse.Namespace) -> dict[str, Any]:
    shape = {
        key: getattr(options, key)
        for key in ("slices", "blocks", "hidden", "sequence", "batch", "microbatches", "rounds")
    }
    return {**shape, **pipelines(device, torch.bfloat16, **shape)}


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
