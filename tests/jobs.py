"""What the pool's ranks can run. Each function takes the job's world first; arguments and results
are JSON."""

from __future__ import annotations

import contextlib
import io
import os
import signal
from pathlib import Path
from typing import Any

from dynmo.balance.partition import Partition
from dynmo.cluster.choose import parks
from dynmo.config import Config, parse
from dynmo.errors import NoRoomError
from dynmo.events import Event, StepEvent, to_json
from dynmo.models.emulated import EmulatedLayer
from dynmo.models.registry import load_model
from dynmo.runtime.comm.world import World
from dynmo.runtime.state.migration import Migration
from dynmo.train.joining import come_back
from dynmo.train.trainer import Trainer

SOURCE = f"file:{Path(__file__).resolve().parents[1] / 'LICENSE'}"


def parsed(config: dict[str, Any]) -> Config:
    """On a short text, if no other is asked for: collecting and shuffling the standard library
    takes longer than a small run."""
    return parse({"data": {"source": SOURCE}} | config)


def train(world: World, config: dict[str, Any]) -> dict[str, Any]:
    """A whole run without a folder: digest and last loss, and on rank 0 every step's loss and
    placement."""
    loaded = parsed(config)
    events: list[Event] = []
    result = Trainer(loaded, world, load_model(loaded), None, listen=events.append).run()
    steps = [e for e in events if isinstance(e, StepEvent)]
    return {
        "digest": result.weights_digest,
        "loss": result.loss,
        "losses": [e.loss for e in steps],
        "layers": [list(e.layers) for e in steps],
        "frozen": [e.frozen for e in steps],
    }


def train_staged(world: World, config: dict[str, Any]) -> dict[str, Any]:
    """As `train`, with messages that are received into other memory first, as between CUDA ranks
    over gloo."""
    world.staged = True
    return train(world, config)


def train_and_weights(world: World, config: dict[str, Any]) -> dict[str, Any]:
    """As `train`, and this rank's weights by layer, flat, in parameter order."""
    loaded = parsed(config)
    events: list[Event] = []
    trainer = Trainer(loaded, world, load_model(loaded), None, listen=events.append)
    trainer.run()
    layers = trainer.pipeline.own_layers
    return {
        "losses": [e.loss for e in events if isinstance(e, StepEvent)],
        "weights": {
            index: [x for p in module.parameters() for x in p.flatten().tolist()]
            for index, (module, _) in layers.items()
        },
    }


def train_in(
    world: World,
    config: dict[str, Any],
    folder: str,
    resume: bool = False,
    stop_after: int | None = None,
) -> dict[str, Any]:
    """A run in a folder. stop_after: the step after which rank 0 is asked to stop, by the signal
    that a launcher sends."""

    def listen(event: Event) -> None:
        if isinstance(event, StepEvent) and event.step == stop_after:
            os.kill(os.getpid(), signal.SIGTERM)

    loaded = parsed(config)
    return vars(Trainer(loaded, world, load_model(loaded), Path(folder), resume, listen).run())


def resume_and_listen(world: World, config: dict[str, Any], folder: str) -> dict[str, Any]:
    """A run that goes on; `said` is what it prints on stderr."""
    with contextlib.redirect_stderr(io.StringIO()) as said:
        result = train_in(world, config, folder, resume=True)
    return {**result, "said": said.getvalue()}


def events(world: World, config: dict[str, Any], fits: bool = True) -> list[dict[str, Any]]:
    """What a run without a folder tells its listener, as the log would have it. fits: whether any
    move that is tried finds room."""
    loaded = parsed(config)
    told: list[Event] = []
    trainer = Trainer(loaded, world, load_model(loaded), None, listen=told.append)
    if not fits:

        def refuse(partition: Partition, is_agreed: bool = False) -> Migration:
            raise NoRoomError(f"{partition.counts} does not fit")

        trainer.pipeline.actions.move = refuse
    trainer.run()
    return [to_json(event) for event in told]


def costs_beside_a_slow_replica(world: World, config: dict[str, Any]) -> list[float]:
    """Seconds of each layer's F, as all ranks know them, where the last rank's first emulated layer
    takes three times as long."""
    loaded = parsed(config)
    trainer = Trainer(loaded, world, load_model(loaded), None)
    if world.rank == world.size - 1:
        (module, _), *_ = trainer.pipeline.own_layers.values()
        assert isinstance(module, EmulatedLayer)
        module.f *= 3
    for step in range(3):
        trainer.advance(step)
    return [cost.f for cost in trainer.pipeline.costs()]


def train_elastic(world: World, config: dict[str, Any]) -> dict[str, Any]:
    """As `train`, of a run whose ranks may leave and come back: what rank 0 saw, and how often this
    process was a rank."""
    loaded = parsed(config)
    events: list[Event] = []
    model = load_model(loaded)
    result = Trainer(loaded, world, model, None, listen=events.append).run()
    if result.left and parks(loaded):
        result = come_back(loaded, world, model, None, result)
    return {
        "left": result.left,
        "digest": result.weights_digest,
        "buffers": result.buffers_digest,
        "loss": result.loss,
        "events": [to_json(event) for event in events],
    }
