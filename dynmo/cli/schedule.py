"""`dynmo schedule` makes or reads a schedule, and replays it at given costs."""

from __future__ import annotations

import contextlib
import json
import math
import shutil
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from dynmo.cli.compiling import compilation_told
from dynmo.cost.layer_cost import Costs, split_costs, uniform_costs
from dynmo.errors import InputError, ScheduleError
from dynmo.schedule.bounds import Objective
from dynmo.schedule.catalogue import SCHEDULES, entry, make_by_hand, placement_of
from dynmo.schedule.chunk_bounds import lower_bound_on
from dynmo.schedule.op import Schedule, to_text
from dynmo.schedule.simulator import Timeline, peak_memory, simulate

if TYPE_CHECKING:
    from rich.table import Table

    from dynmo.schedule.automatic.exact import Exact


@dataclass(frozen=True)
class Result:
    """The figures of a schedule, with the keys of the stable contract.

    Times and memory are in the units of the given costs.

    Attributes:
        schedule: Name of the schedule.
        ranks: Number of ranks.
        microbatches: Microbatches of a step.
        span: See `Timeline.span`.
        makespan: See `Timeline.makespan`.
        bubble_ratio: See `Timeline.bubble_ratio`.
        makespan_bubble_ratio: Likewise, with the makespan.
        idle_ratio: See `Timeline.idle_ratio`.
        lower_bound: Lower bound of the objective.
        peak_memory: Peak memory of each rank.
        seconds: Seconds that making the schedule took.
        proven: Whether the solver found that no schedule is shorter. None if it was not asked.
        every_message: Figures of interleaving with a wait for every message. The published figures
            assume no wait for most messages between the last rank and the first. None for other
            schedules, which always wait.
    """

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
    proven: bool | None
    every_message: dict[str, float] | None


