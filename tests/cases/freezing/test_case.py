"""Freezing by schedule, and by AutoFreeze from gradient norms."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import pytest
from torch import nn

from dynmo.cases.freezing.case import AutoFreeze, ScheduledFreezing
from dynmo.cases.freezing.egeria import Egeria, Freezing
from dynmo.cases.freezing.prefix import freeze_prefix, units
from dynmo.config import parse
from dynmo.cost.layer_cost import Forecast
from dynmo.errors import ConfigError
from dynmo.pipeline.case import Change, Dynamism, Signals
from tests.cases.kept import Kept, cases_of

BLOCKS = [f"blocks.{i}.{half}" for i in (0, 1) for half in ("attention", "feed_forward")]
NAMES = ["embedding", *BLOCKS, "head"]


def feed(
    case: Dynamism, layers: Kept, norms: Sequence[Sequence[float]], first: int = 0
) -> list[Change | None]:
    """Steps with these gradient norms: what the case did before each, and after the last."""
    done: list[Change | None] = []
    for step, row in enumerate(norms, start=first):
        done.append(case.act(step, layers))
        case.observe(Signals(step, 1.0, tuple(x * x for x in row)))
    return [*done, case.act(first + len(norms), layers)]


def test_schedule_freezes_at_its_steps() -> None:
    layers, case = Kept(6), ScheduledFreezing([(2, 1), (4, 3)])
    done = [case.act(step, layers) for step in range(6)]
    assert [d and d.layers for d in done] == [None, None, (0,), None, (1, 2), None]
    assert layers.frozen == {0, 1, 2}
    # A resumed run starts between the steps of the schedule.
    late = Kept(6)
    change = ScheduledFreezing([(2, 1), (4, 3)]).act(5, late)
    assert change == Change((0, 1, 2), "froze layers 0 to 2 (schedule, step 5); 3 of 6 are frozen")


def test_schedule_forecasts_later_freezes() -> None:
    case = ScheduledFreezing([(2, 1), (4, 3), (6, 3)])
    assert case.forecast(0) == (Forecast(2, (0,), b=0.0, w=0.0), Forecast(4, (1, 2), b=0.0, w=0.0))
    assert case.forecast(2) == (Forecast(4, (1, 2), b=0.0, w=0.0),)
    assert case.forecast(4) == ()


def test_freezing_units_are_layers_or_blocks() -> None:
    assert units(NAMES, "block") == (range(1), range(1, 3), range(3, 5), range(5, 6))
    assert units(NAMES, "half") == tuple(range(i, i + 1) for i in range(6))
    for flat in (["emulated.0", "emulated.1"], ["0.Linear", "1.Linear"]):
        assert units(flat, "block") == (range(1), range(1, 2))


def test_autofreeze_combines_the_halves_of_a_block() -> None:
    """3 and 4 give 5. The median of the four changes 0, 0.2, 0.2 and 0.4 is 0.2."""
    for unit, expected in (("block", {0}), ("half", {0, 1})):
        layers, case = Kept(6, NAMES), AutoFreeze(every=1, start=0, most=5, unit=unit)
        feed(case, layers, [(1, 3, 4, 6, 8, 10), (1, 3, math.sqrt(27), 4.8, 6.4, 6)])
        assert layers.frozen == expected
    layers, case = Kept(6, NAMES), AutoFreeze(every=1, start=0, most=2, unit="block")
    feed(case, layers, [(1, 3, 4, 6, 8, 10), (1, 3, 4, 3, 4, 6), (1, 3, 4, 3, 4, 5)])
    assert layers.frozen == {0}, "a block freezes whole, and this one is over the limit"


def test_freeze_prefix_never_thaws() -> None:
    layers = Kept(4)
    layers.freeze([0, 2])
    assert freeze_prefix(layers, 1, "") is None
    assert freeze_prefix(layers, 2, "") == Change((1,), "froze layers 1 to 1 (); 2 of 4 are frozen")
    assert layers.frozen == {0, 1, 2}


def test_autofreeze_freezes_layers_below_the_median_change() -> None:
    """The changes |before - now| / before are 0.0, 0.1, 0.5 and 0.0. Their median is 0.05."""
    layers, case = Kept(4), AutoFreeze(every=2, start=0, most=3)
    done = feed(case, layers, [(1, 10, 4, 2), (1, 10, 4, 2), (1, 9, 2, 2), (1, 9, 2, 2)])
    assert [d is None for d in done] == [True] * 4 + [False]
    assert layers.frozen == {0}, "layer 3 changed little too, but the prefix ends at layer 1"
    assert done[4] is not None
    assert "0.05" in done[4].what
    # The unfrozen layers have 0.0, 0.5 and 0.2. The median is 0.2.
    feed(case, layers, [(0, 9, 1, 1.6)] * 2, first=4)
    assert layers.frozen == {0, 1}


def test_autofreeze_keeps_the_last_layer_and_its_limit() -> None:
    for most in (1, 2, 3):
        layers, case = Kept(4), AutoFreeze(every=1, start=0, most=most)
        # Each layer changes less than those above it, so that as much as allowed freezes.
        norms = [[10 + (1 + layer) * 0.1 * step for layer in range(4)] for step in range(30)]
        feed(case, layers, norms)
        assert layers.frozen == set(range(most))


def test_autofreeze_starts_at_its_start_step() -> None:
    layers, case = Kept(2), AutoFreeze(every=1, start=3, most=1)
    done = feed(case, layers, [(1, step) for step in range(1, 7)])
    assert [d is None for d in done] == [True] * 5 + [False, True]


def test_autofreeze_ignores_layers_without_parameters() -> None:
    """Activation layers have no gradients. Other layers without any have not settled."""
    layers, case = Kept(3), AutoFreeze(every=1, start=0, most=2)
    feed(case, layers, [(0, 0, 0)] * 4)
    assert not layers.frozen
    modules = [nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2), nn.Linear(2, 2), nn.ReLU()]
    layers, case = Kept(5, modules=modules), AutoFreeze(every=1, start=0, most=4)
    case.check(modules)
    feed(case, layers, [(1, 0, 10, 10, 0), (1, 0, 9, 8, 0)])
    assert layers.frozen == {0}
    feed(case, layers, [(0, 0, 9, 5, 0), (0, 0, 9, 2, 0), (0, 0, 9, 1, 0)], first=2)
    assert layers.frozen == {0, 1, 2}, "the last that trains stays, and what is behind it with it"


def test_schedule_must_keep_a_trainable_layer() -> None:
    modules = [nn.Linear(2, 2), nn.Linear(2, 2), nn.ReLU()]
    ScheduledFreezing([(1, 1)]).check(modules)
    with pytest.raises(ConfigError, match=r"freezes 2 layers, .*at most 1"):
        ScheduledFreezing([(1, 2)]).check(modules)


def test_autofreeze_ignores_steps_skipped_by_overflow() -> None:
    """A skipped step has no gradients, so layer 0 would appear to change most."""
    for skipped in ([], [(0, 0, 0)]):
        layers, case = Kept(3), AutoFreeze(every=2, start=0, most=2)
        feed(case, layers, [(10, 10, 10), *skipped, (10, 10, 10), (10, 8, 5), *skipped, (10, 8, 5)])
        assert layers.frozen == {0}
        feed(case, layers, [(10, 8, 4), *skipped, (10, 8, 4)], first=6)
        assert layers.frozen == {0, 1}


@pytest.mark.parametrize("unit", ["half", "block"])
def test_state_of_another_policy_is_ignored(unit: Any) -> None:
    case = AutoFreeze(1, 0, 2, unit)
    fresh = case.state()
    names = ("readings", "first_slopes", "stale", "referenced")
    lists: dict[str, Any] = {name: [] for name in names}
    egeria = lists | {"unit": unit, "rate": 0.1, "frozen_at": 0.0}
    another = AutoFreeze(1, 0, 2, "half" if unit == "block" else "block")
    for other in ({}, egeria, another.state() | {"sums": [1.0]}):
        case.load(other)
        assert case.state() == fresh
    options = Freezing(unit=unit, every=1, start=0, window=2, tolerance=0.5, refresh=4, thaw=0.1)
    policy = Egeria(options, most=2, seed=0)
    policy.load(fresh)
    # But layers that are frozen thaw by the rate at which they froze, whatever the units are now.
    policy.load(egeria | {"unit": "another", "frozen_at": 0.2, "stale": [[0, 1]]})
    state = policy.state()
    assert (state["rate"], state["frozen_at"], state["stale"]) == (0.1, 0.2, [])


def test_autofreeze_continues_from_its_state() -> None:
    norms = [[math.exp((1 + layer) * 0.1 * step) for layer in range(5)] for step in range(12)]
    whole, layers = AutoFreeze(3, 1, 4), Kept(5)
    feed(whole, layers, norms)
    first, cut = AutoFreeze(3, 1, 4), Kept(5)
    feed(first, cut, norms[:7])
    second = AutoFreeze(3, 1, 4)
    second.load(json.loads(json.dumps(first.state())))
    feed(second, cut, norms[7:], first=7)
    assert cut.frozen == layers.frozen
    assert cut.frozen, "nothing froze: this shows nothing"
    assert second.state() == whole.state()


def cases(layers: int, options: dict[str, Any]) -> list[Dynamism]:
    kind = {"kind": "python:a:b"}  # how many layers it has, only the model knows
    dynamism = {"cases": ["freezing"], "freezing": options}
    return cases_of(parse({"model": kind, "dynamism": dynamism}), layers)


def test_freezing_case_follows_the_config() -> None:
    (scheduled,) = cases(4, {"schedule": [[1, 3]]})
    assert isinstance(scheduled, ScheduledFreezing)
    (auto,) = cases(4, {"policy": "autofreeze", "every": 2})
    assert isinstance(auto, AutoFreeze)
    assert cases_of(parse({}), 4) == []
    autofreeze = {"policy": "autofreeze", "max_layers": 5}
    for many, options in ((4, {"schedule": [[1, 4]]}), (5, autofreeze)):
        with pytest.raises(ConfigError, match=f"freezes {many} of the model's 4 layers"):
            cases(4, options)
