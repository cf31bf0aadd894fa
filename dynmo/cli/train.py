"""`dynmo train` starts the ranks of a run, or is one of them.

The ranks start on this machine, under Slurm or under Ray. A process that torchrun or `srun` has
started is a rank itself. With `--join` it becomes a rank of a run that goes on.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import shutil
import sys
import tomllib
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dynmo.cli.compiling import compilation_told
from dynmo.errors import ConfigError, DynmoError, InputError, Interrupted, RunError
from dynmo.files import write_whole

if TYPE_CHECKING:
    from dynmo.config import Config
    from dynmo.events import Event
    from dynmo.launch.starter import Starter
    from dynmo.runtime.comm.rendezvous import Rendezvous

_logger = logging.getLogger(__name__)

RUNS = Path("runs")


class Launcher(StrEnum):
    """The starter of the ranks."""

    local = "local"
    slurm = "slurm"
    ray = "ray"


def train(
    config: Annotated[Path, typer.Argument(help="The run, as TOML.", show_default=False)],
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Change a key.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the newest checkpoint of runs/NAME.")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace runs/NAME.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print plan and memory; train nothing.")
    ] = False,
    launcher: Annotated[
        Launcher | None,
        typer.Option("--launcher", help="Who starts the ranks (default: local)."),
    ] = None,
    join: Annotated[
        bool, typer.Option("--join", help="Become a rank of runs/NAME while it trains.")
    ] = False,
    json_: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Train a model over pipeline ranks, rebalancing as it changes."""
    from dynmo.launch.rank_side import is_local_rank

    import_from_working_folder()
    if is_local_rank():
        raise typer.Exit(_local_joiner(config) if join else _local_rank(config, resume, json_))

    from dynmo.config import load
    from dynmo.runtime.comm.rendezvous import from_environment

    if resume and overwrite:
        raise ConfigError("--resume and --overwrite exclude each other")
    may_start = "RANK" in os.environ
    if join and (overwrite or dry_run or launcher is not None or (resume and not may_start)):
        raise ConfigError(
            "--join excludes --resume, --overwrite, --dry-run and --launcher: it joins a run "
            "that goes on as it is"
        )
    loaded = load(config, set_ or [])
    if join and (status := _join(loaded, may_start)) is not None:
        raise typer.Exit(status)
    if dry_run:
        _dry_run(loaded, json_)
        return
    # In a batch job of Slurm the launcher finds the environment of a rank.
    rendezvous = from_environment() if launcher is None else None
    if rendezvous is None:
        _check_input(loaded)
        with _run_folder(loaded, resume, overwrite) as folder:
            raise typer.Exit(_spawn(loaded, folder, resume, json_, launcher or Launcher.local))
    raise typer.Exit(_joined_rank(loaded, rendezvous, resume, overwrite, json_))


def import_from_working_folder() -> None:
    """Makes modules in the working folder importable, after all installed ones.

    The folder comes last in `sys.path`. A file there with the name of a module of Python or of a
    package, such as `types.py`, therefore hides nothing.
    """
    here = str(Path.cwd())
    if sys.path[:1] in ([""], [here]):  # `python -m dynmo` puts it first
        del sys.path[0]
    if here not in sys.path:
        sys.path.append(here)


def rank_command(*arguments: str) -> list[str]:
    """Returns the command line of a local rank.

    With -P, Python does not put the working folder first in `sys.path`.
    """
    return [sys.executable, "-P", "-m", "dynmo", *arguments]


def _check_input(config: Config) -> None:
    """Checks the config without torch, before anything is made or overwritten."""
    from dynmo.cluster.choose import make_releaser
    from dynmo.data.corpus import check_vocab, open_corpus

    if config.model.kind != "emulated":
        check_vocab(config.model.vocab)
    if config.data.source.startswith("file:"):
        open_corpus(config.data.source)
    make_releaser(config, {})


