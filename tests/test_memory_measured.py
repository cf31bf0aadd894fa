"""The memory model against what the allocator truly held, on every rank, under schedules of every kind."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest
from torch.profiler import ProfilerActivity, profile

from dynmo.api import Pipeline
from dynmo.balance.partition import uniform
from dynmo.config import parse
from dynmo.data.batches import Batches
from dynmo.data.corpus import open_corpus
from dynmo.memory import rank_memory, static_bytes
from dynmo.models.model import load_model
from dynmo.runtime.world import World
from tests.pool import Pool

MICROBATCHES = 8
MODEL = {"blocks": 4, "hidden": 64, "heads": 4, "sequence": 64}


def peak(world: World, schedule: str) -> dict[str, float]:
    """Bytes that one step allocated at its peak on this rank, and what the model says that the schedule keeps alive."""
    config = parse({"model": MODEL, "train": {"global_batch": 4 * MICROBATCHES, "micro_batch": 4}})
    model = load_model(config)
    inputs, targets = Batches(open_corpus("stdlib"), 64, 4 * MICROBATCHES, 4, 0).train(0)
    stages = len(Pipeline.placement_for(schedule, world.size))
    pipeline = Pipeline(world, model, uniform(model.layers, stages), schedule=schedule, microbatches=MICROBATCHES)
    for step in range(2):
        pipeline.step(step, inputs, targets, lr=1e-3)
    costs = pipeline.costs()
    pipeline.replan(costs)
    pipeline.step(2, inputs, targets, lr=1e-3)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        pipeline.forward_backward(3, inputs, targets)
    gradients = sum(p.grad.nbytes for module, _ in pipeline.own_layers.values() for p in module.parameters() if p.grad is not None)
    pipeline.discard()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiled.export_chrome_trace(str(path))
        events = [e for e in json.loads(path.read_text())["traceEvents"] if e.get("name") == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda e: e["ts"]):
        now += event["args"]["Bytes"]
        most = max(most, now)
    counts, placement = pipeline.partition.counts, pipeline.placement
    predicted = rank_memory(costs, counts, pipeline.schedule_for(pipeline.partition, costs))[world.rank]
    live = predicted - static_bytes(costs, counts, placement)[world.rank]
    workspace = max(cost.activation_bytes for cost in costs)
    messages = max(cost.output_bytes for cost in costs[:-1]) * MICROBATCHES * len(pipeline.own_stages)
    return {"measured": most, "live": live, "gradients": gradients, "workspace": workspace, "messages": messages}


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1", "zb-h2", "zb-auto", "zb-v", "interleaved-1f1b"])
def test_peaks_are_as_predicted(pool: Pool, schedule: str) -> None:
    """The least is what the schedule keeps alive. Beyond it there are gradients, messages that have landed early, and what an op allocates
    for itself while it runs: no more than twice what the largest layer keeps of a microbatch."""
    for rank, row in enumerate(pool.run("tests.test_memory_measured:peak", 2, schedule=schedule)):
        assert row["measured"] >= 0.97 * row["live"], (rank, row)
        assert row["measured"] <= row["live"] + row["gradients"] + 2 * row["workspace"] + row["messages"], (rank, row)
