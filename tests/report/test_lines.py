"""The lines about events, the table of a run's phases, and the line of its progress."""

from __future__ import annotations

import math
from dataclasses import replace
from io import StringIO

from rich.console import Console

from dynmo.change_events import (
    ChangeEvent,
    GrowEvent,
    RebalanceEvent,
    RebalanceResultEvent,
    RecoverEvent,
    ReleaseEvent,
    RepackEvent,
    ReshapeEvent,
    SlowRankEvent,
    SpeedsEvent,
    TokensEvent,
)
from dynmo.events import (
    CheckpointEvent,
    DataEvent,
    EndEvent,
    EvalEvent,
    Event,
    FaultEvent,
    NotFiniteEvent,
    RollbackEvent,
    SkippedEvent,
    StepResult,
)
from dynmo.report.lines import ProgressLine, event_line, event_lines, overview, phase_table
from dynmo.report.summary import summarize
from tests.report.records import cells, change, end, move, result, step

MOVED = "moved 2+2 to 3+1 (1.0 MiB in 10 ms): static to balanced x2.00 predicted"


def test_last_token_shares_and_evaluation_have_a_line() -> None:
    events: list[Event] = [step(0), step(1), step(2)]
    events += [TokensEvent(i, "early_exit", (3,), {"exited": [i / 10]}) for i in (1, 2)]
    summary = summarize([*events, EvalEvent(2, 2.5, 300.0, 2.4, 200.0)])
    assert event_lines(summary) == [
        "step 2: early_exit, layers 3: exited 20%",
        (
            "step 3: held-out loss 2.5000 at 300 tokens/s; without exits 2.4000 at 200 tokens/s "
            "(x1.50)"
        ),
    ]


def test_skipped_steps_are_counted() -> None:
    skipped = replace(step(1), skipped=True, loss=math.nan)
    told = overview(summarize([step(0), skipped, end()]))
    assert f"loss {step(0).loss:.6f}" in told, "that of a finite step"
    assert ", 1 of them skipped, " in f"{told}, "


def test_slow_data_is_named() -> None:
    """The first samples come while nothing computes, and repeated steps count once."""

    def told(waited: float, skipped: int = 0) -> str:
        data = [DataEvent(0, 5.0, 60, 10, 0), DataEvent(1, 9.0, 60, 10, 0)]
        data += [DataEvent(1, waited, 40, 15, skipped)]
        return overview(summarize([data[0], step(0), data[1], step(1), data[2], step(1), end()]))

    assert told(0.01).endswith("0.5% waiting for data, 25% padding")
    assert told(0.1, 3).endswith(
        "5.0% waiting for data, 25% padding (the data is slower than the steps), "
        "3 broken samples left out"
    )


def test_busy_machine_is_named_below_the_table() -> None:
    def caption(load: float) -> object:
        done = replace(end(), load=load, cores=2)
        return phase_table(summarize([step(0), step(1), done])).caption

    assert caption(2.5) is None
    assert caption(2.6) == (
        "the machine was busy (load 2.6 on 2 cores): other idle time contains that of other "
        "processes"
    )


def test_many_phases_are_shortened_in_the_middle() -> None:
    events = [e for i in range(30) for e in (change(i), step(i))]
    summary = summarize(events)
    assert len(summary.phases) == 30
    rows = cells(phase_table(summary))
    assert len(rows) == 25
    assert rows["..."][0] == "6 phases more (--json)"
    assert {"0-0", "11-11", "18-18", "29-29"} <= rows.keys()
    assert len(cells(phase_table(summarize(events[:48])))) == 24


def test_move_line_has_predicted_and_measured_gain() -> None:
    """Gains are factors. A step that is 20 % shorter is 1.25 times as fast."""
    events = [step(0), move(1, 1, 0.2), step(1), move(2, 2, 0.5), step(2), result(2, 1, 0.1)]
    lines = event_lines(summarize(events))
    assert lines == [
        (
            "step 1: moved 2+2 to 3+1 (1.0 MiB in 10 ms): static to balanced x1.25 "
            "predicted, x1.11 measured"
        ),
        f"step 2: {MOVED}",
    ]