@contextlib.contextmanager
def _run_folder(config: Config, resume: bool, overwrite: bool) -> Iterator[Path]:
    """Prepares runs/NAME.

    The ranks may find the input wrong, or be interrupted, before the run writes its first event.
    The folder is then restored, so that it does not block the next attempt. A run that --overwrite
    replaces is deleted only after the first event of the new run.

    Raises:
        ConfigError: A run would be lost.
    """
    folder = RUNS / config.name
    with _alone(folder):
        try:
            previous, replaced = _prepare(folder, config, resume, overwrite)
        except OSError as error:
            raise ConfigError(f"{folder} cannot be made ready: {error}") from None
        events = _size(folder / "events.jsonl")
        try:
            yield folder
        except (InputError, Interrupted, KeyboardInterrupt):
            if _size(folder / "events.jsonl") == events:
                if previous is not None:
                    write_whole(folder / "config.toml", previous)
                else:
                    shutil.rmtree(folder)
                if replaced is not None:
                    replaced.rename(folder)
            raise


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Keeps other processes from training this run, while it is open.

    Raises:
        ConfigError: Another process trains the run.
    """
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


def _prepare(
    folder: Path, config: Config, resume: bool, overwrite: bool
) -> tuple[str | None, Path | None]:
    """Returns the resumed run's config, and the folder that holds the replaced run."""
    previous = replaced = None
    if _aside(folder).exists() and not _size(folder / "events.jsonl"):
        # An attempt to replace the run failed before its first event.
        shutil.rmtree(folder, ignore_errors=True)
        _aside(folder).rename(folder)
    if resume:
        if not folder.is_dir():
            raise ConfigError(
                f"{folder} does not exist, so there is nothing to resume; leave out --resume"
            )
        if not any((folder / "checkpoints").glob("step-*[0-9]")):
            raise ConfigError(
                f"{folder} has no checkpoint to resume from; start anew with --overwrite"
            )
        try:
            previous = (folder / "config.toml").read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ConfigError(
                f"{folder}/config.toml: not UTF-8 text (byte {error.start}); save it as UTF-8, or "
                "start anew with --overwrite"
            ) from None
        config = _with_recorded(config, previous)
        _tell_changes(previous, config.to_toml())
    elif folder.exists():
        if not overwrite:
            raise ConfigError(
                f"{folder} exists; go on with --resume, replace it with --overwrite, or choose "
                "another name"
            )
        if any(folder.iterdir()) and not (folder / "config.toml").is_file():
            raise ConfigError(
                f"{folder} does not look like a run (it has no config.toml); --overwrite would "
                "delete it; choose another name"
            )
        if folder.is_symlink():
            raise OSError("it is a symbolic link")
        replaced = _aside(folder)
        shutil.rmtree(replaced, ignore_errors=True)  # left by a run that was killed at its start
        folder.rename(replaced)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / "config.toml", config.to_toml())
    except OSError:
        if not resume:
            shutil.rmtree(folder, ignore_errors=True)
        if replaced is not None:
            replaced.rename(folder)
        raise
    return previous, replaced


def _with_recorded(config: Config, before: str) -> Config:
    """Keeps options that the run has measured by itself (`Pruning.dense_below`)."""
    from dynmo.config import parse, with_options

    # The run's own copy may be edited by hand.
    with contextlib.suppress(tomllib.TOMLDecodeError, ConfigError):
        then = parse(tomllib.loads(before)).dynamism.pruning.dense_below
        if config.dynamism.pruning.dense_below in ("auto", "measured") and isinstance(then, dict):
            return with_options(config, ("dynamism", "pruning"), {"dense_below": then})
    return config


def _tell_changes(before: str, after: str) -> None:
    """Reports changed values of a resumed run, because they change its result."""
    from dynmo.config import without_unused_keys
    from dynmo.report.summary import difference_line, differences

    with contextlib.suppress(tomllib.TOMLDecodeError):  # the run's own copy, edited by hand
        changes = differences(
            [without_unused_keys(tomllib.loads(text)) for text in (before, after)]
        )
        if changes:
            _logger.warning(f"resumed; {difference_line(changes)}")


def _aside(folder: Path) -> Path:
    """Returns the folder of a run that is being replaced. No run can have this name."""
    return folder.with_name(f".{folder.name}.replaced")


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _spawn(config: Config, folder: Path, resume: bool, as_json: bool, launcher: Launcher) -> int:
    from dynmo.launch.supervisor import spawn

    command = rank_command(
        "train", str(folder / "config.toml"), *["--resume"] * resume, *["--json"] * as_json
    )
    meeting = folder / "meeting.json"  # for joiners
    meeting.unlink(missing_ok=True)  # of a run that was killed
    try:
        if launcher is Launcher.local:
            return spawn(command, config.ranks, config.parallel.threads, folder)
        shared = folder / ".launch"
        starter = _starter(launcher, config, shared)
        return spawn(
            command, config.ranks, config.parallel.threads, folder, starter, shared, meeting
        )
    finally:
        meeting.unlink(missing_ok=True)
        if sys.stderr.isatty():
            # A killed rank 0 leaves its live line there, and no cursor.
            print("\r\x1b[K\x1b[?25h", end="", file=sys.stderr, flush=True)


def _starter(launcher: Launcher, config: Config, shared: Path) -> Starter:
    if launcher is Launcher.slurm:
        from dynmo.launch.slurm import SlurmStarter

        return SlurmStarter(config.ranks, shared, config.elastic.job_options)
    from dynmo.launch.ray_actors import RayStarter

    return RayStarter()


def _join(config: Config, may_start: bool) -> int | None:
    """Joins a run, as a process that the user has started.

    It reports its errors itself.

    Args:
        config: Names the run.
        may_start: Whether the process has the variables of a rank. All pods of a job have the same
            command. The first ones start the run, and later ones join it.

    Returns:
        The exit status. None if the run does not go on. This process is then one of its first
        ranks.
    """
    from dynmo.launch.rank_side import describe, quiet_torch

    quiet_torch()
    folder = RUNS / config.name
    if may_start and not (folder / "meeting.json").is_file():
        return None
    try:
        from dynmo.train.joining import RunGone, join_run

        try:
            return join_run(folder)
        except RunGone:
            if may_start:  # of a run that was killed
                return None
            raise
    except DynmoError:
        raise
    except Exception as error:
        raise RunError(f"{describe(error, None)} (DYNMO_TRACEBACK=1 shows more)") from error


