"""`dynmo train`: the files of a run, and input refused before any rank starts."""

from __future__ import annotations

import json
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from dynmo.cli import main
from dynmo.config import load
from dynmo.errors import InputError, Interrupted, RunError
from dynmo.runtime.comm.rendezvous import read_rendezvous
from tests.cli.runs import GPT, Base, Run, assert_refused, fill, tree
from tests.full_disk import files_up_to

STEP = {"loss", "tokens_per_s", "idle_ratio", "imbalance"}
REBALANCE = {"id", "from", "to", "moved_bytes", "seconds", "predicted_gain", "reason"}


# -- a whole run -----------------------------------------------------------------------------------


def test_json_output_of_a_run(base: Base) -> None:
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
    assert "froze layers 0 to 2" in base.killed.err
    assert "dynmo:" not in err


def test_run_writes_only_into_its_folder(base: Base) -> None:
    files = set(tree(base.folder))
    assert {f for f in files if not f.startswith("runs/main/checkpoints/")} == {
        "run.toml",
        "runs/main/costs.json",
        "runs/main/decisions.jsonl",
        "text",
        "models.py",
        "ends.py",
        "step 8 of rank 0",
        "runs/main/config.toml",
        "runs/main/events.jsonl",
        "runs/main/trace.json",
        "runs/main/rank-0.log",  # how it lost rank 1
        "runs/main/rank-1.log",
    }
    assert (base.folder / "runs/main/rank-1.log").read_text() == ""
    assert (base.folder / "runs/main/checkpoints/latest").read_text() == "step-000040"
    assert not list((base.folder / "tmp").glob("dynmo-*"))
    assert load(base.folder / "runs/main/config.toml") == load(base.folder / "run.toml")


def test_event_log_of_a_run(base: Base) -> None:
    lines = (base.folder / "runs/main/events.jsonl").read_text().splitlines()
    assert [json.dumps(json.loads(line)) for line in lines] == lines, "numbers read back exactly"
    by_kind: dict[str, list[dict[str, Any]]] = {}
    for event in base.events:
        assert event.keys() >= {"event", "step", "time"}
        by_kind.setdefault(event["event"], []).append(event)
    steps = by_kind["step"]
    # A rank died in step 23, and the run went on from the checkpoint after step 19.
    told = [e["step"] for e in steps]
    assert told in [[*range(stop), *range(20, 40)] for stop in (22, 23, 24)]
    assert all(e.keys() >= STEP and e["frozen"] == 3 * (e["step"] >= 10) for e in steps)
    for event in by_kind["rebalance"]:
        assert event.keys() >= REBALANCE
        assert sum(event["from"]) == sum(event["to"]) == 6
        assert event["moved_bytes"] > 0
    ids = [e["id"] for e in by_kind["rebalance"]]
    assert ids == sorted(ids)
    assert any(e["layers"][0] > 3 for e in steps), "half of the model was frozen, and nothing moved"
    assert all(e.keys() >= {"id", "measured_gain"} for e in by_kind["rebalance_result"])
    assert {e["id"] for e in by_kind["rebalance_result"]} <= {*ids}
    assert [e["step"] for e in by_kind["eval"]] == [19, 39]
    # A signal came in step 8.
    saved = [e["step"] for e in by_kind["checkpoint"]]
    assert [step for step in saved if step != 8] == list(range(4, 40, 5))
    assert "runs/main/checkpoints every 5 steps" in by_kind["saves"][0]["saves"]
    _, last = by_kind["end"]
    assert last == base.events[-1]
    assert (last["reason"], last["loss"]) == ("done", steps[-1]["loss"])
    assert re.fullmatch("[0-9a-f]{64}", last["weights_digest"])
    assert last["seconds"] > 0


def test_trace_of_a_run(base: Base) -> None:
    trace = json.loads((base.folder / "runs/main/trace.json").read_text())
    slices = [e for e in trace["traceEvents"] if e["ph"] == "X" and e["cat"] != "step"]
    assert len({(e["pid"], e["tid"]) for e in slices}) == 4, "two ranks, measured and planned"
    assert {e["cat"] for e in slices} >= {"F", "B", "W", "wait", "send"}
    assert all(e["dur"] >= 0 for e in slices)


