"""Runs a draw, and says whether it ended as it must."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import tomli_w

from benchmarks.faults import hosts, inject
from benchmarks.faults.draws import RUNS, Draw, Run, Tables
from benchmarks.faults.inject import Fault
from benchmarks.faults.tables import FAILED, LINE, LIVE, RESTARTED, UNHARMED
from dynmo.errors import RunError

LIMIT = 90.0
"""Seconds after which a run hangs. Each wait ends after `parallel.timeout`, and restarts follow."""
_COMMAND = ["train", "run.toml", "--json"]
DISK = 3
"""Megabytes of a disk that gets full."""


class Server:
    """A server of forks, which runs one job at a time."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "benchmarks.faults.forks"]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
        self._reply()

    def run(self, folder: Path, arguments: list[str], **others: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        job = {"folder": str(folder), "arguments": arguments, **others}
        print(json.dumps(job), file=self._process.stdin, flush=True)
        return self._reply()

    def _reply(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RunError(f"the server of forks ended with status {self._process.wait()}")
        return json.loads(line)

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


class Workplace:
    """Where draws run, and what their runs give without a fault.

    Args:
        server: Runs them.
        folder: Takes a folder for each draw that failed.
        number: Tells the network namespaces of several workplaces apart.
    """

    def __init__(self, server: Server, folder: Path, number: int = 0) -> None:
        self._server, self._folder, self._number = server, folder, number
        self._known: dict[str, dict[str, Any]] = {}
        self._lengths: dict[str, float] = {}

    def reference(self, run: Run, nan_step: int | None = None) -> dict[str, Any]:
        """Returns `digest` and `losses` of one rank without a fault, or without a step."""
        config = run.config(alone=True)
        key = json.dumps([config, nan_step])
        if key not in self._known:
            faults = () if nan_step is None else (Fault("NaN", "F", 0, nan_step),)
            self._known[key], _ = self._undisturbed(config, faults)
        return self._known[key]

    def length(self, name: str) -> float:
        """Returns the seconds of a run without a fault."""
        if name not in self._lengths:
            outcome, self._lengths[name] = self._undisturbed(RUNS[name].config(), ())
            if problem := _difference(outcome, self.reference(RUNS[name])):
                raise RunError(f"the run {name} without a fault: {problem}")
        return self._lengths[name]

    def _undisturbed(
        self, config: Tables, faults: tuple[Fault, ...]
    ) -> tuple[dict[str, Any], float]:
        with tempfile.TemporaryDirectory(prefix="dynmo-faults-") as name:
            folder = Path(name)
            done = self._start(folder, config, faults)
            if done["status"]:
                text = (folder / "err").read_text()[-500:]
                raise RunError(f"a run fails without a fault: {text}")
            return _outcome(folder), done["seconds"]

    def _start(
        self, folder: Path, config: Tables, faults: tuple[Fault, ...], **others: Any
    ) -> dict[str, Any]:
        (folder / "run.toml").write_text(tomli_w.dumps(config))
        given = [asdict(fault) for fault in faults]
        return self._server.run(folder, _COMMAND, faults=given, limit=LIMIT, **others)

    def judge(self, draw: Draw) -> dict[str, Any]:
        """Runs a draw, and returns its row."""
        folder = Path(tempfile.mkdtemp(prefix=f"draw-{draw.number}-", dir=self._folder))
        with ExitStack() as stack:
            others: dict[str, Any] = {}
            if draw.needs_network:
                others["hosts"] = stack.enter_context(hosts.two_hosts(self._number))
            if draw.needs_disk:
                stack.enter_context(inject.small_disk(folder / "runs", DISK))
            done = self._start(folder, RUNS[draw.run].config(), draw.faults, **others)
            row = self._row(draw, folder, done)
            if row["how"] == FAILED and draw.needs_disk:
                shutil.copytree(folder / "runs", folder / "runs-copy")
        if row["how"] == FAILED:
            row["folder"] = str(folder)
        else:
            shutil.rmtree(folder)
        return row

    def _row(self, draw: Draw, folder: Path, done: dict[str, Any]) -> dict[str, Any]:
        row: dict[str, Any] = {
            "number": draw.number,
            "run": draw.run,
            "kind": draw.kind,
            "phase": draw.phase,
            "ranks": len(draw.faults),
            "seconds": round(done["seconds"], 2),
        }
        struck = [json.loads(path.read_text()) for path in sorted(folder.glob("struck-*"))]
        row["struck"], events = len(struck), _events(folder)
        spoilt = [each["at_step"] for each in struck if each["fault"]["kind"] == "NaN"]
        # A step that begins before the one before is validated is made again if that is taken back.
        taken_back = {e["step"] for e in events if e["event"] == "rollback"}
        spoilt = [step for step in spoilt if step - 1 not in taken_back]
        expected = self.reference(RUNS[draw.run], *spoilt)
        out, err = ((folder / name).read_text(errors="replace") for name in ("out", "err"))
        problem = _problem_of_end(done, out + err)
        status = done["status"]
        restarts = [line for line in err.splitlines() if re.search(r"restart \d+ of \d+", line)]
        if restarts:
            row["restarts"] = restarts
        if not problem and status:
            row["line"] = err.strip().splitlines()[-1] if err.strip() else ""
            problem = _problem_of_line(status, draw, row["line"])
            if not problem:
                problem = self._resume(folder, expected)
            row["how"] = LINE
        elif not problem:
            problem = _difference(_outcome(folder), expected)
            recovered = any(event["event"] == "recover" for event in events)
            row["how"] = RESTARTED if restarts else LIVE if recovered else UNHARMED
        if problem:
            row |= {"how": FAILED, "problem": problem}
        if struck:
            row |= _times(events, struck, bool(restarts))
        return row

    def _resume(self, folder: Path, expected: dict[str, Any]) -> str:
        """Goes on from the newest checkpoint, and returns what is wrong with the end."""
        (folder / "runs" / "filler").unlink(missing_ok=True)
        saved = list(folder.glob("runs/run/checkpoints/step-??????/manifest.json"))
        how = "--resume" if saved else "--overwrite"
        done = self._server.run(folder, [*_COMMAND, how], limit=LIMIT)
        text = (folder / "err").read_text(errors="replace")
        problem = _problem_of_end(done, text)
        if not problem and done["status"]:
            problem = f"{how} ends with status {done['status']}: {text.strip().splitlines()[-1]}"
        return problem or _difference(_outcome(folder), expected, f"after {how} ")


def _events(folder: Path) -> list[dict[str, Any]]:
    try:
        lines = (folder / "runs/run/events.jsonl").read_text().splitlines()
    except OSError:
        return []
    events = list[dict[str, Any]]()
    for line in lines:
        try:
            events.append(json.loads(line))
        except ValueError:  # the process was killed while it wrote the line
            continue
    return events


def _outcome(folder: Path) -> dict[str, Any]:
    """Returns the digest at the end of a run, and the last loss of each step."""
    *_, last = "", *(folder / "out").read_text().splitlines()
    printed: dict[str, Any] = json.loads(last) if last.startswith("{") else {}
    losses = {str(e["step"]): e["loss"] for e in _events(folder) if e["event"] == "step"}
    return {"digest": printed.get("weights_digest"), "losses": losses}


def _difference(outcome: dict[str, Any], expected: dict[str, Any], when: str = "") -> str:
    if outcome["digest"] != expected["digest"]:
        found, known = outcome["losses"], expected["losses"]
        # A loss that is not finite is no number in JSON.
        first = [step for step in known if repr(found.get(step)) != repr(known[step])]
        where = f"; the first loss that differs is that of step {first[0]}" if first else ""
        return f"{when}weights {outcome['digest']} instead of {expected['digest']}{where}"
    return ""


def _problem_of_end(done: dict[str, Any], text: str) -> str:
    if done["status"] is None:
        return f"it hung for {done['seconds']:.0f} s"
    if done["left"]:
        return f"processes were left: {', '.join(done['left'])}"
    if "Traceback" in text or "a defect in dynmo" in text:
        return "a traceback: " + text.strip().splitlines()[-1]
    return ""


def _problem_of_line(status: int, draw: Draw, line: str) -> str:
    stopped = status == 130 and any(fault.kind == "term" for fault in draw.faults)
    if status != 1 and not stopped:
        return f"status {status}: {line}"
    return "" if line.startswith("dynmo:") else f"no line at the end: {line}"


def _times(
    events: list[dict[str, Any]], struck: list[dict[str, Any]], restarted: bool
) -> dict[str, Any]:
    """Returns when the fault was noticed, and when the next step was done."""
    begin = struck[0]["time"]
    steps = [event for event in events if event["event"] == "step"]
    before = [event["step"] for event in steps if event["time"] <= begin]
    row: dict[str, Any] = {"at_step": before[-1] + 1 if before else 0}
    recovered = [e for e in events if e["event"] == "recover" and e["time"] > begin]
    if recovered and not restarted:
        first = recovered[0]
        row["noticed"] = first["time"] - first["seconds"] - begin
        row["repeated"] = sum(event["repeated"] for event in recovered)
        row["recoveries"] = len(recovered)
        later = [event["time"] for event in steps if event["time"] > recovered[-1]["time"]]
    else:
        later = [
            e["time"] for e in steps if e["time"] > begin and e["step"] <= max(before, default=0)
        ]
        if restarted:
            row["repeated"] = len(steps) - len({event["step"] for event in steps})
    if later:
        row["next_step"] = later[0] - begin
    return row
