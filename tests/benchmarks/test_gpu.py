"""`make gpu` without a GPU.

The tests cover error messages, the runner, and the benchmarks on small CPU models.
"""

from __future__ import annotations

import importlib.metadata
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import __main__ as command
from benchmarks.gpu import attention, checks, device, memory, running, several, sparse, split
from benchmarks.gpu.parts import PARTS, SEVERAL, Part
from benchmarks.torch_orders import torch_order
from benchmarks.torch_peer import PEERS
from dynmo.schedule.catalogue import stage_ranks_of
from tests.processes import wait_until

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
NAMES = ["attention", "cases", "memory", "profile", "slices", "sparse", "split"]
WITHOUT_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="of machines without a GPU")


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=120
    )


# -- the command ------------------------------------------------------------------------------


def all_parts(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(sys, "argv", ["benchmarks.gpu"])
    return command.main()


def one_part(monkeypatch: pytest.MonkeyPatch) -> object:
    monkeypatch.setattr(sys, "argv", ["split", "--json"])
    with pytest.raises(SystemExit) as ended:
        device.main("", split.measure, split.assess, split.OPTIONS)
    return ended.value.code


@WITHOUT_GPU
@pytest.mark.parametrize("run", [pytest.param(all_parts, marks=pytest.mark.matrix), one_part])
def test_missing_gpu_gives_a_one_line_error(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    run: Callable[[pytest.MonkeyPatch], object],
) -> None:
    assert run(monkeypatch) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("benchmarks.gpu: ")
    assert "CUDA" in err


def test_missing_packages_are_named_in_one_line() -> None:
    """`python -S` hides all installed packages, including torch and rich."""
    done = python("-S", "-m", "benchmarks.gpu")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("benchmarks.gpu: ")
    assert done.stderr.count("\n") == 1
    assert ", ".join(checks.PACKAGES) in done.stderr


@pytest.mark.parametrize(
    ("version", "fits"),
    [("2.9.1", False), ("2.10.0", True), ("2.11.0+cu130", True), ("3.0", True), ("new", False)],
)
def test_torch_version_is_checked(
    monkeypatch: pytest.MonkeyPatch, version: str, fits: bool
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _: version)
    if fits:
        checks.check_packages()
        return
    with pytest.raises(checks.Unfit, match=re.escape(version)):
        checks.check_packages()


def test_checked_packages_are_those_of_the_project() -> None:
    """The list has the dependencies of dynmo and of its tests, but those of reports and doctor."""
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    of_tests = {"pytest", "pytest-timeout", "hypothesis"}
    unused = {"jinja2", "matplotlib", "packaging", "psutil"}
    packages = {re.split("[<>=]", word)[0] for word in needed}
    assert packages - unused | of_tests == set(checks.PACKAGES)


def test_unknown_part_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmarks.gpu", "--only", "splits"])
    assert command.main() == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert "'splits'" in err


def test_parts_fit_the_time_limit_and_are_listed() -> None:
    """All parts together take less than 9 minutes.

    This includes one second for each process to end, and the probe.
    """
    assert command.SECONDS + len(PARTS) + 4 <= 9 * 60
    assert set(NAMES) < {part.name for part in PARTS}
    files = {path.stem for path in (ROOT / "benchmarks" / "gpu").glob("*.py")}
    assert files == {
        *NAMES,
        "__init__",
        "__main__",
        "checks",
        "device",
        "parts",
        "running",
        "several",
    }
    assert {part.name for part in SEVERAL} == {"prepare", *several.PARTS}
    assert sum(part.limit for part in SEVERAL) <= command.SECONDS_OF_SEVERAL <= 600


def test_command_starts_without_torch() -> None:
    """The checks must work if torch or rich is missing."""
    code = (
        "import sys, benchmarks.gpu.__main__; print({'torch', 'rich', 'numpy'} & set(sys.modules))"
    )
    assert python("-c", code).stdout == "set()\n"


@pytest.mark.parametrize(("gpus", "said"), [(0, "no CUDA device"), (1, "--several needs 2")])
def test_several_needs_two_gpus(monkeypatch: pytest.MonkeyPatch, gpus: int, said: str) -> None:
    about = json.dumps({"available": gpus > 0, "gpus": gpus})
    monkeypatch.setattr(checks, "_PROBE", f"print({about!r})")
    with pytest.raises(checks.Unfit, match=said):
        checks.probe(2)


# -- the runner -------------------------------------------------------------------------------


def part(name: str, code: str, limit: float = 30.0, needs: Sequence[str] = ()) -> Part:
    return Part(name, f"what {name} shows", limit, ("timeit", "-n1", "-r1", code), (), tuple(needs))


# It leaves a process in a session of its own, as a test that starts a run does.
HANGS = (
    "import subprocess, signal; p = subprocess.Popen(['sleep', '1000'], start_new_session=True); "
    "print(p.pid, flush=True); signal.pause()"
)
PRINTS = "import atexit, json; atexit.register(print, json.dumps(dict({})))"


def test_failing_and_hanging_parts_do_not_stop_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit of the hanging part is over once it has printed."""
    wait = subprocess.Popen[bytes].wait

    def waits(process: subprocess.Popen[bytes], timeout: float | None = None) -> int:
        if timeout != 4.0:
            return wait(process, timeout)
        wait_until(lambda: (tmp_path / "logs" / "hangs.out").stat().st_size > 0)
        raise subprocess.TimeoutExpired("hangs", 4.0)

    monkeypatch.setattr(subprocess.Popen, "wait", waits)
    rows = command.run_all(
        [
            part("fails", "raise ValueError('a wrong figure')"),
            part("hangs", HANGS, limit=4.0),
            part("lacks", "pass", needs=["no_such_package"]),
            part("misses", PRINTS.format("met=False, came='1.05', figure=1.05")),
            part("passes", PRINTS.format("met=True, came='1.01'")),
        ],
        tmp_path,
        {"torch": "2.11.0"},
        dry=False,
        seconds=60,
    )
    assert [ended.status for _, ended in rows] == ["failed", "timeout", "left out", "missed", "ok"]
    came = [ended.came for _, ended in rows[2:]]
    assert came == ["missing package: no_such_package", "1.05", "1.01"]
    assert "ValueError: a wrong figure" in rows[0][1].came
    assert "Traceback" in (tmp_path / "logs" / "fails.log").read_text()
    record = json.loads((tmp_path / "misses.json").read_text())
    assert record["machine"] == {"torch": "2.11.0"}
    assert (record["status"], record["expected"]) == ("missed", "what misses shows")
    assert record["result"]["figure"] == 1.05
    names = "fails hangs lacks misses passes"
    assert sorted(path.stem for path in tmp_path.glob("*.json")) == names.split()
    pid = int((tmp_path / "logs" / "hangs.log").read_text().split()[0])
    wait_until(lambda: not Path(f"/proc/{pid}/cwd").exists())


def test_parts_of_several_share_one_file(tmp_path: Path) -> None:
    parts = [part(name, "pass") for name in ("late", "later")]
    command.run_all(parts, tmp_path, {"gpus": 2}, dry=False, seconds=0, file="several.json")
    content = json.loads((tmp_path / "several.json").read_text())
    assert [(row["part"], row["status"]) for row in content["parts"]] == [
        ("late", "left out"),
        ("later", "left out"),
    ]
    assert content["machine"] == {"gpus": 2}


def test_parts_after_the_time_limit_are_left_out(tmp_path: Path) -> None:
    rows = command.run_all([part("late", "pass")], tmp_path, {}, dry=False, seconds=0)
    assert [ended.status for _, ended in rows] == ["left out"]


def test_last_line_of_pytest_is_the_result(tmp_path: Path) -> None:
    (tmp_path / "x.log").write_text("")
    last = "3 passed, 1 skipped in 0.10s"
    killed = (-9, "", "ended by SIGKILL: no output")
    for code, printed, came in ((0, f"..s\n{last}\n", last), killed):
        assert running.read_output(code, printed, tmp_path / "x.log", 1.0).came == came


@pytest.mark.matrix
def test_dry_run_of_slices_writes_its_result(tmp_path: Path) -> None:
    """The command writes the result file and the log to the given folder.

    This part runs in its own process, because torch's runtime takes the default group.
    """
    done = python("-m", "benchmarks.gpu", "--dry", "--only", "slices", "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads((tmp_path / "slices.json").read_text())
    assert (record["status"], record["dry"]) == ("ok", True)
    assert record["machine"]["torch"] == torch.__version__
    assert {path.name for path in (tmp_path / "logs").iterdir()} == {"slices.log"}
    figures = record["result"]
    names = {"1f1b", "zb-h1", "zb-auto", "torch zero-bubble", "zb-v", "torch zbv"}
    assert set(figures["schedules"]) == names
    # How much overlaps is a ratio of two timings: on a busy CPU it says nothing.
    assert all(row["overlap"] > 0 for row in figures["schedules"].values())
    assert figures["runtime_gain"] > 0


# -- the benchmarks ---------------------------------------------------------------------------


def test_split_benchmark_measures_four_variants() -> None:
    figures = split.stage(CPU, torch.float32, False, device.Shape(1, 64, 16, 1, 2), rounds=1)
    assert set(figures["seconds"]) == {"plain", "fused", "split", "deferred"}
    assert figures["tokens_per_second"]["plain"] == 32 / figures["seconds"]["plain"]


@pytest.mark.parametrize(("ratio", "met"), [(1.01, True), (1.03, False)])
def test_split_goal_is_assessed(ratio: float, met: bool) -> None:
    ratios = {"bfloat16": ratio, "float32": 1.5}
    rows = {name: {"eager": {"split_over_fused": x}} for name, x in ratios.items()}
    assert split.assess({"stage": rows}).met == met


@pytest.mark.matrix
def test_attention_benchmark_measures_each_kind() -> None:
    rows = [
        attention.length(CPU, torch.float32, n, heads=2, size=16, batch=1, rounds=1)
        for n in (32, 128)
    ]
    few, many = "hash, 16 buckets", "hash, 64 buckets"
    assert [set(row["kinds"]) for row in rows] == [{few}, {few, many}]
    assert all(0 < kind["pairs"] < 1 for row in rows for kind in row["kinds"].values())
    fake = [
        {"sequence": n, "kinds": {few: {"speedup": speedup}}}
        for n, speedup in ((1, 0.5), (2, 1.5), (4, 3.0))
    ]
    assert attention.wins_from(fake) == {few: 2, many: None}


def test_share_of_pairs_equals_a_count() -> None:
    x = torch.randn(1, 6, 1, 4, generator=torch.Generator().manual_seed(2))
    hashed = attention.Hashed(2, 32, 1)
    buckets = attention.hash_buckets(x, attention.draw_directions(1, 4, 2, 1))[0, :, 0].tolist()
    pairs = [buckets[i] == buckets[j] for i in range(6) for j in range(i)]
    assert attention.share_of_pairs(x, hashed) == pytest.approx(sum(pairs) / len(pairs))


def test_sparse_benchmark_finds_a_crossover() -> None:
    figures = sparse.matrix(CPU, torch.float32, 32, 32, 16, 1)
    assert [point["sparsity"] for point in figures["points"]] == list(sparse.SPARSITIES)
    assert 0 < figures["crossover"] <= 1


@pytest.mark.parametrize(("name", "own"), [("zero-bubble", "zb-h1"), ("zbv", "zb-v")])
def test_torch_schedules_have_our_placements(name: str, own: str) -> None:
    order = torch_order(PEERS[name], 4, 8, name)
    assert (order.name, order.microbatches, order.stage_ranks) == (name, 8, stage_ranks_of(own, 4))


@pytest.mark.parametrize(
    ("ratios", "met"), [([0.95, 1.05], True), ([0.5, 1.0], False), ([1.0, 1.2], False)]
)
def test_memory_estimate_is_assessed(ratios: list[float], met: bool) -> None:
    result: dict[str, Any] = {"peak_over_account": ratios, "peak_over_planned": [0.9, 0.9]}
    assert memory.assess(result | {"moved_bytes": 2e9, "move_seconds": 0.5}).met == met


def run_of(**given: Any) -> dict[str, Any]:
    return {"digest": "a", "step_seconds": 0.01, "changes": []} | given


@pytest.mark.parametrize(
    ("row", "met", "said"),
    [
        ({"changes": [{"event": "recover", "seconds": 0.5}]}, True, "1 recover in 500 ms"),
        ({}, False, "no event recover"),
        ({"digest": "b"}, False, "digest b instead of a"),
        ({"status": 1, "said": "rank 1 was ended"}, False, "status 1: rank 1 was ended"),
    ],
)
def test_ranks_on_several_gpus_are_assessed(row: dict[str, Any], met: bool, said: str) -> None:
    names = [trial.name for trial in several.trials("recovery", 2)]
    runs = {name: run_of(**row) for name in names}
    verdict = several.assess("recovery", {"alone": run_of(status=0), "runs": runs})
    assert verdict.met == met
    assert said in verdict.came


@pytest.mark.matrix
@pytest.mark.parametrize("name", several.PARTS)
def test_dry_run_of_several_gpus_passes(name: str) -> None:
    done = python("-m", "benchmarks.gpu.several", name, "--dry", "--json")
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert figures["met"], figures["came"]
