"""The table of a run's phases, and the lines about its events."""

from __future__ import annotations

from dataclasses import replace

from dynmo.change_events import ReshapeEvent, TokensEvent
from dynmo.events import DataEvent, EvalEvent, Event, RollbackEvent, SkippedEvent
from dynmo.report.summary import summarize
from dynmo.report.summary_text import event_lines, overview, phase_table, rebalance_lines
from tests.report.records import cells, change, end, move, result, step


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
    lines = rebalance_lines(summarize(events))
    assert lines == [
        (
            "step 1: moved 2+2 to 3+1 (1.0 MiB in 10 ms): static to balanced x1.25 predicted, "
            "x1.11 measured"
        ),
        "step 2: moved 2+2 to 3+1 (1.0 MiB in 10 ms): static to balanced x2.00 predicted",
    ]


def test_event_lines_are_in_order() -> None:
    events: list[Event] = [step(0), change(1), move(1, 1, 0.5), step(1)]
    events += [SkippedEvent(1, 1024.0, 512.0), step(2)]
    events += [ReshapeEvent(3, (4, 1), (2, 2), (3, 5), 8, 0.1), step(3)]
    events += [RollbackEvent(3, "clipped", 0.2)]
    assert event_lines(summarize(events)) == [
        "step 1: moved 2+2 to 3+1 (1.0 MiB in 10 ms): static to balanced x2.00 predicted",
        "step 1: pruning: what it did at 1",
        "step 1: skipped: gradients overflowed at a loss scale of 1024",
        "step 3: reshaped 4 x 1 to 2 x 2, layers 3+5",
        "step 3: taken back: clipped",
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
    assert overview(summarize([*steps, EvalEvent(1, 2.5)])) == (
        "loss 3.000000, held-out loss 2.500000, 2 steps in 3.0 s, 5 tokens/s, not ended"
    )