# Of a `NotFiniteEvent`: kind, layer, microbatch, in a row, and how many end the run.
CAUSE = "inputs", None, 0, 1, 10


def test_event_lines_are_in_order() -> None:
    events: list[Event] = [step(0), change(1), move(1, 1, 0.5), step(1)]
    events += [SkippedEvent(1, 1024.0, 512.0), step(2)]
    events += [NotFiniteEvent(2, "loss nan", *CAUSE)]
    events += [ReshapeEvent(3, (4, 1), (2, 2), (3, 5), 8, 0.1), step(3)]
    events += [RollbackEvent(3, "clipped", 0.2)]
    assert event_lines(summarize(events)) == [
        f"step 1: {MOVED}",
        "step 1: pruning: what it did at 1",
        "step 1: skipped: gradients overflowed at a loss scale of 1024",
        "step 2: skipped: loss nan (1 in a row; 10 end the run)",
        "step 3: reshaped 4 x 1 to 2 x 2, layers 3+5",
        "step 3: taken back: clipped (200 ms of work thrown away)",
    ]
    changes = [e for i in range(30) for e in (change(i, "layer_drop"), step(i))]
    many = event_lines(summarize(changes))
    assert len(many) == 13
    assert many[-1] == "step 12 on: layer_drop 18 times more (events.jsonl)"
    # Resumed from the checkpoint after step 1: what was done again is told once.
    repeated = [step(0), change(1), step(1), change(2), step(2), change(2), step(2)]
    assert len(event_lines(summarize(repeated))) == 2


def test_overview_has_loss_time_and_speed() -> None:
    steps = [step(0, 2.0), step(1, 1.0)]  # 8 tokens each
    assert overview(summarize([*steps, end()])) == "loss 3.000000, 2 steps in 3.0 s, 5 tokens/s"
    told = ((0.1, (5, 9 << 20)), (0.3, (7, 8)))
    busy = [replace(step(i), utilization=x, memory=y) for i, (x, y) in enumerate(told)]
    assert overview(summarize([*busy, end()])).endswith(
        "tokens/s, 20.0% of the peak FLOP/s, at most 9 MiB on a rank"
    )
    on_cpu = overview(summarize([*busy, replace(end(), device="cpu")]))
    assert on_cpu.endswith("at most 9 MiB resident on a rank")
    assert overview(summarize([*steps, EvalEvent(1, 2.5)])) == (
        "loss 3.000000, held-out loss 2.500000, 2 steps in 3.0 s, 5 tokens/s, not ended"
    )


# -- ranks -----------------------------------------------------------------------------------------

RECOVER = RecoverEvent(
    6, ("a:1",), "rank 1 was ended by SIGKILL", 0.52, 1, 3, 2, (3, 1), (2, 1), (6, 6)
)
REPACK = RepackEvent(
    2, 1, 4, 2, (4, 1), (2, 1), (4, 4), 1 << 20, 0.25, 0.04, "2 of 4 ranks", ("a:1", "b:2")
)
GROW = GrowEvent(4, 2, 2, 4, (2, 1), (2, 2), (4, 4), 0, 0.5, None, "planned", ("a:3", "b:4"), 6.0)


def test_resize_events_have_a_line() -> None:
    assert event_line(RECOVER) == (
        "step 6: went on with 2 of 3 ranks (0.5 s, 1 steps repeated): rank 1 was ended by SIGKILL"
    )
    assert event_line(REPACK, -0.05) == (
        "step 2: went on with 2 of 4 ranks (layers 4+4, 1.0 MiB moved, pause 250 ms; 2 of 4 "
        "ranks): a step takes +4.0% predicted, +5.0% measured"
    )
    resized = replace(REPACK, micro_batch=(3, 1))
    assert "(layers 4+4, micro_batch 3 to 1, 1.0 MiB moved" in (event_line(resized) or "")
    assert (event_line(GROW) or "").startswith(
        "step 4: grew from 2 to 4 ranks (layers 4+4 x 2 replicas, 0.0 MiB moved, pause 500 ms; "
        "planned)"
    )
    released = ReleaseEvent(3, "launcher", "node n3", 1, 1.5)
    assert event_line(released) == "step 3: launcher: node n3 (1.5 s)"
    assert event_line(FaultEvent(3, "nobody came")) == "step 3: fault: nobody came"


