"""A large GPT on slices of one GPU, placed evenly and by measured cost.

The GPT computes in bfloat16. One pipeline holds the weights once. For each case the work changes.
The layers then move to and fro between the even and the balanced placement, some steps on each. A
move between slices sends nothing. Steps are whole: forward, backward, clipping, AdamW. The frozen
layers thaw and attention is dense again before the next case. Pruned weights are gone for good, so
pruning is last.

    freezing           the first half of the layers
    sparse attention   hashed, in the first half of the blocks
    pruning            the smallest weights of all layers. The layers differ in scale: the front
                       loses more.

`dense_over_even` is the gain of the case alone: the dense step over the even placement's. The
dense step is timed once, before the cases. Pruned layers run in CSR form from a sparsity of 0.9 on,
so that the work becomes uneven. With `dense_below = "auto"` they would stay dense where that is
faster.

`speedup` is the even placement's step over the balanced one's, and `dense_over_balanced` is both
gains together. `ideal` is the simulator's, from the layers' measured costs.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.cases_race import model_for
from benchmarks.gpu.device import Option, Shape, Verdict, built_on, main, progress, seconds
from benchmarks.harness import run_step
from dynmo.config import Config, parse
from dynmo.pipeline.actions import Actions
from dynmo.pipeline.cases import CaseContext, make_cases
from dynmo.plan.bisection import exact
from dynmo.plan.partition import Partition, uniform
from dynmo.runtime.comm.meeting import Meeting
from dynmo.runtime.comm.signed_store import SignedStore
from dynmo.runtime.engine.engine import Engine
from dynmo.runtime.optim.precision import PRECISIONS
from dynmo.runtime.options import EngineOptions

# Steps at which the cases of the configuration act.
SPARSE, DENSE, PRUNE = 1, 2, 3
HELD = 18  # bytes of a weight: itself in bfloat16, its float32 gradient and master, and two moments


def config_of(options: argparse.Namespace, blocks: int) -> Config:
    """Returns the config of the run.

    The cases act where `measure` calls them, at steps that are names only.
    """
    sparse = [[SPARSE, list(range(max(1, blocks // 2)))], [DENSE, []]]
    return parse(
        {
            "model": {
                "blocks": blocks,
                "hidden": options.hidden,
                "heads": max(1, options.hidden // 128),
                "sequence": options.sequence,
            },
            "train": {"steps": PRUNE + 1, **Shape.of(options).train},
            "parallel": {"pipeline": options.slices, "slices": True},
            "dynamism": {
                "cases": ["pruning", "sparse_attention"],
                "pruning": {
                    "final_sparsity": 0.55,
                    "start": PRUNE,
                    "end": PRUNE,
                    "every": 1,
                    "dense_below": 0.9,
                },
                "sparse_attention": {
                    "kind": "hash",
                    "schedule": sparse,
                    "buckets": min(16, options.sequence),
                },
            },
        }
    )


def blocks_for(device: torch.device, options: argparse.Namespace) -> int:
    """Returns the number of blocks.

    It is at most as many as asked for, and at most as many as leave half of the device's memory
    to activations.
    """
    if device.type != "cuda":
        return options.blocks
    room = torch.cuda.get_device_properties(device).total_memory // 2
    return max(options.slices, min(options.blocks, room // (HELD * 11 * options.hidden**2)))


class Run:
    """One pipeline and its batch."""

    def __init__(self, device: torch.device, config: Config, options: argparse.Namespace) -> None:
        self._device, self._options = device, options
        model = built_on(device, model_for("pruning", config))
        world = Meeting(0, 1, device, 120.0, 0, SignedStore(dist.HashStore()))
        self.even = uniform(model.layers, options.slices)
        self.pipeline = Engine(
            world,
            model,
            self.even,
            EngineOptions(
                "zb-h1",
                microbatches=options.microbatches,
                slices=options.slices,
                dtype=PRECISIONS[config.train.precision],
            ),
        )
        self._tokens = Shape.of(options).tokens(device)
        self.losses: list[float] = []

    def step(self) -> None:
        result = run_step(self.pipeline, len(self.losses), *self._tokens, lr=1e-5, max_norm=1.0)
        self.losses.append(result.loss)

    def steps(self, count: int) -> float:
        """Returns the median seconds of so many steps, after one that is not counted."""
        self.step()
        return median(seconds(self._device, self.step) for _ in range(count))

    def sides(self) -> dict[str, Any]:
        """Times both placements in turn, for the work as it is now."""
        pipeline = self.pipeline
        self.steps(1)
        costs = pipeline.costs()
        balanced = exact([cost.seconds for cost in costs], self._options.slices, current=self.even)
        times: dict[Partition, list[float]] = {self.even: [], balanced: []}
        for _ in range(self._options.pairs):
            for partition in (balanced, self.even):
                Actions(pipeline).move(partition)
                times[partition].append(self.steps(self._options.steps))
        even, fast = median(times[self.even]), median(times[balanced])
        tokens = self._options.microbatches * self._options.batch * self._options.sequence
        return {
            "even_seconds": even,
            "balanced_seconds": fast,
            "balanced_layers": list(balanced.counts),
            "speedup": even / fast,
            "ideal": pipeline.schedule_maker.plan(self.even, costs).timeline.makespan
            / pipeline.schedule_maker.plan(balanced, costs).timeline.makespan,
            "tokens_per_second": tokens / fast,
        }


def measure(device: torch.device, options: argparse.Namespace) -> dict[str, Any]:
    """Measures the cases in turn, on one pipeline."""
    blocks = blocks_for(device, options)
    config = config_of(options, blocks)
    run = Run(device, config, options)
    pipeline = run.pipeline
    facts = config.facts(pipeline.model.layers, on_cuda=True)
    cases = make_cases([*config.dynamism.named.values()], facts)
    pruning, sparse = sorted(cases, key=lambda case: case.name)
    half = range(pipeline.model.layers // 2)

    def act(case: Any, step: int) -> None:
        case.check(pipeline.store.modules)
        change = case.act(step, CaseContext(pipeline))
        assert change is not None, f"{case.name} changed nothing"
        Actions(pipeline).on_workload_change(change.layers)

    progress("the model is built")
    parameters = sum(cost.parameters for cost in pipeline.costs())
    dense = run.steps(options.steps)
    rows: dict[str, Any] = {"dense": {"even_seconds": dense}}
    changes: dict[str, tuple[Callable[[], None], Callable[[], None]]] = {
        "freezing": (
            lambda: Actions(pipeline).freeze(half),
            lambda: Actions(pipeline).unfreeze(half),
        ),
        "sparse attention": (lambda: act(sparse, SPARSE), lambda: act(sparse, DENSE)),
        "pruning": (lambda: act(pruning, PRUNE), lambda: None),
    }
    for name, (begin, end) in changes.items():
        progress(name)
        begin()
        rows[name] = run.sides()
        for side in ("even", "balanced"):
            rows[name][f"dense_over_{side}"] = dense / rows[name][f"{side}_seconds"]
        end()
    if not all(map(math.isfinite, run.losses)):
        raise RuntimeError(f"losses that are not finite: {run.losses}")
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    return {
        "parameters": parameters,
        "blocks": blocks,
        "steps": len(run.losses),
        "losses": run.losses,
        "peak_bytes": peak,
        "cases": rows,
    }


def assess(result: dict[str, Any]) -> Verdict:
    """Requires that balanced is no slower (2 % for noise)."""
    speedups = {name: row["speedup"] for name, row in result["cases"].items() if "speedup" in row}
    over_dense = {name: result["cases"][name]["dense_over_balanced"] for name in speedups}
    told = ", ".join(
        f"{name} x{speedup:.3f} over even (x{over_dense[name]:.2f} over dense)"
        for name, speedup in speedups.items()
    )
    peak = "" if result["peak_bytes"] is None else f", peak {result['peak_bytes'] / 2**30:.1f} GiB"
    told = (
        f"{result['parameters'] / 1e9:.2f} B weights: {told}{peak}, loss {result['losses'][-1]:.3f}"
    )
    return Verdict(all(speedup >= 0.98 for speedup in speedups.values()), told)


OPTIONS = (
    Option("slices", 4, 2, "slices"),
    Option("blocks", 28, 4, "blocks, if the memory allows them"),
    Option("hidden", 2048, 64, "width"),
    Option("sequence", 2048, 16, "tokens"),
    Option("batch", 2, 1, "sequences of a microbatch"),
    Option("microbatches", 8, 4, "microbatches of a step"),
    Option("pairs", 2, 1, "turns of both placements"),
    Option("steps", 2, 1, "counted steps of each placement in a turn"),
)

if __name__ == "__main__":
    main(__doc__ or "", measure, assess, OPTIONS)
