"""Each cause of slow steps is named, with its price, from what a run's folder has."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from dynmo.change_events import RepackEvent, SlowRankEvent
from dynmo.report.verdict import diagnose
from tests.report.folders import LAYER, end_of, make_run, steps_of, waited

HALF = replace(LAYER, b=0.0, w=0.0)
DEAR = replace(LAYER, f=0.06, b=0.06, w=0.06, parameters=9000)  # of another kind
SLOW = replace(LAYER, f=0.03, b=0.03, w=0.03)


def test_slow_loader_is_named(tmp_path: Path) -> None:
    events = [x for step in steps_of(10) for x in (waited(step.step, 0.2), step)]
    found = diagnose(make_run(tmp_path / "r", events, [LAYER] * 4))
    assert found.causes[0].name == "Waiting for data"
    assert found.causes[0].share == pytest.approx(0.36)  # the first samples come before the steps
    assert found.verdict.startswith("Waiting for data costs 36.0% of a step")


def test_frozen_half_without_a_balancer_is_named(tmp_path: Path) -> None:
    config = 'name = "r"\n[balance]\nbalancer = "none"\n'
    layers = [HALF] * 4 + [LAYER] * 4
    run = make_run(tmp_path / "r", steps_of(9, (4, 4)), layers, (4, 4), config, first_trainable=4)
    cause = diagnose(run).causes[0]
    assert cause.name == "A frozen part that is not balanced"
    assert "because layers 0 to 3 are frozen; 5+3 would be even" in cause.text
    assert cause.remedy == 'Set balance.balancer = "exact"'


def test_uneven_layers_are_named_under_a_balancer_that_stays(tmp_path: Path) -> None:
    run = make_run(tmp_path / "r", steps_of(9, (5, 1)), [LAYER] * 6, (5, 1))
    cause = diagnose(run).causes[0]
    assert cause.name == "Uneven layers"
    assert "dynmo simulate" in cause.remedy


def test_heavy_head_is_named(tmp_path: Path) -> None:
    run = make_run(tmp_path / "r", steps_of(9, (3, 1)), [LAYER] * 3 + [DEAR], (3, 1))
    cause = diagnose(run).causes[0]
    assert cause.name == "A heavy layer"
    assert "(layer 3) alone takes 1.3 times an even share" in cause.text
    assert cause.share == pytest.approx(0.25)
    assert "a V schedule" in cause.remedy
    layers = [LAYER, LAYER, LAYER, DEAR]
    run = make_run(tmp_path / "v", steps_of(9, (1,) * 4), layers, (1,) * 4, schedule="zb-v")
    heavy = {cause.name: cause for cause in diagnose(run).causes}["A heavy layer"]
    assert heavy.remedy == "Use fewer ranks"


def test_slow_rank_is_named_by_its_layers_costs(tmp_path: Path) -> None:
    events = steps_of(9, busy=(0.2, 0.45))
    run = make_run(tmp_path / "r", events, [LAYER, LAYER, SLOW, SLOW])
    slow = {cause.name: cause for cause in diagnose(run).causes}["A slow rank"]
    assert slow.text.startswith("rank 1 takes 3.00 times as long")


def test_costs_of_other_ranks_are_not_used(tmp_path: Path) -> None:
    """A run that was resumed on more ranks still has the costs of its first process."""
    run = make_run(tmp_path / "r", steps_of(9, (1,) * 4, (0.4,) * 4), [LAYER] * 4)
    assert run.plan is None


def test_slow_rank_is_named_by_its_event(tmp_path: Path) -> None:
    events = [SlowRankEvent(1, 1, 2.0, "node7", time=100.0), *steps_of(9, busy=(0.2, 0.45))]
    cause = diagnose(make_run(tmp_path / "r", events)).causes[0]
    assert cause.name == "A slow rank"
    assert cause.text.startswith("rank 1 on node7 takes 2.00 times")


def test_slow_rank_that_has_left_is_not_named(tmp_path: Path) -> None:
    slow = SlowRankEvent(1, 1, 2.0, "node7", time=100.0)
    left = RepackEvent(4, 1, 3, 2, (3, 1), (2, 1), (2, 2), 0, 0.1, 0.1, "r", (), time=102.0)
    events = [slow, *steps_of(4), left, *steps_of(5, busy=(0.2, 0.45), begin=4)]
    assert not diagnose(make_run(tmp_path / "r", events)).causes


def test_rank_that_is_slow_no_longer_is_not_named(tmp_path: Path) -> None:
    slow = SlowRankEvent(1, 1, 2.0, "node7", time=100.0)
    events = [slow, replace(slow, factor=1.0, step=2), *steps_of(9)]
    assert not diagnose(make_run(tmp_path / "r", events)).causes


def test_missing_memory_for_warm_up_is_named(tmp_path: Path) -> None:
    config = 'name = "r"\n[pipeline]\nmemory_limit = "%s"\n[balance]\nbalancer = "none"\n'
    layers = [LAYER] * 4
    roomy = make_run(tmp_path / "a", steps_of(9), layers, schedule="zb-auto")
    assert roomy.plan is not None
    need = max(roomy.plan.memory)
    tight = make_run(
        tmp_path / "b", steps_of(9), layers, config=config % (need // 3), schedule="zb-auto"
    )
    cause = diagnose(tight).causes[0]
    assert cause.name == "No memory for warm-up"
    assert "more on a rank" in cause.text


def test_even_run_says_that_nothing_is_to_mend(tmp_path: Path) -> None:
    events = steps_of(9, busy=(0.45, 0.45))
    run = make_run(tmp_path / "r", [*events, end_of(events)])
    assert diagnose(run).verdict == (
        "This run is as fast as its schedule allows: the ranks compute 90.0% of a step."
    )


def test_busy_machine_is_named_if_nothing_else_is(tmp_path: Path) -> None:
    events = steps_of(9, busy=(0.35, 0.35))
    run = make_run(tmp_path / "r", [*events, end_of(events, load=6.0)])
    assert diagnose(run).verdict == (
        "Nothing to mend was found: the ranks compute 70.0% of a step, the schedule idles 10.0% of "
        "it, and the machine was busy (load 6.0 on 2 cores). The costs of the layers are unknown, "
        "so nothing was planned anew."
    )


def test_older_log_is_not_called_as_fast_as_can_be(tmp_path: Path) -> None:
    events = [replace(step, inherent_idle=None) for step in steps_of(9)]  # pyright: ignore[reportCallIssue]
    verdict = diagnose(make_run(tmp_path / "r", events)).verdict
    assert verdict.startswith("Nothing to mend was found")