def test_a_slow_rank_is_named() -> None:
    line = event_line(SpeedsEvent(5, (1.0, 1.0, 0.5)))
    assert line == "step 5: speeds differ: pipeline rank 2 at 0.50 of the middle rank's speed"
    even = event_line(SpeedsEvent(9, (1.0, 1.0, 1.0)))
    assert even == "step 9: all ranks are equally fast again"
    line = event_line(SlowRankEvent(5, 3, 2.0, "b", 2))
    assert line == (
        "step 5: slow: rank 3 on b takes 2.00 times as long as its twin, rank 2 for equal work"
    )
    line = event_line(SlowRankEvent(5, 3, 1.25, "b"))
    assert line == (
        "step 5: slow: rank 3 on b takes 1.25 times as long as the middle rank for equal work"
    )
    assert event_line(SlowRankEvent(9, 3, 1.0, "b")) == "step 9: rank 3 on b is no longer slow"


def test_gpu_seconds_of_a_run_are_told() -> None:
    steps = [step(number, 1.0 + number) for number in range(6)]
    ended = replace(end(), gpu_seconds_returned=4.0)
    summary = summarize([*steps[:2], REPACK, *steps[2:4], GROW, *steps[4:], ended])
    assert summary.ranks is not None
    assert summary.ranks.gpu_seconds == (1 + 2) * 4 + (3 + 4) * 2 + (5 + 6) * 4
    assert summary.ranks.mean == summary.ranks.gpu_seconds / 21
    told = "ranks: 3.3 on average; GPU-seconds: 70.0 used in steps, 4.0 returned"
    assert event_lines(summary)[-1] == told
    assert summarize([step(0), FaultEvent(0, "nobody came")]).ranks is None


# -- progress --------------------------------------------------------------------------------------


def done(number: int, frozen: int = 0) -> StepResult:
    return StepResult(number, 3.25, 12345.6, 0.125, 0.5, 1.0, 1.0, 0.1, (4, 2), frozen)


def told(steps: int, *events: object, terminal: bool = False) -> str:
    out = StringIO()
    console = Console(file=out, force_terminal=terminal, width=200)
    with ProgressLine("run", steps, console) as progress:
        for event in events:
            progress(event)  # pyright: ignore[reportArgumentType]
    return out.getvalue()


def test_progress_lines_are_limited() -> None:
    lines = told(50, *(done(i, frozen=i // 45) for i in range(50))).splitlines()
    assert len(lines) == 25, "every second step, and the last"
    assert lines[0] == "run 2/50  loss 3.2500  12,346 tokens/s  idle 12%  layers 4+2"
    assert lines[-1] == "run 50/50  loss 3.2500  12,346 tokens/s  idle 12%  layers 4+2  frozen 1"
    assert len(told(3, done(0), done(1), done(2)).splitlines()) == 3


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
        "step 3: freezing: froze [0]",
        (
            "step 4: moved 4+2 to 5+1 (0.0 MiB in 12 ms): static to balanced x1.25 predicted "
            "(exact: pays)"
        ),
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
    events = (done(9), EvalEvent(9, 2.5), CheckpointEvent(9, "runs/a/step-000010", 0, 0))
    heads = [line.split(":")[0].split("  ")[0] for line in told(24, *events).splitlines()]
    assert heads == ["run 10/24", "step 10", "step 10"]


def test_terminal_shows_one_live_line() -> None:
    text = told(2, done(0), done(1), terminal=True)
    assert "loss 3.2500" in text
    assert "2/2" in text