def schedule(
    name: Annotated[
        str | None,
        typer.Option("--schedule", metavar="NAME", help=f"One of {', '.join(SCHEDULES)}."),
    ] = None,
    ranks: Annotated[int | None, typer.Option(metavar="P", help="Pipeline ranks.")] = None,
    microbatches: Annotated[
        int | None, typer.Option(metavar="M", help="Microbatches of a step.")
    ] = None,
    from_torch_csv: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Read the schedule from torch's CSV instead of making one."
        ),
    ] = None,
    tf: Annotated[
        float | None,
        typer.Option(metavar="TIME", help="Time of F on every stage, in any one unit."),
    ] = None,
    tb: Annotated[
        float | None, typer.Option(metavar="TIME", help="Time of B, the gradient of the input.")
    ] = None,
    tw: Annotated[
        float | None, typer.Option(metavar="TIME", help="Time of W, the gradient of the weights.")
    ] = None,
    tcomm: Annotated[
        float | None, typer.Option(metavar="TIME", help="Time of every link (default 0).")
    ] = None,
    costs: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Per-stage costs in JSON, instead of the four times."),
    ] = None,
    memory_limit: Annotated[
        float | None,
        typer.Option(
            metavar="X", help="Most live activations of a rank; 1 is one F's (or FILE's unit)."
        ),
    ] = None,
    objective: Annotated[
        Objective, typer.Option(help="What the schedule and the lower bound are about.")
    ] = Objective.SPAN,
    chunks: Annotated[
        int | None, typer.Option(metavar="V", help="Stages per rank (default: the schedule's own).")
    ] = None,
    w_memory: Annotated[
        float | None,
        typer.Option(
            metavar="SHARE", help="Part of F's activations that stays until W (default 0.5)."
        ),
    ] = None,
    exact: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            help="Then let a solver better it, or prove that nothing can, for at most so long.",
        ),
    ] = None,
    grid: Annotated[bool, typer.Option("--grid", help="Draw the timeline.")] = False,
    ops: Annotated[bool, typer.Option("--ops", help="List every rank's ops in order.")] = False,
    torch_csv: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the schedule as torch's CSV.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Make or read a pipeline schedule and replay it at given costs."""
    read: Schedule | None = None
    if from_torch_csv is not None:
        asked = {
            "--schedule": name,
            "--ranks": ranks,
            "--microbatches": microbatches,
            "--chunks": chunks,
        }
        read = _read_torch_csv(from_torch_csv, asked)
        name, ranks, microbatches, placement = (
            read.name,
            read.ranks,
            read.microbatches,
            read.placement,
        )
    else:
        name, ranks, microbatches = (
            _needed("--schedule", name),
            _needed("--ranks", ranks),
            _needed("--microbatches", microbatches),
        )
        if ranks < 1 or microbatches < 1:
            raise ScheduleError(
                f"--ranks {ranks} --microbatches {microbatches}: at least 1 of each is needed"
            )
        placement = placement_of(name, ranks, chunks)
    first_trainable, caps = 0, (math.inf,) * ranks
    if costs is None:
        stage_costs = _uniform(placement, tf, tb, tw, tcomm, 0.5 if w_memory is None else w_memory)
    else:
        times = {"--tf": tf, "--tb": tb, "--tw": tw, "--tcomm": tcomm}
        stage_costs, first_trainable, caps = _from_file(costs, placement, times, w_memory)
    if memory_limit is not None:
        if not memory_limit >= 0:
            raise InputError(f"--memory-limit {memory_limit}: a limit is a number of at least 0")
        caps = tuple(min(cap, memory_limit) for cap in caps)

    began = time.perf_counter()
    wanted = _Wanted(ranks, microbatches, stage_costs, chunks, caps, first_trainable, objective)
    if read is not None and first_trainable:
        raise InputError(
            f"costs file {costs}: a frozen prefix, but torch's CSV has a backward of every stage; "
            "give costs without one"
        )
    with (
        compilation_told() if read is None and entry(name).from_costs else contextlib.nullcontext()
    ):
        schedule = wanted.make(name) if read is None else read
    seconds = time.perf_counter() - began
    _check_memory(schedule, wanted)
    proof = None if exact is None else _prove(schedule, wanted, exact)
    if proof is not None and proof.schedule.ops != schedule.ops:
        name, schedule = "exact", proof.schedule
    # The published figures of interleaving do not wait for every message. Measured costs do.
    published = name == "interleaved-1f1b" and costs is None and len(placement) > ranks > 1
    plain = simulate(schedule, stage_costs)
    timeline = simulate(schedule, stage_costs, wrap_group=ranks) if published else plain
    if not math.isfinite(timeline.makespan):
        raise InputError(
            "the times are so large that their sum is not a number any more; choose a larger unit"
        )
    bound = lower_bound_on(
        schedule.placement, stage_costs, microbatches, first_trainable, objective, caps
    )
    bound = bound if proof is None else max(bound, proof.bound)
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
        # The bound is summed in another order than the time that reaches it. It may therefore come
        # out a rounding error above that time.
        lower_bound=min(bound, reached),
        peak_memory=timeline.peak_memory,
        seconds=seconds,
        proven=None if proof is None else proof.proven,
        every_message={
            "span": plain.span,
            "makespan": plain.makespan,
            "bubble_ratio": plain.bubble_ratio,
        }
        if published
        else None,
    )
    if not all(
        map(
            math.isfinite,
            (
                *timeline.peak_memory,
                timeline.span,
                timeline.idle_ratio,
                result.lower_bound,
                plain.makespan,
            ),
        )
    ):
        raise InputError(
            "the times or the memory are so large that their sum is not a number any more; "
            "choose a larger unit"
        )
    if torch_csv is not None:
        _write_torch_csv(torch_csv, schedule)
    if as_json:
        _print_json(result, schedule, timeline, grid, ops)
    else:
        _print_text(result, schedule, timeline, grid, ops)


_T = TypeVar("_T")


def _needed(option: str, value: _T | None) -> _T:
    if value is None:
        raise InputError(
            f"Missing option '{option}'; give --schedule, --ranks and --microbatches, or "
            "--from-torch-csv FILE"
        )
    return value


