"""Folders of runs that did not run: a log, a config and the costs of the layers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import tomli_w

from dynmo.cost import costs_file
from dynmo.cost.costs_file import Profile
from dynmo.cost.layer_cost import LayerCost
from dynmo.event_log import EventLog
from dynmo.events import DataEvent, EndEvent, Event, StepResult
from dynmo.report.figures import Picture, loss
from dynmo.report.run_record import RunRecord

LAYER = LayerCost(0.01, 0.01, 0.01, 1000, 4000, 4000, 8000, 1 << 20, 1 << 19, 1 << 16)


def steps_of(
    count: int,
    layers: Sequence[int] = (2, 2),
    busy: Sequence[float] = (0.4, 0.4),
    frozen: int = 0,
    begin: int = 0,
) -> list[Event]:
    """Steps of half a second, with slowly falling losses."""
    idle = 1 - sum(busy) / len(busy) / 0.5
    return [
        StepResult(
            step,
            3.0 - step / (10 + step),
            2000.0,
            idle,
            (max(busy) - min(busy)) / max(busy),
            0.5,
            1 / (1 + step),
            1e-3,
            tuple(layers),
            frozen,
            memory=tuple(1 << 28 for _ in busy),
            inherent_idle=0.1,
            busy=tuple(busy),
            time=100.0 + step / 2,
        )
        for step in range(begin, begin + count)
    ]


def end_of(events: Sequence[Event], load: float = 0.5) -> EndEvent:
    last = events[-1]
    return EndEvent(
        last.step + 1, 1.0, "ab" * 32, 60.0, "done", load=load, cores=2, device="cpu",
        time=last.time + 1,
    )  # fmt: skip


def drawn(run: RunRecord) -> list[Picture]:
    """Draws one picture, for tests of what a page says. All of them take a second."""
    return [picture for picture in [loss(run)] if picture is not None]


def waited(step: int, seconds: float) -> DataEvent:
    return DataEvent(step, seconds, 1000, 10, 0, time=100.0 + step / 2)


def make_run(
    folder: Path,
    events: Sequence[Event],
    layers: Sequence[LayerCost] = (),
    partition: Sequence[int] = (2, 2),
    config: str | None = None,
    **facts: object,
) -> RunRecord:
    """Writes the folder of a run of two ranks, and reads it.

    Args:
        facts: More of the costs file, such as `schedule`.
    """
    folder.mkdir(parents=True)
    log = EventLog(folder / "events.jsonl")
    for event in events:
        log.write(event)
    log.close()
    text = config if config is not None else tomli_w.dumps({"name": folder.name})
    (folder / "config.toml").write_text(text)
    if layers:
        known = {"schedule": "zb-h1", "microbatches": 8, "microbatch": 2} | facts
        profile = Profile(
            tuple(layers),
            tuple(f"blocks.{index}.attention" for index in range(len(layers))),
            ranks=2,
            partition=tuple(partition),
            **known,  # pyright: ignore[reportArgumentType]
        )
        costs_file.write(folder / costs_file.IN_RUN, profile)
    return RunRecord.read(folder)
