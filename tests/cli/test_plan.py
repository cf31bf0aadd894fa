"""`dynmo plan` for one pipeline: JSON, text and refused input."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.cli.plans import FIELDS, answer
from tests.cli.runs import Run, assert_refused


def test_json_fields_and_values(plan: Run, costs_file: Path) -> None:
    options = ("--ranks", 4, "--microbatches", 8, "--balancer", "exact", "--schedule", "zb-h1")
    answered = answer(plan, "--costs", costs_file, *options)
    assert list(answered) == FIELDS
    given = [answered[key] for key in ("schedule", "balancer", "ranks", "microbatches")]
    assert given == ["zb-h1", "exact", 4, 8]
    assert sum(answered["partition"]) == 10
    assert max(answered["stage_cost"]) == pytest.approx(9e-3)
    apart = 9e-3 - min(answered["stage_cost"])
    assert answered["imbalance"] == pytest.approx(apart / (33e-3 / 4))
    assert answered["lower_bound"] <= answered["span"] <= answered["makespan"]
    assert answered["bubble_ratio"] == pytest.approx(1 - 8 * 9e-3 / answered["span"])
    assert len(answered["memory"]) == 4
    assert set(answered["alternatives"]) == {"balancers", "schedules", "microbatches", "ranks"}
    best = answered["alternatives"]["schedules"][0]
    assert best["gain"] == pytest.approx(1 - best["span"] / answered["span"])


def test_options_default_to_the_costs_file(plan: Run, costs_file: Path) -> None:
    answered = answer(plan, "--costs", costs_file, "--no-alternatives")
    given = [answered[key] for key in ("schedule", "ranks", "microbatches", "alternatives")]
    assert given == ["1f1b", 2, 8, {}], "the file's"
    # Moves are from where the layers were.
    assert answered["partition"] == [5, 5] or answered["moves"]
    of_folder = answer(plan, "--costs", costs_file.parent, "--no-alternatives")
    assert of_folder["partition"] == answered["partition"], "a run's folder"


def test_minimal_costs_file_is_enough(plan: Run, tmp_path: Path) -> None:
    path = tmp_path / "hand.json"
    path.write_text('{"f": [1, 1, 2, 1], "b": [1, 1, 2, 1], "w": [1, 1, 2, 1], "comm": 0.1}')
    options = ("--costs", path, "--ranks", 2, "--microbatches", 4)
    answered = answer(plan, *options)
    assert answered["schedule"] == "zb-auto", "the default of dynmo train"
    assert answered["partition"] in ([2, 2], [3, 1])
    assert answered["memory"] == [0, 0]
    makespan = answer(plan, *options, "--objective", "makespan", "--no-alternatives")
    assert makespan["objective"] == "makespan"


def test_text_output(plan: Run, costs_file: Path) -> None:
    """Reasons for impossible choices are too long for a column. They stand below their table."""
    options = ("--ranks", 4, "--microbatches", 6, "--schedule", "zb-h1", "--memory-limit", "1GiB")
    out = plan("--costs", costs_file, *options).good
    bars = [line for line in out.splitlines() if line.startswith("rank ")]
    assert len(bars) == 4
    assert all("F" in bar and "B" in bar and "W" in bar for bar in bars)
    assert any("F" * 20 + "B" * 20 + "W" * 20 in bar for bar in bars), "the longest fills a line"
    assert "embedding" in bars[0]
    words = ["step", "lower bound", "imbalance", "of the limit of 1,024.0 MiB", "moves"]
    words += ["other balancers", "other schedules", "other microbatches, same global batch"]
    assert all(word in out for word in [*words, "rank-seconds"])
    assert re.search(r"│ interleaved-1f1b .*│ not possible", out)
    assert re.search(r"(?m)^  interleaved-1f1b: .*microbatches", out)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-auto"])
def test_last_line_is_the_fastest_schedule(plan: Run, costs_file: Path, schedule: str) -> None:
    options = ("--costs", costs_file, "--ranks", 4, "--schedule", schedule)
    answered = answer(plan, *options)
    (fastest, *_) = answered["alternatives"]["schedules"]
    line = plan(*options).out.splitlines()[-1]
    if schedule == "1f1b":
        saved = 100 * (1 - fastest["span"] / answered["span"])
        assert line.startswith(f"{fastest['choice']}: ")
        assert f", {saved:.0f} % less than 1f1b" in line
        assert "MiB instead of" in line
    else:
        assert fastest["gain"] <= 0.005
        assert re.fullmatch(r"zb-auto: [\d.]+ ms(, \d+ % less than [\w-]+)?", line)


@pytest.mark.parametrize(
    ("options", "mentions"),
    [
        (("--schedule", "zb-h3"), ["zb-h3"]),
        (("--balancer", "best"), ["best"]),
        (("--ranks", "0"), ["--ranks", "1"]),
        (("--microbatches", "0"), ["--microbatches", "1"]),
        (("--ranks", "11"), ["11 ranks", "10"]),
        (
            ("--schedule", "interleaved-1f1b", "--microbatches", "5"),
            ["5 microbatches", "2 ranks", "4 or 6"],
        ),
        (("--memory-limit", "much"), ["--memory-limit much"]),
        (("--memory-limit", "0"), ["--memory-limit 0"]),
        (("--memory-limit", "100MiB"), ["104857600"]),
        (("--memory-limit", "1GiB,2GiB,3GiB"), ["3 memory limits for 2 ranks"]),
        (("--memory-limit", "1GiB,much"), ["--memory-limit 1GiB,much: not a size"]),
        (("--memory-limit", "1GiB,100KiB"), ["102400", "rank 1"]),
        (("--speeds", "1"), ["1 speeds for 2 ranks"]),
        (("--speeds", "1,0"), ["--speeds 1,0: must be greater than 0"]),
        (("--speeds", "1,-1"), ["--speeds 1,-1: must be greater than 0"]),
        (("--speeds", "1,x"), ["--speeds 1,x: must be a valid number"]),
        (("--speeds", "1,1", "--fewest-ranks", "0.1"), ["--speeds", "--fewest-ranks"]),
        (("--recompute", "some"), ["--recompute", "some", "auto"]),
        (("--cost", "costs.json"), ["--cost", "costs.json", "parameters"]),
        (("--gpus", "4"), ["--gpus", "--global-batch"]),
        (("--zero", "1"), ["--zero", "--gpus"]),
        (("--gpus", "4", "--global-batch", "8", "--ranks", "2"), ["--ranks", "--gpus"]),
        (("--gpus", "4", "--global-batch", "8", "--cost", "parameters"), ["--cost", "--gpus"]),
        (("--gpus", "0", "--global-batch", "8"), ["--gpus", "1"]),
        (("--gpus", "4", "--global-batch", "8", "--micro-batch", "one"), ["--micro-batch one"]),
        (("--gpus", "4", "--global-batch", "8", "--bandwidth", "fast"), ["--bandwidth fast"]),
        (("--gpus", "4", "--global-batch", "0"), ["--global-batch", "1"]),
        (("--gpus", "4", "--global-batch", "8", "--micro-batch", "0"), ["--micro-batch", "1"]),
        (("--gpus", "4", "--global-batch", "8", "--bandwidth", "0"), ["--bandwidth", "0"]),
        (("--gpus", "4", "--global-batch", "8", "--zero", "2"), ["--zero", "1"]),
        (("--gpus", "4", "--global-batch", "7", "--micro-batch", "2"), ["global batch of 7"]),
        (("--gpus", "4", "--global-batch", "8", "--memory-limit", "20MiB"), ["20971520"]),
        (("--fewest-ranks", -1), ["--fewest-ranks"]),
        (("--fewest-ranks", "nan"), ["--fewest-ranks"]),
        (("--fewest-ranks", "inf"), ["--fewest-ranks inf"]),
        (("--fewest-ranks", 0, "--megatron"), ["--megatron", "--fewest-ranks"]),
        (("--fewest-ranks", 0, "--cost", "parameters"), ["--cost", "--fewest-ranks"]),
        (("--fewest-ranks", 0, "--ranks", 40), ["40", "10"]),
        (("--fewest-ranks", 0, "--zero", 1), ["--zero", "--gpus"]),
        (("--fewest-ranks", 0, "--gpus", 4), ["--gpus", "--global-batch"]),
    ],
)
def test_wrong_options_are_refused(
    plan: Run, costs_file: Path, options: tuple[object, ...], mentions: list[str]
) -> None:
    assert_refused(plan("--costs", costs_file, *options), *mentions)


def test_slow_ranks_and_ranks_of_little_memory_get_fewer_layers(
    plan: Run, costs_file: Path
) -> None:
    options = ("--costs", costs_file, "--schedule", "zb-h1", "--no-alternatives")
    even = answer(plan, *options)
    slow = answer(plan, *options, "--speeds", "0.4,1")
    assert slow["speeds"] == [0.4, 1.0]
    assert slow["partition"][0] < even["partition"][0]
    assert even["span"] < slow["span"] < even["span"] / 0.4
    assert "0.4, 1" in plan(*options, "--speeds", "0.4,1").out
    roomy, tight = even["memory"]
    tight = tight * 9 // 10
    small = answer(plan, *options, "--memory-limit", f"{4 * roomy},{tight}")
    assert small["memory_limit"] == [4 * roomy, tight]
    assert small["memory"][1] <= tight
    assert small["partition"][1] < even["partition"][1]


def test_missing_or_wrong_costs_are_refused(plan: Run, tmp_path: Path) -> None:
    assert_refused(plan("--ranks", 4), "--costs")
    path = tmp_path / "hand.json"
    path.write_text('{"f": [1, NaN], "b": [1, 1], "w": [1, 1]}')
    done = plan("--costs", path, "--ranks", 2, "--microbatches", 4)
    assert_refused(done, path, "f[1] = nan: must be a finite number")
    path.write_text('{"f": [1, 1], "b": [1, 1], "w": [1, 1]}')
    assert_refused(plan("--costs", path, "--microbatches", 4), "--ranks")


def test_huge_sizes_do_not_overflow(plan: Run, tmp_path: Path) -> None:
    path = tmp_path / "large.json"
    times = {key: [1] * 8 for key in "fbw"}
    path.write_text(json.dumps({**times, "weight_bytes": [1 << 60] * 8}))
    options = ("--costs", path, "--ranks", 2, "--microbatches", 4)
    assert answer(plan, *options, "--no-alternatives")["partition"] == [4, 4]
    assert_refused(plan(*options, "--memory-limit", "1GiB"), "1073741824")


def test_recompute_auto_makes_a_plan_fit(plan: Run, costs_file: Path) -> None:
    options = ("--costs", costs_file, "--schedule", "1f1b", "--no-alternatives", "--memory-limit")
    assert_refused(plan(*options, "110MiB"))
    answered = answer(plan, *options, "110MiB", "--recompute", "auto")
    assert 0 < len(answered["recompute"]) < 10
    assert max(answered["memory"]) <= 110 << 20
    every = answer(plan, *options, "110MiB", "--recompute", "all")
    assert every["recompute"] == list(range(10))
    assert answered["span"] < every["span"]
    assert "recomputed" in plan(*options, "110MiB", "--recompute", "auto").out
    assert answer(plan, *options, "10GiB", "--recompute", "auto")["recompute"] == []


@pytest.mark.parametrize("schedule", ["zb-v", "v-half", "v-min"])
def test_v_shape_on_one_rank_fits_a_memory_limit(
    plan: Run, costs_file: Path, schedule: str
) -> None:
    options = ("--ranks", 1, "--schedule", schedule, "--memory-limit", "1GiB")
    answered = answer(plan, "--costs", costs_file, *options, "--no-alternatives")
    assert len(answered["partition"]) == 2
