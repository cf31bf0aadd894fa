"""Jobs of the pool's ranks for the tests of checkpoints and of whole pipelines."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import torch
from torch import nn

from dynmo.balance.partition import Partition, uniform
from dynmo.config import parse
from dynmo.errors import ConfigError, RunError
from dynmo.models.loss import next_token_loss
from dynmo.models.model import from_factories
from dynmo.pipeline.actions import Actions
from dynmo.pipeline.saving import restore_layer
from dynmo.runtime.comm.world import World
from dynmo.runtime.engine.engine import Engine
from dynmo.runtime.engine.options import StepOptions
from dynmo.runtime.state import checkpoint
from dynmo.runtime.state.layer_options import LayerOptions
from dynmo.train.setup import model_of
from tests.full_disk import full_at
from tests.runtime.jobs.migrate import fingerprint

GPT = {"blocks": 2, "hidden": 16, "heads": 2, "sequence": 8}


def pipeline(world: World, counts: list[int]) -> Engine:
    loaded = parse({"model": GPT})
    return Engine(
        world,
        model_of(loaded),
        Partition(tuple(counts)),
        StepOptions("zb-h1", microbatches=3),
        layers=LayerOptions(seed=loaded.seed),
    )


def steps(pipeline: Engine, first: int, last: int) -> list[float]:
    """Losses of the steps from `first` to before `last`."""
    losses: list[float] = []
    for step in range(first, last):
        tokens = torch.randint(256, (3, 2, 9), generator=torch.Generator().manual_seed(step))
        losses.append(pipeline.step(step, tokens[..., :-1], tokens[..., 1:], lr=0.01).loss)
    return losses


def save_and_go_on(world: World, folder: str, counts: list[int]) -> dict[str, Any]:
    """Four steps with a checkpoint after two. Layers 0 and 1 are frozen by then."""
    pipe = pipeline(world, counts)
    steps(pipe, 0, 1)
    Actions(pipe).freeze([0, 1])
    steps(pipe, 1, 2)
    held = [(i, (m, o.state())) for i, (m, o) in pipe.store.own.items()]
    saved = checkpoint.save(
        world,
        Path(folder),
        2,
        pipe.model.names,
        held,
        {"frozen": sorted(pipe.store.frozen.layers)},
        keep=2,
    )
    layers = {i: fingerprint(m, o, gradients=False) for i, (m, o) in pipe.store.own.items()}
    return {
        "layers": layers,
        "losses": steps(pipe, 2, 4),
        "digest": pipe.digest(),
        "bytes": saved.bytes,
    }


def save_on_a_full_disk(world: World, folder: str, full: int) -> str:
    """The error message if one rank can write nothing."""
    pipe = pipeline(world, [3, 3])
    held = [(i, (m, o.state())) for i, (m, o) in pipe.store.own.items()]
    try:
        with full_at(0 if world.rank == full else -1):
            checkpoint.save(world, Path(folder), 1, pipe.model.names, held, {}, keep=2)
    except RunError as error:
        return str(error).split(";")[0]
    return ""


def load_and_go_on(world: World, folder: str, counts: list[int]) -> dict[str, Any]:
    path, manifest, _ = checkpoint.find(Path(folder), world)
    pipe = pipeline(world, counts)
    Actions(pipe).freeze(manifest.state["frozen"])
    for index in pipe.store.own:
        restore_layer(pipe, index, checkpoint.load_layer(path, index, world.device))
    layers = {i: fingerprint(m, o, gradients=False) for i, (m, o) in pipe.store.own.items()}
    return {"layers": layers, "losses": steps(pipe, manifest.step, 4), "digest": pipe.digest()}


def look_together(world: World, folder: str) -> dict[str, Any]:
    """The checkpoint found, and the files that this rank has read to the end."""
    read: list[str] = []
    sha256 = checkpoint._sha256

    def watched(path: Path) -> bytes:
        read.append(str(path.relative_to(folder)))
        return sha256(path)

    with mock.patch.object(checkpoint, "_sha256", watched):
        path, _, problems = checkpoint.find(Path(folder), world)
    return {"path": path.name, "problems": problems, "read": read}


def message_timeout(world: World, w_granularity: Literal["whole", "linear"]) -> list[Any]:
    """The seconds after which pieces of W run, and the links' latencies."""
    pipeline = Engine(
        world,
        model_of(parse({"model": GPT})),
        uniform(6, world.size),
        StepOptions("zb-h1", microbatches=3, w_granularity=w_granularity),
    )
    waits = pipeline.programs.executor().timeout
    Actions(pipeline).on_workload_change(())  # closes its channels
    return [waits, [link.latency for link in pipeline.schedule_keeper.links.values()]]


def builds_another(world: World, other: int) -> str:
    """One rank makes layer 2 of four wider than the others. Returns what is said."""
    width = 9 if world.rank == other else 8
    sizes = [(8, 8), (8, 8), (8, width), (width, 8)]
    factories = [partial(nn.Linear, *size) for size in sizes]
    model = from_factories(list("abcd"), factories, 0, next_token_loss)
    try:
        Engine(world, model, uniform(4, world.size), StepOptions("zb-h1", microbatches=2))
    except ConfigError as error:
        return str(error)
    return ""
