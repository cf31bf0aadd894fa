"""Events of runs that do not run, and the cells of a table."""

from __future__ import annotations

from collections.abc import Sequence
from io import StringIO

from rich.console import Console
from rich.table import Table

from dynmo.change_events import ChangeEvent, RebalanceEvent, RebalanceResultEvent
from dynmo.events import EndEvent, Event, StepResult
from dynmo.report.summary import Summary


def step(
    number: int,
    seconds: float = 1.0,
    layers: tuple[int, ...] = (2, 2),
    frozen: int = 0,
    loss: float = 3.0,
) -> StepResult:
    return StepResult(
        number, loss, 8 / seconds, seconds / 10, seconds / 4, seconds, 1.0, 0.1, layers, frozen
    )


def move(number: int, id: int, gain: float = 0.2) -> RebalanceEvent:
    return RebalanceEvent(number, id, (2, 2), (3, 1), 1 << 20, 0.01, gain, "exact: pays")


def result(number: int, id: int, gain: float) -> RebalanceResultEvent:
    return RebalanceResultEvent(number, id, gain)


def end(digest: str = "aa", loss: float = 1.0, seconds: float = 9.0) -> EndEvent:
    return EndEvent(10, loss, digest, seconds, "done", 0.25, 0.5, 1.0)


def change(number: int, case: str = "pruning") -> ChangeEvent:
    return ChangeEvent(number, case, (0, 1), f"what it did at {number}")


def phases_of(summary: Summary) -> list[tuple[int, int]]:
    """The first and the last step of each phase."""
    return [(phase.first, phase.last) for phase in summary.phases]


def changed(at: int, steps: Sequence[StepResult]) -> list[Event]:
    """These steps, with a change of the work before step `at`."""
    return [*steps[:at], change(at), *steps[at:]]


def cells(table: Table) -> dict[str, list[str]]:
    """The cells of each row, by its first cell."""
    screen = StringIO()
    Console(file=screen, width=150).print(table)
    lines = [line for line in screen.getvalue().splitlines() if line.startswith("│")]
    rows = [[cell.strip() for cell in line.strip("│ ").split("│")] for line in lines]
    return {row[0]: row[1:] for row in rows}
