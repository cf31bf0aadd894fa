"""The end of a user's program on several ranks: Ctrl-C, errors, threads that still wait."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from dynmo.errors import InputError, RunError
from dynmo.pipeline import start as program
from tests.cli.runs import free_port
from tests.pool import Pool
from tests.processes import end_all, start
from tests.runtime.alone import alone

ROOT, HERE = Path(__file__).parents[2], Path(__file__).parent
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")


@pytest.mark.parametrize(
    ("error", "line", "status"),
    [
        (KeyboardInterrupt(), "[rank0]: interrupted", 130),
        (InputError("a\nwrong batch"), "[rank0]: InputError: a wrong batch", 2),
        (RunError("it failed"), "[rank0]: RunError: it failed", 1),
        (ValueError("the user's own"), "ValueError: the user's own", 1),
    ],
)
def test_uncaught_error_is_one_line(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    line: str,
    status: int,
) -> None:
    ended = list[int]()
    monkeypatch.setattr(program, "end_process", ended.append)
    monkeypatch.setattr(
        sys, "excepthook", lambda *a: print(f"{a[0].__name__}: {a[1]}", file=sys.stderr)
    )
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    # Threads of other tests go on.
    monkeypatch.setattr(program, "_end_threads", lambda: None)
    program.report_uncaught(replace(alone(), size=2))
    sys.excepthook(type(error), error, None)
    assert capsys.readouterr().err == line + "\n"
    assert ended == [status]


def test_interruption_in_generated_code_names_the_user(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Python makes classes of records with exec: a Ctrl-C there names the line that asked."""
    monkeypatch.setattr(program, "_end", lambda _: None)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    program.report_uncaught(replace(alone(), size=2))
    try:
        exec("raise KeyboardInterrupt")
    except KeyboardInterrupt as error:
        sys.excepthook(type(error), error, error.__traceback__)
    assert re.search(r"interrupted \(test_uncaught\.py:\d+\)", capsys.readouterr().err)


def test_world_of_one_rank_leaves_the_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    before = sys.excepthook
    program.report_uncaught(alone())
    assert sys.excepthook is before


def test_no_module_of_torch_holds_a_group(pool: Pool) -> None:
    """torch.optim imports torch._dynamo, which would hold the group. Its threads would not end."""
    assert pool.run("tests.pipeline.jobs:held_groups", 2) == ["(None,)", "(None,)"]


@pytest.mark.matrix  # a launcher and two processes each
@pytest.mark.parametrize("who", ["all", "one"])
def test_interrupted_loop_says_one_line_a_rank(tmp_path: Path, who: str) -> None:
    # torchrun looks after 5 s, and then ends the rank that has not said its line.
    patient = "--monitor-interval=5"
    command = [sys.executable, *TORCHRUN, patient, str(HERE / "endless.py")]
    process = start(command, tmp_path, {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "default"})
    try:
        assert process.stdout is not None
        began = set[str]()
        while len(began) < 2:
            began.add(process.stdout.readline().partition(" is at ")[0])
        if who == "all":
            os.killpg(process.pid, signal.SIGINT)
        else:
            listed = ["pgrep", "-P", str(process.pid)]
            children = subprocess.run(listed, capture_output=True, text=True, check=True)
            os.kill(int(children.stdout.split()[-1]), signal.SIGINT)
        _, err = process.communicate(timeout=60)
    finally:
        end_all([process])
    lines = sorted(line for line in err.splitlines() if line.startswith("[rank"))
    assert len(lines) == 2, err
    if who == "all":
        assert all(": interrupted (endless.py:" in line for line in lines)
    else:
        assert sum(": interrupted (endless.py:" in line for line in lines) == 1, err
        assert sum(bool(re.search(r"because rank \d was interrupted", line)) for line in lines) == 1


@pytest.mark.matrix  # two processes for each try
@pytest.mark.parametrize("ends", ["first", "meanwhile", "last"])
def test_waiting_thread_does_not_abort_a_failed_process(tmp_path: Path, ends: str) -> None:
    """Rank 0 fails while one of its threads waits for rank 1, which ends, too."""
    shared = {"PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo", "RANK_1_ENDS": ends}
    shared |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    command = [sys.executable, str(HERE / "waiting_thread.py")]
    ranks = [
        start(command, tmp_path, shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(2)
    ]
    try:
        errors = [process.communicate(timeout=60)[1] for process in ranks]
    finally:
        end_all(ranks)
    assert [process.returncode for process in ranks] == [1, 0], errors
    assert errors[0].startswith("[rank0]: RunError: refused (waiting_thread.py:")
