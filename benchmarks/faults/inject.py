"""Faults that strike in the process of a rank, or from outside at a moment.

A fault of a phase comes when the rank calls a function of dynmo for the n-th time from a step on.
Each fault strikes once in a run: the file `struck-N` says when it did. A process that replaces
another finds the file, and goes on.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import random
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import Any
from zlib import crc32

from dynmo import Dynamism, Layers

PHASES = {
    "rendezvous": "dynmo.runtime.comm.meeting.Meeting._meet",
    "load": "dynmo.train.trainer.open_data",
    "F": "dynmo.runtime.layer.stage.Stage.forward",
    "B": "dynmo.runtime.layer.stage.Stage.backward_input",
    "W": "dynmo.runtime.layer.stage.Stage.backward_weight",
    "message": "dynmo.runtime.comm.channels.Transport.put",
    "reduction": "dynmo.runtime.engine.step_reduction.StepReduction.shared",
    "optimizer step": "dynmo.runtime.engine.optimizer_step.OptimizerStep.apply",
    "verdict": "dynmo.runtime.engine.post_validation.PostValidation._judge",
    "profile": "dynmo.runtime.engine.profiler.Profiler.gather",
    "decision": "dynmo.pipeline.rebalance.Rebalancer.consider",
    "before a move": "dynmo.pipeline.actions.Actions.move",
    "in a move": "dynmo.runtime.state.migration._Transit.carry",
    "after a move": "dynmo.pipeline.actions.Actions.move",
    "regroup": "dynmo.runtime.comm.meeting.Meeting.renew",
    "release": "dynmo.elastic.newcomers.Newcomers.on_resize",
    "evaluation": "dynmo.runtime.engine.engine.Engine.evaluate",
    "snapshot": "dynmo.runtime.state.save.Save.take",
    "write": "dynmo.runtime.state.background.MemoryFiles.send",
    "rename": "dynmo.runtime.state.save._complete",
    "copies": "dynmo.runtime.state.copies.Copies.take",
    "recovery": "dynmo.pipeline.recovery.Recovery._go_on",
    "roll call": "dynmo.runtime.comm.survivors.RollCall.members",
    "hand-over": "dynmo.pipeline.recovery.hand_over",
    "end": "dynmo.pipeline.pipeline.Pipeline.digest",
}
"""The function whose call begins a phase of a run."""

RECOVERY = ("recovery", "roll call", "hand-over")
"""Phases of a recovery."""

AFTER = ("after a move", "write")
"""Phases that begin as the function returns."""

_STEPS = "dynmo.pipeline.steps.Steps.train"
_SMALL = 64 << 20  # bytes of a disk that is filled, at most


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        kind: What happens: "kill", "stop", "term", "cut network", "slow network", "full disk",
            "slow disk", "flipped bit" or "NaN".
        phase: When it happens. Empty: at `time`.
        rank: Whose process it hits. None means the first to come to the phase, or the launcher.
        step: The step from which on calls count.
        call: Strikes at this call of the phase.
        seconds: How long it lasts. 0 means for ever.
        time: Seconds since the launcher's start.
    """

    kind: str
    phase: str = ""
    rank: int | None = None
    step: int = 0
    call: int = 1
    seconds: float = 0.0
    time: float = 0.0

    def __str__(self) -> str:
        whose = "" if self.rank is None else f" of rank {self.rank}"
        lasts = f" for {self.seconds:g} s" if self.seconds else ""
        if not self.phase:
            return f"{self.kind}{lasts}{whose} at {self.time:.2f} s"
        return f"{self.kind}{lasts}{whose} in call {self.call} of {self.phase}, step {self.step}"


def is_known(phase: str) -> bool:
    """Whether dynmo has the function of a phase."""
    try:
        resolve_name(PHASES[phase])
    except (ImportError, AttributeError):
        return False
    return True


def load() -> None:
    """Imports the functions of all phases."""
    for phase in PHASES:
        is_known(phase)


# -- in a rank -------------------------------------------------------------------------------------


class _Here:
    """What the faults of this process need."""

    step = -1
    rank = 0
    calls: dict[int, int]
    folder: Path
    faults: list[Fault]