def _local_joiner(path: Path) -> int:
    """Runs a joiner that the run's launcher has started. Errors go to the launcher."""
    from dynmo.launch.rank_side import enter_rank, report_failure

    process = int(os.environ["DYNMO_PROCESS"])
    log = path.parent / f"rank-{process}.log"
    enter_rank(log)
    try:
        from dynmo.train.joining import join_run

        return join_run(path.parent, process)
    except Exception as error:
        return report_failure(error, log)


def _local_rank(path: Path, resume: bool, as_json: bool) -> int:
    """Runs a rank that dynmo's launcher started on the config in its run's folder.

    Errors go to the launcher, which reports the cause.
    """
    from dynmo.launch.rank_side import enter_rank, report_failure

    log = path.parent / f"rank-{os.environ['RANK']}.log"
    enter_rank(log)
    try:
        from dynmo.config import load
        from dynmo.runtime.comm.rendezvous import from_environment

        rendezvous = from_environment()
        assert rendezvous is not None
        return _rank(load(path), rendezvous, path.parent, resume, as_json)
    except Exception as error:
        return report_failure(error, log)


def _joined_rank(
    config: Config, rendezvous: Rendezvous, resume: bool, overwrite: bool, as_json: bool
) -> int:
    """Runs a rank that torchrun or Slurm started. It reports its errors itself."""
    from dynmo.launch.rank_side import describe, quiet_torch

    quiet_torch()
    if rendezvous.loopback and sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # Only rank 0 writes. A world of the wrong size makes nothing, and `run` says why.
    writes = rendezvous.rank == 0 and rendezvous.size == config.ranks
    try:
        with (
            _run_folder(config, resume, overwrite)
            if writes
            else contextlib.nullcontext(RUNS / config.name) as folder
        ):
            return _rank(config, rendezvous, folder, resume, as_json)
    except DynmoError:
        raise
    except Exception as error:
        raise RunError(
            f"{describe(error, rendezvous.rank)} (DYNMO_TRACEBACK=1 shows more)"
        ) from error


def _rank(config: Config, rendezvous: Rendezvous, folder: Path, resume: bool, as_json: bool) -> int:
    from dynmo.report.progress import ProgressLine
    from dynmo.train.run import run
    from dynmo.train.setup import warn_of_cores

    if rendezvous.rank:
        return 130 if run(config, rendezvous, folder, resume).interrupted else 0
    warning = warn_of_cores(config)
    if warning:
        _logger.warning(warning)
    with (
        compilation_told(),
        _stdout_for_json(as_json),
        ProgressLine(config.name, config.train.steps) as progress,
    ):

        def listen(event: Event) -> None:
            shutil.rmtree(_aside(folder), ignore_errors=True)  # the run has begun
            progress(event)

        result = run(config, rendezvous, folder, resume, listen)
    summary: dict[str, Any] = {"name": config.name, "folder": str(folder), **vars(result)}
    if as_json:
        print(json.dumps(summary))
    else:
        _print_summary(folder)
    return 130 if result.interrupted else 0


def _stdout_for_json(as_json: bool) -> contextlib.AbstractContextManager[object]:
    """Redirects the prints of a user's own model to stderr with --json.

    Stdout is for the one JSON object.
    """
    return contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext()


def _print_summary(folder: Path) -> None:
    from dynmo.events import read
    from dynmo.report.summary import console_for_tables, event_lines, phase_table, summarize

    console = console_for_tables()
    summary = summarize(read(folder / "events.jsonl"))
    console.print(phase_table(summary))
    for line in event_lines(summary):
        console.print(line, highlight=False, markup=False)
    loss = "" if summary.loss is None else f"loss {summary.loss:.6f}, "
    digest = summary.digest or ""
    console.print(
        f"{summary.reason}: {loss}weights {digest[:16]}, {summary.seconds:.1f} s of steps; "
        f"{folder}/",
        highlight=False,
        soft_wrap=True,
    )
    console.print(
        f"trace: open {folder}/trace.json at ui.perfetto.dev", highlight=False, soft_wrap=True
    )


def _dry_run(config: Config, as_json: bool) -> None:
    """Prints placement, schedule and memory per rank, from shapes alone."""
    from dynmo.train.dry_run import dry_run

    with _stdout_for_json(as_json):
        plan = dry_run(config)
    if plan.activations_unknown is not None:
        _logger.warning(plan.activations_unknown)
    if as_json:
        print(json.dumps(plan.to_json()))
        return
    from dynmo.report.summary import console_for_tables

    console_for_tables().print(plan.table())
