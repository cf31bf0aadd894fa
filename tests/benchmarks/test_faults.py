"""Faults in short runs, and what a seed draws. The rest is `python -m benchmarks.faults`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.faults import hosts, steady
from benchmarks.faults.draws import KINDS, RUNS, Draw, draw
from benchmarks.faults.inject import PHASES, Fault, is_known
from benchmarks.faults.judge import Server, Workplace
from benchmarks.faults.tables import LINE, LIVE, summary, tables


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workplace]:
    server = Server()
    try:
        yield Workplace(server, tmp_path_factory.mktemp("draws"), 7)
    finally:
        server.close()


OF_REPLICAS = (
    Fault("stop", "message", 1, 3, seconds=0.3),
    Fault("kill", "reduction", 3, 6),
    Fault("slow disk", "write", 1, 14, seconds=0.3),
    Fault("kill", "optimizer step", 0, 18),
    Fault("kill", "snapshot", 1, 26),
)
KILLS = (
    Fault("kill", "verdict", 3, 5),
    Fault("kill", "message", 0, 14),
    Fault("kill", "snapshot", 1, 22),
)
MIXED = (
    Fault("NaN", "B", 1, 3),
    Fault("kill", "F", 1, 11, 2),
    Fault("stop", "F", 0, 15, seconds=0.2),
    Fault("slow disk", "write", 0, 15, seconds=0.3),
    Fault("stop", "optimizer step", 0, 17, seconds=0.2),
    Fault("flipped bit", "F", 1, 20),
    Fault("term", "B", None, 26),
)
"""All ranks end with the flipped bit, and start again from the checkpoint before."""


@pytest.mark.parametrize(
    ("run", "faults", "how"),
    [
        ("replicas", OF_REPLICAS, LIVE),
        ("1f1b", MIXED, LINE),
        pytest.param("post-validation", KILLS, LIVE, marks=pytest.mark.matrix),
        # The first copy with a newcomer is not complete, which therefore cannot repeat the step.
        pytest.param(
            "regrouping", (Fault("kill", "copies", 1, 15),), LIVE, marks=pytest.mark.matrix
        ),
    ],
)
def test_a_run_with_faults_ends_with_the_undisturbed_digest(
    run: str, faults: tuple[Fault, ...], how: str, place: Workplace
) -> None:
    row = place.judge(Draw(0, run, faults))
    assert (row["how"], row["struck"], row.get("problem")) == (how, len(faults), None)


@pytest.mark.matrix
@pytest.mark.parametrize("number", range(12))
def test_drawn_faults(number: int, place: Workplace) -> None:
    why = hosts.why_not()
    without = ("cut network", "slow network", "full disk") if why else ()
    row = place.judge(draw(69, number, place.length, without))
    assert row.get("problem") is None, row


def test_every_phase_is_a_function_of_dynmo() -> None:
    assert [phase for phase in PHASES if not is_known(phase)] == []


def test_draws_have_every_kind_and_phase() -> None:
    drawn = [draw(1, number, lambda name: 3.0) for number in range(3000)]
    assert drawn[7] == draw(1, 7, lambda name: 3.0)
    assert {each.kind for each in drawn} == KINDS.keys()
    assert {each.run for each in drawn} == RUNS.keys()
    assert {each.phase for each in drawn} == {*PHASES, "a time"}
    timed = [each.phase == "a time" for each in drawn if each.kind != "NaN"]
    assert 0.45 < sum(timed) / len(timed) < 0.55
    without = draw(1, 7, lambda name: 3.0, [*KINDS.keys() - {"stop"}])
    assert without.kind == "stop"


def test_figures_count_kills_and_stops_of_one_rank_after_the_first_step() -> None:
    def row(number: int, kind: str, how: str, at_step: int, **times: Any) -> dict[str, Any]:
        about = {"number": number, "run": "1f1b", "kind": kind, "phase": "F", "struck": 1}
        return about | {"how": how, "at_step": at_step} | times

    figures = summary(
        [
            row(0, "kill", "live", 3, noticed=0.1, next_step=0.5, repeated=1),
            row(1, "kill", "live", 9, noticed=0.3, next_step=0.9, repeated=2),
            row(2, "kill", "restarted", 0, next_step=4.0, repeated=0),
            row(3, "stop", "restarted", 5, next_step=9.0, repeated=5),
            row(4, "term", "line", 5),
            row(5, "kill twice", "failed", 5),
        ]
    )
    assert (figures["kills_and_stops"], figures["live_share"]) == (3, 2 / 3)
    assert figures["failed"] == [5]
    kills = figures["kinds"][0]
    assert (kills["kind"], kills["draws"], kills["noticed"]) == ("kill", 3, 0.2)
    assert (kills["next_step"], kills["repeated"]) == (0.9, 1)
    assert (
        "| F | 0.20 / 0.90 / 1 | none | - / 9.00 / 5 | none |" in tables(figures)["faults by phase"]
    )


def test_restarts_by_hand_by_arithmetic() -> None:
    # Checkpoints after 2000 steps: a kill before repeats all, and one after it what came since.
    assert steady.by_hand(3000, 1000, 0.3, 5.0) == pytest.approx((3000 + 1000 + 0) * 0.3 + 10)
    assert steady.by_hand(3000, 1500, 0.3, 0.0) == pytest.approx(4500 * 0.3)


def test_restarts_of_a_long_run_follow_from_those_of_a_short_one() -> None:
    figures = steady.compare(
        {
            "steps": 1001,
            "every": 100,
            "undisturbed": {"seconds": 100.0, "digest": "a"},
            "live": {"seconds": 105.0, "digest": "a"},
            # Two kills, each with 3 s and 20 steps of 0.1 s.
            "restarts": {"steps": 301, "seconds": 30.0 + 2 * 5.0, "kills": 2, "repeated": 40},
        }
    )
    assert figures["restart_seconds"] == pytest.approx(3.0)
    assert figures["over_undisturbed"]["live"] == pytest.approx(1.05)
    assert figures["over_undisturbed"]["restarts"] == pytest.approx(1.5)
    assert figures["same"] is True


@pytest.mark.matrix
def test_a_long_run_with_kills(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = steady.settings(30, 0.05) | {"elastic": {"recover": "memory"}}
    figures = steady.run(config, [10, 20])
    assert (figures["kills"], figures["recoveries"]) == (2, 2)
    assert json.dumps(figures)
