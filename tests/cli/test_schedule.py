from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import typer

import dynmo.cli
import dynmo.schedule.generators
from dynmo.cli import main
from dynmo.errors import RunError

UNIT = ("--tf", "1", "--tb", "1", "--tw", "1")
FIELDS = [
    "schedule",
    "ranks",
    "microbatches",
    "span",
    "makespan",
    "bubble_ratio",
    "makespan_bubble_ratio",
]
FIELDS += ["idle_ratio", "lower_bound", "peak_memory", "seconds"]

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs the command line in this process: exit status, stdout, stderr."""

    def call(*arguments: object) -> tuple[int, str, str]:
        status = main([str(x) for x in arguments])
        out = capsys.readouterr()
        return status, out.out, out.err

    return call


def asked(name: str = "zb-h1", ranks: object = 4, microbatches: object = 8) -> tuple[object, ...]:
    return ("schedule", "--schedule", name, "--ranks", ranks, "--microbatches", microbatches)


def answer(run: Run, *arguments: object) -> dict[str, Any]:
    status, out, err = run(*arguments, "--json")
    assert (status, err) == (0, "")
    return json.loads(out)


def replay(
    ops: list[list[list[Any]]],
    f: Sequence[float],
    b: Sequence[float],
    w: Sequence[float],
    comm: float,
) -> list[list[tuple[float, float]]]:
    """A simulator from the contract's `ops` alone: start and end of every op."""
    end: dict[tuple[str, int, int], float] = {}
    rows: list[list[tuple[float, float]]] = [[] for _ in ops]
    while any(len(row) < len(done) for row, done in zip(rows, ops, strict=True)):
        for rank, row in enumerate(ops):
            if len(rows[rank]) == len(row):
                continue
            kind, s, j = row[len(rows[rank])]
            needs = [] if kind != "F" or s == 0 else [(("F", s - 1, j), comm)]
            if kind in ("B", "BW"):
                needs = [(("F", s, j), 0.0)] + (
                    [(("B", s + 1, j), comm)] if s + 1 < len(ops) else []
                )
            if kind == "W":
                needs = [(("B", s, j), 0.0)]
            if any(op not in end for op, _ in needs):
                continue
            free = rows[rank][-1][1] if rows[rank] else 0.0
            start = max([free, *(end[op] + link for op, link in needs)])
            stop = start + {"F": f[s], "B": b[s], "W": w[s], "BW": b[s] + w[s]}[kind]
            end["B" if kind == "BW" else kind, s, j] = stop
            rows[rank].append((start, stop))
    return rows


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1", "zb-h2"])
def test_the_contract(run: Run, name: str) -> None:
    times = ("--tf", 3, "--tb", 4, "--tw", 2, "--tcomm", 0.5)
    result = answer(run, *asked(name), *times, "--ops")
    assert list(result) == [*FIELDS, "ops"]
    assert (result["schedule"], result["ranks"], result["microbatches"]) == (name, 4, 8)
    assert [len(row) for row in result["ops"]] == [24 if name.startswith("zb") else 16] * 4
    rows = replay(result["ops"], [3] * 4, [4] * 4, [2] * 4, 0.5)
    span = max(row[-1][1] - row[0][0] for row in rows)
    makespan = max(row[-1][1] for row in rows)
    busy = 8 * (3 + 4 + 2)
    assert (result["span"], result["makespan"]) == (span, makespan)
    assert result["bubble_ratio"] == pytest.approx(1 - busy / span)
    assert result["makespan_bubble_ratio"] == pytest.approx(1 - busy / makespan)
    assert result["idle_ratio"] == pytest.approx(1 - busy / span)
    assert busy <= result["lower_bound"] <= span
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
    assert {k: v for k, v in span.items() if k not in ("lower_bound", "seconds")} == {
        k: v for k, v in makespan.items() if k not in ("lower_bound", "seconds")
    }


@pytest.mark.parametrize("microbatches", range(1, 12))
def test_a_bound_that_is_reached_is_not_exceeded_by_rounding(run: Run, microbatches: int) -> None:
    result = answer(run, *asked("1f1b", 1, microbatches), "--tf", 0.1, "--tb", 0.7, "--tw", 0.3)
    assert result["lower_bound"] <= result["span"]
    assert result["lower_bound"] == pytest.approx(result["span"])


