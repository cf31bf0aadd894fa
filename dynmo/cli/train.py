"""`dynmo train`: starts the ranks it needs on this machine, or joins the world it finds itself in."""

from __future__ import annotations

import json
import shutil
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dynmo.errors import ConfigError

if TYPE_CHECKING:
    from dynmo.config import Config
    from dynmo.runtime.rendezvous import Rendezvous

RUNS = Path("runs")


def train(
    config: Annotated[Path, typer.Argument(help="The run, as TOML.", show_default=False)],
    set_: Annotated[list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Change a key.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoint of runs/NAME.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace runs/NAME.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print plan and memory; train nothing.")] = False,
    json_: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Train a model over pipeline ranks, rebalancing as it changes."""
    from dynmo.config import load
    from dynmo.runtime.launch import is_local_rank
    from dynmo.runtime.rendezvous import from_environment

    loaded = load(config, set_ or [])
    if dry_run:
        _dry_run(loaded, json_)
        return
    folder = RUNS / loaded.name
    rendezvous = from_environment()
    if rendezvous is None:
        _prepare(folder, loaded, resume, overwrite)
        raise typer.Exit(_spawn(loaded, folder, resume, json_))
    if is_local_rank():
        raise typer.Exit(_local_rank(loaded, rendezvous, folder, resume, json_))
    if rendezvous.rank == 0 and rendezvous.size == loaded.ranks:
        _prepare(folder, loaded, resume, overwrite)
    raise typer.Exit(_rank(loaded, rendezvous, folder, resume, json_))


def _prepare(folder: Path, config: Config, resume: bool, overwrite: bool) -> None:
    """Makes runs/NAME ready. Raises ConfigError rather than lose anything."""
    from dynmo.config import to_toml

    if resume and overwrite:
        raise ConfigError("--resume and --overwrite exclude each other")
    if folder.exists() and not resume:
        if not overwrite:
            raise ConfigError(f"{folder} exists; go on with --resume, replace it with --overwrite, or choose another name")
        if any(folder.iterdir()) and not (folder / "config.toml").is_file():
            raise ConfigError(f"{folder} does not look like a run (it has no config.toml); --overwrite would delete it")
        shutil.rmtree(folder)
    if resume and not folder.is_dir():
        raise ConfigError(f"{folder} does not exist, so there is nothing to resume; leave out --resume")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.toml").write_text(to_toml(config), encoding="utf-8")


def _spawn(config: Config, folder: Path, resume: bool, as_json: bool) -> int:
    from dynmo.runtime.launch import spawn

    command = [sys.executable, "-m", "dynmo", "train", str(folder / "config.toml")]
    command += ["--resume"] * resume + ["--json"] * as_json
    return spawn(command, config.ranks, config.parallel.threads, folder)


def _local_rank(config: Config, rendezvous: Rendezvous, folder: Path, resume: bool, as_json: bool) -> int:
    """A rank that this machine's launcher started: errors go to the launcher, which reports the cause."""
    from dynmo.runtime.launch import enter_rank, report_failure

    enter_rank()
    try:
        return _rank(config, rendezvous, folder, resume, as_json)
    except Exception as error:
        with (folder / f"rank-{rendezvous.rank}.log").open("a", encoding="utf-8") as log:
            traceback.print_exc(file=log)
        return report_failure(error)


def _rank(config: Config, rendezvous: Rendezvous, folder: Path, resume: bool, as_json: bool) -> int:
    from dynmo.report.progress import ProgressLine
    from dynmo.trainer import run, warn_of_cores

    if rendezvous.rank:
        return 130 if run(config, rendezvous, folder, resume).interrupted else 0
    warning = warn_of_cores(config)
    if warning:
        print(f"dynmo: {warning}", file=sys.stderr)
    with ProgressLine(config.name, config.train.steps) as progress:
        result = run(config, rendezvous, folder, resume, progress)
    summary: dict[str, Any] = {"name": config.name, "folder": str(folder), **vars(result)}
    if as_json:
        print(json.dumps(summary))
    else:
        _print_summary(folder)
    return 130 if result.interrupted else 0


def _print_summary(folder: Path) -> None:
    from rich.console import Console

    from dynmo.events import read
    from dynmo.report.summary import phase_table, rebalance_lines, summarize

    console = Console()
    summary = summarize(read(folder / "events.jsonl"))
    console.print(phase_table(summary))
    for line in rebalance_lines(summary):
        console.print(line, highlight=False)
    loss = "" if summary.loss is None else f"loss {summary.loss:.6f}, "
    digest = summary.digest or ""
    console.print(
        f"{summary.reason}: {loss}weights {digest[:16]}, {summary.seconds:.1f} s of steps; {folder}/", highlight=False, soft_wrap=True
    )
    console.print(f"trace: open {folder}/trace.json at ui.perfetto.dev", highlight=False, soft_wrap=True)


def _dry_run(config: Config, as_json: bool) -> None:
    """What would run: placement, schedule and memory per rank, from shapes alone."""
    from dynmo.plan import dry_run

    plan = dry_run(config)
    if as_json:
        print(json.dumps(plan.to_json()))
        return
    from rich.console import Console

    Console().print(plan.table())
