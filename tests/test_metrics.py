"""Numbers of a run for TensorBoard and tables."""

from __future__ import annotations

import csv
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import dynmo
from dynmo.config import parse
from dynmo.errors import ConfigError, RunError
from dynmo.events import CheckpointEvent, DataEvent, EvalEvent, Event, StepResult
from dynmo.metrics import Csv, numbers_of, open_sink
from dynmo.train.run_log import RunLog
from tests.full_disk import files_up_to


def step(number: int, loss: float, norm: float | None = 2.0) -> StepResult:
    return StepResult(number, loss, 100.0, 0.25, 0.5, 0.1, norm, 1e-3, (2, 3), 1)


EVENTS: list[Event] = [
    DataEvent(0, 0.5, 64, 16, 0),
    step(0, 3.0),
    EvalEvent(0, 2.5, 200.0),
    step(1, 1.0, norm=None),
]


def test_each_number_has_the_name_of_its_field() -> None:
    data = {"waited": 0.5, "tokens": 64.0, "padding": 16.0, "skipped": 0.0}
    assert dict(numbers_of(EVENTS[0])) == {f"data/{name}": x for name, x in data.items()}
    assert dict(numbers_of(EVENTS[2])) == {"eval/loss": 2.5, "eval/tokens_per_s": 200.0}
    saved = dict(numbers_of(CheckpointEvent(1, "a", 5, 0.5)))
    assert saved == {"checkpoint/bytes": 5.0, "checkpoint/seconds": 0.5}


