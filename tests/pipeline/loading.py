"""Jobs of the ranks of `test_loader.py`: a loop of one's own on samples."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dynmo
from dynmo.data.stream import HELD_OUT
from dynmo.events import DataEvent, Event
from dynmo.pipeline.options import grouped
from dynmo.runtime.comm.meeting import Meeting

COUNT = HELD_OUT + 20


def records() -> Iterator[dict[str, list[int]]]:
    """Token ids of lengths 2 to 8. The second is the number of the record."""
    for number in range(COUNT):
        yield {"input_ids": [1, number, *range(number % 7)]}


def numbers(batch: Any) -> list[int]:
    """The numbers of the records of a batch."""
    return [row[1] for each in batch or [] for row in each["input_ids"].tolist()]


def make(
    world: dynmo.World,
    model: str,
    source: Any,
    microbatches: int,
    streaming: bool,
    **options: Any,
) -> tuple[dynmo.Pipeline, dynmo.Loader]:
    replicas = options.get("replicas", 1)
    layers = dynmo.load_model(dynmo.ModelOptions(kind="hf", path=model, sequence=32))
    pipeline = dynmo.Pipeline(
        layers, world, microbatches=microbatches // replicas, **grouped(options)
    )
    loader = dynmo.Loader(
        pipeline,
        source,
        micro_batch=2,
        sequence=32,
        batching="grouped",
        streaming=streaming,
        block=24 if streaming else 1000,
    )
    return pipeline, loader


def train(
    world: Meeting,
    model: str,
    steps: int,
    folder: str | None = None,
    load: bool = False,
    replicas: int = 1,
    streaming: bool = False,
    groups: int | None = None,
) -> dict[str, Any]:
    """Trains up to a number of steps, evaluates and saves. `load` goes on from the last time."""
    told = list[Event]()
    table = None if folder is None or world.rank else dynmo.Csv(Path(folder) / "numbers.csv")

    def listen(event: Event) -> None:
        told.append(event)
        if table is not None:
            table(event)

    taken = 0

    def counted() -> Iterator[dict[str, list[int]]]:
        nonlocal taken
        for record in records():
            taken += 1
            yield record

    source = counted if streaming else list(records())
    options = {"replicas": replicas, "reduction_slots": groups, "listen": listen}
    pipeline, loader = make(world, model, source, 12, streaming, **options)
    if load:
        assert folder is not None
        pipeline.load(folder)
        loader.load_state_dict(pipeline.extra["data"])
    read = list[list[int]]()
    for batch in loader:
        read.append(numbers(batch))
        pipeline.step(batch)
        if pipeline.steps == steps:
            break
    loss = pipeline.evaluate(loader.held_out(2), microbatches=2, shared=True)
    if folder is not None:
        pipeline.save(folder, extra={"data": loader.state_dict()})
    loader.close()
    pipeline.close()
    if table is not None:
        table.close()
    return {
        "digest": pipeline.digest(),
        "loss": loss,
        "read": read,
        "taken": taken,
        "events": [event.step for event in told if isinstance(event, DataEvent)],
    }
