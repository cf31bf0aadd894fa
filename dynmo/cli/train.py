"""`dynmo train` starts the ranks of a run, or is one of them.

The ranks start on this machine, under Slurm or under Ray. A process that torchrun or `srun` has
started is a rank itself. With `--join` it becomes a rank of a run that goes on.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Callable
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from dynmo.cli.options import OfRun, command
from dynmo.cli.output import compilation_told, console_for_tables, print_json
from dynmo.cli.rank_process import (
    check_input,
    described_errors,
    import_from_working_folder,
    prepare_joined_rank,
    rank_command,
    report_to_launcher,
    run_local_rank,
    show_progress_of_reading,
    stdout_for_json,
    with_known_steps,
)
from dynmo.cli.run_folder import (
    NOTHING_TO_SAVE,
    RUNS,
    forget_replaced,
    how_to_go_on,
    is_again,
    make_ready_again,
    newest_checkpoint,
    on_ranks_left,
    run_folder,
    steps_done,
)
from dynmo.errors import ConfigError
from dynmo.options import Whole
from dynmo.signals import interrupted_by_signals

if TYPE_CHECKING:
    from dynmo.config import Config
    from dynmo.elastic.launch import Store
    from dynmo.elastic.manager import Starter
    from dynmo.events import Event
    from dynmo.runtime.comm.rendezvous import Rendezvous
    from dynmo.train.run_log import Listener
    from dynmo.train.trainer import RunResult

_logger = logging.getLogger(__name__)

# Seconds in which the other ranks must go on without one that has ended, beyond those that a rank
# may work without progress.
_RECOVERY = 30.0


class Launcher(StrEnum):
    """The starter of the ranks."""

    local = "local"
    slurm = "slurm"
    ray = "ray"


class TrainOptions(OfRun):
    resume: bool = False
    """Go on from the newest checkpoint of runs/NAME."""
    overwrite: bool = False
    """Replace runs/NAME."""
    dry_run: bool = False
    """Print plan and memory; train nothing."""
    launcher: Launcher | None = None
    """Who starts the ranks (default: local)."""
    restarts: Whole | None = None
    """Starts again so often after a failure (launch.restarts)."""
    join: bool = False
    """Become a rank of runs/NAME while it trains."""

    def check_combination(self, may_start: bool) -> None:
        """Checks that no option excludes another one."""
        if self.resume and self.overwrite:
            raise ConfigError("--resume and --overwrite exclude each other")
        starts = self.overwrite or self.dry_run or self.launcher is not None
        starts = starts or self.restarts is not None
        if self.join and (starts or (self.resume and not may_start)):
            raise ConfigError(
                "--join excludes --resume, --overwrite, --dry-run, --launcher and --restarts: it "
                "joins a run that goes on as it is"
            )


@command
def train(options: TrainOptions) -> None:
    from dynmo.elastic.launcher.rank_side import is_local_rank, survive_save_signal

    survive_save_signal()
    import_from_working_folder()
    if is_local_rank():
        raise typer.Exit(_local_newcomer(options) if options.join else _local_rank(options))

    from dynmo.config import load
    from dynmo.runtime.comm.rendezvous import from_environment

    may_start = "RANK" in os.environ
    options.check_combination(may_start)
    restarts = options.restarts
    sets = [] if restarts is None else [f"launch.restarts={restarts}"]
    config = load(options.config, [*(options.set_ or []), *sets])
    if options.join and (status := _join(config, options, may_start)) is not None:
        raise typer.Exit(status)
    if options.dry_run:
        _dry_run(with_known_steps(config, options.as_json), options.as_json)
        return
    # In a batch job of Slurm the launcher finds the environment of a rank.
    rendezvous = from_environment() if options.launcher is None else None
    if rendezvous is None:
        with interrupted_by_signals(NOTHING_TO_SAVE):
            check_input(config)
            config = with_known_steps(config, options.as_json)
        with run_folder(config, options.resume, options.overwrite) as folder:
            raise typer.Exit(_train_with_restarts(config, folder, options))
    if restarts is not None:
        raise ConfigError(
            "--restarts has no effect on ranks that another launcher started; leave it out, and "
            "give torchrun --max-restarts"
        )
    raise typer.Exit(_joined_rank(config, rendezvous, options))


# -- the process that starts the ranks -------------------------------------------------------------


def _train_with_restarts(config: Config, folder: Path, options: TrainOptions) -> int:
    from dynmo.elastic.launcher.restarts import with_restarts

    resumes, starter = options.resume, _starter(options.launcher, config, folder)

    def attempt() -> int:
        return _spawn(config, folder, options, resumes, starter)

    def prepare() -> str:
        nonlocal config, resumes
        before = config
        config = on_ranks_left(config, starter.ranks_left(config.ranks))
        resumes = make_ready_again(config)
        how = f"goes on from {newest_checkpoint(folder)}" if resumes else "begins anew"
        pipeline, replicas = config.parallel.pipeline, config.parallel.replicas
        fewer = f" with {config.ranks} of {before.ranks} ranks ({pipeline} x {replicas})"
        return how + fewer * (config.ranks < before.ranks)

    return with_restarts(attempt, config.restarts, lambda: steps_done(folder), prepare)


def _spawn(
    config: Config, folder: Path, options: TrainOptions, resumes: bool, starter: Starter
) -> int:
    from dynmo.elastic.launch import ServedStore
    from dynmo.elastic.launcher.environment import clear_live_line
    from dynmo.elastic.launcher.supervisor import spawn

    flags = [*["--resume"] * resumes, *["--json"] * options.as_json]
    line = rank_command("train", str(folder / "config.toml"), *flags)
    rendezvous_file = folder / "rendezvous.json"  # for newcomers
    rendezvous_file.unlink(missing_ok=True)  # of a run that was killed
    try:
        parallel, recovers = config.parallel, config.elastic.recover != "none"
        is_local = (options.launcher or Launcher.local) is Launcher.local
        if is_local and not recovers:
            return spawn(line, config.ranks, parallel.threads, folder)

        def open_store() -> Store:
            from dynmo.runtime.comm.store import home_of, serve  # loads torch while ranks start

            address = "127.0.0.1" if is_local else None
            return home_of(serve(rendezvous_file, parallel.timeout, address))

        return spawn(
            line,
            config.ranks,
            parallel.threads,
            folder,
            None if is_local else starter,
            None if is_local else _shared(folder),
            ServedStore(rendezvous_file, open_store),
            max(parallel.timeout, parallel.work_timeout) + _RECOVERY if recovers else None,
        )
    finally:
        rendezvous_file.unlink(missing_ok=True)
        clear_live_line()


def _shared(folder: Path) -> Path:
    """Returns the launch folder of ranks on several machines."""
    return folder / ".launch"


def _starter(launcher: Launcher | None, config: Config, folder: Path) -> Starter:
    if launcher is Launcher.slurm:
        from dynmo.elastic.managers.slurm import SlurmStarter

        return SlurmStarter(_shared(folder), config.elastic.job_options)
    if launcher is Launcher.ray:
        from dynmo.elastic.managers.ray import RayStarter

        return RayStarter()
    from dynmo.elastic.managers.local import LocalStarter

    return LocalStarter()


# -- ranks -----------------------------------------------------------------------------------------


def _local_rank(options: TrainOptions) -> int:
    """Runs a rank that dynmo's launcher started on the config in its run's folder."""
    return run_local_rank(
        options.config, lambda config, rendezvous: _rank(config, rendezvous, options)
    )


def _joined_rank(config: Config, rendezvous: Rendezvous, options: TrainOptions) -> int:
    """Runs a rank that torchrun or Slurm started. It reports its errors itself."""
    prepare_joined_rank(rendezvous)
    with described_errors(rendezvous.rank):
        config = with_known_steps(config, options.as_json)
    again = is_again(config)
    if again:
        saved = newest_checkpoint(RUNS / config.name)
        options = options.model_copy(update={"resume": saved is not None, "overwrite": False})
        if rendezvous.rank == 0:
            how = "begins anew" if saved is None else f"goes on from {saved}"
            _logger.warning(f"the ranks were started again; {RUNS / config.name} {how}")
    # Only rank 0 writes. A world of the wrong size makes nothing, and `run` says why.
    writes = rendezvous.rank == 0 and rendezvous.size == config.ranks
    with (
        run_folder(config, options.resume, options.overwrite, again)
        if writes
        else contextlib.nullcontext(),
        described_errors(rendezvous.rank),
    ):
        return _rank(config, rendezvous, options)


def _rank(config: Config, rendezvous: Rendezvous, options: TrainOptions) -> int:
    from dynmo.train.run import run
    from dynmo.train.setup import warnings_of

    folder, told = RUNS / config.name, contextlib.nullcontext()
    if rendezvous.rank == 0:
        for warning in warnings_of(config):
            _logger.warning(warning)
        show_progress_of_reading()
        told = compilation_told()
    with told:
        return _show(
            config, options, lambda listen: run(config, rendezvous, folder, options.resume, listen)
        )


def _show(
    config: Config, options: TrainOptions, train: Callable[[Listener], RunResult | None]
) -> int:
    """Trains as one rank, and shows the run while this is rank 0. Returns the exit status."""
    from dynmo.elastic.launcher.rank_side import printed_by_launcher

    folder, seen = RUNS / config.name, set[str]()
    with contextlib.ExitStack() as stack:
        stack.enter_context(stdout_for_json(options.as_json))

        @cache
        def progress() -> Listener:
            from dynmo.report.lines import ProgressLine

            print(f"watch it in a browser: dynmo dashboard {folder}", file=sys.stderr)
            return stack.enter_context(ProgressLine(config.name, config.train.steps))

        def listen(event: Event) -> None:
            forget_replaced(folder)  # the run has begun
            seen.add(event.event)
            progress()(event)

        result = train(listen)
    if result is None or "end" not in seen:  # another process is rank 0
        return 130 if result is not None and result.interrupted else 0
    with printed_by_launcher():
        if options.as_json:
            summary: dict[str, Any] = {"name": config.name, "folder": str(folder), **vars(result)}
            print_json(summary, of_run=True)
        else:
            _print_summary(folder, has_trained="step" in seen)
    if result.interrupted:
        sys.stdout.flush()
        _logger.warning(f"interrupted; {how_to_go_on(folder)}")
    return 130 if result.interrupted else 0


def _print_summary(folder: Path, has_trained: bool) -> None:
    from dynmo.event_log import read
    from dynmo.report.lines import event_lines, phase_table
    from dynmo.report.summary import summarize

    summary = summarize(read(folder / "events.jsonl"))
    console_for_tables().print(phase_table(summary))
    for line in event_lines(summary):
        print(line)
    loss = "" if summary.loss is None else f"loss {summary.loss:.6f}, "
    digest = summary.digest or ""
    ended = summary.reason if has_trained else "nothing trained"
    print(f"{ended}: {loss}weights {digest[:16]}, {summary.seconds:.1f} s of steps; {folder}/")
    if (folder / "trace.json").exists():
        print(f"trace: open {folder}/trace.json at ui.perfetto.dev")


# -- a process that joins --------------------------------------------------------------------------


def _join(config: Config, options: TrainOptions, may_start: bool) -> int | None:
    """Joins a run, as a process that the user has started.

    It reports its errors itself.
    """
    from dynmo.elastic.launcher.rank_side import quiet_torch

    quiet_torch()
    folder = RUNS / config.name
    if may_start and not (folder / "rendezvous.json").is_file():
        return None
    with described_errors(None):
        from dynmo.elastic.newcomer import RunGone
        from dynmo.train.run import join_run

        try:
            return _show(config, options, lambda listen: join_run(folder, listen))
        except RunGone:
            if may_start:  # of a run that was killed
                return None
            raise


def _local_newcomer(options: TrainOptions) -> int:
    """Runs a newcomer that the run's launcher has started. Errors go to the launcher."""
    folder = options.config.parent

    def run() -> int:
        from dynmo.config import load
        from dynmo.train.run import join_run

        config = load(options.config)
        return _show(config, options, lambda listen: join_run(folder, listen))

    return report_to_launcher(folder / f"rank-{os.environ['DYNMO_PROCESS']}.log", run)


# -- without ranks ---------------------------------------------------------------------------------


def _dry_run(config: Config, as_json: bool) -> None:
    """Prints placement, schedule and memory per rank, from shapes alone."""
    from dynmo.train.setup import plan_run

    with stdout_for_json(as_json):
        plan = plan_run(config)
    if plan.activations_unknown is not None:
        _logger.warning(plan.activations_unknown)
    if as_json:
        print_json(plan.to_json())
        return

    console_for_tables().print(plan.table())
    for line in (*plan.shape_lines(), *plan.block_lines()):
        print(line)
