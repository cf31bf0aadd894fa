"""`dynmo profile` measures a model's layers and writes a costs file.

It measures for a few steps. `dynmo plan` reads the file.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dynmo.cli.compiling import compilation_told
from dynmo.cli.train import (
    _check_input,  # pyright: ignore[reportPrivateUsage]
    _stdout_for_json,  # pyright: ignore[reportPrivateUsage]
    import_from_working_folder,
    rank_command,
)
from dynmo.errors import DynmoError, InputError, RunError

if TYPE_CHECKING:
    from rich.table import Table

    from dynmo.config import Config
    from dynmo.cost.profile_file import Profile
    from dynmo.runtime.comm.rendezvous import Rendezvous

_logger = logging.getLogger(__name__)


def profile(
    config: Annotated[
        Path, typer.Argument(help="The run, as TOML (as for dynmo train).", show_default=False)
    ],
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Change a key.")
    ] = None,
    steps: Annotated[
        int, typer.Option(metavar="N", help="Steps to measure, after one that warms up.")
    ] = 8,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The costs file (default: NAME-costs.json).")
    ] = None,
    json_: Annotated[
        bool, typer.Option("--json", help="The file's content on stdout, one JSON object.")
    ] = False,
) -> None:
    """Measure a model's layers and write a costs file."""
    from dynmo.config import load
    from dynmo.launch.rank_side import is_local_rank

    import_from_working_folder()
    if is_local_rank():
        assert out is not None
        raise typer.Exit(_local_rank(config, steps, out, json_))

    from dynmo.runtime.comm.rendezvous import from_environment

    loaded = load(config, set_ or [])
    if steps < 1:
        raise InputError(f"--steps {steps}: at least 1 is needed")
    out = out or Path(f"{loaded.name}-costs.json")
    rendezvous = from_environment()
    if rendezvous is None:
        _check_input(loaded)
        _check_out(out)
        raise typer.Exit(_spawn(loaded, steps, out, json_))
    if rendezvous.rank == 0:
        _check_out(out)
    raise typer.Exit(_joined_rank(loaded, rendezvous, steps, out, json_))


def _check_out(out: Path) -> None:
    """Rejects another file of that name, or a missing folder, before the work begins."""
    from dynmo.cost.profile_file import KIND

    if not out.parent.is_dir():
        raise InputError(f"--out {out}: there is no folder {out.parent}")
    if not out.exists():
        return
    try:
        known = KIND in out.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        known = False
    if not known:
        raise InputError(
            f"--out {out} exists and was not written by dynmo profile; choose another name"
        )


def _spawn(config: Config, steps: int, out: Path, as_json: bool) -> int:
    """Starts the ranks on this machine.

    Keeps their logs only if a rank fails and says why there.
    """
    from dynmo.launch.supervisor import spawn

    folder = Path(tempfile.mkdtemp(prefix="dynmo-profile-"))
    try:
        (folder / "config.toml").write_text(config.to_toml(), encoding="utf-8")
        command = rank_command(
            "profile", str(folder / "config.toml"), "--steps", str(steps), "--out", str(out)
        )
        command += ["--json"] * as_json
        status = spawn(command, config.ranks, config.parallel.threads, folder)
    except BaseException as error:
        told = isinstance(error, RunError) and any(
            log.stat().st_size for log in folder.glob("*.log")
        )
        if not told:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    shutil.rmtree(folder, ignore_errors=True)
    return status


def _local_rank(path: Path, steps: int, out: Path, as_json: bool) -> int:
    """Runs a rank that this machine's launcher started.

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
        return _rank(load(path), rendezvous, steps, out, as_json)
    except Exception as error:
        return report_failure(error, log)


def _joined_rank(
    config: Config, rendezvous: Rendezvous, steps: int, out: Path, as_json: bool
) -> int:
    """Runs a rank that torchrun or Slurm started. It reports its errors itself."""
    from dynmo.launch.rank_side import describe, quiet_torch

    quiet_torch()
    if rendezvous.loopback and sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    try:
        return _rank(config, rendezvous, steps, out, as_json)
    except DynmoError:
        raise
    except Exception as error:
        raise RunError(
            f"{describe(error, rendezvous.rank)} (DYNMO_TRACEBACK=1 shows more)"
        ) from error


def _rank(config: Config, rendezvous: Rendezvous, steps: int, out: Path, as_json: bool) -> int:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    from dynmo.cost.profile_file import to_json, write
    from dynmo.report.summary import console_for_tables
    from dynmo.train.profile_run import run
    from dynmo.train.setup import warn_of_cores

    if rendezvous.rank:
        run(config, rendezvous, steps)
        return 0
    warning = warn_of_cores(config)
    if warning:
        _logger.warning(warning)
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=20),
        TextColumn("{task.completed}/{task.total} steps"),
    )
    with (
        compilation_told(),
        _stdout_for_json(as_json),
        Progress(*columns, console=console, disable=not console.is_terminal) as progress,
    ):
        task = progress.add_task(f"measuring {config.name}", total=steps)

        def listen(step: int, seconds: float) -> None:
            progress.update(task, completed=step)
            if not console.is_terminal and step == steps:
                console.print(f"measured {step} steps, {seconds:.3f} s the last", highlight=False)

        measured = run(config, rendezvous, steps, listen)
    write(out, measured)
    if as_json:
        print(json.dumps({"file": str(out), **to_json(measured)}, allow_nan=False))
        return 0
    tables = console_for_tables()
    tables.print(table(measured))
    for (low, high), link in measured.links:
        rate = (
            f"{link.bytes_per_second / 1e9:.2f} GB/s"
            if link.bytes_per_second < 1e15
            else "no measurable time per byte"
        )
        tables.print(
            f"rank {low} - rank {high}: {link.latency * 1e6:.0f} us, {rate}", highlight=False
        )
    tables.print(
        f"{out}: plan with it: dynmo plan --costs {out}",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
    return 0


def table(measured: Profile) -> Table:
    """Returns a row per layer: milliseconds and sizes of one microbatch."""
    from rich.markup import escape
    from rich.table import Table

    table = Table(
        title=f"{len(measured.layers)} layers, microbatches of {measured.microbatch}, median "
        f"of {measured.steps} steps",
        title_justify="left",
    )
    table.add_column("layer")
    for heading in (
        "F ms",
        "B ms",
        "W ms",
        "share",
        "parameters",
        "held MiB",
        "activations MiB",
        "until W MiB",
        "output MiB",
    ):
        table.add_column(heading, justify="right")
    whole = sum(layer.seconds for layer in measured.layers) or 1.0
    for name, layer in zip(measured.names, measured.layers, strict=True):
        sizes = (layer.static_bytes, layer.activation_bytes, layer.stash_bytes, layer.output_bytes)
        row = [f"{seconds * 1e3:.3f}" for seconds in (layer.f, layer.b, layer.w)] + [
            f"{layer.seconds / whole:.1%}"
        ]
        table.add_row(
            escape(name), *row, f"{layer.parameters:,}", *(f"{size / 2**20:,.2f}" for size in sizes)
        )
    return table