def test_json_is_all_there_is_on_stdout(run: Run) -> None:
    status, out, err = run(*asked(), *UNIT, "--json", "--ops", "--grid")
    assert (status, err) == (0, "")
    assert out.endswith("}\n")
    assert out.count("\n") == 1
    assert list(json.loads(out)) == [*FIELDS, "ops", "grid"]


def test_for_people(run: Run) -> None:
    status, out, err = run(*asked(), *UNIT)
    assert (status, err) == (0, "")
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


def test_costs_from_a_file(run: Run, costs: Callable[..., Path]) -> None:
    f, b, w = [1, 2, 1.5], [2, 2, 1], [0.5, 1, 2]
    memory = {"mem_f": [100, 200, 300], "mem_b": [-50, -100, -300], "mem_w": [-50, -100, 0]}
    path = costs(f=f, b=b, w=w, comm=0.25, **memory, cap=[300, 500, 300])
    result = answer(run, *asked("zb-h1", 3, 6), "--costs", path, "--ops")
    rows = replay(result["ops"], f, b, w, 0.25)
    assert result["makespan"] == max(row[-1][1] for row in rows)
    assert result["span"] == max(row[-1][1] - row[0][0] for row in rows)
    # Rank 1 holds two microbatches and what a third one's W waits for.
    assert result["peak_memory"] == [300, 500, 300]


def test_a_frozen_prefix(run: Run, costs: Callable[..., Path]) -> None:
    path = costs(f=[1, 1, 1], b=[0, 0, 1], w=[0, 0, 1])
    result = answer(run, *asked("zb-h1", 3, 4), "--costs", path, "--ops")
    assert [{kind for kind, _, _ in row} for row in result["ops"]] == [
        {"F"},
        {"F"},
        {"F", "B", "W"},
    ]
    assert result["peak_memory"] == [0, 0, 1]


def test_caps_and_the_limit_both_hold(run: Run, costs: Callable[..., Path]) -> None:
    path = costs(f=[1, 1], b=[1, 1], w=[1, 1], cap=[9, 1])
    status, out, err = run(*asked("zb-h1", 2, 4), "--costs", path)
    assert (status, out) == (2, "")
    assert err == (
        "dynmo: zb-h1: peak memory of rank 1 is 1.5, over the limit of 1; 1f1b and zb-auto "
        "would fit\n"
    )
    assert run(*asked("1f1b", 2, 4), "--costs", path)[0] == 0
    err = run(*asked("1f1b", 2, 4), "--costs", path, "--memory-limit", 1.5)[2]
    assert (
        err == "dynmo: 1f1b: peak memory of rank 0 is 2, over the limit of 1.5; zb-auto would fit\n"
    )


def test_a_limit_that_is_met_exactly(run: Run) -> None:
    for name, limit in (("1f1b", 4), ("zb-h1", 4), ("zb-h2", 7), ("gpipe", 8)):
        assert run(*asked(name), *UNIT, "--memory-limit", limit)[0] == 0
        assert run(*asked(name), *UNIT, "--memory-limit", limit - 0.01)[0] == 2
    # A running sum of 1, -0.94 and -0.06 ends a rounding error above 7, which must not count.
    exact = (*asked("zb-h2", 4, 24), *UNIT, "--w-memory", 0.06)
    assert answer(run, *exact)["peak_memory"][0] > 7
    assert run(*exact, "--memory-limit", 7)[0] == 0


