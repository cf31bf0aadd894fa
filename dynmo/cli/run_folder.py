"""The folder of a run, `runs/NAME`, which one process at a time makes, resumes or replaces.

An attempt that fails before its first event leaves the folder as it was.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dynmo.errors import ConfigError, DynmoError, InputError, Interrupted, RunError
from dynmo.files import parse_toml, read_text, write_whole

if TYPE_CHECKING:
    from dynmo.config import Config

_logger = logging.getLogger(__name__)

RUNS, EVENTS = Path("runs"), "events.jsonl"
_OF_JOB = ".job"  # the id of the job that trains a run
NOTHING_TO_SAVE = "interrupted before the first step, so there is nothing to save"


@contextlib.contextmanager
def run_folder(
    config: Config, resume: bool, overwrite: bool, again: bool = False
) -> Iterator[Path]:
    """Prepares runs/NAME.

    The ranks may find the input wrong, or be interrupted, before the run writes its first event.
    The folder is then restored, so that it does not block the next attempt. A run that --overwrite
    replaces is deleted only after the first event of the new run, by `forget_replaced`. The error
    of a run that fails says how it, or the run before, can go on.

    Args:
        again: Whether the job of this process has started this run before.
    """
    folder = RUNS / config.name
    with _alone(folder):
        try:
            before = _prepare(folder, config, resume, overwrite, again)
            _mark_job(folder)
        except OSError as error:
            raise ConfigError(f"{folder} cannot be made ready: {error}") from None
        events = _size(folder / EVENTS)
        try:
            yield folder
        except (DynmoError, KeyboardInterrupt) as error:
            is_kept = _size(folder / EVENTS) == events
            failed = isinstance(error, RunError) and not isinstance(error, Interrupted)
            if is_kept and (before.replaced is not None or not failed):
                before.restore(folder)
            if is_kept and before.replaced is not None:
                how = _how_to_resume(folder)
                error.args = (f"{error}; the run before is kept{how and f', and {how}'}",)
            elif is_kept and isinstance(error, Interrupted):
                how = _how_to_resume(folder)
                error.args = (f"{NOTHING_TO_SAVE}{how and f'; {how}'}",)
            elif isinstance(error, RunError) and folder.is_dir():
                # Wrong input of a restart: it has tried to resume.
                in_vain = isinstance(error.__cause__, InputError)
                how = "--overwrite starts anew" if in_vain else how_to_go_on(folder)
                error.args = (f"{error}; {how}",)
            raise
        if resume and _size(folder / EVENTS) == events:  # nothing was left to train
            before.restore(folder)


def check_run(folder: Path) -> None:
    """Checks that a command was given a folder."""
    if folder.is_file():
        raise InputError(f"{folder} is a file; give the run's folder, {folder.parent}")
    if not folder.is_dir():
        raise InputError(f"{folder} is no folder; give a run, such as runs/NAME")


def forget_replaced(folder: Path) -> None:
    """Deletes the run that this one replaces, if there is one."""
    shutil.rmtree(_aside(folder), ignore_errors=True)


def how_to_go_on(folder: Path) -> str:
    """Names the newest checkpoint of a run that was cut short, or says that there is none."""
    return _how_to_resume(folder) or _no_checkpoint(folder)


def _no_checkpoint(folder: Path) -> str:
    return f"{folder} has no checkpoint to go on from (checkpoint.every); --overwrite starts anew"


def _how_to_resume(folder: Path) -> str:
    saved = _checkpoints(folder)
    return f"--resume goes on from {saved[-1]}" if saved else ""


def _checkpoints(folder: Path) -> list[Path]:
    """Returns the complete checkpoints of a run, the newest last."""
    saved = (folder / "checkpoints").glob("step-*[0-9]")
    return sorted(saved, key=lambda path: (len(path.name), path.name))


def make_ready_again(config: Config) -> bool:
    """Prepares runs/NAME for another attempt. Returns whether that resumes."""
    folder = RUNS / config.name
    resumes = bool(_checkpoints(folder))
    try:
        _prepare(folder, config, resumes, overwrite=False, again=True)
    except OSError as error:
        raise RunError(f"{folder} cannot be made ready: {error}") from None
    return resumes


def on_ranks_left(config: Config, left: int) -> Config:
    """Returns the run on at most so many ranks: on as many as work, on as many replicas as before.

    Raises:
        RunError: The run works on no mesh that is so small.
    """
    from dynmo.config import with_options

    if left >= config.ranks:
        return config
    parallel, why = config.parallel, ""
    # The sums over the batch have the same bits on any mesh.
    same = with_options(config, ("train",), {"reduction_slots": config.options.accumulation_groups})
    meshes = (
        (ranks, replicas)
        for ranks in range(left, 0, -1)
        for replicas in range(min(ranks, parallel.replicas), 0, -1)
        if (ranks == replicas if parallel.slices else ranks % replicas == 0)
    )
    for ranks, replicas in meshes:
        pipeline = parallel.pipeline if parallel.slices else ranks // replicas
        try:
            mesh = {"pipeline": pipeline, "replicas": replicas}
            return with_options(same, ("parallel",), mesh)
        except ConfigError as error:
            why = f"; no smaller mesh works: {error}"
    raise RunError(f"{left} of {config.ranks} ranks are left{why}")


def is_again(config: Config) -> bool:
    """Returns whether the job of this process has started this run before, and starts it again."""
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if "DYNMO_JOB" not in os.environ and restarts == "0":
        return False  # several jobs of torchrun may have one id
    with contextlib.suppress(OSError):
        return (RUNS / config.name / _OF_JOB).read_text("utf-8") == _job()
    return False


def _job() -> str:
    """Returns the id of a job that starts its ranks again after a failure. Empty if none does."""
    return os.environ.get("DYNMO_JOB") or os.environ.get("TORCHELASTIC_RUN_ID", "")


def _mark_job(folder: Path) -> None:
    """Notes which job trains the run. Another job has no part in it."""
    if job := _job():
        write_whole(folder / _OF_JOB, job)


def newest_checkpoint(folder: Path) -> Path | None:
    """Returns the newest complete checkpoint of a run, if there is one."""
    return next(reversed(_checkpoints(folder)), None)


def steps_done(folder: Path) -> int:
    """Returns the number of steps that a run has done, as its log has it."""
    last = b""
    with contextlib.suppress(OSError), (folder / EVENTS).open("rb") as log:
        for line in log:
            if line.startswith(b'{"event": "step",') and line.endswith(b"\n"):
                last = line
    return json.loads(last)["step"] + 1 if last else 0


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Keeps other processes from training this run, while it is open."""
    import filelock

    path = folder.with_name(f".{folder.name}.lock")
    # A process that ends removes its lock file. A process that opened the removed file tries again,
    # so the timeout is not 0.
    lock = filelock.FileLock(path, timeout=0.1, poll_interval=0.02)
    with contextlib.ExitStack() as stack:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(lock)
        except filelock.Timeout:
            raise ConfigError(
                f"{folder} is being trained by another process; wait until it ends, or choose "
                "another name"
            ) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise ConfigError(f"{folder} cannot be made ready: {error}") from None
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


