"""The local launcher, with ranks that are emulated or run short scripts.

The tests check which failure is reported, how signals travel, and that no process is left.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from dynmo.elastic.launcher import environment, supervisor
from dynmo.errors import (
    ConfigError,
    DynmoError,
    InputError,
    Interrupted,
    RankDied,
    RunError,
    WaitTimeout,
)
from tests.elastic.launcher.emulated import EmulatedProcess, Script, Steps, ends, launch, stops
from tests.processes import gone, wait_until

# A launcher as the command line is one.
LAUNCHER = """
import sys
from pathlib import Path
from dynmo.errors import DynmoError
from dynmo.elastic.launcher import supervisor

try:
    sys.exit(supervisor.spawn([sys.executable, "-c", *sys.argv[2:]], int(sys.argv[1]), \
2, Path.cwd()))
except DynmoError as error:
    print(f"{type(error).__name__}: {error}", file=sys.stderr)
    sys.exit(error.exit_status)
"""

# A rank: enters, and does as told. The second argument is run before it enters.
RANK = """
import os, signal, sys, time
from pathlib import Path
from dynmo.elastic.launcher.rank_side import enter_rank

rank, launcher = int(os.environ["RANK"]), int(os.environ["DYNMO_LAUNCHER"])
exec(sys.argv[2])
enter_rank()
heard = []
signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))

def up():
    Path(f"up-{rank}").write_text(str(os.getpid()))

def train():
    up()
    while not heard:
        time.sleep(0.01)
    sys.exit(130)

exec(sys.argv[1])
"""

NOTHING = "SIGUSR1: no step is under way, so there is nothing to save"
Launch = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def go(start_here: Launch) -> Launch:
    """Starts the launcher on ranks that do `body`."""

    def call(body: str, ranks: int = 2, before: str = "") -> subprocess.Popen[str]:
        return start_here([sys.executable, "-c", LAUNCHER, str(ranks), RANK, body, before])

    return call


def end(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=20)
    return process.returncode, out, err


def up(folder: Path, ranks: int = 2) -> None:
    wait_until(lambda: all((folder / f"up-{rank}").exists() for rank in range(ranks)))


def test_rank_gets_its_environment(go: Launch, tmp_path: Path) -> None:
    """A rank gets its rank numbers, its threads and a rendezvous folder.

    Only this user can read the folder. Rank 0 prints to the terminal, and the others write logs.
    """
    body = """
folder = Path(os.environ["DYNMO_RENDEZVOUS"])
keys = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "OMP_NUM_THREADS", "MKL_NUM_THREADS", \
"GLOO_SOCKET_IFNAME")
import json
print(json.dumps([folder.stat().st_mode, sys.stdin.read(), \
signal.getsignal(signal.SIGINT) == signal.SIG_IGN]
    + [os.environ.get(key) for key in keys]))
"""
    status, out, err = end(go(body))
    assert (status, err) == (0, "")
    interface = "lo" if sys.platform == "linux" else None
    for rank, text in enumerate((out, (tmp_path / "rank-1.log").read_text())):
        mode, stdin, ignores, *given = json.loads(text)
        assert stat.S_IMODE(mode) == 0o700
        assert (stdin, ignores) == ("", True)
        assert given == [str(rank), "2", str(rank), "2", "2", interface]


def raises(error: Exception) -> Script:
    def script(me: EmulatedProcess) -> Steps:
        yield
        raise error

    return script


@pytest.mark.parametrize(
    ("ranks", "kind", "line"),
    [
        ([stops, ends(-9)], RunError, "rank 1 was ended by SIGKILL; out of memory?"),
        ([ends(-6), stops], RunError, "rank 0 was ended by SIGABRT"),
        ([stops, ends(3)], RunError, "rank 1 ended with status 3; see {}/rank-1.log"),
        (
            [stops, raises(RankDied("a peer is gone")), raises(AssertionError("it"))],
            RunError,
            "rank 2: AssertionError: it; the traceback is in {}/rank-2.log",
        ),
        (
            [raises(RankDied("a peer is gone")), ends(0)],
            RunError,
            "rank 1 ended with status 0 before the run was over, as if a layer called os._exit",
        ),
        # Rank 2 hangs. Rank 1 waits for it, and rank 0 waits for rank 1.
        (
            [
                raises(WaitTimeout("rank 0 waited 1 s for rank 1", [1])),
                raises(WaitTimeout("rank 1 waited 1 s for rank 2", [2])),
                stops,
            ],
            RunError,
            "rank 1 waited 1 s for rank 2",
        ),
        ([raises(ConfigError("the same\n on both"))] * 2, InputError, "the same on both"),
    ],
    ids=["killed", "crashed", "exited", "cause", "silent", "hung", "input"],
)
def test_cause_of_a_failure_is_told(
    tmp_path: Path, ranks: list[Script], kind: type[DynmoError], line: str
) -> None:
    with pytest.raises(kind) as caught:
        launch(tmp_path, *ranks)
    said = re.sub(r" \(\w+\.py:\d+\)", "", str(caught.value))
    assert said == line.format(tmp_path)


@pytest.mark.parametrize(
    ("number", "to_all"), [(signal.SIGINT, True), (signal.SIGTERM, False)], ids=["group", "one"]
)
def test_signal_stops_all_ranks(
    go: Launch, tmp_path: Path, number: signal.Signals, to_all: bool
) -> None:
    """The signal goes to the launcher, or to every process as from a terminal."""
    process = go("train()")
    up(tmp_path)
    (os.killpg if to_all else os.kill)(process.pid, number)
    assert end(process) == (130, "", "")


def test_signal_to_save_reaches_all_ranks(go: Launch, tmp_path: Path) -> None:
    """It ends neither a rank that starts nor one that trains."""
    before = """
