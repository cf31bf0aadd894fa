"""`dynmo doctor` looks at this machine, and says what to do about what it finds.

Its own process checks the machine. It starts ranks as `dynmo train` does. They measure each other.
Under torchrun or Slurm the processes are the ranks, and one of each machine checks it.
"""

from __future__ import annotations

import faulthandler
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dynmo.cli.options import ARGUMENT, CommandOptions, command
from dynmo.cli.output import print_json, print_table, progress
from dynmo.cli.rank_process import (
    described_errors,
    folder_of_ranks,
    import_from_working_folder,
    prepare_joined_rank,
    rank_command,
    run_local_rank,
    stdout_for_json,
)
from dynmo.cli.run_folder import RUNS
from dynmo.doctor.finding import Finding, State
from dynmo.errors import ConfigError, DynmoError, Interrupted
from dynmo.options import Count

if TYPE_CHECKING:
    from dynmo.config import Config
    from dynmo.runtime.comm.rank_group import RankGroup
    from dynmo.runtime.comm.rendezvous import Rendezvous

_LIMIT, _ALL = 60, 180
"""Seconds of each wait between ranks, and of all that a rank does."""
_FINDINGS = "findings.json"


class DoctorOptions(CommandOptions):
    config: Annotated[Path | None, ARGUMENT] = None
    """A run, as TOML: is there enough of everything for it?"""
    ranks: Count | None = None
    """Ranks that measure (default: those of CONFIG, or one a GPU, or 2)."""


@command
def doctor(options: DoctorOptions) -> None:
    from dynmo.config import load
    from dynmo.elastic.launcher.environment import most_local_ranks
    from dynmo.elastic.launcher.rank_side import is_local_rank
    from dynmo.runtime.comm.rendezvous import from_environment

    import_from_working_folder()
    if is_local_rank():
        assert options.config is not None
        raise typer.Exit(run_local_rank(options.config, partial(_local_rank, options.config)))
    config, rendezvous = load(options.config), from_environment()
    if rendezvous is not None:
        if options.ranks not in (None, rendezvous.size):
            raise ConfigError(f"--ranks {options.ranks}: the launcher started {rendezvous.size}")
        raise typer.Exit(_joined_rank(options, config, rendezvous))
    if options.ranks is not None and options.ranks > most_local_ranks():
        most = most_local_ranks()
        raise ConfigError(f"--ranks {options.ranks}: at most {most} ranks start on this machine")
    ranks = options.ranks or (config.ranks if options.config else None)
    with progress("checking this machine") as listen:
        found = _check(options, config, None, ranks, listen)
    raise typer.Exit(_show(found, options.as_json))


def _check(
    options: DoctorOptions,
    config: Config,
    rendezvous: Rendezvous | None,
    ranks: int | None,
    listen: Callable[[int, int], None],
) -> list[Finding]:
    """Checks this machine. Without a launcher, starts ranks that measure."""
    from dynmo.doctor.packages import check_packages, packages_of

    listen(0, 4)
    found = list(check_packages(packages_of(config) if options.config else ()))
    if any(each.state == State.problem and not each.check.startswith("extra") for each in found):
        return found  # nothing else can be loaded
    import torch

    from dynmo.doctor.network import check_network
    from dynmo.doctor.resources import check_resources

    ranks = ranks or max(torch.cuda.device_count(), 2 - torch.cuda.is_available())
    here = range(max(ranks, config.ranks))
    if rendezvous is not None:
        first = rendezvous.rank - rendezvous.local_rank
        here = range(first, first + int(os.environ.get("LOCAL_WORLD_SIZE", rendezvous.size)))
    listen(1, 4)
    found += check_network(rendezvous)
    listen(2, 4)
    with stdout_for_json(True):  # a model of the user's own may print
        found += check_resources(config, options.config is not None, here, RUNS / config.name)
    listen(3, 4)
    if rendezvous is None:
        faults = {each.check for each in found if each.state == State.problem}
        if faults & {"interface of local ranks", "devices", "backends", "temporary folder"}:
            seen = "not measured: mend the problems first"
            return [*found, Finding("ranks", State.warning, seen)]
        found += _measure_here(config, ranks)
    listen(4, 4)
    return found


