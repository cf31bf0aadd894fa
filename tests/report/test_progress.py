"""The progress display: a live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

from io import StringIO

from rich.console import Console

from dynmo.change_events import ChangeEvent, RebalanceEvent, RebalanceResultEvent, TokensEvent
from dynmo.events import CheckpointEvent, EndEvent, EvalEvent, StepResult
from dynmo.report.progress import ProgressLine


def step(number: int, frozen: int = 0) -> StepResult:
    return StepResult(number, 3.25, 12345.6, 0.125, 0.5, 1.0, 1.0, 0.1, (4, 2), frozen)


def told(steps: int, *events: object, terminal: bool = False) -> str:
    out = StringIO()
    console = Console(file=out, force_terminal=terminal, width=200)
    with ProgressLine("run", steps, console) as progress:
        for event in events:
            progress(event)  # pyright: ignore[reportArgumentType]
    return out.getvalue()


def test_progress_lines_are_limited() -> None:
    lines = told(50, *(step(i, frozen=i // 45) for i in range(50))).splitlines()
    assert len(lines) == 25, "every second step, and the last"
    assert lines[0] == "run 2/50  loss 3.2500  12,346 tokens/s  idle 12%  layers 4+2"
    assert lines[-1] == "run 50/50  loss 3.2500  12,346 tokens/s  idle 12%  layers 4+2  frozen 1"
    assert len(told(3, step(0), step(1), step(2)).splitlines()) == 3


def test_events_are_printed_at_once() -> None:
    lines = told(
        100,
        ChangeEvent(3, "freezing", (0,), "froze [0]"),
        RebalanceEvent(4, 1, (4, 2), (5, 1), 10, 0.0123, 0.2, "exact: pays"),
        RebalanceResultEvent(9, 1, 0.25),
        EvalEvent(10, 2.5),
        TokensEvent(10, "early_exit", (5, 8), {"exited": [0.4, 0.25]}),
        EvalEvent(11, 2.5, 200.0, 2.4, 100.0),
        CheckpointEvent(10, "runs/a", 3 << 20, 0.5),
        EndEvent(99, 1.0, "ab", 1.0, "done"),
    ).splitlines()
    assert lines == [
        "step 3: froze [0]",
        "step 4: moved layers 4+2 -> 5+1 in 12 ms (exact: pays)",
        "step 9: rebalance 1 measured: +25.0% of a step saved",
        "step 11: held-out loss 2.5000",
        "step 10: early_exit, layers 5, 8: exited 40%, 25%",
        (
            "step 12: held-out loss 2.5000 at 200 tokens/s; without exits 2.4000 at 100 tokens/s "
            "(x2.00)"
        ),
        "step 11: saved runs/a (3.0 MiB in 0.50 s)",
    ]


def test_evaluation_and_checkpoint_have_the_number_of_the_progress_line() -> None:
    """The log numbers steps from 0. People read how many are done."""
    events = (step(9), EvalEvent(9, 2.5), CheckpointEvent(9, "runs/a/step-000010", 0, 0))
    heads = [line.split(":")[0].split("  ")[0] for line in told(24, *events).splitlines()]
    assert heads == ["run 10/24", "step 10", "step 10"]


def test_terminal_shows_one_live_line() -> None:
    text = told(2, step(0), step(1), terminal=True)
    assert "loss 3.2500" in text
    assert "2/2" in text
