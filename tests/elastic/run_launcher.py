"""A launcher as a process, over ranks that run scripts (`rank_program.py`).

Usage: `python -m tests.elastic.run_launcher local|slurm|ray SIZE FOLDER`. It says how the run ended
as the command line does. `launcher_command` writes the scripts and returns this command.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from dynmo.elastic.launcher import supervisor
from dynmo.elastic.manager import Starter
from dynmo.errors import DynmoError
from tests.processes import gone, wait_until

ROOT = Path(__file__).parents[2]
# Variables of a launcher that works in another folder.
PATHS = {"PYTHONPATH": str(ROOT)}
# Those of a run that survives a dead rank.
RECOVERS = {**PATHS, "RECOVERS_WITHIN": "20"}

# A rank that ends after it was asked to, once it may.
STOPS_WHEN_ASKED = """
say(f"up-{process}")
until(lambda: signals, "a signal")
heard("may-stop")
say(f"stopped-{process}")
sys.exit(130)
"""

# Four ranks, of which the last two leave. Rank 0 asks for two others when another job of the
# cluster has waited for their resources, has got them and has ended.
LENDS_TWO = (
    """
say("up")
heard("another-waits")
give_back(2, 3, stay=[0, 1])
say("leave")
reports(1)
heard("another-is-over")
manager.start(2)
heard("joined-4")
heard("joined-5")
ranks_are(0, 1, 4, 5)
reports(3)
print("result")
say("done")
""",
    "heard('done')",
    "heard('leave')",
    "heard('leave')",
)


# Three ranks, of which one dies and one stops. Rank 0 goes on alone.
LOSES_TWO = (
    """
ended(1)
ranks_are(0, 2)
say("goes-on")
heard("stops")
time.sleep(0.5)
arbiter.end(2)
ended(2)
ranks_are(0)
reports(2)
print(arbiter.how_it_ended(1), "and", arbiter.how_it_ended(2))
""",
    "os.kill(os.getpid(), signal.SIGKILL)",
    """
heard("goes-on")
say("stops")
os.kill(os.getpid(), signal.SIGSTOP)
heard("never")
""",
)


def launcher_command(name: str, folder: Path, *scripts: str, join: str = "") -> list[str]:
    """Writes the scripts of a run, and returns the command of its launcher."""
    for number, script in enumerate(scripts):
        (folder / f"script-{number}.py").write_text(script)
    (folder / "script-join.py").write_text(join)
    module = [sys.executable, "-m", "tests.elastic.run_launcher"]
    return [*module, name, str(len(scripts)), str(folder)]


def reports_of(folder: Path) -> list[str]:
    """The reports of the launcher, as rank 0 has written them down."""
    return (folder / "reports").read_text().splitlines()


def check_that_ranks_end_with(
    process: subprocess.Popen[str], folder: Path, number: int
) -> tuple[int, str]:
    """Sends a signal to the launcher of two ranks that run `STOPS_WHEN_ASKED`.

    Ctrl-C lets the ranks finish their step. Ranks end if their launcher is killed. Returns the
    status of the launcher, and its errors.
    """
    wait_until(lambda: all((folder / f"up-{rank}").exists() for rank in range(2)))
    os.kill(process.pid, number)
    if number == signal.SIGINT:
        (folder / "may-stop").touch()
    _, err = process.communicate(timeout=50)
    stopped = [(folder / f"stopped-{rank}").exists() for rank in range(2)]
    assert stopped == [number == signal.SIGINT] * 2
    wait_until(lambda: gone(folder), 60)
    return process.returncode, err


def starter(name: str, size: int, folder: Path) -> Starter | None:
    options = json.loads(os.environ.get("JOB_OPTIONS", "[]"))
    if name == "slurm":
        from dynmo.elastic.managers.slurm import SlurmStarter

        return SlurmStarter(folder / ".launch", options)
    if name == "ray":
        from dynmo.elastic.managers.ray import RayStarter

        return RayStarter()
    return None


def main(name: str, size: int, folder: Path) -> int:
    program = Path(__file__).with_name("rank_program.py")
    command = [sys.executable, str(program), str(folder)]
    shared = None if name == "local" else folder / ".launch"
    supervisor._GRACE = 2.0
    within = float(os.environ["RECOVERS_WITHIN"]) if "RECOVERS_WITHIN" in os.environ else None
    where = starter(name, size, folder), shared, None
    try:
        return supervisor.spawn(command, size, 1, folder, *where, within)
    except DynmoError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return error.exit_status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])))
