"""When a run looks whether layers should move."""

from __future__ import annotations

import pytest

from dynmo.pipeline.rebalance_watch import RebalanceWatch

EVEN, UNEVEN = (1.0, 1.0), (1.0, 1.5)


def seen(watch: RebalanceWatch, *steps: tuple[float, ...]) -> list[bool]:
    out: list[bool] = []
    for busy in steps:
        watch.observe(busy)
        out.append(watch.is_due)
    return out


@pytest.fixture
def watch() -> RebalanceWatch:
    """A watch whose first look is over. It comes after some even steps."""
    watch = RebalanceWatch(0.02)
    assert seen(watch, *[EVEN] * 5) == [False] * 4 + [True]
    watch.decided()
    return watch


def test_rebalance_watch_ignores_noise_and_even_growth(watch: RebalanceWatch):
    assert not any(seen(watch, *[(2.0, 2.02)] * 20)), "all ranks alike may work more"
    assert not any(seen(watch, (1.0, 9.0), (2.0, 2.0), (9.0, 1.0))), "single steps are noise"
    assert any(seen(watch, *[UNEVEN] * 3)), "drift"
    watch.decided()
    assert not any(seen(watch, *[UNEVEN] * 20)), "it was looked at"
    watch.on_workload_change()
    assert not watch.is_due, "nothing of the new work is measured"
    assert seen(watch, UNEVEN) == [True]
    watch.decided()
    # Once more, should that step have been one by chance.
    assert seen(watch, *[UNEVEN] * 3) == [False, True, True]
    watch.decided()
    # Work that changes before every step is looked at too.
    for expected in (True, False, True):
        watch.on_workload_change()
        assert seen(watch, UNEVEN) == [expected]
        if expected:
            watch.decided()
    assert not watch.is_due
    assert not any(seen(watch, *[(0.0, 0.0)] * 9)), "nothing to do is even"


def test_uncertain_decision_is_checked_later(watch: RebalanceWatch):
    watch.check_later()
    assert seen(watch, *[EVEN] * 5) == [False] * 4 + [True]
    watch.decided()
    assert not any(seen(watch, *[EVEN] * 9))
    watch.on_workload_change()
    assert seen(watch, EVEN) == [True]
    watch.decided()
    watch.check_later()
    assert seen(watch, *[EVEN] * 2) == [False, True], "the second look comes sooner"


def test_a_change_right_after_a_decision_is_looked_at(watch: RebalanceWatch):
    """The reference of the next decisions already has the change in it."""
    assert not any(seen(watch, *[(1.0, 2.0)] * 9))
    assert watch.is_due or seen(watch, (1.0, 2.0)) == [True]
    watch.decided()
    assert not any(seen(watch, *[(1.0, 2.0)] * 20)), "it was looked at"


def test_a_move_changes_the_imbalance_and_asks_for_no_look():
    watch = RebalanceWatch(0.02)
    assert seen(watch, *[(1.0, 3.0)] * 5)[-1]
    watch.decided()
    watch.moved()
    assert not any(seen(watch, *[(1.0, 1.0)] * 20))
