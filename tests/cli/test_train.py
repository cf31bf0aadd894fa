"""`dynmo train` as a process: what it writes, what it refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from dynmo.cli import main
from dynmo.config import load
from dynmo.errors import RunError
from tests.cli.runs import GPT, Base, Run, end, fill, train, tree
from tests.full_disk import files_up_to
from tests.processes import gone

STEP = {"loss", "tokens_per_s", "idle_ratio", "imbalance"}
REBALANCE = {"id", "from", "to", "moved_bytes", "seconds", "predicted_gain", "reason"}


# -- a whole run -----------------------------------------------------------------------------------


def test_what_a_run_says(base: Base) -> None:
    status, out, err = base.done
    assert status == 0
    assert out.count("\n") == 1
    result = json.loads(out)
    assert (result["name"], result["folder"], result["steps"], result["interrupted"]) == (
        "main",
        "runs/main",
        40,
        False,
    )
    assert {
        key: base.events[-1][key] for key in ("loss", "weights_digest", "buffers_digest")
    }.items() <= result.items()
    assert "main 40/40  loss" in err
    assert "froze layers 0 to 2" in err
    assert "dynmo:" not in err


def test_what_a_run_writes(base: Base) -> None:
    """Nothing outside of its folder."""
    files = set(tree(base.folder))
    assert {f for f in files if not f.startswith("runs/main/checkpoints/")} == {
        "run.toml",
        "runs/main/costs.json",
        "text",
        "models.py",
        "runs/main/config.toml",
        "runs/main/events.jsonl",
        "runs/main/trace.json",
        "runs/main/rank-1.log",
    }
    assert (base.folder / "runs/main/rank-1.log").read_text() == ""
    assert (base.folder / "runs/main/checkpoints/latest").read_text() == "step-000040"
    assert not list((base.folder / "tmp").glob("dynmo-*"))
    assert gone(base.folder)
    assert load(base.folder / "runs/main/config.toml") == load(base.folder / "run.toml")


def test_the_events(base: Base) -> None:
    lines = (base.folder / "runs/main/events.jsonl").read_text().splitlines()
    assert [json.dumps(json.loads(line)) for line in lines] == lines, "numbers read back exactly"
    by_kind: dict[str, list[dict[str, Any]]] = {}
    for event in base.events:
        assert event.keys() >= {"event", "step", "time"}
        by_kind.setdefault(event["event"], []).append(event)
    assert [e["step"] for e in by_kind["step"]] == list(range(40))
    assert all(e.keys() >= STEP for e in by_kind["step"])
    assert [e["frozen"] for e in by_kind["step"]] == [0] * 10 + [3] * 30
    for event in by_kind["rebalance"]:
        assert event.keys() >= REBALANCE
        assert sum(event["from"]) == sum(event["to"]) == 6
        assert event["moved_bytes"] > 0
    assert [e["id"] for e in by_kind["rebalance"]] == list(range(1, len(by_kind["rebalance"]) + 1))
    assert by_kind["step"][-1]["layers"][0] > 3, "half of the model was frozen, and nothing moved"
    assert all(e.keys() >= {"id", "measured_gain"} for e in by_kind["rebalance_result"])
    assert {e["id"] for e in by_kind["rebalance_result"]} <= {e["id"] for e in by_kind["rebalance"]}
    assert [e["step"] for e in by_kind["eval"]] == [19, 39]
    assert [e["step"] for e in by_kind["checkpoint"]] == list(range(4, 40, 5))
    (last,) = by_kind["end"]
    assert last == base.events[-1]
    assert (last["reason"], last["loss"]) == ("done", by_kind["step"][-1]["loss"])
    assert re.fullmatch("[0-9a-f]{64}", last["weights_digest"])
    assert last["seconds"] > 0


def test_the_trace(base: Base) -> None:
    trace = json.loads((base.folder / "runs/main/trace.json").read_text())
    slices = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    assert {e["tid"] for e in slices} == {0, 1}
    assert {e["cat"] for e in slices} >= {"F", "B", "W", "wait", "send"}
    assert all(e["dur"] >= 0 for e in slices)


def test_it_is_reported(
    base: Base, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(base.folder)
    assert main(["report", "runs/main"]) == 0
    out = capsys.readouterr().out
    assert "Measured, phase by phase" in out
    assert re.search(r"step \d+: moved 3\+3 to \d\+\d .* predicted", out)


# -- what is there already -------------------------------------------------------------------------


def test_a_run_is_not_lost(base: Base, run: Run) -> None:
    before = tree(base.folder)
    says = {
        (): (
            "runs/main exists; go on with --resume, replace it with --overwrite, or choose "
            "another name"
        ),
        ("--resume", "--overwrite"): "--resume and --overwrite exclude each other",
        (
            "--overwrite",
            "--set",
            "data.source=file:nothing",
        ): 'data.source = "file:nothing": cannot be read',
        ("--resume", "--set", "model.vocab=10", "--set", "model.kind=gpt"): "model.vocab = 10",
        ("--overwrite", "--set", "train.steps=many"): "--set: train.steps",
    }
    for arguments, text in says.items():
        done = run(base.folder, "run.toml", *arguments)
        assert (done.status, done.out) == (2, "")
        assert done.line.startswith(f"dynmo: {text}")
        assert tree(base.folder) == before


def test_what_a_resumed_run_has_otherwise(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path)
    (tmp_path / "runs/main/checkpoints/step-000005").mkdir(parents=True)
    (tmp_path / "runs/main/checkpoints/step-000005/manifest.json").write_text("")
    (tmp_path / "runs/main/config.toml").write_text(load(tmp_path / "run.toml").to_toml())
    monkeypatch.setattr("dynmo.launch.supervisor.spawn", lambda *arguments: 0)
    assert run(tmp_path, "run.toml", "--resume") == (0, "", "")
    told = (
        "dynmo: resumed; the configs differ in parallel.timeout (30.0, 9.0), train.lr (0.01, 0.5)\n"
    )
    assert run(tmp_path, "run.toml", "--resume", sets=("train.lr=0.5", "parallel.timeout=9.0")) == (
        0,
        "",
        told,
    )
    # A value that the run has found out by itself is no change.
    given, sought = (
        f"dynamism.pruning.dense_below={value}" for value in ("{8x8 = 0.5}", "measured")
    )
    (tmp_path / "runs/main/config.toml").write_text(load(tmp_path / "run.toml", [given]).to_toml())
    assert run(tmp_path, "run.toml", "--resume", sets=(sought,)) == (0, "", "")
    assert load(tmp_path / "runs/main/config.toml").dynamism.pruning.dense_below == {"8x8": 0.5}


def test_a_full_disk_before_the_ranks_start(tmp_path: Path, run: Run) -> None:
    """The run's own files stay as they were, and a new run leaves nothing in the way."""
    fill(tmp_path)
    (tmp_path / "runs/main/checkpoints/step-000005").mkdir(parents=True)
    (tmp_path / "runs/main/config.toml").write_text(load(tmp_path / "run.toml").to_toml())
    before = tree(tmp_path)
    for flags in (("--resume",), ("--overwrite",), ("--set", "name=new")):
        with files_up_to(10):
            done = run(tmp_path, "run.toml", *flags)
        assert (done.status, done.out, done.err.count("\n")) == (2, "", 1)
        told = r"dynmo: runs/(main|new) cannot be made ready: .*File too large"
        assert re.fullmatch(told, done.line)
        assert tree(tmp_path) == before
        assert [path.name for path in (tmp_path / "runs").iterdir()] == ["main"]