Path(f"starts-{rank}").touch()
while signal.SIGUSR1 not in signal.sigpending() and not Path("goes-on").exists():
    time.sleep(0.01)
"""
    body = """
def saves(number, frame):
    Path(f"saved-{rank}").touch()
signal.signal(signal.SIGUSR1, saves)
train()
"""
    process = go(body, before=before)
    wait_until(lambda: all((tmp_path / f"starts-{rank}").exists() for rank in range(2)))
    os.killpg(process.pid, signal.SIGUSR1)  # as Slurm sends it, to every process
    up(tmp_path)
    process.send_signal(signal.SIGUSR1)
    wait_until(lambda: all((tmp_path / f"saved-{rank}").exists() for rank in range(2)))
    process.send_signal(signal.SIGTERM)
    status, _, err = end(process)
    assert status == 130
    assert err in ("", f"{NOTHING}\n"), "only rank 0 says so"


def test_last_rank_to_stop_may_write_its_files(tmp_path: Path) -> None:
    """A rank that stops on request has not failed, so the others get more time than the grace."""

    def writes(me: EmulatedProcess) -> Steps:
        signal.raise_signal(signal.SIGINT)
        yield from me.asked()
        yield from [None] * 1000
        (tmp_path / "trace").touch()
        return 130

    assert launch(tmp_path, writes, stops) == (130, [])
    assert (tmp_path / "trace").exists()


def test_second_signal_ends_all_ranks_at_once(tmp_path: Path) -> None:
    def stays(me: EmulatedProcess) -> Steps:
        for _ in range(2 * (me.number == 0)):
            signal.raise_signal(signal.SIGINT)
            yield from me.asked()
        while True:
            yield

    with pytest.raises(Interrupted, match="interrupted twice"):
        launch(tmp_path, stays, stays)


def test_signal_during_start_gives_no_traceback(go: Launch, tmp_path: Path) -> None:
    """Ctrl-C does not interrupt the imports of a rank."""
    before = """
Path(f"up-{rank}").touch()
while signal.SIGTERM not in signal.sigpending():
    time.sleep(0.01)
"""
    process = go("train()", before=before)
    up(tmp_path)
    os.killpg(process.pid, signal.SIGINT)
    assert end(process) == (130, "", "Interrupted: interrupted while starting or finishing\n")


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG")
@pytest.mark.parametrize(
    "before",
    ["", "Path(f'up-{rank}').touch()\nwhile os.getppid() == launcher: time.sleep(0.01)"],
    ids=["running", "starting"],
)
def test_ranks_die_with_their_launcher(go: Launch, tmp_path: Path, before: str) -> None:
    process = go("train()", before=before)
    up(tmp_path)
    process.kill()
    process.communicate()
    wait_until(lambda: gone(tmp_path), 15)
    for folder in (tmp_path / "tmp").iterdir():  # nobody was there to remove it
        shutil.rmtree(folder)


def test_launch_folder_that_is_removed_ends_no_run(go: Launch, tmp_path: Path) -> None:
    """Ranks still leave the reason of a failure, in a folder that is made again."""
    body = """
up()
folder = Path(os.environ["DYNMO_RENDEZVOUS"])
while not Path("removed").exists() or not folder.exists():
    time.sleep(0.01)
from dynmo.elastic.launcher.rank_side import report_failure
sys.exit(report_failure(ValueError("bad")) if rank else 0)
"""
    process = go(body)
    up(tmp_path)
    (folder,) = (tmp_path / "tmp").iterdir()
    shutil.rmtree(folder)
    (tmp_path / "removed").touch()
    status, _, err = end(process)
    assert status == 1
    first, last = err.splitlines()
    assert first == (
        f"{folder} was removed while the run uses it; the run goes on, but its ranks may not be "
        "able to leave or join"
    )
    assert last == "RunError: rank 1: ValueError: bad"


def test_launch_folders_of_killed_launchers_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(environment, "_MAKING", -1.0)
    other = tmp_path / "dynmo-launch-elsewhere-1"
    other.mkdir()
    with environment.launch_folder(None) as used:
        left = used.with_name(f"{used.name}x")
        left.mkdir()
        (left / "entered-0").touch()
        os.utime(used, (0, 0))
        with environment.launch_folder(None) as second:
            assert {*tmp_path.iterdir()} == {used, second, other}
        environment.keep(used)
        assert used.stat().st_mtime > 0
    assert [*tmp_path.iterdir()] == [other]


def test_command_that_cannot_start_raises_an_error(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"rank 0 .*No such file"):
        supervisor.spawn([str(tmp_path / "nothing")], 1, 1, tmp_path)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == set()


def test_signal_before_the_first_rank_starts_no_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank started after the signal would never be stopped."""
    original = supervisor.process_environment

    def interrupted(rank: int, size: int, folder: Path, threads: int) -> dict[str, str]:
        if rank == 0:
            os.kill(os.getpid(), signal.SIGINT)
        return original(rank, size, folder, threads)

    monkeypatch.setattr(supervisor, "process_environment", interrupted)
    with pytest.raises(Interrupted):
        supervisor.spawn([sys.executable, "-c", RANK, "train()", ""], 2, 1, tmp_path)


def test_cuda_variables_are_set_for_several_ranks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Values that the user has set stay."""
    given = environment.FOR_RANKS_ON_CUDA
    for name in given:
        monkeypatch.delenv(name, raising=False)
    alone, several = (environment.process_environment(0, size, tmp_path, 1) for size in (1, 2))
    assert not given.keys() & alone.keys()
    assert given.items() <= several.items()
    monkeypatch.setenv("CUDA_MODULE_LOADING", "LAZY")
    assert environment.process_environment(0, 2, tmp_path, 1)["CUDA_MODULE_LOADING"] == "LAZY"
