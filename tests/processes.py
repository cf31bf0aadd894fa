"""Starting processes in a folder of their own.

The helpers also see that none is left there.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path


def start(
    command: Sequence[str], folder: Path, env: Mapping[str, str] | None = None
) -> subprocess.Popen[str]:
    """Starts a process group of its own, working in `folder`.

    Temporary files are in `folder/tmp`. Warnings are errors there too."""
    (folder / "tmp").mkdir(exist_ok=True)
    given = {"PYTHONWARNINGS": "error", "TMPDIR": str(folder / "tmp"), **(env or {})}
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command,
        cwd=folder,
        env={**os.environ, **given},
        stdin=subprocess.DEVNULL,
        stdout=pipe,
        stderr=pipe,
        text=True,
        start_new_session=True,
    )


def end_all(processes: Sequence[subprocess.Popen[str]]) -> None:
    """Kills the groups of processes that `start` has started and that still run."""
    for process in processes:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()


def run_script(script: Path, *arguments: str, ranks: int = 1) -> str:
    """Runs a Python script that must end well."""
    root = Path(__file__).parents[1]
    launcher = (
        ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        if ranks > 1
        else []
    )
    done = subprocess.run(
        [sys.executable, *launcher, str(script), *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def gone(folder: Path) -> bool:
    """True if no living process works in `folder`."""
    return not living(folder)


def living(folder: Path) -> list[int]:
    """The processes that work in `folder`, oldest first.

    A zombie has no folder any more.
    """
    pids: list[int] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if (entry / "cwd").readlink() == folder:
                    pids.append(int(entry.name))
            except OSError:  # it has ended, or is not ours to look at
                continue
    return sorted(pids)


def wait_until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    """Waits until a condition holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


def ranks(folder: Path) -> dict[int, int]:
    """Rank -> process, of those that work in `folder`."""
    by_rank: dict[int, int] = {}
    for pid in living(folder):
        try:
            variables = Path("/proc", str(pid), "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        by_rank |= {int(v.removeprefix(b"RANK=")): pid for v in variables if v.startswith(b"RANK=")}
    return by_rank


def catches(process: subprocess.Popen[str], number: int) -> bool:
    """Returns whether a process has a handler of a signal (Linux)."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    caught = next(line for line in status.splitlines() if line.startswith("SigCgt"))
    return bool(int(caught.split()[1], 16) >> number - 1 & 1)