def test_report_of_a_run(
    base: Base, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(base.folder)
    assert main(["report", "runs/main"]) == 0
    out = capsys.readouterr().out
    assert "Measured, phase by phase" in out
    assert re.search(r"step \d+: moved 3\+3 to \d\+\d .* predicted", out)


# -- what is there already -------------------------------------------------------------------------


def test_refused_command_leaves_the_run_unchanged(base: Base, run: Run) -> None:
    before = tree(base.folder)
    for flags, sets, word in (
        ([], [], "runs/main exists"),
        (["--resume", "--overwrite"], [], "--resume and --overwrite"),
        (["--overwrite"], ["data.source=file:nothing"], 'data.source = "file:nothing"'),
        (["--resume"], ["model.vocab=10", "model.kind=gpt"], "model.vocab = 10"),
        (["--overwrite"], ["train.steps=many"], "train.steps"),
    ):
        assert_refused(run(base.folder, "run.toml", *flags, sets=sets), word)
        assert tree(base.folder) == before


def test_resume_names_the_changed_keys(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path)
    (tmp_path / "runs/main/checkpoints/step-000005").mkdir(parents=True)
    (tmp_path / "runs/main/checkpoints/step-000005/manifest.json").write_text("")
    (tmp_path / "runs/main/config.toml").write_text(load(tmp_path / "run.toml").to_toml())
    monkeypatch.setattr("dynmo.elastic.launcher.supervisor.spawn", lambda *arguments: 0)
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


def test_launcher_that_is_not_installed_is_refused(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path)
    monkeypatch.setenv("PATH", "")
    done = run(tmp_path, "run.toml", "--launcher", "slurm")
    assert_refused(done, "Slurm is not installed on this machine", "leave out --launcher")
    monkeypatch.setitem(sys.modules, "ray", None)
    done = run(tmp_path, "run.toml", "--launcher", "ray")
    assert_refused(done, "ray is not installed; install it with pip install ray")
    assert not list((tmp_path / "runs").iterdir())


def test_failed_run_says_how_to_go_on(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newest checkpoint is named. Wrong input and a run that never began get no advice."""
    fill(tmp_path)

    def fails(*arguments: object) -> int:
        raise kind(text)

    monkeypatch.setattr("dynmo.elastic.launcher.supervisor.spawn", fails)
    kind, text = RunError, "rank 1 was ended by SIGKILL; out of memory?"
    none = "runs/main has no checkpoint to go on from (checkpoint.every); --overwrite starts anew"
    assert run(tmp_path, "run.toml") == (1, "", f"dynmo: {text}; {none}\n")
    for step in ("step-000095", "step-000100", "step-000105.tmp"):
        (tmp_path / "runs/main/checkpoints" / step).mkdir(parents=True)
    on = "--resume goes on from runs/main/checkpoints/step-000100"
    assert run(tmp_path, "run.toml", "--resume") == (1, "", f"dynmo: {text}; {on}\n")
    kind, text = InputError, "layer 2 is wrong"
    for arguments, sets in (("--resume",), ()), ((), ("name=new",)):
        assert run(tmp_path, "run.toml", *arguments, sets=sets) == (2, "", f"dynmo: {text}\n")
    assert not (tmp_path / "runs/new").exists(), "the next attempt can make it"
    kind, text = Interrupted, "interrupted while starting or finishing"
    new = run(tmp_path, "run.toml", sets=("name=new",))
    nothing = "interrupted before the first step, so there is nothing to save"
    assert new == (130, "", f"dynmo: {nothing}\n")
    assert run(tmp_path, "run.toml", "--resume") == (130, "", f"dynmo: {nothing}; {on}\n")


def test_restart_that_cannot_use_its_checkpoints_does_not_advise_to_resume(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path)
    damaged = "runs/main/checkpoints: no checkpoint is whole"
    faults = iter([RunError("rank 1 was ended by SIGKILL"), InputError(damaged)])

    def fails(*_: object) -> int:
        (tmp_path / "runs/main/checkpoints/step-000100").mkdir(parents=True, exist_ok=True)
        raise next(faults)

    monkeypatch.setattr("dynmo.elastic.launcher.supervisor.spawn", fails)
    done = run(tmp_path, "run.toml", "--restarts", "2")
    assert done.status == 1
    assert done.err.splitlines()[-1] == f"dynmo: {damaged}; --overwrite starts anew"


def test_restart_goes_on_from_the_newest_checkpoint(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first restart finds no checkpoint. It replaces an older run all the same."""
    fill(tmp_path)
    folder = tmp_path / "runs/main"
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text("")
    (folder / "old").write_text("")
    commands: list[list[str]] = []

    def fails(command: list[str], *_: object) -> int:
        commands.append(command)
        if len(commands) == 3:
            return 0
        for name in ("decisions.jsonl", "rendezvous.json"):
            assert not (folder / name).exists()
            (folder / name).write_text("")
        with (folder / "events.jsonl").open("a") as log:
            for step in range(3 * len(commands)):
                log.write(json.dumps({"event": "step", "step": step, "loss": 1.0}) + "\n")
            log.write('{"event": "step", "step": 99')  # torn
        if len(commands) == 2:
            (folder / "checkpoints/step-000005").mkdir(parents=True)
        raise RunError("rank 1 died")

    monkeypatch.setattr("dynmo.elastic.launcher.supervisor.spawn", fails)
    told = "dynmo: after {} steps: rank 1 died; restart {} of 2 {}\n"
    on = "goes on from runs/main/checkpoints/step-000005"
    said = told.format(3, 1, "begins anew") + told.format(6, 2, on)
    assert run(tmp_path, "run.toml", "--overwrite", "--restarts", "2") == (0, "", said)
    assert ["--resume" in command for command in commands] == [False, False, True]
    assert load(folder / "config.toml").launch.restarts == 2
    assert not (folder / "old").exists()
    refused = run(tmp_path, "run.toml", "--restarts", "-1")
    assert_refused(refused, "--restarts -1: must be greater than or equal to 0")


def test_signal_before_there_are_ranks_is_told(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path)

    def asked(*_: object) -> None:
        signal.raise_signal(signal.SIGUSR1)
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr("dynmo.cli.train.check_input", asked)
    status, out, err = run(tmp_path, "run.toml")
    assert (status, out) == (130, "")
    assert err.splitlines() == [
        "dynmo: SIGUSR1: no step is under way, so there is nothing to save",
        "dynmo: interrupted before the first step, so there is nothing to save",
    ]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert not (tmp_path / "runs").exists()


def test_resume_removes_what_a_killed_run_has_left(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint that was just being replaced gets its name back."""
    fill(tmp_path)
    folder = tmp_path / "runs/main"
    names = ("step-000005", "step-000010.replaced.tmp", "step-000010.tmp", "step-000015.tmp")
    for name in names:
        (folder / "checkpoints" / name).mkdir(parents=True)
    (folder / "checkpoints/step-000010.replaced.tmp/manifest.json").write_text("of step 10")
    (folder / ".launch").mkdir()
    for name in ("rendezvous.json", "config.toml.tmp", ".launch/entered-0"):
        (folder / name).write_text("")
    (folder / "config.toml").write_text(load(tmp_path / "run.toml").to_toml())
    monkeypatch.setattr("dynmo.elastic.launcher.supervisor.spawn", lambda *arguments: 0)
    assert run(tmp_path, "run.toml", "--resume") == (0, "", "")
    assert {*tree(folder)} == {"config.toml", "checkpoints/step-000010/manifest.json"}
    left = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert left == ["step-000005", "step-000010"]
    assert not (folder / ".launch").exists()


def test_full_disk_at_start_leaves_the_run_unchanged(tmp_path: Path, run: Run) -> None:
    """The files of an old run stay unchanged, and a new run leaves no folder behind."""
    fill(tmp_path)
    (tmp_path / "runs/main/checkpoints/step-000005").mkdir(parents=True)
    by_hand = load(tmp_path / "run.toml").to_toml() + "# a note"
    (tmp_path / "runs/main/config.toml").write_text(by_hand)
    before = tree(tmp_path)
    for flags in (("--resume",), ("--overwrite",), ("--set", "name=new")):
        with files_up_to(10):
            done = run(tmp_path, "run.toml", *flags)
        assert_refused(done, "runs/new" if "name=new" in flags else "runs/main", "File too large")
        assert tree(tmp_path) == before
        assert [path.name for path in (tmp_path / "runs").iterdir()] == ["main"]


def test_failed_overwrite_restores_the_old_run(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log of the failed attempt is the only file that it leaves."""
    fill(tmp_path)
    (tmp_path / "runs/main").mkdir(parents=True)
    (tmp_path / "runs/main/config.toml").write_text("")
    (tmp_path / "runs/main/events.jsonl").write_text("of weeks")

    def fail(*arguments: object) -> int:
        (tmp_path / "runs/main/rank-0.log").write_text("why")
        raise RunError("rank 0 was ended by SIGKILL")

    monkeypatch.setattr("dynmo.elastic.launcher.supervisor.spawn", fail)
    kept = {"config.toml": b"", "events.jsonl": b"of weeks", "rank-0.log": b"why"}
    said = "dynmo: rank 0 was ended by SIGKILL; the run before is kept"
    for saved in (False, True):
        on = ", and --resume goes on from runs/main/checkpoints/step-000005" * saved
        assert run(tmp_path, "run.toml", "--overwrite") == (1, "", f"{said}{on}\n")
        assert tree(tmp_path / "runs/main") == kept
        (tmp_path / "runs/main/checkpoints/step-000005").mkdir(parents=True, exist_ok=True)
    assert_refused(run(tmp_path, "run.toml"), "runs/main exists")
    assert tree(tmp_path / "runs/main") == kept


def test_run_of_another_process_is_not_touched(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No command touches a run that another process trains.

    This includes a run that replaces an older one and has no event yet.
    """
    fill(tmp_path)
    attempts: list[tuple[str, ...]] = []

    def meanwhile(*arguments: object) -> int:
        before = tree(tmp_path)
        for flags in ((), ("--overwrite",), ("--resume",)):
            assert_refused(run(tmp_path, "run.toml", *flags), "runs/main", "another process")
            attempts.append(flags)
        assert tree(tmp_path) == before
        return 0

    monkeypatch.setattr("dynmo.elastic.launcher.supervisor.spawn", meanwhile)
    (tmp_path / "runs/main").mkdir(parents=True)
    (tmp_path / "runs/main/config.toml").write_text("")
    assert run(tmp_path, "run.toml", "--overwrite").status == 0
    assert len(attempts) == 3
    assert not list((tmp_path / "runs").glob(".*.lock")), "it ends with the run"
    monkeypatch.setattr("dynmo.elastic.launcher.supervisor.spawn", lambda *_: 0)
    assert run(tmp_path, "run.toml", "--overwrite").status == 0


def test_folder_that_is_not_a_run_is_not_touched(tmp_path: Path, run: Run) -> None:
    fill(tmp_path)
    (tmp_path / "runs/main").mkdir(parents=True)
    (tmp_path / "runs/main/thesis.txt").write_text("years of work")
    (tmp_path / "runs/file").write_text("no folder")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/config.toml").write_text("")
    (tmp_path / "runs/link").symlink_to(tmp_path / "elsewhere")
    before = tree(tmp_path)
    for flag, name, word in (
        ("--overwrite", "main", "config.toml"),
        ("--resume", "main", "checkpoint"),
        ("--resume", "new", "does not exist"),
        ("--overwrite", "file", ""),
        ("--overwrite", "link", "link"),
    ):
        done = run(tmp_path, "run.toml", flag, sets=[f"name={name}"])
        assert_refused(done, f"runs/{name}", word)
        assert tree(tmp_path) == before


# -- what would run --------------------------------------------------------------------------------


def test_dry_run_prints_the_plan_and_writes_no_file(tmp_path: Path, run: Run) -> None:
    fill(tmp_path)
    before = tree(tmp_path)
    done = run(tmp_path, "run.toml", "--dry-run")
    assert (done.status, done.err) == (0, "")
    assert "zb-auto, 2 ranks, 4 microbatches" in done.out
    assert "emulated.5" in done.out
    # The output of a user's model does not mix with the JSON.
    done = run(
        tmp_path, "run.toml", "--dry-run", "--json", sets=("model.kind=python:models:tires",)
    )
    assert (done.status, set(done.err.splitlines())) == (0, {"a model may print"})
    plan = json.loads(done.out)
    assert (plan["partition"], plan["schedule"], plan["microbatches"], plan["limit"]) == (
        [2, 2],
        "zb-auto",
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
    limit = max(plan["memory"])
    assert_refused(done, "rank 0", f"pipeline.memory_limit = {limit}")
    each = f"pipeline.memory_limit=[{2 * limit}, 100]"
    done = run(tmp_path, "run.toml", "--dry-run", sets=(*GPT, each))
    assert_refused(done, "rank 1", "pipeline.memory_limit = 100")
    assert tree(tmp_path) == before


# -- wrong input -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sets", "mentions"),
    [
        (["train.stepz=3"], ["train.stepz", "train.steps"]),
        (["train.steps=3.5"], ["train.steps = 3.5"]),
        (["train.steps=soon"], ['train.steps = "soon"']),
        (["parallel.pipeline=7"], ["parallel.pipeline = 7", "6 layers"]),
        (["train.micro_batch=3"], ["train.micro_batch = 3", "8"]),
        (["data.source=file:nothing"], ['data.source = "file:nothing"']),
        (["data.source=file:runs.d"], ['data.source = "file:runs.d"']),
        ([*GPT, "model.vocab=255"], ["model.vocab = 255", "256"]),
        (["name=../up"], ['name = "../up"']),
    ],
)
def test_wrong_keys_start_no_rank(
    tmp_path: Path, run: Run, sets: list[str], mentions: list[str]
) -> None:
    fill(tmp_path)
    (tmp_path / "runs.d").mkdir()
    assert_refused(run(tmp_path, "run.toml", sets=sets), *mentions)
    assert not (tmp_path / "runs").exists()


def test_unreadable_config_is_refused(tmp_path: Path, run: Run) -> None:
    assert_refused(run(tmp_path, "nothing.toml"), "nothing.toml")
    (tmp_path / "bad.toml").write_text("[model\n")
    assert_refused(run(tmp_path, "bad.toml"), "bad.toml", "TOML")


@pytest.mark.parametrize(
    ("function", "mentions"),
    [
        ("nowhere:make", ["nowhere"]),
        ("malformed:make", ["SyntaxError"]),
        ("models:absent", ["absent"]),
        ("models:constant", ["constant"]),
        ("models:number", ["number()", "list"]),
        ("models:empty", ["empty()", "list"]),
        ("models:raises", ["ArithmeticError: no model today", "(models.py:24)"]),
        ("models:misfit", ["RuntimeError"]),
    ],
)
def test_unloadable_own_model_is_refused(
    tmp_path: Path, run: Run, caplog: pytest.LogCaptureFixture, function: str, mentions: list[str]
) -> None:
    fill(tmp_path)
    (tmp_path / "malformed.py").write_text("def make(:\n")
    kind = f"model.kind=python:{function}"
    done = run(tmp_path, "run.toml", "--dry-run", sets=[kind, "dynamism.cases=[]"])
    assert_refused(done, f"model.kind = 'python:{function}'", *mentions)
    assert not caplog.records, "torch has printed too"


# -- launchers and newcomers -----------------------------------------------------------------------


@pytest.mark.parametrize("option", ["--resume", "--overwrite", "--dry-run", "--launcher=local"])
def test_options_excluded_by_join_are_refused(tmp_path: Path, run: Run, option: str) -> None:
    fill(tmp_path)
    done = run(tmp_path, "run.toml", "--join", option)
    assert_refused(done, "--join", option.partition("=")[0])


def test_join_without_a_run_is_refused(tmp_path: Path, run: Run) -> None:
    fill(tmp_path)
    assert_refused(run(tmp_path, "run.toml", "--join"), "runs/main")
    assert not (tmp_path / "runs").exists()


def test_unreachable_ray_cluster_is_refused(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command creates no folder."""
    pytest.importorskip("ray")
    fill(tmp_path)
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:9")
    done = run(tmp_path, "run.toml", "--launcher", "ray")
    assert_refused(done, "--launcher ray", "127.0.0.1:9")
    assert not list((tmp_path / "runs").iterdir())


def test_launcher_gets_the_run_folder_for_rendezvous(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files through which ranks and newcomers meet are in the folder of the run."""
    fill(tmp_path)
    given: list[tuple[Any, ...]] = []
    monkeypatch.setattr(
        "dynmo.elastic.launcher.supervisor.spawn", lambda *arguments: given.append(arguments) or 0
    )
    monkeypatch.setattr("dynmo.elastic.managers.slurm.SlurmStarter", lambda *arguments: arguments)
    options = ("elastic.job_options=['--partition=p']",)
    assert run(tmp_path, "run.toml", "--launcher", "slurm", sets=options).status == 0
    ((command, ranks, _, folder, starter, shared, served, recovers_within),) = given
    assert command[-2:] == ["train", "runs/main/config.toml"]
    assert (ranks, str(folder)) == (2, "runs/main")
    assert starter == (shared, ("--partition=p",))
    assert [str(path) for path in (shared, served.file)] == [
        "runs/main/.launch",
        "runs/main/rendezvous.json",
    ]
    assert recovers_within is None


def test_local_ranks_that_recover_meet_in_the_launcher(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path)
    records = list[dict[str, Any]]()

    def spawn(*arguments: Any) -> int:
        *_, starter, shared, served, recovers_within = arguments
        assert (starter, shared, recovers_within) == (None, None, 1830.0)
        assert served.open() is not None
        records.append(read_rendezvous(served.file))
        return 0

    monkeypatch.setattr("dynmo.elastic.launcher.supervisor.spawn", spawn)
    monkeypatch.setenv("MASTER_ADDR", "elsewhere")
    assert run(tmp_path, "run.toml", sets=("elastic.recover=memory",)).status == 0
    assert records[0]["address"] == "127.0.0.1"
    assert len(records[0]["token"]) > 20
