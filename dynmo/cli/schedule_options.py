"""The options of `dynmo schedule`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from dynmo.schedule.bounds import Objective
from dynmo.schedule.catalogue import SCHEDULES


@dataclass(frozen=True)
class ScheduleOptions:
    """The options of `dynmo schedule`. None means that an option is not given."""

    name: Annotated[
        str | None,
        typer.Option("--schedule", metavar="NAME", help=f"One of {', '.join(SCHEDULES)}."),
    ] = None
    ranks: Annotated[int | None, typer.Option(metavar="P", help="Pipeline ranks.")] = None
    microbatches: Annotated[
        int | None, typer.Option(metavar="M", help="Microbatches of a step.")
    ] = None
    from_torch_csv: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Read the schedule from torch's CSV instead of making one."
        ),
    ] = None
    tf: Annotated[
        float | None,
        typer.Option(metavar="TIME", help="Time of F on every rank, in any one unit (default 1)."),
    ] = None
    tb: Annotated[
        float | None,
        typer.Option(metavar="TIME", help="Time of B, the gradient of the input (default 1)."),
    ] = None
    tw: Annotated[
        float | None,
        typer.Option(metavar="TIME", help="Time of W, the gradient of the weights (default 1)."),
    ] = None
    tcomm: Annotated[
        float | None, typer.Option(metavar="TIME", help="Time of every link (default 0).")
    ] = None
    costs: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="A costs file, or a run's folder, instead of the four times."
        ),
    ] = None
    memory_limit: Annotated[
        float | None,
        typer.Option(
            metavar="X", help="Most live activations of a rank; 1 is one F's (or FILE's unit)."
        ),
    ] = None
    objective: Annotated[Objective, typer.Option(help="Time to keep short: span, or makespan.")] = (
        Objective.SPAN
    )
    chunks: Annotated[
        int | None, typer.Option(metavar="V", help="Stages per rank (default: the schedule's own).")
    ] = None
    w_memory: Annotated[
        float | None,
        typer.Option(
            metavar="SHARE", help="Part of F's activations that stays until W (default 0.5)."
        ),
    ] = None
    exact: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            help="Then let a solver better it, or prove that nothing can, for at most so long.",
        ),
    ] = None
    grid: Annotated[bool, typer.Option("--grid", help="Draw the timeline.")] = False
    ops: Annotated[
        bool, typer.Option("--ops", help="List every rank's ops in order (--json has them).")
    ] = False
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Draw the timeline into an SVG, PNG or PDF (needs the extra plot)."
        ),
    ] = None
    torch_csv: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the schedule as torch's CSV.")
    ] = None
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False
