"""Two processes that share the GPU: peak memory, and a move in mid-training.

The peak is held against the account. Each process has its own allocator, so
`torch.cuda.max_memory_allocated` is a rank's own peak. One process with slices would only give the
peak of all slices. The account (`dynmo.schedule.memory.rank_memory`) knows tensors only: cuBLAS's
workspace and what the allocator rounds up come on top.

The account is made from what the layers were measured to keep. The plan's account is made before
any run, from shapes alone. It counts more than CUDA keeps: torch has one kernel for an RMS norm
there, and shapes are traced through several.

After some steps a quarter of the layers moves from rank 0 to rank 1 with weights and optimizer
state, through host memory, and training goes on. The digest of all weights must be the same before
and after the move.

A dry run has no allocator to ask: there `peak_bytes` is weights and optimizer state alone.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.gpu.device import Option, Shape, Verdict, built_on, main, progress, synchronize
from benchmarks.harness import run_ranks, run_step
from dynmo.config import parse
from dynmo.pipeline.actions import Actions
from dynmo.pipeline.shape_costs import shape_costs
from dynmo.plan.partition import Partition, uniform
from dynmo.plan.recompute import recompute_as_workspace
from dynmo.runtime.comm.agreement import maxima
from dynmo.runtime.comm.meeting import Meeting
from dynmo.runtime.engine.engine import Engine
from dynmo.runtime.optim.precision import PRECISIONS
from dynmo.runtime.options import EngineOptions
from dynmo.runtime.state.migration import Migration
from dynmo.schedule.memory import rank_memory
from dynmo.train.setup import model_of

SCHEDULE = "zb-h1"


class Run:
    """This rank's part of a pipeline, and the batch of its steps.

    Attributes:
        pipeline: The engine.
        partition: The first placement.
    """

    def __init__(self, world: Meeting, shape: Shape) -> None:
        self._world, self._shape = world, shape
        self._config = parse(
            {
                "model": shape.model,
                "train": shape.train,
                "parallel": {"pipeline": world.size},
                "pipeline": {"schedule": SCHEDULE},
            }
        )
        self._model = model_of(self._config)
        self.partition = uniform(self._model.layers, world.size)
        self.pipeline = Engine(
            world,
            built_on(world.device, self._model),
            self.partition,
            EngineOptions(
                SCHEDULE,
                microbatches=shape.microbatches,
                dtype=PRECISIONS[self._config.train.precision],
            ),
        )
        progress(f"rank {world.rank}: the model is built")
        self._tokens = shape.tokens(world.device)
        self._count = 0

    def steps(self, number: int) -> float:
        """Runs so many steps. Returns the seconds of the last one."""
        seconds = 0.0
        for _ in range(number):
            self._world.barrier("the step to start")
            start = time.perf_counter()
            run_step(self.pipeline, self._count, *self._tokens, lr=1e-5, max_norm=1.0)
            synchronize(self._world.device)
            seconds = time.perf_counter() - start
            self._count += 1
        return maxima(self.pipeline.store.world, (seconds,))[0]

    def peaks(self) -> list[float]:
        """Returns the peak memory of each rank, in bytes."""
        world, device = self._world, self._world.device
        held = sum(
            t.nbytes
            for module, optimizer in self.pipeline.store.own.values()
            for t in (*module.parameters(), *optimizer.state().values())
        )
        table = torch.zeros(world.size, dtype=torch.float64)
        on_gpu = device.type == "cuda"
        table[world.rank] = torch.cuda.max_memory_allocated(device) if on_gpu else held
        world.sum(table, "the peaks of all ranks")
        return table.tolist()

    def accounts(self) -> tuple[list[int], list[int]]:
        """Returns the account of each rank, by measured costs and by shapes alone, in bytes."""
        schedule, counts = self.pipeline.schedule_maker.on(self.partition), self.partition.counts
        shapes = recompute_as_workspace(shape_costs(self._config.options, self._model), ())
        measured = rank_memory(self.pipeline.costs(), counts, schedule)
        return list(measured), list(rank_memory(shapes, counts, schedule))

    def move(self, layers: int) -> Migration:
        """Moves so many layers from rank 0 to rank 1."""
        first, second = self.partition.counts
        before = self.pipeline.digest()
        migration = Actions(self.pipeline).move(Partition((first - layers, second + layers)))
        after = self.pipeline.digest()
        if before != after:
            raise RuntimeError(f"the move changed the weights: {before} before, {after} after")
        return migration


def on_a_rank(world: Meeting, shape: Sequence[int]) -> dict[str, Any]:
    """Runs on each rank. Both ranks return the same."""
    run = Run(world, Shape(*shape))
    run.steps(2)
    if world.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(world.device)
    before = run.steps(2)
    peaks, (account, planned) = run.peaks(), run.accounts()
    progress(f"rank {world.rank}: the steps before the move have run")
    quarter = max(1, run.partition.layers // 4)
    migration = run.move(quarter)
    return {
        "peak_bytes": peaks,
        "account_bytes": account,
        "planned_bytes": planned,
        "peak_over_account": [x / y for x, y in zip(peaks, account, strict=True)],
        "peak_over_planned": [x / y for x, y in zip(peaks, planned, strict=True)],
        "moved_layers": quarter,
        "moved_bytes": migration.moved_bytes,
        "move_seconds": migration.seconds,
        "step_seconds": {"before": before, "after": run.steps(2)},
        "parameters": sum(cost.parameters for cost in run.pipeline.costs()),
    }


def measure(device: torch.device, options: argparse.Namespace) -> dict[str, Any]:
    """Runs two ranks that share the device."""
    shape = Shape.of(options)
    figures = run_ranks("benchmarks.gpu.memory:on_a_rank", 2, str(device), shape=shape)
    return shape._asdict() | figures


def assess(result: dict[str, Any]) -> Verdict:
    ratios = result["peak_over_account"]
    planned = result["peak_over_planned"]
    told = ", ".join(
        f"rank {rank} {ratio:.3f} of the account, {planned[rank]:.3f} of the plan"
        for rank, ratio in enumerate(ratios)
    )
    move = (
        f"moved {result['moved_bytes'] / 1e9:.2f} GB in {result['move_seconds']:.2f} s, "
        "same weights"
    )
    return Verdict(
        all(0.9 <= ratio <= 1.1 for ratio in ratios) and max(planned) <= 1.1, f"{told}; {move}"
    )


OPTIONS = (
    Option("blocks", 12, 3, "blocks"),
    Option("hidden", 2048, 32, "width"),
    Option("sequence", 2048, 16, "tokens"),
    Option("batch", 2, 1, "sequences of a microbatch"),
    Option("microbatches", 8, 4, "microbatches of a step"),
)

if __name__ == "__main__":
    main(__doc__ or "", measure, assess, OPTIONS)