def _read_torch_csv(path: Path, asked: dict[str, object]) -> Schedule:
    """Reads a schedule.

    Raises:
        InputError: The file is wrong, or an option of `asked` is given too.
    """
    from dynmo.schedule.torch_csv import from_torch_csv

    given = next((option for option, value in asked.items() if value is not None), None)
    if given is not None:
        raise InputError(
            f"{given} and --from-torch-csv both say what the schedule is; use one of them"
        )
    try:
        return from_torch_csv(path.read_text(encoding="utf-8"), name="torch")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text in UTF-8"
        raise InputError(f"torch CSV {path}: cannot be read: {reason}") from None
    except ScheduleError as error:
        raise ScheduleError(f"torch CSV {path}: {error}") from None


def _write_torch_csv(path: Path, schedule: Schedule) -> None:
    from dynmo.files import write_whole
    from dynmo.schedule.torch_csv import to_torch_csv

    try:
        write_whole(path, to_torch_csv(schedule))
    except OSError as error:
        raise InputError(f"torch CSV {path} cannot be written: {error.strerror}") from None


@dataclass(frozen=True)
class _Wanted:
    """The parts of a schedule request but its name."""

    ranks: int
    microbatches: int
    costs: Costs
    chunks: int | None
    caps: tuple[float, ...]
    first_trainable: int
    objective: Objective

    def make(self, name: str) -> Schedule:
        if not entry(name).from_costs:  # needs no numba, which takes a while to import
            return make_by_hand(
                name, self.ranks, self.microbatches, self.chunks, self.first_trainable
            )
        from dynmo.schedule.automatic.make import make

        return make(
            name,
            self.ranks,
            self.microbatches,
            costs=self.costs,
            chunks=self.chunks,
            caps=self.caps,
            first_trainable=self.first_trainable,
            objective=self.objective,
        )


def _uniform(
    placement: tuple[int, ...],
    tf: float | None,
    tb: float | None,
    tw: float | None,
    tcomm: float | None,
    w_memory: float,
) -> Costs:
    """Returns equal costs for all stages.

    The times are those of a rank. The stages of a rank share them, and its memory, equally.
    """
    if tf is None or tb is None or tw is None:
        raise InputError("no costs: give --tf, --tb and --tw (and --tcomm), or --costs FILE")
    tcomm = 0.0 if tcomm is None else tcomm
    for option, value in {"--tf": tf, "--tb": tb, "--tw": tw, "--tcomm": tcomm}.items():
        if not math.isfinite(value) or value < 0:
            raise InputError(f"{option} {value}: a time is a number of at least 0")
    return split_costs(uniform_costs(max(placement) + 1, tf, tb, tw, tcomm, w_memory), placement)


def _from_file(
    path: Path, placement: tuple[int, ...], times: dict[str, float | None], w_memory: float | None
) -> tuple[Costs, int, tuple[float, ...]]:
    """Returns costs, first trainable stage, and the limit of every rank.

    The file's lists have one number per stage, or one per rank. The stages of a rank then share its
    number equally.
    """
    from dynmo.cost.costs_file import read_costs

    given = [option for option, value in times.items() if value is not None]
    if given:
        raise InputError(f"{given[0]} and --costs both give times; use one of them")
    if w_memory is not None and not 0 <= w_memory <= 1:
        raise InputError(f"--w-memory {w_memory}: it is a share between 0 and 1")
    ranks = max(placement) + 1
    file = read_costs(path, ranks, 0.5 if w_memory is None else w_memory, len(placement))
    if file.has_memory and w_memory is not None:
        raise InputError(
            f"--w-memory, but costs file {path} has mem_f, mem_b and mem_w, which say it; use one "
            "of them"
        )
    costs, caps = file.costs, file.caps or (math.inf,) * len(file.costs.stages)
    if len(placement) == ranks:
        return costs, file.first_trainable, caps
    if len(costs.stages) == len(placement):
        together = tuple(
            sum(cap for cap, holder in zip(caps, placement, strict=True) if holder == rank)
            for rank in range(ranks)
        )
        return costs, file.first_trainable, together
    if file.first_trainable:
        raise InputError(
            f"costs file {path}: a frozen prefix and several stages a rank; give one number per "
            f"stage ({len(placement)})"
        )
    return split_costs(costs, placement), 0, caps