# Each mistake gives one line and status 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            (*asked("zb-h2"), *UNIT, "--memory-limit", 4),
            (
                "zb-h2: peak memory of rank 0 is 7, over the limit of 4; 1f1b and zb-h1 and "
                "zb-auto would fit"
            ),
        ),
        (
            (*asked(), *UNIT, "--memory-limit", "nan"),
            "--memory-limit nan: a limit is a number of at least 0",
        ),
        ((*asked(), *UNIT, "--memory-limit", -1), "--memory-limit -1.0"),
        ((*asked(), *UNIT, "--chunks", 2), "zb-h1 has 1 stage a rank, not 2; leave chunks out"),
        ((*asked(ranks=0), *UNIT), "--ranks 0 --microbatches 8: at least 1 of each is needed"),
        ((*asked(microbatches=-3), *UNIT), "--ranks 4 --microbatches -3: at least 1"),
        (
            (*asked("zb-h3"), *UNIT),
            "unknown schedule 'zb-h3'; choose one of gpipe, 1f1b, zb-h1, zb-h2",
        ),
        (
            (*asked("interleaved-1f1b", 3, 7), *UNIT),
            "interleaved-1f1b: 7 microbatches are not a multiple of 3 ranks; use 6 or 9",
        ),
        (asked(), "no costs: give --tf, --tb and --tw (and --tcomm), or --costs FILE"),
        ((*asked(), "--tf", 1, "--tb", 1), "no costs: give"),
        ((*asked(), *UNIT, "--tcomm", -1), "--tcomm -1.0: a time is a number of at least 0"),
        ((*asked(), "--tf", 1, "--tb", "inf", "--tw", 1), "--tb inf: a time"),
        ((*asked(), "--tf", 1e308, "--tb", 1, "--tw", 1), "the times are so large"),
        ((*asked(), *UNIT, "--w-memory", 1.5), "w-memory is 1.5; it is a share between 0 and 1"),
        ((*asked(), *UNIT, "--costs", "x.json"), "--tf and --costs both give times"),
        ((*asked(), "--costs", "x.json", "--tcomm", 1), "--tcomm and --costs both give times"),
        (
            (*asked(), "--costs", "x.json", "--w-memory", 2),
            "--w-memory 2.0: it is a share between 0 and 1",
        ),
        (
            (*asked(), "--costs", "none/x.json"),
            "costs file none/x.json: cannot be read: No such file",
        ),
        # The usage errors of the command line itself.
        (("shedule",), "No such command 'shedule'. Did you mean 'schedule'?"),
        (("--colour",), "No such option: --colour"),
        (
            (*asked(), "--microbatch", 3),
            "No such option: --microbatch (Possible options: --microbatches",
        ),
        (("schedule", "--ranks", 4), "Missing option '--schedule'"),
        (("schedule", "--schedule"), "Option '--schedule' requires an argument"),
        (asked(ranks="many"), "Invalid value for '--ranks'"),
        ((*asked(), *UNIT, "--objective", "speed"), "Invalid value for '--objective'"),
        ((*asked(), *UNIT, "extra"), "Got unexpected extra argument"),
    ],
)
def test_wrong_input(run: Run, arguments: tuple[object, ...], message: str) -> None:
    status, out, err = run(*arguments)
    assert (status, out) == (2, "")
    assert err.startswith(f"dynmo: {message}")
    assert err.count("\n") == 1


def test_memory_that_sums_to_no_number(run: Run, costs: Callable[..., Path]) -> None:
    path = costs(f=[1, 1], b=[1, 1], w=[1, 1], mem_f=[1e308, 1], mem_b=[0, -1], mem_w=[-1e308, 0])
    status, out, err = run(*asked("1f1b", 2, 4), "--costs", path, "--json")
    assert (status, out) == (2, "")
    assert err == (
        "dynmo: the times or the memory are so large that their sum is not a number any "
        "more; choose a larger unit\n"
    )


def test_a_file_that_gives_memory_leaves_no_share_to_give(
    run: Run, costs: Callable[..., Path]
) -> None:
    path = costs(f=[1], b=[1], w=[1], mem_f=[2], mem_b=[-1], mem_w=[-1])
    assert answer(run, *asked("1f1b", 1, 4), "--costs", path)["peak_memory"] == [2]
    status, _, err = run(*asked("1f1b", 1, 4), "--costs", path, "--w-memory", 0.5)
    assert status == 2
    assert "--w-memory, but costs file" in err


# main()