# Errors of a file system without locks. Its users must take care themselves.
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP}


@dataclass(frozen=True)
class _Before:
    """The content of a run's folder before this attempt.

    Attributes:
        config: Text of the resumed run's `config.toml`. None if the run is new.
        replaced: Where the replaced run is now. None if no run is replaced.
    """

    config: str | None = None
    replaced: Path | None = None

    def restore(self, folder: Path) -> None:
        if self.config is not None:
            if folder.is_dir():  # others may have moved it
                _write_config(folder, self.config)
            return
        if self.replaced is not None:  # the logs of the ranks say what was wrong
            for log in folder.glob("rank-*.log"):
                log.rename(self.replaced / log.name)
        shutil.rmtree(folder, ignore_errors=True)
        if self.replaced is not None:
            self.replaced.rename(folder)


def _write_config(folder: Path, text: str) -> None:
    """Leaves a file that says the same as it is."""
    path = folder / "config.toml"
    with contextlib.suppress(OSError, UnicodeDecodeError):
        if path.read_text(encoding="utf-8") == text:
            return
    write_whole(path, text)


def _prepare(
    folder: Path, config: Config, resume: bool, overwrite: bool, again: bool = False
) -> _Before:
    """Makes the folder with the run's config, and returns its content before.

    Args:
        again: Whether the folder is that of an earlier attempt of the same run.
    """
    if os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0":
        (folder / _OF_JOB).unlink(missing_ok=True)  # of an earlier job
    if resume or again:
        _remove_leftovers(folder)
    if again and not resume:
        (folder / "decisions.jsonl").unlink(missing_ok=True)  # the log tells later events apart
    if not again and _aside(folder).exists() and not _size(folder / EVENTS):
        # An attempt to replace the run failed before its first event.
        shutil.rmtree(folder, ignore_errors=True)
        _aside(folder).rename(folder)
    before = _Before()
    if resume:
        recorded = _resumed_config(folder)
        before = _Before(config=recorded)
        config = _with_recorded(config, recorded)
        _tell_changes(recorded, config.to_toml())
    elif folder.exists() and not again:
        before = _Before(replaced=_set_aside(folder, overwrite))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _write_config(folder, config.to_toml())
    except OSError:
        if not resume:
            shutil.rmtree(folder, ignore_errors=True)
        if before.replaced is not None:
            before.replaced.rename(folder)
        raise
    return before