def test_a_run_is_back_after_a_failed_attempt_to_replace_it(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attempt's own log stays until the next one.

    The run that it was to replace is there again, for --resume or another --overwrite.
    """
    fill(tmp_path)
    (tmp_path / "runs/main").mkdir(parents=True)
    (tmp_path / "runs/main/config.toml").write_text("")
    (tmp_path / "runs/main/events.jsonl").write_text("of weeks")

    def fail(*arguments: object) -> int:
        (tmp_path / "runs/main/rank-0.log").write_text("why")
        raise RunError("rank 0 was ended by SIGKILL")

    monkeypatch.setattr("dynmo.launch.supervisor.spawn", fail)
    for _ in range(2):
        assert run(tmp_path, "run.toml", "--overwrite").status == 1
        assert set(tree(tmp_path / "runs/main")) == {"config.toml", "rank-0.log"}
    assert run(tmp_path, "run.toml").line.startswith("dynmo: runs/main exists")
    assert tree(tmp_path / "runs") == {"main/config.toml": b"", "main/events.jsonl": b"of weeks"}


def test_a_run_that_another_process_trains_is_left_alone(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run is left alone from its start on, and whatever is asked for.

    That includes a run that replaces another and has no event yet.
    """
    fill(tmp_path)
    seen: list[str] = []

    def meanwhile(*arguments: object) -> int:
        before = tree(tmp_path)
        for flags in ((), ("--overwrite",), ("--resume",)):
            done = run(tmp_path, "run.toml", *flags)
            seen.append(done.line)
            assert (done.status, done.err.count("\n")) == (2, 1)
        assert tree(tmp_path) == before
        return 0

    monkeypatch.setattr("dynmo.launch.supervisor.spawn", meanwhile)
    (tmp_path / "runs/main").mkdir(parents=True)
    (tmp_path / "runs/main/config.toml").write_text("")
    assert run(tmp_path, "run.toml", "--overwrite").status == 0
    assert (
        seen
        == [
            (
                "dynmo: runs/main is being trained by another process; wait until it ends, or "
                "choose another name"
            )
        ]
        * 3
    )
    assert not list((tmp_path / "runs").glob(".*.lock")), "it ends with the run"
    monkeypatch.setattr("dynmo.launch.supervisor.spawn", lambda *_: 0)
    assert run(tmp_path, "run.toml", "--overwrite").status == 0


def test_what_is_no_run_is_not_lost(tmp_path: Path, run: Run) -> None:
    fill(tmp_path)
    (tmp_path / "runs/main").mkdir(parents=True)
    (tmp_path / "runs/main/thesis.txt").write_text("years of work")
    (tmp_path / "runs/file").write_text("no folder")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/config.toml").write_text("")
    (tmp_path / "runs/link").symlink_to(tmp_path / "elsewhere")
    before = tree(tmp_path)
    says = {
        ("--overwrite",): "runs/main does not look like a run (it has no config.toml)",
        ("--resume",): "runs/main has no checkpoint to resume from; start anew with --overwrite",
        ("--resume", "--set", "name=new"): "runs/new does not exist, so there is nothing to resume",
        ("--overwrite", "--set", "name=file"): "runs/file cannot be made ready",
        ("--overwrite", "--set", "name=link"): "runs/link cannot be made ready",
    }
    for arguments, text in says.items():
        done = run(tmp_path, "run.toml", *arguments)
        assert (done.status, done.out) == (2, "")
        assert done.line.startswith(f"dynmo: {text}")
        assert tree(tmp_path) == before


# -- what would run --------------------------------------------------------------------------------


def test_dry_run(tmp_path: Path, run: Run) -> None:
    fill(tmp_path)
    before = tree(tmp_path)
    done = run(tmp_path, "run.toml", "--dry-run")
    assert (done.status, done.err) == (0, "")
    assert "zb-h1, 2 ranks, 4 microbatches" in done.out
    assert "emulated.5" in done.out
    # The output of a user's model does not mix with the JSON.
    done = run(
        tmp_path, "run.toml", "--dry-run", "--json", sets=("model.kind=python:models:tires",)
    )
    assert (done.status, set(done.err.splitlines())) == (0, {"a model may print"})
    plan = json.loads(done.out)
    assert (plan["partition"], plan["schedule"], plan["microbatches"], plan["limit"]) == (
        [2, 2],
        "zb-h1",
        4,
        None,
    )
    assert plan["parameters"] == [256 * 8 + 72, 72 + 9 * 256]
    done = run(
        tmp_path,
        "run.toml",
        "--dry-run",
        sets=(*GPT, f"pipeline.memory_limit={max(plan['memory'])}"),
    )
    assert (done.status, done.out) == (2, "")
    limit = max(plan["memory"])
    assert re.fullmatch(
        (
            rf"dynmo: rank 0 needs \d+ bytes at the peak of zb-h1, over pipeline.memory_limit = "
            rf"{limit}; use .*"
        ),
        done.line,
    )
    assert tree(tmp_path) == before


# -- wrong input -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sets", "says"),
    [
        (("train.stepz=3",), "--set: unknown key train.stepz; did you mean train.steps?"),
        (("train.steps=3.5",), "--set: train.steps = 3.5: must be"),
        (("train.steps=soon",), "--set: train.steps = \"soon\": must be"),
        (("parallel.pipeline=7",), (
            "run.toml and --set: parallel.pipeline = 7 is more than the model's 6 layers"
        )),
        (("train.micro_batch=3",), (
            "run.toml and --set: train.micro_batch = 3 does not divide train.global_batch / "
            "parallel.data = 8"
        )),
        (("data.source=file:nothing",), (
            'data.source = "file:nothing": cannot be read (No such file or directory)'
        )),
        (("data.source=file:runs.d",), 'data.source = "file:runs.d": not a regular file'),
        ((*GPT, "model.vocab=255"), (
            "model.vocab = 255: the corpus is bytes, so at least 256 tokens are needed"
        )),
        (("name=../up",), "--set: name = \"../up\": must be"),
    ],
)  # fmt: skip
def test_what_is_known_at_once(tmp_path: Path, run: Run, sets: tuple[str, ...], says: str) -> None:
    fill(tmp_path)
    (tmp_path / "runs.d").mkdir()
    done = run(tmp_path, "run.toml", sets=sets)
    assert (done.status, done.out, done.err.count("\n")) == (2, "", 1)
    assert done.line.startswith(f"dynmo: {says}")
    assert not (tmp_path / "runs").exists()


