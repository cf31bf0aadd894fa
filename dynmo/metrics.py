"""Numbers of a run, for programs that draw curves. Each takes events, as any listener does.

    csv           numbers.csv: a row for each step
    tensorboard   files for TensorBoard
    wandb         Weights & Biases, or its folder alone with WANDB_MODE=offline
    opentelemetry spans (`spans.py`)
    python:...    a sink of one's own

A name is that of the event and of its field: `step/loss`, `eval/loss`, `data/waited`. A field of a
step with a number for each rank or stage has the greatest as `step/memory`, and each as
`step/memory/0` and so on. The table has the greatest alone.

A run that resumes goes back to the step of its checkpoint. Each sink then has one row a step.
"""

from __future__ import annotations

import importlib
import secrets
from collections.abc import Iterator
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any, Protocol, cast

from dynmo.errors import ConfigError, RunError, not_installed
from dynmo.events import DataEvent, EvalEvent, Event, StepResult
from dynmo.files import LineLog, write_whole
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
        elif isinstance(event, StepResult) and isinstance(value, tuple) and value:
            yield name, float(max(value))
            for index, each in enumerate(value):
                yield f"{name}/{index}", float(each)


class _Rows:
    """Collects the numbers of each step. Those of its data come before it, evaluations after it."""

    def __init__(self) -> None:
        self._step: int | None = None
        self._row: dict[str, float] = {}
        self._later: dict[str, float] = {}  # of a step that has no row yet

    def __call__(self, event: Event) -> None:
        if isinstance(event, StepResult):
            self._step, self._row, self._later = event.step, self._later, {}
        to = self._row if event.step == self._step else self._later
        to |= numbers_of(event)


class Csv(_Rows):
    """A table with a row for each step, and an evaluation in the row of its step.

    Args:
        path: The file. Rows are added to one that is there, under its columns. Rows from the first
            new step on are dropped, and so is a torn row.

    Raises:
        ConfigError: The file cannot be written, or another row is damaged.
    """

    def __init__(self, path: str | Path) -> None:
        super().__init__()
        self._path = Path(path)
        self._names = [
            f"{kind.event}/{field.name}"
            for kind in (StepResult, DataEvent, EvalEvent)
            for field in fields(kind)
            if field.name not in ("step", "time", "held_out")
        ]
        self._rows: dict[int, int] = {}  # where the row of each step begins
        try:
            self._log = LineLog(self._path)
            self._read()
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error.strerror}") from None

    def _read(self) -> None:
        """Takes the columns and the places of the rows of a file that is there."""
        place = 0
        for number, line in enumerate(self._path.read_bytes().splitlines(keepends=True), start=1):
            first, *rest = line.decode("utf-8", errors="replace").rstrip("\r\n").split(",")
            if not place:
                self._names = rest
            elif first.isdigit() and len(rest) == len(self._names):
                self._rows[int(first)] = place
            else:
                self._log.close()
                columns = f"a step and {len(self._names)} numbers"
                raise ConfigError(f"{self._path}:{number}: not a row of {columns}; remove the line")
            place += len(line)
        if not place:
            self._log.write(",".join(["step", *self._names]))

    def __call__(self, event: Event) -> None:
        """Writes the row of a step, in place of the rows from this step on."""
        super().__call__(event)
        step = event.step
        if step != self._step or not isinstance(event, StepResult | EvalEvent):
            return
        again = [place for each, place in self._rows.items() if each >= step]
        row = [step, *(self._row.get(name, "") for name in self._names)]
        try:
            if again:
                self._log.truncate(min(again))
            self._rows = {each: place for each, place in self._rows.items() if each < step}
            self._rows[step] = self._log.size
            self._log.write(",".join(map(str, row)))
        except OSError as error:
            raise RunError(f"{self._path} cannot be written: {error.strerror}") from None

    def close(self) -> None:
        self._log.close()


class TensorBoard:
    """Files for TensorBoard.

    Args:
        folder: Where they are written.

    Raises:
        ConfigError: tensorboard is not installed.
    """

    def __init__(self, folder: str | Path) -> None:
        self._make: Any = partial(_module("torch.utils.tensorboard").SummaryWriter, str(folder))
        self._writer: Any = None

    def __call__(self, event: Event) -> None:
        if self._writer is None:  # what an earlier process wrote from this step on is hidden
            self._writer = self._make(purge_step=event.step)
        for name, value in numbers_of(event):
            self._writer.add_scalar(name, value, event.step, walltime=event.time)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class WandB(_Rows):
    """A run of Weights & Biases. A process that resumes goes on with it.

    Args:
        folder: Where it writes. The file `wandb-id` there names the run.
        name: Name of the run.

    Raises:
        ConfigError: wandb is not installed.
    """

    def __init__(self, folder: str | Path, name: str) -> None:
        super().__init__()
        wandb, path = _module("wandb"), Path(folder) / "wandb-id"
        if not path.exists():
            write_whole(path, secrets.token_hex(4))
        number = path.read_text(encoding="utf-8").strip()
        self._run = wandb.init(
            project="dynmo", name=name, dir=str(folder), id=number, resume="allow"
        )

    def __call__(self, event: Event) -> None:
        if isinstance(event, StepResult):
            self._log()  # once, because a row whose step is there is dropped
        super().__call__(event)

    def _log(self) -> None:
        if self._row:
            self._run.log(self._row | {"step": self._step}, step=self._step)

    def close(self) -> None:
        self._row |= self._later
        self._log()
        self._run.finish()


def _module(name: str, package: str | None = None) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        package = package or name.rpartition(".")[2]
        raise ConfigError(not_installed(package)) from None


def open_sink(kind: str, folder: Path, name: str) -> NumberSink:
    """Opens a sink of `metrics.to` in a run's folder.

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
    if kind == "opentelemetry":
        return cast(NumberSink, _module("dynmo.spans", "opentelemetry-sdk").Spans(name))
    return TensorBoard(folder / "tensorboard") if kind == "tensorboard" else WandB(folder, name)