def _remove_leftovers(folder: Path) -> None:
    """Removes what a run that was killed has left."""
    shutil.rmtree(folder / ".launch", ignore_errors=True)
    for path in (folder / "rendezvous.json", *folder.glob("*.tmp")):
        path.unlink(missing_ok=True)
    for path in sorted((folder / "checkpoints").glob("step-*.tmp")):
        final = path.with_name(path.name.partition(".")[0])
        if path.name.endswith(".replaced.tmp") and not final.exists():
            path.rename(final)  # killed before the new one had its name
        else:
            shutil.rmtree(path, ignore_errors=True)


def _resumed_config(folder: Path) -> str:
    """Returns the text of the config of a run that can be resumed."""
    if not folder.is_dir():
        raise ConfigError(
            f"{folder} does not exist, so there is nothing to resume; leave out --resume"
        )
    if not _checkpoints(folder):
        raise ConfigError(_no_checkpoint(folder))
    try:
        return read_text(folder / "config.toml")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{folder}/config.toml: not UTF-8 text (byte {error.start}); save it as UTF-8, or "
            "start anew with --overwrite"
        ) from None


def _set_aside(folder: Path, overwrite: bool) -> Path:
    """Renames the folder of a run that is replaced, and returns its new path."""
    if not overwrite:
        raise ConfigError(
            f"{folder} exists; go on with --resume, replace it with --overwrite, or choose "
            "another name"
        )
    if any(folder.iterdir()) and not (folder / "config.toml").is_file():
        raise ConfigError(
            f"{folder} is no run: it has no config.toml; --overwrite would delete it; choose "
            "another name"
        )
    if folder.is_symlink():
        raise OSError("it is a symbolic link")
    replaced = _aside(folder)
    shutil.rmtree(replaced, ignore_errors=True)  # left by a run that was killed at its start
    folder.rename(replaced)
    return replaced


def _with_recorded(config: Config, before: str) -> Config:
    """Keeps options that the run's cases have measured by themselves."""
    from dynmo.cases import CASES
    from dynmo.config import parse, with_options

    # The run's own copy may be edited by hand.
    with contextlib.suppress(ValueError):
        then = parse(parse_toml(before)).dynamism
        for name in CASES:
            kept = getattr(config.dynamism, name).measured(getattr(then, name))
            config = with_options(config, ("dynamism", name), kept) if kept else config
    return config


def _tell_changes(before: str, after: str) -> None:
    """Reports changed values of a resumed run, because they change its result."""
    from dynmo.config import without_unused_keys
    from dynmo.report.comparison import difference_line, differences

    with contextlib.suppress(ValueError):  # the run's own copy, edited by hand
        changes = differences([without_unused_keys(parse_toml(text)) for text in (before, after)])
        if changes:
            _logger.warning(f"resumed; {difference_line(changes)}")


def _aside(folder: Path) -> Path:
    """Returns the folder of a run that is being replaced. No run can have this name."""
    return folder.with_name(f".{folder.name}.replaced")


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