def test_a_config_that_is_not_there(tmp_path: Path, run: Run) -> None:
    done = run(tmp_path, "nothing.toml")
    assert (done.status, done.line) == (
        2,
        (
            "dynmo: nothing.toml: cannot be read (No such file or directory); give the path of a "
            "TOML file"
        ),
    )
    (tmp_path / "bad.toml").write_text("[model\n")
    done = run(tmp_path, "bad.toml")
    assert (done.status, done.err.count("\n")) == (2, 1)
    assert done.line.startswith("dynmo: bad.toml: not valid TOML: ")


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (
            "nowhere:make",
            "cannot import nowhere: No module named 'nowhere'; run from its folder or install it",
        ),
        ("wrong:make", "importing wrong raised SyntaxError: "),
        ("models:absent", "models has no function absent"),
        ("models:constant", "models has no function constant"),
        (
            "models:number",
            (
                "number() must return a list of torch modules or of functions that make one "
                "each, or (list, loss)"
            ),
        ),
        (
            "models:three",
            (
                "three() must return a list of torch modules or of functions that make one each, "
                "or (list, loss)"
            ),
        ),
        (
            "models:empty",
            (
                "empty() must return a list of torch modules or of functions that make one each, "
                "or (list, loss)"
            ),
        ),
        ("models:raises", "raises() raised ArithmeticError: no model today (models.py:24)"),
        ("models:misfit", "on shapes alone, its layers raised RuntimeError: "),
    ],
)
def test_a_model_of_ones_own_that_is_none(
    tmp_path: Path, run: Run, caplog: pytest.LogCaptureFixture, function: str, says: str
) -> None:
    fill(tmp_path)
    (tmp_path / "wrong.py").write_text("def make(:\n")
    done = run(
        tmp_path,
        "run.toml",
        "--dry-run",
        sets=(f"model.kind=python:{function}", "dynamism.cases=[]"),
    )
    assert (done.status, done.out, done.err.count("\n")) == (2, "", 1)
    assert done.line.startswith(f"dynmo: model.kind = 'python:{function}': {says}")
    assert not caplog.records, "torch has printed too"