def _measure_here(config: Config, ranks: int) -> list[Finding]:
    """Starts ranks on this machine, and returns what they found."""
    from dynmo.elastic.launcher.supervisor import spawn

    try:
        with folder_of_ranks(config, "doctor") as folder:
            line = rank_command("doctor", str(folder / "config.toml"))
            status = spawn(line, ranks, config.parallel.threads, folder)
            if status:
                raise Interrupted("interrupted")
            records = json.loads((folder / _FINDINGS).read_text("utf-8"))
            return [Finding(**each) for each in records]
    except Interrupted:
        raise
    except DynmoError as error:
        return [_of_failure(error)]


def _of_failure(error: DynmoError) -> Finding:
    remedy = "mend what the other lines say; DYNMO_TRACEBACK=1 shows more of torch's own words"
    return Finding("ranks", State.problem, str(error), remedy)


def _measured(
    config: Config, rendezvous: Rendezvous, act: Callable[[RankGroup], list[Finding]]
) -> list[Finding]:
    """Meets the other ranks as a run does, and calls `act`. No wait is without a limit."""
    import torch

    from dynmo.config import with_options
    from dynmo.train.setup import device_for, join_world

    faulthandler.dump_traceback_later(_ALL, exit=True, file=2)
    limits = {"timeout": float(_LIMIT), "work_timeout": float(_LIMIT)}
    config = with_options(config, ("parallel",), limits)
    torch.set_num_threads(config.parallel.threads)
    try:
        with join_world(config, rendezvous, device_for(config, rendezvous.local_rank)) as world:
            return act(world)
    finally:
        faulthandler.cancel_dump_traceback_later()


def _local_rank(path: Path, config: Config, rendezvous: Rendezvous) -> int:
    from dynmo.doctor.ranks import measure

    found = _measured(config, rendezvous, measure)
    if rendezvous.rank == 0:
        text = json.dumps([asdict(each) for each in found])
        path.with_name(_FINDINGS).write_text(text, "utf-8")
    return 0


def _joined_rank(options: DoctorOptions, config: Config, rendezvous: Rendezvous) -> int:
    """Runs a rank that torchrun or Slurm started. Rank 0 shows what all have found."""
    prepare_joined_rank(rendezvous)
    from dynmo.doctor.ranks import measure
    from dynmo.elastic.manager import own_node
    from dynmo.runtime.comm.agreement import share_texts

    own: list[Finding] = []
    if rendezvous.local_rank == 0:
        own = _check(options, config, rendezvous, rendezvous.size, lambda done, of: None)

    def act(world: RankGroup) -> list[Finding]:
        text = json.dumps([own_node(), [asdict(each) for each in own]])
        shared = share_texts(world, text, "the findings of all machines")
        return [*_merged(map(json.loads, shared)), *measure(world)]

    with described_errors(rendezvous.rank):
        try:
            found = _measured(config, rendezvous, act)
        except DynmoError as error:
            if rendezvous.rank:
                raise
            found = [*own, _of_failure(error)]
    return _show(found, options.as_json) if rendezvous.rank == 0 else 0


def _merged(shared: Iterable[tuple[str, list[dict[str, Any]]]]) -> Iterator[Finding]:
    """Yields the findings of all machines. Those that all have alike come once."""
    of_host = {host: [Finding(**each) for each in found] for host, found in shared if found}
    told = list[Finding]()
    for host, found in of_host.items():
        for each in found:
            everywhere = all(each in others for others in of_host.values())
            if everywhere and each not in told:
                yield each
            elif not everywhere:
                yield replace(each, seen=f"{host}: {each.seen}")
            told.append(each)


def _show(found: Sequence[Finding], as_json: bool) -> int:
    """Prints the findings. Returns the exit status."""
    counts = Counter(each.state for each in found)
    problems, warnings = counts[State.problem], counts[State.warning]
    if as_json:
        worst = State.problem if problems else State.warning if warnings else State.ok
        print_json({"state": worst, "findings": [asdict(each) for each in found]})
    else:
        print_table(
            [
                {"check": each.check, "": each.state, "seen": each.seen, "remedy": each.remedy}
                for each in found
            ]
        )
        print(f"problems: {problems}, warnings: {warnings}")
    return int(problems > 0)
