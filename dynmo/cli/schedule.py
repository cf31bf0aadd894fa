"""`dynmo schedule`: make a schedule, replay it at given costs, print what it takes."""

from __future__ import annotations

import json
import math
import shutil
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dynmo.costs import Costs, uniform_costs
from dynmo.errors import InputError, ScheduleError
from dynmo.schedule.bound import Objective, lower_bound
from dynmo.schedule.generators import GENERATORS, make_schedule
from dynmo.schedule.op import Schedule, to_text
from dynmo.simulator import Timeline, peak_memory, simulate

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class Result:
    """The contract's words. Times and memory in the units of the given costs, `seconds` what making the schedule took."""

    schedule: str
    ranks: int
    microbatches: int
    span: float
    makespan: float
    bubble_ratio: float
    makespan_bubble_ratio: float
    idle_ratio: float
    lower_bound: float
    peak_memory: tuple[float, ...]
    seconds: float


def schedule(
    name: Annotated[str, typer.Option("--schedule", metavar="NAME", help=f"One of {', '.join(GENERATORS)}.")],
    ranks: Annotated[int, typer.Option(metavar="P", help="Pipeline ranks, one stage each.")],
    microbatches: Annotated[int, typer.Option(metavar="M", help="Microbatches of a step.")],
    tf: Annotated[float | None, typer.Option(metavar="TIME", help="Time of F on every stage, in any one unit.")] = None,
    tb: Annotated[float | None, typer.Option(metavar="TIME", help="Time of B, the gradient of the input.")] = None,
    tw: Annotated[float | None, typer.Option(metavar="TIME", help="Time of W, the gradient of the weights.")] = None,
    tcomm: Annotated[float | None, typer.Option(metavar="TIME", help="Time of every link (default 0).")] = None,
    costs: Annotated[Path | None, typer.Option(metavar="FILE", help="Per-stage costs in JSON, instead of the four times.")] = None,
    memory_limit: Annotated[
        float | None, typer.Option(metavar="X", help="Most live activations of a rank; 1 is one F's (or FILE's unit).")
    ] = None,
    objective: Annotated[Objective, typer.Option(help="What the schedule and the lower bound are about.")] = Objective.SPAN,
    chunks: Annotated[int, typer.Option(metavar="V", help="Stages per rank.")] = 1,
    w_memory: Annotated[
        float | None, typer.Option(metavar="SHARE", help="Part of F's activations that stays until W (default 0.5).")
    ] = None,
    grid: Annotated[bool, typer.Option("--grid", help="Draw the timeline.")] = False,
    ops: Annotated[bool, typer.Option("--ops", help="List every rank's ops in order.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Make a pipeline schedule and replay it at given costs."""
    if chunks != 1:
        raise ScheduleError(f"--chunks {chunks}: this version serves 1 stage per rank only")
    if ranks < 1 or microbatches < 1:
        raise ScheduleError(f"--ranks {ranks} --microbatches {microbatches}: at least 1 of each is needed")
    first_trainable, caps = 0, (math.inf,) * ranks
    if costs is None:
        stage_costs = _uniform(ranks, tf, tb, tw, tcomm, 0.5 if w_memory is None else w_memory)
    else:
        stage_costs, first_trainable, caps = _from_file(costs, ranks, {"--tf": tf, "--tb": tb, "--tw": tw, "--tcomm": tcomm}, w_memory)
    if memory_limit is not None:
        if not memory_limit >= 0:
            raise InputError(f"--memory-limit {memory_limit}: a limit is a number of at least 0")
        caps = tuple(min(cap, memory_limit) for cap in caps)

    began = time.perf_counter()
    made = make_schedule(name, ranks, microbatches, first_trainable)
    seconds = time.perf_counter() - began
    _check_memory(made, stage_costs, caps)
    timeline = simulate(made, stage_costs)
    if not math.isfinite(timeline.makespan):
        raise InputError("the times are so large that their sum is not a number any more; choose a larger unit")
    bound = lower_bound(stage_costs, microbatches, first_trainable, objective)
    reached = timeline.span if objective is Objective.SPAN else timeline.makespan
    result = Result(
        schedule=name,
        ranks=ranks,
        microbatches=microbatches,
        span=timeline.span,
        makespan=timeline.makespan,
        bubble_ratio=timeline.bubble_ratio,
        makespan_bubble_ratio=timeline.makespan_bubble_ratio,
        idle_ratio=timeline.idle_ratio,
        # A bound that is reached may come out a rounding error above what reached it, since it is summed in another order.
        lower_bound=min(bound, reached),
        peak_memory=timeline.peak_memory,
        seconds=seconds,
    )
    if as_json:
        _print_json(result, made, timeline, grid, ops)
    else:
        _print_text(result, made, timeline, grid, ops)


def _uniform(ranks: int, tf: float | None, tb: float | None, tw: float | None, tcomm: float | None, w_memory: float) -> Costs:
    if tf is None or tb is None or tw is None:
        raise InputError("no costs: give --tf, --tb and --tw (and --tcomm), or --costs FILE")
    tcomm = 0.0 if tcomm is None else tcomm
    for option, value in {"--tf": tf, "--tb": tb, "--tw": tw, "--tcomm": tcomm}.items():
        if not math.isfinite(value) or value < 0:
            raise InputError(f"{option} {value}: a time is a number of at least 0")
    return uniform_costs(ranks, tf, tb, tw, tcomm, w_memory)


def _from_file(path: Path, ranks: int, times: dict[str, float | None], w_memory: float | None) -> tuple[Costs, int, tuple[float, ...]]:
    """Costs, first trainable stage, and the limit of every stage."""
    from dynmo.schedule.costs_file import read_costs

    given = [option for option, value in times.items() if value is not None]
    if given:
        raise InputError(f"{given[0]} and --costs both give times; use one of them")
    if w_memory is not None and not 0 <= w_memory <= 1:
        raise InputError(f"--w-memory {w_memory}: it is a share between 0 and 1")
    file = read_costs(path, ranks, 0.5 if w_memory is None else w_memory)
    if file.has_memory and w_memory is not None:
        raise InputError(f"--w-memory, but costs file {path} has mem_f, mem_b and mem_w, which say it; use one of them")
    return file.costs, file.first_trainable, file.caps or (math.inf,) * ranks


def _check_memory(made: Schedule, costs: Costs, caps: tuple[float, ...]) -> None:
    """Raises ScheduleError, with the schedules that would fit, where a rank's peak is over its cap."""
    peaks = peak_memory(made, costs)
    over = [rank for rank in range(made.ranks) if not _fits(peaks[rank], caps[rank])]
    if not over:
        return
    rank = over[0]
    others = {name: peak_memory(make_schedule(name, made.ranks, made.microbatches, made.first_trainable), costs) for name in GENERATORS}
    fitting = [name for name, other in others.items() if all(map(_fits, other, caps))]
    hint = f"{' and '.join(fitting)} would fit" if fitting else f"none of {', '.join(GENERATORS)} fits"
    raise ScheduleError(f"{made.name}: peak memory of rank {rank} is {peaks[rank]:.10g}, over the limit of {caps[rank]:.10g}; {hint}")


def _fits(peak: float, cap: float) -> bool:
    # A peak is a running sum, so it may lie a rounding error above the number of activations that it stands for.
    return peak <= cap * (1 + 1e-9)


def _print_json(result: Result, made: Schedule, timeline: Timeline, grid: bool, ops: bool) -> None:
    fields: dict[str, object] = asdict(result)
    if ops:
        fields["ops"] = made.ops
    if grid:
        from dynmo.schedule.grid import draw

        fields["grid"] = draw(timeline)
    print(json.dumps(fields, allow_nan=False))


def _print_text(result: Result, made: Schedule, timeline: Timeline, grid: bool, ops: bool) -> None:
    from rich.console import Console

    console = Console()
    console.print(f"{result.schedule}: {result.ranks} ranks, {result.microbatches} microbatches", highlight=False)
    console.print(_table(result))
    if grid:
        from dynmo.schedule.grid import MIN_WIDTH, draw, draw_coloured

        width = max(MIN_WIDTH, shutil.get_terminal_size((120, 24)).columns)
        if console.is_terminal:
            console.print(draw_coloured(timeline, width), soft_wrap=True)
        else:
            print(draw(timeline, width))
    if ops:
        sys.stdout.write(to_text(made))


def _table(result: Result) -> Table:
    from rich.table import Table

    table = Table(box=None, show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for field in ("span", "makespan", "bubble_ratio", "makespan_bubble_ratio", "idle_ratio", "lower_bound"):
        table.add_row(field.replace("_", " "), f"{getattr(result, field):.6g}")
    most = max(result.peak_memory)
    table.add_row("peak memory", f"{most:.6g}", f"on rank {result.peak_memory.index(most)}")
    table.add_row("made in", f"{result.seconds:.2g}", "seconds")
    return table
