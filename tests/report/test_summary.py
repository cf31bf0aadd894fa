"""The summary of a run: phases, medians, and the repeated steps of a resumed run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dynmo.change_events import ChangeEvent, ReshapeEvent
from dynmo.events import EndEvent, EvalEvent, Event
from dynmo.report.summary import summarize
from tests.report.records import change, end, move, phases_of, result, step


def test_a_phase_has_the_medians_of_its_steps() -> None:
    events: list[Event] = [step(0, 9.0), step(1, 1.0), step(2, 2.0), step(3, 3.0)]
    events += [step(4, 9.0, frozen=1), step(5, 0.5, frozen=1), move(6, 1), step(6, 5.0, (3, 1), 1)]
    events += [EvalEvent(6, 2.5), end()]
    summary = summarize(events)
    assert phases_of(summary) == [(0, 3), (4, 5), (6, 6)]
    assert [p.layers for p in summary.phases] == [(2, 2), (2, 2), (3, 1)]
    assert [p.frozen for p in summary.phases] == [0, 1, 1]
    # Medians leave out the first step of a phase, which warms up. It counts if it is the only one.
    assert [p.seconds for p in summary.phases] == [2.0, 0.5, 5.0]
    assert [p.tokens_per_s for p in summary.phases] == [4.0, 16.0, 1.6]
    assert [p.idle_ratio for p in summary.phases] == [0.2, 0.05, 0.5]
    assert [p.imbalance for p in summary.phases] == [0.5, 0.125, 1.25]
    assert (summary.steps, summary.seconds, summary.loss, summary.held_out) == (7, 29.5, 3.0, 2.5)
    assert (summary.digest, summary.reason) == ("aa", "done")


def test_idle_time_is_split_into_the_schedule_s_and_other() -> None:
    """Logs of an earlier version have no inherent bubble."""
    steps = [replace(step(i, 2.0), inherent_idle=0.05 + i / 100) for i in range(4)]
    (phase,) = summarize(steps).phases
    assert (phase.idle_ratio, phase.inherent_idle) == (0.2, 0.07)
    assert phase.other_idle == 0.2 - 0.07
    (old,) = summarize([step(0), step(1)]).phases
    assert (old.inherent_idle, old.other_idle) == (None, None)


def test_phase_ends_at_any_change_of_the_work() -> None:
    """A case that freezes no layer and a reshape to the same layers end a phase too.

    An event that changed no layer does not end a phase.
    """
    events: list[Event] = [change(0), step(0), step(1), change(2, "sparse_attention")]
    events += [step(2), step(3), ReshapeEvent(4, (2, 1), (1, 2), (2, 2), 8, 0.1), step(4)]
    events += [ChangeEvent(5, "balance", (), "layers stay"), step(5)]
    summary = summarize(events)
    assert phases_of(summary) == [(0, 1), (2, 3), (4, 5)]
    assert summary.changed == (2, 4)
    # Done again after a checkpoint, without the reshape.
    assert summarize([*events, step(3), step(4)]).changed == (2,)


def test_an_empty_or_unfinished_run_has_no_digest() -> None:
    empty = summarize([])
    assert (empty.phases, empty.loss, empty.digest, empty.reason) == ((), None, None, None)
    assert summarize([step(0)]).digest is None


def test_later_events_of_a_resumed_run_replace_earlier_ones() -> None:
    """A run is cut off after step 5 and resumes from the checkpoint after step 3.

    The later events of repeated steps and moves count.
    """
    before: list[Event] = [step(0), step(1), move(2, 1), step(2), result(3, 1, 0.1), step(3)]
    before += [move(4, 2), step(4, 7.0), step(5, 7.0)]
    after: Sequence[Event] = [move(4, 2, 0.3), step(4), result(5, 2, 0.4), step(5), end()]
    summary = summarize([*before, *after])
    assert summary.steps == 6
    assert summary.seconds == 6.0
    assert [(r.id, r.predicted_gain) for r in summary.rebalances] == [(1, 0.2), (2, 0.3)]
    assert [(r.id, r.measured_gain) for r in summary.results] == [(1, 0.1), (2, 0.4)]


def test_discarded_steps_do_not_count() -> None:
    """A run is killed after 6 steps. Its resumption with 4 steps ends at the checkpoint after 4."""
    killed = [step(i, loss=9.0 - i) for i in range(6)]
    evaluations = [EvalEvent(3, 2.5), EvalEvent(5, 1.5)]
    ended = EndEvent(4, 6.0, "aa", 0.0, "done")
    summary = summarize([*killed[:4], evaluations[0], *killed[4:], evaluations[1], ended])
    assert (summary.steps, summary.loss, summary.held_out) == (4, 6.0, 2.5)
    assert summary.run_seconds is None


def test_resumed_run_has_no_total_seconds() -> None:
    whole = [*map(step, range(4)), end(seconds=5.0)]
    assert summarize(whole).run_seconds == 5.0
    for events in (
        # Cut off, and resumed from a checkpoint.
        [step(0), step(1), step(1), step(2), end(seconds=5.0)],
        [*whole, step(4), step(5), end(seconds=9.0)],  # ended, and trained on
        [step(0), step(1), step(2), end(seconds=2.5)],  # cut off right behind a checkpoint
        [*whole, end(seconds=0.1)],  # ended, and resumed with nothing to do
    ):
        resumed = summarize(events)
        assert (resumed.reason, resumed.run_seconds, resumed.move_seconds) == ("done", None, None)
    cut = summarize([*whole, step(4)])
    assert (cut.steps, cut.reason, cut.digest) == (5, None, None), "the end was not the end"