def raising(error: BaseException) -> Callable[..., Any]:
    def make(*_: object) -> None:
        raise error

    return make


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (RunError("rank 3\nis gone"), 1, "dynmo: rank 3 is gone"),
        (KeyboardInterrupt(), 130, "dynmo: interrupted"),
        (typer.Abort(), 130, "dynmo: interrupted"),
    ],
)
def test_errors_become_a_line(
    run: Run, monkeypatch: pytest.MonkeyPatch, error: BaseException, status: int, line: str
) -> None:
    monkeypatch.setitem(dynmo.schedule.generators.GENERATORS, "zb-h1", raising(error))
    assert run(*asked(), *UNIT) == (status, "", line + "\n")


def test_a_defect_says_where(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(dynmo.schedule.generators.GENERATORS, "zb-h1", raising(KeyError("oops")))
    status, out, err = run(*asked(), *UNIT)
    assert (status, out) == (1, "")
    assert err.startswith(
        "dynmo: a defect in dynmo, please report it: dynmo/schedule/generators.py:"
    )
    assert err.endswith("KeyError: 'oops' (DYNMO_TRACEBACK=1 shows more)\n")
    assert err.count("\n") == 1
    monkeypatch.setenv("DYNMO_TRACEBACK", "1")
    err = run(*asked(), *UNIT)[2]
    assert "Traceback (most recent call last)" in err
    assert err.splitlines()[-1].startswith("dynmo: a defect")


def test_help_and_version(run: Run) -> None:
    assert run("--version") == (0, f"dynmo {version('dynmo')}\n", "")
    status, out, err = run()
    assert (status, err) == (0, "")
    assert "schedule" in out
    status, out, _ = run("schedule", "--help")
    assert status == 0
    assert all(
        option in out
        for option in ("--memory-limit", "--objective", "--w-memory", "--chunks", "--json")
    )


def dynmo_process(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "dynmo", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        **options,
    )


def test_as_a_process() -> None:
    done = dynmo_process(*map(str, asked()), *UNIT, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["span"] == 27
    done = dynmo_process(*map(str, asked("zb-h9")), *UNIT)
    assert (done.returncode, done.stdout) == (2, "")


def test_whoever_reads_may_stop_reading() -> None:
    command = [
        sys.executable,
        "-m",
        "dynmo",
        *map(str, asked(microbatches=2000)),
        *UNIT,
        "--json",
        "--ops",
    ]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read(10) == '{"schedule'
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait(60) == 1


def test_exact_betters_and_proves(run: Run) -> None:
    answered = answer(run, *asked("1f1b", 3, 4), *UNIT, "--memory-limit", 3, "--exact", 5)
    assert (
        answered["schedule"],
        answered["span"],
        answered["lower_bound"],
        answered["proven"],
    ) == ("exact", 14, 14, True)
    kept = answer(run, *asked("zb-h1", 3, 4), *UNIT, "--memory-limit", 3, "--exact", 5)
    assert (kept["schedule"], kept["span"], kept["proven"]) == ("zb-h1", 14, True)
    assert "proven" not in answer(run, *asked("zb-h1", 3, 4), *UNIT)
    assert run(*asked("zb-h1", 3, 4), *UNIT, "--exact", 0)[0] == 2


# The published table, through the command line

TABLE_5 = json.loads((Path(__file__).parents[1] / "facts" / "zero_bubble_table5.json").read_text())[
    "rows"
]
# The published runs interleave single layers: 24, 32, 48 and 64 of them.
CHUNKS = {"1.5B": 3, "6.2B": 4, "14.6B": 3, "28.3B": 2}


@pytest.mark.parametrize("row", TABLE_5, ids=lambda row: f"{row['model']}-m{row['microbatches']}")
def test_the_published_table(run: Run, row: dict[str, Any]) -> None:
    p = row["ranks"]
    times = (
        "--tf",
        row["t_f_ms"],
        "--tb",
        row["t_b_ms"],
        "--tw",
        row["t_w_ms"],
        "--tcomm",
        row["t_comm_ms"],
    )
    times = (*times, "--w-memory", row["w_memory_share"])

    def bubble(name: str, *more: object) -> dict[str, Any]:
        return answer(run, *asked(name, p, row["microbatches"]), *times, *more)

    for name in ("1f1b", "zb-h1", "zb-h2"):
        assert bubble(name)["bubble_ratio"] == pytest.approx(row["bubble"][name], abs=5e-5)
    interleaved = bubble("interleaved-1f1b", "--chunks", CHUNKS[row["model"]])
    assert interleaved["bubble_ratio"] == pytest.approx(row["bubble"]["interleaved-1f1b"], abs=5e-5)
    assert interleaved["every_message"]["bubble_ratio"] > interleaved["bubble_ratio"]
    for key, limit in (("zb-1p", p), ("zb-2p", 2 * p)):
        ratio = bubble("zb-auto", "--memory-limit", limit)
        assert ratio["bubble_ratio"] <= row["bubble"][key] + 5e-5
        assert ratio["lower_bound"] <= ratio["span"]
        assert max(ratio["peak_memory"]) <= limit * (1 + 1e-9)
    if row["microbatches"] == 3 * p:
        ratio = bubble("zb-v")
        assert (
            round(ratio["bubble_ratio"], 4)
            <= {"1.5B": 0.0703, "6.2B": 0.0403, "14.6B": 0.0498, "28.3B": 0.0531}[row["model"]]
        )
        assert max(ratio["peak_memory"]) <= p * (1 + 1e-9)


# -- torch's CSV -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["1f1b", "zb-h2", "zb-v", "interleaved-1f1b"])
def test_torch_csv_reads_back(run: Run, tmp_path: Path, name: str) -> None:
    path = tmp_path / "schedule.csv"
    status, out, err = run(*asked(name), *UNIT, "--json", "--ops", "--torch-csv", path)
    assert (status, err) == (0, "")
    written = json.loads(out)
    status, out, err = run("schedule", "--from-torch-csv", path, *UNIT, "--json", "--ops")
    assert (status, err) == (0, "")
    read = json.loads(out)
    assert read["schedule"] == "torch"
    same = ("ranks", "microbatches", "ops", "peak_memory", "lower_bound")
    assert [read[key] for key in same] == [written[key] for key in same]
    every = written.get("every_message", written)
    assert (read["span"], read["makespan"]) == (every["span"], every["makespan"])


def test_torch_csv_is_written_and_read_by_hand(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "schedule.csv"
    assert run(*asked("zb-h1", 2, 2), *UNIT, "--torch-csv", path)[0] == 0
    assert path.read_text(encoding="utf-8") == "0F0,0F1,0I0,0W0,0I1,0W1\n1F0,1I0,1F1,1I1,1W0,1W1\n"
    path.write_text("0F0,,0F1,0B0,0B1\n,1F0,1B0,1F1,1B1\n", encoding="utf-8")
    status, out, _ = run("schedule", "--from-torch-csv", path, *UNIT, "--grid")
    assert status == 0
    assert out.startswith("torch: 2 ranks, 2 microbatches")


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        (None, (), "schedule.csv: cannot be read: No such file or directory"),
        ("0F0,0I0,0X0\n", (), "schedule.csv: row 0, cell 2 of torch's CSV: '0X0' is not an action"),
        ("", (), "schedule.csv: torch's CSV is empty"),
        (
            "0F0,0B0\n",
            ("--ranks", 1),
            "--ranks and --from-torch-csv both say what the schedule is; use one of them",
        ),
        (
            "0F0,0B0\n",
            ("--torch-csv", "missing/folder.csv"),
            "torch CSV missing/folder.csv cannot be written",
        ),
        (
            "0F0,0B0\n",
            ("--memory-limit", 0.5),
            "torch: peak memory of rank 0 is 1, over the limit of 0.5",
        ),
    ],
)
def test_torch_csv_that_is_refused(
    run: Run, tmp_path: Path, text: str | None, options: tuple[object, ...], message: str
) -> None:
    path = tmp_path / "schedule.csv"
    if text is not None:
        path.write_text(text, encoding="utf-8")
    status, out, err = run("schedule", "--from-torch-csv", path, *UNIT, *options)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert message in err