def test_table_has_a_row_for_each_step_and_goes_on(tmp_path: Path) -> None:
    for events in (EVENTS, [replace(step(2, 0.5), memory=(7, 9))]):
        table = Csv(tmp_path / "numbers.csv")
        for event in events:
            table(event)
        table.close()
    with (tmp_path / "numbers.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows] == ["0", "1", "2"]
    assert [row["step/loss"] for row in rows] == ["3.0", "1.0", "0.5"]
    assert [row["step/gradient_norm"] for row in rows] == ["2.0", "", "2.0"]
    assert [row["step/layers"] for row in rows] == ["3.0", "3.0", "3.0"]
    assert [row["step/memory"] for row in rows] == ["", "", "9.0"]
    assert [row["data/waited"] for row in rows] == ["0.5", "", ""]
    assert [row["eval/loss"] for row in rows] == ["2.5", "", ""]


def test_table_of_a_resumed_run_has_a_row_for_each_step(tmp_path: Path) -> None:
    """Rows from the first new step on are dropped, and a row that a full disk has cut."""
    path = tmp_path / "numbers.csv"
    table = Csv(path)
    for number in range(4):
        table(step(number, 3.0))
        table(EvalEvent(number, 2.0, 200.0))
    table.close()
    with path.open("a") as file:
        file.write("4,0.5,1")
    table = Csv(path)
    for number in (2, 3):
        table(step(number, 1.0))
    table(EvalEvent(3, 0.5, 200.0))
    table.close()
    with path.open() as file:
        rows = [(row["step"], row["step/loss"], row["eval/loss"]) for row in csv.DictReader(file)]
    assert rows == [("0", "3.0", "2.0"), ("1", "3.0", "2.0"), ("2", "1.0", ""), ("3", "1.0", "0.5")]


class FakeWandB(ModuleType):
    """Notes how it is called."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.opened: list[dict[str, Any]] = []
        self.rows: list[tuple[int, dict[str, float]]] = []

    def init(self, **options: Any) -> FakeWandB:
        self.opened.append(options)
        return self

    def log(self, row: dict[str, float], step: int) -> None:
        self.rows.append((step, row))

    def finish(self) -> None:
        self.rows.append((-1, {}))


def test_resumed_run_is_one_run_of_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeWandB()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    for first in (0, 1):
        sink = open_sink("wandb", tmp_path, "main")
        for event in (*EVENTS, CheckpointEvent(1, "a", 5, 0.5))[3 * first :]:
            sink(event)
        sink.close()
    assert fake.opened[0] == fake.opened[1]
    assert fake.opened[0]["resume"] == "allow"
    assert [number for number, _ in fake.rows] == [0, 1, -1, 1, -1]
    assert {"data/waited", "step/loss", "eval/loss"} <= fake.rows[0][1].keys()
    assert fake.rows[1][1]["checkpoint/bytes"] == 5


def test_table_on_a_full_disk_is_named(tmp_path: Path) -> None:
    table = Csv(tmp_path / "numbers.csv")
    size = (tmp_path / "numbers.csv").stat().st_size
    with files_up_to(size + 10), pytest.raises(RunError, match=r"numbers\.csv cannot be written"):
        table(step(0, 1.0))
    table.close()
    assert (tmp_path / "numbers.csv").stat().st_size == size


def test_table_keeps_the_columns_of_an_older_one(tmp_path: Path) -> None:
    path = tmp_path / "numbers.csv"
    path.write_text("step,step/seconds,step/loss\n0,0.2,4.0\n")
    table = Csv(path)
    table(step(1, 3.0))
    table.close()
    assert path.read_text().splitlines()[1:] == ["0,0.2,4.0", "1,0.1,3.0"]


@pytest.mark.parametrize("row", ["1,0.2", "1,0.22,0.2,3.0", "x,0.2,3.0"])
def test_damaged_row_of_a_table_is_named(tmp_path: Path, row: str) -> None:
    path = tmp_path / "numbers.csv"
    path.write_text(text := f"step,step/seconds,step/loss\n0,0.2,4.0\n{row}\n2,0.2,3.5\n")
    with pytest.raises(ConfigError, match=r"numbers\.csv:3: not a row of a step and 2 numbers"):
        Csv(path)
    assert path.read_text() == text


def test_numbers_of_ranks_are_the_greatest_and_each() -> None:
    numbers = dict(numbers_of(replace(step(0, 3.0), memory=(5, 8))))
    assert numbers["step/memory"] == numbers["step/memory/1"] == 8
    assert (numbers["step/memory/0"], numbers["step/layers/1"]) == (5, 3)
    assert "step/utilization" not in numbers


def test_pipeline_writes_a_table(tmp_path: Path) -> None:
    with dynmo.init(device="cpu") as world:
        table = dynmo.Csv(tmp_path / "numbers.csv")
        layers = [nn.Embedding(50, 8), nn.Linear(8, 50, bias=False)]
        pipeline = dynmo.Pipeline(
            dynmo.Sequential(layers),
            world,
            microbatches=2,
            log=dynmo.Log(peak_flops=1e9, listen=table),
        )
        ids = torch.arange(12).view(4, 3)
        result = pipeline.step(ids, torch.where(ids < 2, -100, ids))
        table.close()
    flops = 6 * 8 * 50 * 12
    assert result.model_flops_per_s == flops / result.seconds
    with pytest.warns(FutureWarning, match="model_flops_per_s"):
        assert result.model_flops == pytest.approx(flops)
    assert result.utilization == flops / result.seconds / 1e9
    with (tmp_path / "numbers.csv").open() as file:
        (row,) = csv.DictReader(file)
    assert float(row["step/utilization"]) == result.utilization
    assert float(row["step/tokens_per_s"]) == 10 / result.seconds
    assert float(row["step/memory"]) == max(result.memory)


def test_tensorboard_reads_what_was_written(tmp_path: Path) -> None:
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    board = open_sink("tensorboard", tmp_path, "run")
    for event in EVENTS:
        board(event)
    board.close()
    told = reader.EventAccumulator(str(tmp_path / "tensorboard"))
    told.Reload()
    assert [(each.step, each.value) for each in told.Scalars("step/loss")] == [(0, 3.0), (1, 1.0)]
    assert [each.value for each in told.Scalars("eval/loss")] == [2.5]


@pytest.mark.parametrize(
    ("kind", "module"), [("tensorboard", "torch.utils.tensorboard"), ("wandb", "wandb")]
)
def test_missing_package_is_named(
    kind: str, module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(
        ConfigError, match=f"{kind} is not installed; install it with pip install {kind}"
    ):
        open_sink(kind, tmp_path, "run")


def test_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        Csv(tmp_path / "file" / "numbers.csv")


class Losses:
    """A sink of one's own."""

    def __init__(self, folder: Path, name: str) -> None:
        self._path, self._losses = folder / f"{name}.txt", list[str]()

    def __call__(self, event: Event) -> None:
        self._losses += [str(event.loss)] if isinstance(event, StepResult) else []

    def close(self) -> None:
        self._path.write_text(" ".join(self._losses))


def no_sink(folder: Path, name: str) -> str:
    return name


def test_a_sink_of_a_run_is_closed_once(tmp_path: Path) -> None:
    to = [f"python:{__name__}:Losses"]
    log = RunLog(parse({"name": "run", "metrics": {"to": to}}), tmp_path, None)
    log.close()
    (tmp_path / "run.txt").unlink()
    log.close()
    assert not (tmp_path / "run.txt").exists()


def test_sink_of_ones_own_takes_the_events(tmp_path: Path) -> None:
    sink = open_sink(f"python:{__name__}:Losses", tmp_path, "run")
    for event in EVENTS:
        sink(event)
    sink.close()
    assert (tmp_path / "run.txt").read_text() == "3.0 1.0"
    with pytest.raises(ConfigError, match="returned a str; it must return an object that takes"):
        open_sink(f"python:{__name__}:no_sink", tmp_path, "run")
