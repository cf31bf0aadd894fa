"""`dynmo schedule`: JSON, drawings, torch's CSV format and refused input."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.plans import answer
from tests.cli.runs import Run, assert_refused

UNIT = ("--tf", "1", "--tb", "1", "--tw", "1")
FIELDS = ["schedule", "ranks", "microbatches", "span", "makespan", "bubble_ratio"]
FIELDS += ["makespan_bubble_ratio", "idle_ratio", "lower_bound", "peak_memory", "seconds"]


@pytest.fixture
def run(dynmo: Run) -> Run:
    return dynmo


def asked(name: str = "zb-h1", ranks: object = 4, microbatches: object = 8) -> tuple[object, ...]:
    return ("schedule", "--schedule", name, "--ranks", ranks, "--microbatches", microbatches)


def test_costs_are_equal_by_default(dynmo: Run) -> None:
    plain = answer(dynmo, *asked()) | {"seconds": 0}
    assert plain == answer(dynmo, *asked(), *UNIT) | {"seconds": 0}
    told = "equal costs by default: F, B and W take 1 each"
    assert told in dynmo(*asked()).out
    assert told not in dynmo(*asked(), *UNIT).out


@pytest.mark.parametrize(
    ("name", "span", "ops"), [("gpipe", 102, 16), ("1f1b", 107, 16), ("zb-h1", 93, 24)]
)
def test_json_fields_and_simulated_times(run: Run, name: str, span: float, ops: int) -> None:
    times = ("--tf", 3, "--tb", 4, "--tw", 2, "--tcomm", 0.5)
    result = answer(run, *asked(name), *times)
    assert list(result) == [*FIELDS, "ops"]
    assert (result["schedule"], result["ranks"], result["microbatches"]) == (name, 4, 8)
    assert [len(row) for row in result["ops"]] == [ops] * 4
    assert (result["span"], result["makespan"], result["lower_bound"]) == (span, span, 82)
    ratios = [result[key] for key in ("bubble_ratio", "makespan_bubble_ratio", "idle_ratio")]
    assert ratios == pytest.approx([1 - 8 * (3 + 4 + 2) / span] * 3)
    assert result["seconds"] > 0


def test_peak_memory_is_in_forward_activations(run: Run) -> None:
    assert answer(run, *asked("gpipe"), *UNIT)["peak_memory"] == [8, 8, 8, 8]
    assert answer(run, *asked("1f1b"), *UNIT)["peak_memory"] == [4, 3, 2, 1]
    assert answer(run, *asked("zb-h1"), *UNIT)["peak_memory"] == [4, 3.5, 3, 2.5]
    assert answer(run, *asked("zb-h1"), *UNIT, "--w-memory", 0)["peak_memory"] == [4, 3, 2, 1]
    assert answer(run, *asked("zb-h2"), *UNIT)["peak_memory"][0] == 7


def test_the_objective_chooses_the_bound(run: Run) -> None:
    span, makespan = (
        answer(run, *asked(), *UNIT, "--objective", objective) for objective in ("span", "makespan")
    )
    assert span["lower_bound"] == answer(run, *asked(), *UNIT)["lower_bound"] == 24
    assert makespan["lower_bound"] == 24 + 3  # the last rank waits for three F's
    assert makespan == span | {key: makespan[key] for key in ("lower_bound", "seconds")}


@pytest.mark.parametrize("microbatches", range(1, 12))
def test_rounding_never_puts_the_bound_above_the_span(run: Run, microbatches: int) -> None:
    result = answer(run, *asked("1f1b", 1, microbatches), "--tf", 0.1, "--tb", 0.7, "--tw", 0.3)
    assert result["lower_bound"] <= result["span"]
    assert result["lower_bound"] == pytest.approx(result["span"])


def test_json_output_is_the_only_output(run: Run) -> None:
    assert list(answer(run, *asked(), *UNIT, "--grid")) == [*FIELDS, "ops", "grid"]


def test_plot_is_an_svg_file(run: Run, tmp_path: Path) -> None:
    assert run(*asked("zb-v"), *UNIT, "--plot", tmp_path / "ops.svg").status == 0
    assert "<svg" in (tmp_path / "ops.svg").read_text()
    assert run(*asked(), *UNIT, "--plot", tmp_path / "ops.txt").status == 2


def test_text_output(run: Run) -> None:
    out = run(*asked(), *UNIT).good
    assert "zb-h1: 4 ranks, 8 microbatches" in out
    assert "makespan bubble ratio" in out
    assert "|F0" not in out
    assert "|F0" in run(*asked(), *UNIT, "--grid")[1]
    assert "0 | F0 F1 F2 F3 B0 W0" in run(*asked(), *UNIT, "--ops")[1]


def test_the_grid_is_as_wide_as_the_terminal(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for columns, used in ((60, 60), (10, 32)):
        monkeypatch.setenv("COLUMNS", str(columns))
        lines = run(*asked(microbatches=100), *UNIT, "--grid")[1].splitlines()
        assert max(len(line) for line in lines if "|" in line) == used


# Costs from a file


@pytest.fixture
def costs(tmp_path: Path) -> Callable[..., Path]:
    def write(**fields: object) -> Path:
        path = tmp_path / "costs.json"
        path.write_text(json.dumps(fields))
        return path

    return write


def test_costs_are_read_from_a_file(run: Run, costs: Callable[..., Path]) -> None:
    f, b, w = [1, 2, 1.5], [2, 2, 1], [0.5, 1, 2]
    memory = {"mem_f": [100, 200, 300], "mem_b": [-50, -100, -300], "mem_w": [-50, -100, 0]}
    path = costs(f=f, b=b, w=w, comm=0.25, **memory, cap=[300, 500, 300])
    result = answer(run, *asked("zb-h1", 3, 6), "--costs", path)
    assert (result["span"], result["makespan"]) == (33, 34)
    # Rank 1 holds two microbatches and what a third one's W waits for.
    assert result["peak_memory"] == [300, 500, 300]


def test_caps_and_memory_limit_both_apply(run: Run, costs: Callable[..., Path]) -> None:
    path = costs(f=[1, 1], b=[1, 1], w=[1, 1], cap=[9, 1])
    done = run(*asked("zb-h1", 2, 4), "--costs", path)
    assert_refused(done, "rank 1 is 1.5", "limit of 1;", "1f1b and zb-auto")
    assert run(*asked("1f1b", 2, 4), "--costs", path).status == 0
    done = run(*asked("1f1b", 2, 4), "--costs", path, "--memory-limit", 1.5)
    assert_refused(done, "rank 0 is 2", "limit of 1.5", "zb-auto")


def test_memory_limit_may_be_met_exactly(run: Run) -> None:
    for name, limit in (("1f1b", 4), ("zb-h1", 4), ("zb-h2", 7), ("gpipe", 8)):
        assert run(*asked(name), *UNIT, "--memory-limit", limit)[0] == 0
        assert run(*asked(name), *UNIT, "--memory-limit", limit - 0.01)[0] == 2
    # A running sum of 1, -0.94 and -0.06 ends a rounding error above 7, which must not count.
    exact = (*asked("zb-h2", 4, 24), *UNIT, "--w-memory", 0.06)
    assert answer(run, *exact)["peak_memory"][0] > 7
    assert run(*exact, "--memory-limit", 7)[0] == 0


# Each mistake gives one line and status 2


@pytest.mark.parametrize(
    ("arguments", "mentions"),
    [
        ((*asked("zb-h2"), *UNIT, "--memory-limit", 4), ["rank 0 is 7", "limit of 4", "zb-auto"]),
        ((*asked(), *UNIT, "--memory-limit", "nan"), ["--memory-limit nan"]),
        ((*asked(), *UNIT, "--memory-limit", -1), ["--memory-limit -1"]),
        ((*asked(), *UNIT, "--chunks", 2), ["zb-h1", "2", "chunks"]),
        ((*asked(ranks=0), *UNIT), ["--ranks 0"]),
        ((*asked(microbatches=-3), *UNIT), ["--microbatches -3"]),
        ((*asked("zb-h3"), *UNIT), ["zb-h3", "zb-h1"]),
        ((*asked("interleaved-1f1b", 3, 7), *UNIT), ["7 microbatches", "3 ranks", "6 or 9"]),
        ((*asked(), "--tf", 1, "--tb", 1), ["--tw is missing", "none of them"]),
        ((*asked(), "--tw", 1), ["--tf is missing"]),
        ((*asked(), *UNIT, "--tcomm", -1), ["--tcomm -1"]),
        ((*asked(), "--tf", 1, "--tb", "inf", "--tw", 1), ["--tb inf"]),
        ((*asked(), "--tf", 1e308, "--tb", 1, "--tw", 1), ["the times"]),
        ((*asked(), *UNIT, "--w-memory", 1.5), ["--w-memory 1.5"]),
        ((*asked(), *UNIT, "--w-memory", -0.1), ["--w-memory -0.1"]),
        ((*asked(), *UNIT, "--w-memory", "nan"), ["--w-memory nan"]),
        ((*asked(), *UNIT, "--costs", "x.json"), ["--tf", "--costs"]),
        ((*asked(), "--costs", "x.json", "--tcomm", 1), ["--tcomm", "--costs"]),
        ((*asked(), "--costs", "x.json", "--w-memory", 2), ["--w-memory 2"]),
        ((*asked(), "--costs", "none/x.json"), ["none/x.json"]),
        ((*asked("zb-h1", 3, 4), *UNIT, "--exact", 0), ["--exact 0"]),
        (("schedule", "--ranks", 4), ["--schedule"]),
        (asked(microbatches="many"), ["--microbatches many", "integer"]),
        ((*asked(), *UNIT, "--objective", "speed"), ["--objective speed", "'makespan'"]),
    ],
)
def test_wrong_input_is_refused(
    run: Run, arguments: tuple[object, ...], mentions: list[str]
) -> None:
    assert_refused(run(*arguments), *mentions)


def test_infinite_memory_sum_is_refused(run: Run, costs: Callable[..., Path]) -> None:
    path = costs(f=[1, 1], b=[1, 1], w=[1, 1], mem_f=[1e308, 1], mem_b=[0, -1], mem_w=[-1e308, 0])
    assert_refused(run(*asked("1f1b", 2, 4), "--costs", path, "--json"), "memory")


def test_w_memory_is_refused_if_the_file_gives_memory(run: Run, costs: Callable[..., Path]) -> None:
    path = costs(f=[1], b=[1], w=[1], mem_f=[2], mem_b=[-1], mem_w=[-1])
    assert answer(run, *asked("1f1b", 1, 4), "--costs", path)["peak_memory"] == [2]
    done = run(*asked("1f1b", 1, 4), "--costs", path, "--w-memory", 0.5)
    assert_refused(done, "--w-memory", path)
    nothing = costs(f=[1], b=[1], w=[1], mem_f=[0], mem_b=[0], mem_w=[0])
    assert answer(run, *asked("1f1b", 1, 4), "--costs", nothing)["peak_memory"] == [0]
    done = run(*asked("1f1b", 1, 4), "--costs", nothing, "--w-memory", 0.5)
    assert_refused(done, "--w-memory", nothing)


def test_exact_improves_the_schedule_and_proves_the_bound(run: Run) -> None:
    answered = answer(run, *asked("1f1b", 3, 4), *UNIT, "--memory-limit", 3, "--exact", 5)
    proven = [answered[key] for key in ("schedule", "span", "lower_bound", "proven")]
    assert proven == ["exact", 14, 14, True]
    kept = answer(run, *asked("zb-h1", 3, 4), *UNIT, "--memory-limit", 3, "--exact", 5)
    assert (kept["schedule"], kept["span"], kept["proven"]) == ("zb-h1", 14, True)
    assert "proven" not in answer(run, *asked("zb-h1", 3, 4), *UNIT)


# -- torch's CSV -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["1f1b", "zb-h2", "zb-v", "interleaved-1f1b"])
def test_torch_csv_reads_back(run: Run, tmp_path: Path, name: str) -> None:
    path = tmp_path / "schedule.csv"
    written = answer(run, *asked(name), *UNIT, "--torch-csv", path)
    read = answer(run, "schedule", "--from-torch-csv", path, *UNIT)
    assert read["schedule"] == "torch"
    same = ("ranks", "microbatches", "ops", "peak_memory", "lower_bound")
    assert [read[key] for key in same] == [written[key] for key in same]
    every = written.get("every_message", written)
    assert (read["span"], read["makespan"]) == (every["span"], every["makespan"])


def test_torch_csv_matches_a_hand_written_file(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "schedule.csv"
    assert run(*asked("zb-h1", 2, 2), *UNIT, "--torch-csv", path)[0] == 0
    assert path.read_text(encoding="utf-8") == "0F0,0F1,0I0,0W0,0I1,0W1\n1F0,1I0,1F1,1I1,1W0,1W1\n"
    path.write_text("0F0,,0F1,0B0,0B1\n,1F0,1B0,1F1,1B1\n", encoding="utf-8")
    out = run("schedule", "--from-torch-csv", path, *UNIT, "--grid").good
    assert out.startswith("torch: 2 ranks, 2 microbatches")


@pytest.mark.parametrize(
    ("text", "options", "mentions"),
    [
        (None, (), ["schedule.csv"]),
        ("0F0,0I0,0X0\n", (), ["schedule.csv", "row 0, cell 2", "'0X0'"]),
        ("", (), ["schedule.csv"]),
        ("0F0,0B0\n", ("--ranks", 1), ["--ranks", "--from-torch-csv"]),
        ("0F0,0B0\n", ("--torch-csv", "missing/folder.csv"), ["missing/folder.csv"]),
        ("0F0,0B0\n", ("--memory-limit", 0.5), ["rank 0 is 1", "limit of 0.5"]),
    ],
)
def test_bad_torch_csv_is_refused(
    run: Run, tmp_path: Path, text: str | None, options: tuple[object, ...], mentions: list[str]
) -> None:
    path = tmp_path / "schedule.csv"
    if text is not None:
        path.write_text(text, encoding="utf-8")
    assert_refused(run("schedule", "--from-torch-csv", path, *UNIT, *options), *mentions)
