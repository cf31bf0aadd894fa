"""Phases, their medians, and runs held against each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from io import StringIO

from rich.console import Console
from rich.table import Table

from dynmo.events import (
    ChangeEvent,
    EndEvent,
    EvalEvent,
    Event,
    RebalanceEvent,
    RebalanceResultEvent,
    ReshapeEvent,
    RollbackEvent,
    SkippedEvent,
    StepEvent,
    TokensEvent,
)
from dynmo.report.summary import (
    Summary,
    aligned,
    comparison_table,
    difference_line,
    differences,
    event_lines,
    layers_text,
    noise,
    phase_table,
    rebalance_lines,
    summarize,
    verdict,
)


def step(
    number: int,
    seconds: float = 1.0,
    layers: tuple[int, ...] = (2, 2),
    frozen: int = 0,
    loss: float = 3.0,
) -> StepEvent:
    return StepEvent(
        number, 0.0, loss, 8 / seconds, seconds / 10, seconds / 4, seconds, 1.0, 0.1, layers, frozen
    )


def move(number: int, id: int, gain: float = 0.2) -> RebalanceEvent:
    return RebalanceEvent(number, 0.0, id, (2, 2), (3, 1), 1 << 20, 0.01, gain, "exact: pays")


def result(number: int, id: int, gain: float) -> RebalanceResultEvent:
    return RebalanceResultEvent(number, 0.0, id, gain)


def end(digest: str = "aa", loss: float = 1.0, seconds: float = 9.0) -> EndEvent:
    return EndEvent(9, 0.0, loss, digest, seconds, "done", 0.25, 0.5, 1.0)


def test_phases() -> None:
    events: list[Event] = [step(0, 9.0), step(1, 1.0), step(2, 2.0), step(3, 3.0)]
    events += [
        step(4, 9.0, frozen=1),
        step(5, 0.5, frozen=1),
        move(6, 1),
        step(6, 5.0, (3, 1), 1),
        EvalEvent(6, 0.0, 2.5),
        end(),
    ]
    summary = summarize(events)
    assert [(p.first, p.last, p.layers, p.frozen) for p in summary.phases] == [
        (0, 3, (2, 2), 0),
        (4, 5, (2, 2), 1),
        (6, 6, (3, 1), 1),
    ]
    # Medians leave out the first step of a phase, which warms up. It counts if it is the only one.
    assert [p.seconds for p in summary.phases] == [2.0, 0.5, 5.0]
    assert [p.tokens_per_s for p in summary.phases] == [4.0, 16.0, 1.6]
    assert [p.idle_ratio for p in summary.phases] == [0.2, 0.05, 0.5]
    assert [p.imbalance for p in summary.phases] == [0.5, 0.125, 1.25]
    assert (summary.steps, summary.seconds, summary.loss, summary.held_out) == (7, 29.5, 3.0, 2.5)
    assert (summary.digest, summary.reason) == ("aa", "done")


def test_tokens_and_evaluations_with_exits() -> None:
    """The last of each is told."""
    records: list[Event] = [
        TokensEvent(i, 0.0, "early_exit", (3,), {"exited": [i / 10]}) for i in (1, 2)
    ]
    summary = summarize(
        [step(0), step(1), step(2), *records, EvalEvent(2, 0.0, 2.5, 300.0, 2.4, 200.0)]
    )
    assert event_lines(summary) == [
        "step 2: early_exit, layers 3: exited 20%",
        (
            "step 2: held-out loss 2.5000 at 300 tokens/s; without exits 2.4000 at 200 tokens/s "
            "(x1.50)"
        ),
    ]


def cells(table: Table) -> dict[str, list[str]]:
    """The cells of each row, by its first cell."""
    screen = StringIO()
    Console(file=screen, width=150).print(table)
    rows = [
        [cell.strip() for cell in line.strip("│ ").split("│")]
        for line in screen.getvalue().splitlines()
        if line.startswith("│")
    ]
    return {row[0]: row[1:] for row in rows}


def test_phases_end_where_the_work_changes() -> None:
    """Any change of the work ends a phase.

    That includes a case that freezes nothing, and a reshape to the same layers. An event that
    changed no layer does not end one.
    """
    events: list[Event] = [
        change(0),
        step(0),
        step(1),
        change(2, "sparse_attention"),
        step(2),
        step(3),
    ]
    events += [
        ReshapeEvent(4, 0.0, (2, 1), (1, 2), (2, 2), 8, 0.1),
        step(4),
        ChangeEvent(5, 0.0, "balance", (), "layers stay"),
        step(5),
    ]
    summary = summarize(events)
    assert [(p.first, p.last) for p in summary.phases] == [(0, 1), (2, 3), (4, 5)]
    assert summary.changed == (2, 4)
    # Done again after a checkpoint, without the reshape.
    assert summarize([*events, step(3), step(4)]).changed == (2,)


def test_runs_are_compared_over_the_same_steps() -> None:
    """The work is another from step 6 on.

    In the second run layers move, and in the third the case is missing.
    """
    steady = [step(i, 4.0 if i < 6 else 2.0) for i in range(12)]
    moving = [step(i, 4.0 if i < 6 else 1.0, (2, 2) if i < 8 else (3, 1)) for i in range(12)]
    one, two, without = (
        summarize(changed(6, steady)),
        summarize(changed(6, moving)),
        summarize(steady),
    )
    assert [(p.first, p.last) for p in without.phases] == [(0, 11)]
    runs = aligned([without, one, two])
    assert [[(p.first, p.last) for p in run.phases] for run in runs] == [
        [(0, 5), (6, 11)],
        [(0, 5), (6, 11)],
        [(0, 5), (6, 7), (8, 11)],
    ]
    table = cells(comparison_table([("a", runs[0]), ("b", runs[1]), ("c", runs[2])]))
    assert table["last phase: s/step"] == ["2.000", "2.000", "1.000"]
    assert table["last phase: speed-up"] == ["x1.00", "x1.00", "x2.00"]
    # A run that ended before is not held against what came after.
    short = aligned([one, summarize(steady[:5])])
    assert cells(comparison_table([("a", short[0]), ("b", short[1])]))["last phase: speed-up"] == [
        "x1.00",
        "-",
    ]


def test_a_case_that_never_rests_fills_no_screen() -> None:
    summary = summarize([e for i in range(30) for e in (change(i), step(i))])
    assert len(summary.phases) == 30
    rows = cells(phase_table(summary))
    assert len(rows) == 25
    assert rows["..."][0] == "6 phases more (--json)"
    assert {"0-0", "11-11", "18-18", "29-29"} <= rows.keys()
    assert (
        len(cells(phase_table(summarize([e for i in range(24) for e in (change(i), step(i))]))))
        == 24
    )


def test_an_empty_or_unfinished_run() -> None:
    empty = summarize([])
    assert (empty.phases, empty.loss, empty.digest, empty.reason) == ((), None, None, None)
    assert summarize([step(0)]).digest is None


def test_a_resumed_run_is_told_once() -> None:
    """A run is cut off after step 5 and resumed from the checkpoint after step 3.

    The later account of steps and of moves counts.
    """
    before: Sequence[Event] = [
        step(0),
        step(1),
        move(2, 1),
        step(2),
        result(3, 1, 0.1),
        step(3),
        move(4, 2),
        step(4, 7.0),
        step(5, 7.0),
    ]
    after: Sequence[Event] = [move(4, 2, 0.3), step(4), result(5, 2, 0.4), step(5), end()]
    summary = summarize([*before, *after])
    assert summary.steps == 6
    assert summary.seconds == 6.0
    assert [(r.id, r.predicted_gain) for r in summary.rebalances] == [(1, 0.2), (2, 0.3)]
    assert [(r.id, r.measured_gain) for r in summary.results] == [(1, 0.1), (2, 0.4)]


def test_rebalance_lines() -> None:
    """Predicted against measured gains, as factors.

    A step shorter by 20 % is 1.25 times as fast.
    """
    lines = rebalance_lines(
        summarize([step(0), move(1, 1, 0.2), step(1), move(2, 2, 0.5), step(2), result(2, 1, 0.1)])
    )
    assert lines == [
        (
            "step 1: moved 2+2 to 3+1 (1.0 MiB in 10 ms): static to balanced x1.25 predicted, "
            "x1.11 measured"
        ),
        "step 2: moved 2+2 to 3+1 (1.0 MiB in 10 ms): static to balanced x2.00 predicted",
    ]


def change(number: int, case: str = "pruning") -> ChangeEvent:
    return ChangeEvent(number, 0.0, case, (0, 1), f"what it did at {number}")


def changed(at: int, steps: Sequence[StepEvent]) -> list[Event]:
    """These steps, with a change of the work before step `at`."""
    return [*steps[:at], change(at), *steps[at:]]


def test_what_happened_is_told_in_order() -> None:
    events: list[Event] = [
        step(0),
        change(1),
        move(1, 1, 0.5),
        step(1),
        SkippedEvent(1, 0.0, 1024.0, 512.0),
        step(2),
    ]
    events += [
        ReshapeEvent(3, 0.0, (4, 1), (2, 2), (3, 5), 8, 0.1),
        step(3),
        RollbackEvent(3, 0.0, "clipped", 0.2),
    ]
    assert event_lines(summarize(events)) == [
        "step 1: moved 2+2 to 3+1 (1.0 MiB in 10 ms): static to balanced x2.00 predicted",
        "step 1: pruning: what it did at 1",
        "step 1: skipped: gradients overflowed at a loss scale of 1024",
        "step 3: reshaped 4 x 1 to 2 x 2, layers 3+5",
        "step 3: taken back: clipped",
    ]
    many = event_lines(
        summarize([e for i in range(30) for e in (change(i, "layer_drop"), step(i))])
    )
    assert len(many) == 13
    assert many[-1] == "step 12 on: layer_drop 18 times more (events.jsonl)"
    # Resumed from the checkpoint after step 1: what was done again is told once.
    repeated = [step(0), change(1), step(1), change(2), step(2), change(2), step(2)]
    assert len(event_lines(summarize(repeated))) == 2


def test_runs_of_unequal_length_are_compared_per_step() -> None:
    runs = [
        (name, summarize([step(i, seconds) for i in range(count)]))
        for name, seconds, count in (("a", 1.0, 10), ("b", 0.5, 4))
    ]
    screen = StringIO()
    Console(file=screen, width=100).print(comparison_table(runs))
    (row,) = [line for line in screen.getvalue().splitlines() if "speed-up, per step" in line]
    assert [cell.strip() for cell in row.split("│")[2:4]] == ["x1.00 (steps)", "x2.00 (steps)"]


def test_what_balancing_takes_counts() -> None:
    """The second run's steps are twice as fast.

    The time between them is as long again.
    """
    one, two = (
        summarize([*map(step, range(10)), end(seconds=10.5)]),
        summarize([*(step(i, 0.5) for i in range(10)), end(seconds=10.0)]),
    )
    assert (
        two.seconds,
        two.run_seconds,
        two.measure_seconds,
        two.decide_seconds,
        two.move_seconds,
    ) == (5.0, 10.0, 0.25, 0.5, 1.0)
    table = cells(comparison_table([("a", one), ("b", two)]))
    assert table["seconds, all steps"] == ["10.0", "5.0"]
    assert table["seconds, whole run"] == ["10.5", "10.0"]
    assert table["measure + decide + move"] == ["1.75", "1.75"]
    assert table["speed-up"] == ["x1.00", "x1.05"]
    # One that still runs has its steps only.
    table = cells(
        comparison_table([("a", one), ("b", summarize([step(i, 0.5) for i in range(10)]))])
    )
    assert table["seconds, whole run"] == ["10.5", "-"]
    assert table["measure + decide + move"] == ["1.75", "-"]
    assert table["speed-up"] == ["x1.00", "x2.00 (steps)"]


def test_the_end_of_a_resumed_run_tells_of_its_last_part() -> None:
    whole = [*map(step, range(4)), end(seconds=5.0)]
    assert summarize(whole).run_seconds == 5.0
    for events in (
        [
            step(0),
            step(1),
            step(1),
            step(2),
            end(seconds=5.0),
        ],  # cut off, and resumed from a checkpoint
        [*whole, step(4), step(5), end(seconds=9.0)],  # ended, and trained on
        [step(0), step(1), step(2), end(seconds=2.5)],  # cut off right behind a checkpoint
        [*whole, end(seconds=0.1)],  # ended, and resumed with nothing to do
    ):
        resumed = summarize(events)
        assert (resumed.reason, resumed.run_seconds, resumed.move_seconds) == ("done", None, None)


def test_what_configs_differ_in() -> None:
    one = {"name": "a", "train": {"steps": 6, "lr": 0.1}, "balance": {"balancer": "none"}}
    other = {
        "name": "b",
        "train": {"steps": 4, "lr": 0.1},
        "balance": {"balancer": "none", "initial": [2, 4]},
    }
    told = differences([one, other])
    assert told == {"balance.initial": [None, [2, 4]], "train.steps": [6, 4]}
    assert (
        difference_line(told)
        == "the configs differ in balance.initial (not set, [2, 4]), train.steps (6, 4)"
    )
    assert difference_line(differences([one, one | {"name": "c"}])) == "the configs are the same"


def test_verdict() -> None:
    one, same = summarize([step(0), end("aa")]), summarize([step(0), end("aa")])
    other, cut = summarize([step(0), end("bb")]), summarize([step(0)])
    assert verdict([("a", one), ("b", same)]) == "same loss and same weights, to the last bit"
    assert "different weights" in verdict([("a", one), ("b", other)])
    buffers = [(name, replace(one, buffers_digest=name)) for name in "cd"]
    assert (
        verdict([buffers[0], buffers[0]])
        == "same loss and same weights, to the last bit, buffers included"
    )
    assert verdict([("a", one), buffers[0]]) == "same loss and same weights, to the last bit", (
        "an old log does not tell"
    )
    assert verdict(buffers).startswith("same loss and same weights, but different buffers")
    rows = cells(comparison_table([("a", one), *buffers]))
    assert rows["buffers"] == ["-", "c", "d"]
    assert "has not ended" in verdict([("a", one), ("b", cut)])


def test_a_machine_that_was_not_alike() -> None:
    """The first steps tell a machine that was not alike.

    They are the same work as long as nothing has moved.
    """

    def runs(
        seconds: float, count: int = 6, layers: tuple[int, ...] = (2, 2)
    ) -> list[tuple[str, Summary]]:
        return [
            (str(s), summarize([step(i, s, layers if s != 1.0 else (2, 2)) for i in range(count)]))
            for s in (1.0, seconds)
        ]

    balancing = {"balance.balancer": ["none", "exact"]}
    told = (
        "from step 1 to 5 all did the same work, at 1.000 and 1.200 s a step: the machine was "
        "not alike, and nor are the speed-ups; "
    )
    assert noise(runs(1.2), balancing) == told + "compare runs of a quieter one"
    assert noise(runs(1.05), balancing) is None
    assert noise(runs(1.2, count=4), balancing) is None, "too few to say"
    assert noise(runs(1.2, layers=(3, 1)), balancing) is None, "other work"
    assert noise(runs(1.2), balancing | {"pipeline.schedule": ["1f1b", "zb-h1"]}) is None
    assert noise(runs(1.2), None) is None


def test_noise_is_told_by_the_same_work_only() -> None:
    """Two runs in which attention gets sparse at step 6.

    Layers move in the second run alone. Steps after either event say nothing of the machine.
    """
    balancing = {"balance.balancer": ["none", "exact"]}

    def runs(early: float, at: int) -> list[tuple[str, Summary]]:
        static = [step(i, 2.0 if i < at else 1.0) for i in range(24)]
        moved = [step(i, early if i < at else 0.7, (2, 2) if i < at else (3, 1)) for i in range(24)]
        return [
            (name, summarize(changed(at, steps))) for name, steps in (("a", static), ("b", moved))
        ]

    assert noise(runs(2.0, 6), balancing) is None
    told = noise(runs(3.0, 6), balancing)
    assert told is not None
    assert told.startswith("from step 1 to 5 all did the same work, at 2.000 and 3.000 s a step")
    assert noise(runs(3.0, 4), balancing) is None, "too few to say"
    # The work is the same, but one run has moved: its steps from there on are not counted, nor
    # those of the other.
    static = summarize([step(i, 2.0 if i < 8 else 9.0) for i in range(24)])
    moved = summarize([step(i, 2.0, (2, 2) if i < 8 else (3, 1)) for i in range(24)])
    assert noise([("a", static), ("b", moved)], balancing) is None


def test_layers_text() -> None:
    assert layers_text((3, 1, 2)) == "3+1+2"