def _prove(schedule: Schedule, wanted: _Wanted, seconds: float) -> Exact:
    from dynmo.schedule.automatic.exact import exact

    if not seconds > 0:
        raise InputError(f"--exact {seconds:g}: a time limit is a number of seconds over 0")
    return exact(
        wanted.costs,
        wanted.microbatches,
        caps=wanted.caps,
        first_trainable=wanted.first_trainable,
        objective=wanted.objective,
        start=schedule,
        seconds=seconds,
    )


def _check_memory(schedule: Schedule, wanted: _Wanted) -> None:
    """Checks that no rank's peak memory is over its cap.

    Raises:
        ScheduleError: A peak is over the cap. The message has the schedules that would fit.
    """
    peaks, caps = peak_memory(schedule, wanted.costs), wanted.caps
    over = [rank for rank in range(schedule.ranks) if not _fits(peaks[rank], caps[rank])]
    if not over:
        return
    rank = over[0]
    # Only schedules with as many stages can be compared at the same costs.
    others = [
        name
        for name in SCHEDULES
        if name != schedule.name and _fits_all(name, schedule.placement, wanted)
    ]
    hint = (
        f"{' and '.join(others)} would fit"
        if others
        else "no other schedule of as many stages fits"
    )
    raise ScheduleError(
        f"{schedule.name}: peak memory of rank {rank} is {peaks[rank]:.10g}, over the limit of "
        f"{caps[rank]:.10g}; {hint}"
    )


def _fits_all(name: str, placement: tuple[int, ...], wanted: _Wanted) -> bool:
    try:
        if placement_of(name, wanted.ranks, wanted.chunks) != placement:
            return False
        return all(map(_fits, peak_memory(wanted.make(name), wanted.costs), wanted.caps))
    except ScheduleError:
        return False


def _fits(peak: float, cap: float) -> bool:
    # A peak is a running sum. It may lie a rounding error above its number of activations.
    return peak <= cap * (1 + 1e-9)


def _print_json(
    result: Result, schedule: Schedule, timeline: Timeline, grid: bool, ops: bool
) -> None:
    fields: dict[str, object] = asdict(result)
    for key in ("proven", "every_message"):
        if fields[key] is None:
            del fields[key]
    if ops:
        fields["ops"] = schedule.ops
    if grid:
        from dynmo.schedule.grid import draw

        fields["grid"] = draw(timeline)
    print(json.dumps(fields, allow_nan=False))


def _print_text(
    result: Result, schedule: Schedule, timeline: Timeline, grid: bool, ops: bool
) -> None:
    from rich.console import Console

    console = Console()
    console.print(
        f"{result.schedule}: {result.ranks} ranks, {result.microbatches} microbatches",
        highlight=False,
    )
    console.print(_table(result))
    if grid:
        from dynmo.schedule.grid import MIN_WIDTH, draw, draw_coloured

        width = max(MIN_WIDTH, shutil.get_terminal_size((120, 24)).columns)
        if console.is_terminal:
            console.print(draw_coloured(timeline, width), soft_wrap=True)
        else:
            print(draw(timeline, width))
    if ops:
        sys.stdout.write(to_text(schedule))


def _table(result: Result) -> Table:
    from rich.table import Table

    table = Table(box=None, show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for field in (
        "span",
        "makespan",
        "bubble_ratio",
        "makespan_bubble_ratio",
        "idle_ratio",
        "lower_bound",
    ):
        table.add_row(field.replace("_", " "), f"{getattr(result, field):.6g}")
    most = max(result.peak_memory)
    table.add_row("peak memory", f"{most:.6g}", f"on rank {result.peak_memory.index(most)}")
    if result.proven is not None:
        table.add_row("proven optimal", "yes" if result.proven else "no")
    if result.every_message is not None:
        table.add_row("span, every message waited for", f"{result.every_message['span']:.6g}")
    table.add_row("made in", f"{result.seconds:.2g}", "seconds")
    return table