def test_what_only_the_ranks_can_know(work: Path) -> None:
    """The folder that was made for the run is gone again.

    It does not stand in the way of the next attempt.
    """
    done = end(train(work, sets=("model.kind=python:models:raises", "dynamism.cases=[]")))
    assert (done.status, done.out, done.err.count("\n")) == (2, "", 1)
    says = "raises() raised ArithmeticError: no model today (models.py:24)"
    assert done.line == f"dynmo: model.kind = 'python:models:raises': {says}"
    assert not list((work / "runs").iterdir())


# -- launchers and joiners -------------------------------------------------------------------------


@pytest.mark.parametrize("option", ["--resume", "--overwrite", "--dry-run", "--launcher=local"])
def test_what_join_excludes(tmp_path: Path, run: Run, option: str) -> None:
    fill(tmp_path)
    done = run(tmp_path, "run.toml", "--join", option)
    assert (done.status, done.out, done.err.count("\n")) == (2, "", 1)
    assert done.line.startswith(
        "dynmo: --join excludes --resume, --overwrite, --dry-run and --launcher"
    )


def test_there_is_no_run_to_join(tmp_path: Path, run: Run) -> None:
    fill(tmp_path)
    done = run(tmp_path, "run.toml", "--join")
    assert (done.status, done.err.count("\n")) == (2, 1)
    assert "runs/main" in done.line
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("slurm", "dynmo: --launcher slurm: srun is not installed on this machine"),
        ("ray", "dynmo: --launcher ray: no Ray cluster answers at 127.0.0.1:9: "),
    ],
)
def test_a_launcher_that_is_not_there(
    tmp_path: Path,
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    line: str,
) -> None:
    """Nothing is made."""
    if name == "ray":
        pytest.importorskip("ray")
    fill(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:9")
    done = run(tmp_path, "run.toml", "--launcher", name)
    assert (done.status, done.out, done.err.count("\n")) == (2, "", 1)
    assert done.line.startswith(line)
    assert not list((tmp_path / "runs").iterdir())


def test_what_a_launcher_is_given(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files through which ranks and joiners meet are in the run's folder."""
    fill(tmp_path)
    given: list[tuple[Any, ...]] = []
    monkeypatch.setattr(
        "dynmo.launch.supervisor.spawn", lambda *arguments: given.append(arguments) or 0
    )
    monkeypatch.setattr("dynmo.launch.slurm.SlurmStarter", lambda *arguments: arguments)
    options = ("elastic.job_options=['--partition=p']",)
    assert run(tmp_path, "run.toml", "--launcher", "slurm", sets=options).status == 0
    ((command, ranks, _, folder, starter, shared, meeting),) = given
    assert command[-2:] == ["train", "runs/main/config.toml"]
    assert (ranks, str(folder)) == (2, "runs/main")
    assert starter == (2, shared, ("--partition=p",))
    assert [str(path) for path in (shared, meeting)] == [
        "runs/main/.launch",
        "runs/main/meeting.json",
    ]
