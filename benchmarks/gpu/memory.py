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
from typing import Any

import torch

from benchmarks.gpu.device import Option, Verdict, built_on, main, progress, synchronize
from benchmarks.harness import run_ranks
from dynmo.balance.partition import Partition, uniform
from dynmo.config import parse
from dynmo.models.registry import load_model
from dynmo.pipeline.engine import Engine
from dynmo.planner.recompute import recompute_as_workspace
from dynmo.runtime.comm.world import World
from dynmo.runtime.layer.precision import PRECISIONS
from dynmo.schedule.memory import rank_memory
from dynmo.train.shape_costs import shape_costs

SCHEDULE = "zb-h1"


def on_a_rank(
    world: World, blocks: int, hidden: int, sequence: int, batch: int, microbatches: int
) -> dict[str, Any]:
    """Runs on each rank. Returns what both ranks found.

    Args:
        world: The ranks.
        blocks: Depth of the model.
        hidden: Width of the model.
        sequence: Tokens of a sequence.
        batch: Sequences of a microbatch.
        microbatches: Microbatches of a step.
    """
    device = world.device
    config = parse(
        {
            "model": {
                "blocks": blocks,
                "hidden": hidden,
                "heads": max(1, hidden // 64),
                "sequence": sequence,
            },
            "train": {
                "global_batch": batch * microbatches,
                "micro_batch": batch,
                "precision": "bfloat16",
            },
            "parallel": {"pipeline": world.size},
            "pipeline": {"schedule": SCHEDULE},
        }
    )
    model = load_model(config)
    partition = uniform(model.layers, world.size)
    dtype = PRECISIONS[config.train.precision]
    pipeline = Engine(
        world,
        built_on(device, model),
        partition,
        schedule=SCHEDULE,
        microbatches=microbatches,
        dtype=dtype,
    )
    progress(f"rank {world.rank}: the model is built")
    tokens = torch.randint(
        0, 256, (2, microbatches, batch, sequence), generator=torch.Generator().manual_seed(0)
    ).to(device)
    count = 0

    def steps(number: int) -> float:
        """Runs so many steps. Returns the seconds of the last one."""
        nonlocal count
        taken = 0.0
        for _ in range(number):
            world.barrier("the step to start")
            start = time.perf_counter()
            pipeline.step(count, tokens[0], tokens[1], lr=1e-5, max_norm=1.0)
            synchronize(device)
            taken, count = time.perf_counter() - start, count + 1
        return pipeline.largest(taken)

    steps(2)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    before = steps(2)
    held = sum(
        t.nbytes
        for module, optimizer in pipeline.own_layers.values()
        for t in (*module.parameters(), *optimizer.state().values())
    )
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else held
    schedule = pipeline.schedule_for(partition)
    account = rank_memory(pipeline.costs(), partition.counts, schedule)
    planned = rank_memory(
        recompute_as_workspace(shape_costs(config, model), ()), partition.counts, schedule
    )
    table = torch.zeros(world.size, dtype=torch.float64)
    table[world.rank] = peak
    world.sum(table, "the peaks of all ranks")

    progress(f"rank {world.rank}: the steps before the move have run")
    digest, quarter = pipeline.digest(), max(1, model.layers // 4)
    migration = pipeline.move(
        Partition((partition.counts[0] - quarter, partition.counts[1] + quarter))
    )
    after = pipeline.digest()
    if digest != after:
        raise RuntimeError(f"the move changed the weights: {digest} before, {after} after")
    return {
        "peak_bytes": table.tolist(),
        "account_bytes": list(account),
        "planned_bytes": list(planned),
        "peak_over_account": [
            peak / said for peak, said in zip(table.tolist(), account, strict=True)
        ],
        "peak_over_planned": [
            peak / said for peak, said in zip(table.tolist(), planned, strict=True)
        ],
        "moved_layers": quarter,
        "moved_bytes": migration.moved_bytes,
        "move_seconds": migration.seconds,
        "step_seconds": {"before": before, "after": steps(2)},
        "parameters": sum(cost.parameters for cost in pipeline.costs()),
    }


def measure(device: torch.device, options: argparse.Namespace) -> dict[str, Any]:
    shape = {
        key: getattr(options, key)
        for key in ("blocks", "hidden", "sequence", "batch", "microbatches")
    }
    return {**shape, **run_ranks("benchmarks.gpu.memory:on_a_rank", 2, str(device), **shape)}


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
