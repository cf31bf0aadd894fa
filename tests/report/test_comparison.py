"""Comparison of runs: phases, speed-ups, weights, configs and noise."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dynmo.report.comparison import (
    aligned,
    comparison_table,
    conclusion,
    difference_line,
    differences,
    noise,
    verdict,
)
from dynmo.report.summary import Summary, summarize
from tests.report.records import cells, changed, end, move, phases_of, step

BALANCING = {"balance.balancer": ["none", "exact"]}


def table_of(*runs: Summary) -> dict[str, list[str]]:
    return cells(comparison_table([*zip("abc", runs, strict=False)]))


def test_runs_are_compared_over_the_same_steps() -> None:
    """The work changes at step 6.

    Layers move in the second run, and the third run has no dynamic case.
    """
    steady = [step(i, 4.0 if i < 6 else 2.0) for i in range(12)]
    moving = [step(i, 4.0 if i < 6 else 1.0, (2, 2) if i < 8 else (3, 1)) for i in range(12)]
    one = summarize(changed(6, steady))
    two = summarize(changed(6, moving))
    without = summarize(steady)
    assert phases_of(without) == [(0, 11)]
    runs = aligned([without, one, two])
    assert [phases_of(run) for run in runs[:2]] == [[(0, 5), (6, 11)]] * 2
    assert phases_of(runs[2]) == [(0, 5), (6, 7), (8, 11)]
    table = table_of(*runs)
    assert table["last phase: s/step"] == ["2.000", "2.000", "1.000"]
    assert table["last phase: speed-up"] == ["x1.00", "x1.00", "x2.00"]
    # A run that ended before is not held against what came after.
    short = aligned([one, summarize(steady[:5])])
    assert table_of(*short)["last phase: speed-up"] == ["x1.00", "-"]


def test_runs_of_unequal_length_are_compared_per_step() -> None:
    long, short = summarize(map(step, range(10))), summarize([step(i, 0.5) for i in range(4)])
    assert table_of(long, short)["speed-up, per step"] == ["x1.00 (steps)", "x2.00 (steps)"]


def test_balancing_time_counts_in_the_speed_up() -> None:
    """The steps of the second run take half as long.

    The time between its steps is as long as the steps.
    """
    one = summarize([*map(step, range(10)), end(seconds=10.5)])
    half = [step(i, 0.5) for i in range(10)]
    two = summarize([*half, end(seconds=10.0)])
    assert (two.seconds, two.run_seconds) == (5.0, 10.0)
    assert (two.measure_seconds, two.decide_seconds, two.move_seconds) == (0.25, 0.5, 1.0)
    table = table_of(one, two)
    assert table["seconds, all steps"] == ["10.0", "5.0"]
    assert table["seconds, whole run"] == ["10.5", "10.0"]
    assert table["measure + decide + move"] == ["1.75", "1.75"]
    assert table["speed-up"] == ["x1.00", "x1.05"]
    # One that still runs has its steps only.
    table = table_of(one, summarize(half))
    assert table["seconds, whole run"] == ["10.5", "-"]
    assert table["measure + decide + move"] == ["1.75", "-"]
    assert table["speed-up"] == ["x1.00", "x2.00 (steps)"]


def test_differing_config_keys_are_listed() -> None:
    one = {"name": "a", "train": {"steps": 6, "lr": 0.1}, "balance": {"balancer": "none"}}
    balance = {"balancer": "none", "initial": [2, 4]}
    other = {"name": "b", "train": {"steps": 4, "lr": 0.1}, "balance": balance}
    told = differences([one, other])
    assert told == {"balance.initial": [None, [2, 4]], "train.steps": [6, 4]}
    line = difference_line(told)
    assert line == "the configs differ in balance.initial (not set, [2, 4]), train.steps (6, 4)"
    assert difference_line(differences([one, one | {"name": "c"}])) == "the configs are the same"


def test_verdict_compares_loss_and_digests() -> None:
    one, same = summarize([step(0), end("aa")]), summarize([step(0), end("aa")])
    other, cut = summarize([step(0), end("bb")]), summarize([step(0)])
    equal = "same loss and same weights, to the last bit"
    assert verdict([("a", one), ("b", same)]) == equal
    assert "different weights" in verdict([("a", one), ("b", other)])
    buffers = [(name, replace(one, buffers_digest=name)) for name in "cd"]
    assert verdict([buffers[0], buffers[0]]) == f"{equal}, buffers included"
    assert verdict([("a", one), buffers[0]]) == equal, "an old log does not tell"
    assert verdict(buffers).startswith("same loss and same weights, but different buffers")
    assert table_of(one, *dict(buffers).values())["buffers"] == ["-", "c", "d"]
    assert "has not ended" in verdict([("a", one), ("b", cut)])


def test_unequal_times_of_equal_steps_are_noise() -> None:
    """All runs do the same work until the first layer moves."""

    def runs(
        seconds: float, count: int = 6, layers: tuple[int, ...] = (2, 2)
    ) -> list[tuple[str, Summary]]:
        still = summarize(map(step, range(count)))
        return [("a", still), ("b", summarize([step(i, seconds, layers) for i in range(count)]))]

    line = noise(runs(1.2), BALANCING)
    assert line is not None
    assert line.startswith("from step 1 to 5 all did the same work, at 1.000 and 1.200 s a step")
    assert noise(runs(1.05), BALANCING) is None
    assert noise(runs(1.2, count=4), BALANCING) is None, "too few to say"
    assert noise(runs(1.2, layers=(3, 1)), BALANCING) is None, "other work"
    assert noise(runs(1.2), BALANCING | {"pipeline.schedule": ["1f1b", "zb-h1"]}) is None
    assert noise(runs(1.2), None) is None


def test_steps_after_a_change_or_move_do_not_count_as_noise() -> None:
    """Attention becomes sparse at step 6 in both runs. Layers move in the second run.

    Steps after either event are no measure of the machine's noise.
    """

    def runs(early: float, at: int) -> list[tuple[str, Summary]]:
        static = [step(i, 2.0 if i < at else 1.0) for i in range(24)]
        moved = [step(i, early if i < at else 0.7, (2, 2) if i < at else (3, 1)) for i in range(24)]
        return [("a", summarize(changed(at, static))), ("b", summarize(changed(at, moved)))]

    assert noise(runs(2.0, 6), BALANCING) is None
    told = noise(runs(3.0, 6), BALANCING)
    assert told is not None
    assert told.startswith("from step 1 to 5 all did the same work, at 2.000 and 3.000 s a step")
    assert noise(runs(3.0, 4), BALANCING) is None, "too few to say"
    # The work is the same, but one run has moved: its steps from there on are not counted, nor
    # those of the other.
    static = summarize([step(i, 2.0 if i < 8 else 9.0) for i in range(24)])
    moved = summarize([step(i, 2.0, (2, 2) if i < 8 else (3, 1)) for i in range(24)])
    assert noise([("a", static), ("b", moved)], BALANCING) is None


@pytest.mark.parametrize(
    ("seconds", "load", "said"),
    [
        (0.8, 5.1, "b: x1.25 in the last phase, same"),
        (1.03, 5.1, "b: measured x0.97, predicted x1.25 in the last phase: the machine was busy "
         "(load 5.1 on 2 cores), same"),
        (0.5, 5.1, "b: measured x2.00, predicted x1.25 in the last phase: the machine was busy "
         "(load 5.1 on 2 cores), same"),
        (1.03, 2.1, "b: measured x0.97, predicted x1.25 in the last phase, same"),
        (1.03, None, "b: measured x0.97, predicted x1.25 in the last phase, same"),
    ],
)  # fmt: skip
def test_conclusion_has_the_gain_of_the_last_phase(
    seconds: float, load: float | None, said: str
) -> None:
    """Half of the model is frozen at step 4. At step 6 the second run moves layers."""
    done = replace(end(), load=load, cores=None if load is None else 2)
    static = summarize([*changed(4, [step(i) for i in range(12)]), end()])
    moving = [step(i, 1.0 if i < 6 else seconds, (2, 2) if i < 6 else (3, 1)) for i in range(12)]
    moved = summarize([*changed(4, moving[:6]), move(6, 1), *moving[6:], done])
    named = list(zip("ab", aligned([static, moved]), strict=True))
    assert conclusion(named, BALANCING).startswith(said)
    # Other keys than the balancer's explain a gain too, and so does a move before the last change.
    plain = f"b: x{1 / seconds:.2f} in the last phase, same"
    assert conclusion(named, {"pipeline.schedule": ["1f1b", "zb-h1"]}).startswith(plain)
    early = replace(moved, rebalances=(move(2, 1),))
    assert conclusion([named[0], ("b", early)], {}).startswith(plain)


def test_conclusion_without_common_work_is_the_verdict() -> None:
    """The work changes at step 6, after the end of the second run."""
    whole = summarize(changed(6, [step(i) for i in range(12)]))
    one, short = aligned([whole, summarize([step(0)])])
    runs = [("a", one), ("b", short)]
    assert conclusion(runs, {}) == verdict(runs)
