"""Numbers of a run, for programs that draw curves. Each takes events, as any listener does.

    csv           numbers.csv: a row for each step
    tensorboard   files for TensorBoard
    wandb         Weights & Biases, or its folder alone with WANDB_MODE=offline
    python:...    a sink of one's own

A name is that of the event and of its field: `step/loss`, `eval/loss`, `data/waited`. A field of a
step with a number for each rank or stage has the greatest as `step/memory`, and each as
`step/memory/0` and so on. The table has the greatest alone.
"""

from __future__ import annotations

import csv
import importlib
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, Protocol, cast

from dynmo.errors import ConfigError, needs_extra
from dynmo.events import DataEvent, Event, StepEvent
from dynmo.options import find_own


class NumberSink(Protocol):
    """Takes the events of a run. `close` follows the last one."""

    def __call__(self, event: Event) -> None: ...

    def close(self) -> None: ...


def numbers_of(event: Event) -> Iterator[tuple[str, float]]:
    """Yields name and value of each number of an event."""
    for field in fields(event):
        name, value = f"{event.event}/{field.name}", getattr(event, field.name)
        if field.name not in ("step", "time") and isinstance(value, float | int):
            yield name, float(value)
        elif isinstance(event, StepEvent) and isinstance(value, tuple) and value:
            yield name, float(max(value))
            for index, each in enumerate(value):
                yield f"{name}/{index}", float(each)


class Csv:
    """A table with a row for each step.

    Args:
        path: The file. Rows are added to one that is there, under its columns.
    """

    def __init__(self, path: str | Path) -> None:
        self._names = [
            f"{kind.event}/{field.name}"
            for kind in (StepEvent, DataEvent)
            for field in fields(kind)
            if field.name not in ("step", "time")
        ]
        self._row: dict[str, float] = {}
        try:
            self._file = Path(path).open("a+", newline="", encoding="utf-8")  # noqa: SIM115
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error.strerror}") from None
        self._table = csv.writer(self._file)
        self._file.seek(0)
        header = next(csv.reader(self._file), [])
        if header:
            self._names = header[1:]
        else:
            self._table.writerow(["step", *self._names])

    def __call__(self, event: Event) -> None:
        if isinstance(event, StepEvent | DataEvent):
            self._row |= numbers_of(event)
        if isinstance(event, StepEvent):
            row = [self._row.get(name, "") for name in self._names]
            self._table.writerow([event.step, *row])
            self._file.flush()
            self._row = {}

    def close(self) -> None:
        self._file.close()


class TensorBoard:
    """Files for TensorBoard.

    Args:
        folder: Where they are written.

    Raises:
        ConfigError: tensorboard is not installed.
    """

    def __init__(self, folder: str | Path) -> None:
        self._writer: Any = _module("torch.utils.tensorboard").SummaryWriter(str(folder))

    def __call__(self, event: Event) -> None:
        for name, value in numbers_of(event):
            self._writer.add_scalar(name, value, event.step, walltime=event.time)

    def close(self) -> None:
        self._writer.close()


class WandB:
    """A run of Weights & Biases.

    Args:
        folder: Where it writes.
        name: Name of the run.

    Raises:
        ConfigError: wandb is not installed.
    """

    def __init__(self, folder: str | Path, name: str) -> None:
        self._run = _module("wandb").init(project="dynmo", name=name, dir=str(folder))

    def __call__(self, event: Event) -> None:
        # Its steps never go back, as those of an evaluation after a step would.
        numbers = dict(numbers_of(event))
        if numbers:
            self._run.log(numbers | {"step": event.step})

    def close(self) -> None:
        self._run.finish()


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        package = name.rpartition(".")[2]
        raise ConfigError(needs_extra(package, "metrics")) from None


def open_sink(kind: str, folder: Path, name: str) -> NumberSink:
    """Opens csv, tensorboard, wandb or `python:package.module:function` in a run's folder.

    Raises:
        ConfigError: A package is missing, or the function returns no sink.
    """
    if kind.startswith("python:"):
        sink = find_own("metrics.to", kind)(folder, name)
        if not callable(sink) or not callable(getattr(sink, "close", None)):
            raise ConfigError(
                f'metrics.to has "{kind}", which returned a {type(sink).__name__}; it must return '
                "an object that takes events when called, and has a close()"
            )
        return cast(NumberSink, sink)
    if kind == "csv":
        return Csv(folder / "numbers.csv")
    return TensorBoard(folder / "tensorboard") if kind == "tensorboard" else WandB(folder, name)
