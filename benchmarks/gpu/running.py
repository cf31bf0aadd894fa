"""Runs one part of `make gpu` in a process of its own.

Imports the standard library only.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from benchmarks.gpu.parts import Part

ROOT = Path(__file__).resolve().parents[2]
LOGS = "logs"
Status = Literal["ok", "missed", "failed", "timeout", "left out"]


@dataclass(frozen=True)
class Ended:
    """How a part ended.

    Attributes:
        status: "ok"; "missed" (it ran, its figures are not as expected); "failed"; "timeout"; or
            "left out" (it did not start).
        came: What the part showed, or why it showed nothing.
        seconds: How long it ran.
        result: The object that the part printed, if it printed one.
    """

    status: Status
    came: str
    seconds: float = 0.0
    result: Mapping[str, Any] | None = None


def run(
    command: Sequence[str], limit: float, log: Path, environment: Mapping[str, str] | None = None
) -> Ended:
    """Runs `python -m COMMAND` and judges what it printed."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    start = time.monotonic()
    with log.open("wb") as errors, log.with_suffix(".out").open("w+b") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", *command],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": path, **(environment or {})},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
            start_new_session=True,
        )
        try:
            code: int | None = process.wait(limit)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            kill_tree(process)
        seconds = time.monotonic() - start
        output.seek(0)
        printed = output.read()
        errors.write(printed)
    log.with_suffix(".out").unlink()
    if code is None:
        return Ended("timeout", f"ended after its limit of {limit:.0f} s", seconds)
    return read_output(code, printed.decode(errors="replace"), log, seconds)


def read_output(code: int, printed: str, log: Path, seconds: float) -> Ended:
    """Reads a part's exit status and its last line.

    The last line is one JSON object, or the last line of pytest.
    """
    lines = [line for line in printed.splitlines() if line.strip()]
    if code:
        told = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        ended = f"ended by {signal.Signals(-code).name}" if code < 0 else f"status {code}"
        return Ended(
            "failed", f"{ended}: {(lines or told or ['no output'])[-1].strip('= ')}", seconds
        )
    try:
        result = json.loads(lines[-1]) if lines else None
    except ValueError:
        result = None
    if not isinstance(result, dict):
        return Ended("ok", lines[-1].strip("= ") if lines else "no output", seconds)
    return Ended(
        "ok" if result.get("met", True) else "missed", str(result.get("came", "")), seconds, result
    )


def kill_tree(process: subprocess.Popen[bytes]) -> None:
    """Kills a process and its descendants, also those in sessions of their own."""
    for pid in (*descendants(process.pid), *([process.pid] if process.poll() is None else [])):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    # Ranks die with their launcher. Others of the group may have lost their parent.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def descendants(pid: int) -> list[int]:
    """Returns all living descendants of a process, as far as /proc shows them."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # The name in parentheses may hold spaces.
            parent = int(entry.read_text(errors="replace").rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(entry.parent.name))
    out, waiting = list[int](), [pid]
    while waiting:
        below = children.get(waiting.pop(), [])
        out += below
        waiting += below
    return out


def record(part: Part, ended: Ended) -> dict[str, Any]:
    """Returns what a result file has of a part."""
    about = {"part": part.name, "expected": part.expected}
    return about | asdict(ended) | {"limit": part.limit}


def write(path: Path, content: Mapping[str, Any]) -> None:
    """Writes a result file, whole or not at all."""
    partial = path.with_suffix(".tmp")
    partial.write_text(json.dumps(content, indent=1) + "\n")
    partial.replace(path)