def enter(environment: Mapping[str, str]) -> None:
    """Prepares the process of a rank, before it runs."""
    if "DYNMO_FAULTS" not in environment:
        return
    here = _Here()
    here.folder, here.calls = Path(environment["DYNMO_FAULTS_FOLDER"]), {}
    here.faults = [Fault(**each) for each in json.loads(environment["DYNMO_FAULTS"])]
    here.rank = int(environment["RANK"])
    if crc32(environment["DYNMO_FAULTS"].encode()) % 2:
        # Half of the runs send their copies, as those of several machines do.
        _patch("dynmo.pipeline.roster.Roster.shares_memory", lambda _: lambda _: False)
    pids = here.folder / "pids"
    pids.mkdir(exist_ok=True)
    note = pids / environment["DYNMO_PROCESS"]
    note.write_text(f"{os.getpid()} {_born(os.getpid())}")
    phases = {fault.phase for fault in here.faults if fault.phase}
    if phases:
        _patch(_STEPS, lambda train: _seen(train, here))
    for phase in phases:
        _patch(PHASES[phase], lambda call, phase=phase: _struck(call, phase, here))


class Strikes(Dynamism):
    """A case that changes nothing: with it, ranks that are no forks have faults, too."""

    name = "strikes"

    def __init__(self) -> None:
        enter(os.environ)

    def act(self, step: int, layers: Layers) -> None:
        pass

    def acts(self, step: int) -> bool:
        return False


def _patch(target: str, change: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    owner, _, name = target.rpartition(".")
    place = resolve_name(owner)
    found = inspect.getattr_static(place, name)
    if isinstance(found, staticmethod | classmethod):
        setattr(place, name, type(found)(change(found.__func__)))
    else:
        setattr(place, name, change(found))


def _seen(train: Callable[..., Any], here: _Here) -> Callable[..., Any]:
    """`Steps.train`, whose step and rank are noted."""

    def call(self: Any, *given: Any, **named: Any) -> Any:
        here.step = self._done
        here.rank = self._engine.store.world.everyone.rank
        return train(self, *given, **named)

    return call


def _struck(original: Callable[..., Any], phase: str, here: _Here) -> Callable[..., Any]:
    """The function of a phase, with its faults."""
    mine = [(at, fault) for at, fault in enumerate(here.faults) if fault.phase == phase]

    def call(*given: Any, **named: Any) -> Any:
        due = [(at, fault) for at, fault in mine if _is_due(at, fault, here)]
        poisons = [(at, fault) for at, fault in due if fault.kind == "NaN"]
        for at, fault in due:
            if fault.kind != "NaN" and phase not in AFTER:
                _strike(at, fault, here)
        result = original(*given, **named)
        for at, fault in poisons:
            if _claim(at, fault, here.folder, here):
                for tensor in result:
                    if tensor is not None and tensor.is_floating_point():
                        tensor.data.fill_(float("nan"))
        for at, fault in due:
            if fault.kind != "NaN" and phase in AFTER:
                _strike(at, fault, here)
        return result

    return call


def _is_due(at: int, fault: Fault, here: _Here) -> bool:
    if here.step < fault.step - (fault.step == 0) or fault.rank not in (None, here.rank):
        return False
    here.calls[at] = here.calls.get(at, 0) + 1
    return here.calls[at] == fault.call


def _claim(
    at: int, fault: Fault, folder: Path, here: _Here | None = None, target: int | None = None
) -> bool:
    """Notes that a fault strikes now. Returns False if it has before."""
    about: dict[str, Any] = {"at": at, "pid": target or os.getpid(), "fault": asdict(fault)}
    about["time"] = time.time()
    if here is not None:
        about |= {"at_step": here.step, "at_rank": here.rank}
    try:
        file = os.open(folder / f"struck-{at}", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    except FileExistsError:
        return False
    os.write(file, json.dumps(about).encode())
    os.close(file)
    return True


def _strike(at: int, fault: Fault, here: _Here) -> None:
    if not _claim(at, fault, here.folder, here):
        return
    if fault.kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault.kind == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault.kind == "term":
        os.kill(os.getpid() if fault.rank is not None else os.getppid(), signal.SIGTERM)
    elif fault.kind == "slow disk":
        _slow_down(fault.seconds)
    else:
        _from_outside(at, fault, here.folder)


def _slow_down(seconds: float) -> None:
    """Files of this process are synced slowly, and its writer stops for a while."""
    from dynmo.runtime.state import background

    end, sync = time.monotonic() + seconds, os.fsync

    def slow(file: int) -> None:
        if time.monotonic() < end:
            time.sleep(0.2)
        sync(file)

    os.fsync = slow
    if background._writer is not None:
        writer = background._writer.process
        writer.send_signal(signal.SIGSTOP)
        later = threading.Timer(seconds, writer.send_signal, [signal.SIGCONT])
        later.daemon = True
        later.start()


def _from_outside(at: int, fault: Fault, folder: Path, host: str = "") -> None:
    """Strikes as any process can. One that is on no host names it."""
    if fault.kind == "full disk":
        fill(folder / "runs")
    elif fault.kind == "flipped bit":
        flip(folder, at)
        for pid in sorted(living(folder), key=os.getpid().__eq__):  # this one last
            os.kill(pid, signal.SIGKILL)
    elif fault.kind in ("cut network", "slow network"):
        from benchmarks.faults import hosts

        hosts.disturb(fault.kind, host)


def living(folder: Path) -> list[int]:
    """Returns the processes of ranks that live."""
    return [pid for path in (folder / "pids").glob("*") if (pid := _living(path)) is not None]


def _living(note: Path) -> int | None:
    """Returns the process that a file names, if that lives and was not replaced by a stranger."""
    try:
        pid, born = note.read_text().split()
        return int(pid) if _born(int(pid)) == born else None
    except (OSError, ValueError):
        return None


def _born(pid: int) -> str:
    """Returns when a process began, or an empty string if it has ended."""
    state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return "" if state in "ZX" else fields[18]


def fill(folder: Path) -> None:
    """Fills the disk of a folder, if it is a small one made for this."""
    space = os.statvfs(folder)
    if space.f_blocks * space.f_frsize > _SMALL:
        return
    with contextlib.suppress(OSError), (folder / "filler").open("wb", 0) as file:
        while True:
            file.write(bytes(1 << 12))


def flip(folder: Path, seed: int) -> None:
    """Flips a bit in a file of the newest checkpoint, if there is an older one."""
    saved = sorted(folder.glob("runs/*/checkpoints/step-??????"))
    if len(saved) > 1:
        files = sorted(path for path in saved[-1].rglob("*") if path.is_file())
        draw = random.Random(f"{seed} {saved[-1].name}")
        path = draw.choice(files)
        content = bytearray(path.read_bytes())
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        path.write_bytes(content)


# -- from outside ----------------------------------------------------------------------------------


class Outside:
    """Strikes at moments, and ends what lasts for a while."""

    def __init__(
        self, faults: Sequence[Mapping[str, Any]], folder: Path, start: float, names: Sequence[str]
    ) -> None:
        self._faults = [Fault(**each) for each in faults]
        self._folder, self._start, self._hosts = folder, start, names
        self._lasting = {
            at
            for at, fault in enumerate(self._faults)
            if fault.seconds and fault.kind != "slow disk"
        }
        self._due = {at for at, fault in enumerate(self._faults) if not fault.phase}

    def act(self, launcher: int) -> None:
        """Does what is due now."""
        for at in sorted(self._due):
            fault = self._faults[at]
            if time.time() >= self._start + fault.time and self._strike(at, fault, launcher):
                self._due.discard(at)
        for at in sorted(self._lasting):
            with contextlib.suppress(OSError, ValueError):
                struck = json.loads((self._folder / f"struck-{at}").read_text())
                if time.time() >= struck["time"] + self._faults[at].seconds:
                    self._lasting.discard(at)
                    self._heal(self._faults[at], struck["pid"])

    def _strike(self, at: int, fault: Fault, launcher: int) -> bool:
        """Returns False as long as the process is not there."""
        if fault.kind in ("kill", "stop", "term"):
            number = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "term": signal.SIGTERM}
            note = self._folder / "pids" / str(fault.rank)
            target = launcher if fault.rank is None else _living(note)
            if target is None:
                return False
            _claim(at, fault, self._folder, target=target)
            os.kill(target, number[fault.kind])
        else:
            _claim(at, fault, self._folder)
            _from_outside(at, fault, self._folder, self._hosts[-1] if self._hosts else "")
        return True

    def _heal(self, fault: Fault, target: int) -> None:
        if fault.kind == "stop" and target in living(self._folder):
            os.kill(target, signal.SIGCONT)
        elif fault.kind == "full disk":
            (self._folder / "runs" / "filler").unlink(missing_ok=True)
        elif fault.kind in ("cut network", "slow network"):
            from benchmarks.faults import hosts

            for name in self._hosts:
                hosts.heal(name)

    def end(self) -> None:
        """Ends what still lasts after the run."""
        (self._folder / "runs" / "filler").unlink(missing_ok=True)


@contextlib.contextmanager
def small_disk(folder: Path, megabytes: int):
    """Mounts a small disk at a folder. Needs root."""
    folder.mkdir(parents=True)
    options = ["-t", "tmpfs", "-o", f"size={megabytes}m", "none", str(folder)]
    subprocess.run(["mount", *options], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=False)
        shutil.rmtree(folder, ignore_errors=True)
