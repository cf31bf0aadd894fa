"""`dynmo schedule` makes or reads a schedule, and replays it at given costs."""

from __future__ import annotations

import contextlib
import json
import math
import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dynmo.cli.compiling import compilation_told
from dynmo.cli.options import command
from dynmo.cli.plot import check_plot, save_plot
from dynmo.cli.schedule_options import ScheduleOptions
from dynmo.cli.schedule_request import ScheduleRequest, request_of
from dynmo.errors import InputError, ScheduleError
from dynmo.schedule.bounds import lower_bound
from dynmo.schedule.catalogue import SCHEDULES, stage_ranks_of
from dynmo.schedule.op import Kind, Schedule
from dynmo.schedule.simulator import Timeline, peak_memory, simulate

if TYPE_CHECKING:
    from rich.table import Table

    from dynmo.schedule.automatic.exact import Exact


@command
def schedule(options: ScheduleOptions) -> None:
    if options.plot is not None:
        check_plot(options.plot)
    request = request_of(options)
    began = time.perf_counter()
    with compilation_told() if request.is_optimized else contextlib.nullcontext():
        made = request.schedule()
    seconds = time.perf_counter() - began
    _check_memory(made, request)
    name, proof = request.name, None
    if options.exact is not None:
        proof = _prove(made, request, options.exact)
        name = name if proof.schedule.ops == made.ops else "exact"
        made = proof.schedule
    waiting = timeline = simulate(made, request.costs)
    # The published figures of interleaving do not wait for every message. Measured costs do.
    several = len(request.stage_ranks) > request.ranks > 1
    if name == "interleaved-1f1b" and options.costs is None and several:
        timeline = simulate(made, request.costs, wrap_group=request.ranks)
    result = _result(name, request, timeline, waiting, seconds, proof)
    if options.torch_csv is not None:
        _write_torch_csv(options.torch_csv, made)
    if options.plot is not None:
        _plot(timeline, options.plot)
    show = _print_json if options.as_json else _print_text
    show(result, made, timeline, options)


def _result(
    name: str,
    request: ScheduleRequest,
    timeline: Timeline,
    waiting: Timeline,
    seconds: float,
    proof: Exact | None,
) -> dict[str, Any]:
    """Returns the figures of a timeline, with the keys of `--json`.

    `waiting` is the timeline with a wait for every message. The published figures of interleaving
    assume no wait for most messages between the last rank and the first.
    """
    if not math.isfinite(timeline.makespan):
        raise InputError(
            "the times are so large that their sum is not a number any more; choose a larger unit"
        )
    bound = lower_bound(
        request.costs,
        request.microbatches,
        request.first_trainable,
        request.objective,
        request.caps,
        request.stage_ranks,
    )
    bound = bound if proof is None else max(bound, proof.bound)
    # The bound is summed in another order than the time that reaches it. It may therefore come out
    # a rounding error above that time.
    bound = min(bound, timeline.length(request.objective))
    figures = (timeline.span, timeline.idle_ratio, bound, waiting.makespan, *timeline.peak_memory)
    if not all(map(math.isfinite, figures)):
        raise InputError(
            "the times or the memory are so large that their sum is not a number any more; "
            "choose a larger unit"
        )
    result: dict[str, Any] = {
        "schedule": name,
        "ranks": request.ranks,
        "microbatches": request.microbatches,
        "span": timeline.span,
        "makespan": timeline.makespan,
        "bubble_ratio": timeline.bubble_ratio,
        "makespan_bubble_ratio": timeline.makespan_bubble_ratio,
        "idle_ratio": timeline.idle_ratio,
        "lower_bound": bound,
        "peak_memory": timeline.peak_memory,
        "seconds": seconds,
    }
    if proof is not None:
        result["proven"] = proof.proven
    if timeline is not waiting:
        keys = ("span", "makespan", "bubble_ratio")
        result["every_message"] = {key: getattr(waiting, key) for key in keys}
    return result


def _write_torch_csv(path: Path, schedule: Schedule) -> None:
    from dynmo.files import write_whole
    from dynmo.schedule.torch_csv import to_torch_csv

    try:
        write_whole(path, to_torch_csv(schedule))
    except OSError as error:
        raise InputError(f"torch CSV {path} cannot be written: {error.strerror}") from None


_COLOURS = {Kind.F: "tab:cyan", Kind.B: "tab:green", Kind.W: "gold", Kind.BW: "tab:pink"}


def _plot(timeline: Timeline, path: Path) -> None:
    """Draws a row for each rank, with a bar for each op. Later stages of a rank are paler."""
    from matplotlib.figure import Figure  # not pyplot: no window, no state
    from matplotlib.patches import Patch

    rows = timeline.ranks
    size = min(4 + 0.2 * max(map(len, rows)), 40), 1.5 + 0.4 * len(rows)
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots()
    for rank, row in enumerate(rows):
        for op, start, end in row:
            alpha = 1 / (1 + op.stage // len(rows))
            axes.barh(rank, end - start, left=start, color=_COLOURS[op.kind], alpha=alpha)
            middle = (start + end) / 2
            axes.text(middle, rank, str(op.microbatch), ha="center", va="center", fontsize=6)
    used = {op.kind for row in rows for op, *_ in row}
    axes.legend(
        handles=[Patch(color=_COLOURS[kind], label=kind) for kind in Kind if kind in used],
        loc="upper left",
        bbox_to_anchor=(1, 1),
    )
    axes.set(xlabel="time", ylabel="rank", yticks=range(len(rows)))
    axes.invert_yaxis()
    save_plot(figure, path)


def _prove(schedule: Schedule, request: ScheduleRequest, seconds: float) -> Exact:
    from dynmo.schedule.automatic.exact import exact

    if not seconds > 0:
        raise InputError(f"--exact {seconds:g}: a time limit is a number of seconds over 0")
    return exact(
        schedule, request.costs, caps=request.caps, objective=request.objective, seconds=seconds
    )


def _check_memory(schedule: Schedule, request: ScheduleRequest) -> None:
    """Checks that no rank's peak memory is over its cap."""
    peaks, caps = peak_memory(schedule, request.costs), request.caps
    over = [rank for rank in range(schedule.ranks) if not _fits(peaks[rank], caps[rank])]
    if not over:
        return
    rank = over[0]
    # Only schedules with as many stages can be compared at the same costs.
    others = [
        name
        for name in SCHEDULES
        if name != schedule.name and _fits_all(name, schedule.stage_ranks, request)
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


def _fits_all(name: str, stage_ranks: tuple[int, ...], request: ScheduleRequest) -> bool:
    try:
        if stage_ranks_of(name, request.ranks, request.chunks) != stage_ranks:
            return False
        return all(map(_fits, peak_memory(request.make(name), request.costs), request.caps))
    except ScheduleError:
        return False


def _fits(peak: float, cap: float) -> bool:
    # A peak is a running sum. It may lie a rounding error above its number of activations.
    return peak <= cap * (1 + 1e-9)


def _print_json(
    result: dict[str, Any], schedule: Schedule, timeline: Timeline, options: ScheduleOptions
) -> None:
    result["ops"] = schedule.ops
    if options.grid:
        from dynmo.schedule.grid import draw

        result["grid"] = draw(timeline).plain
    print(json.dumps(result, allow_nan=False))


def _print_text(
    result: dict[str, Any], schedule: Schedule, timeline: Timeline, options: ScheduleOptions
) -> None:
    from rich.console import Console

    console = Console()
    ranks, microbatches = result["ranks"], result["microbatches"]
    print(f"{result['schedule']}: {ranks} ranks, {microbatches} microbatches")
    if options.costs is None and options.tf is None:
        print("equal costs by default: F, B and W take 1 each (--tf, --tb, --tw, or --costs FILE)")
    console.print(_table(result))
    if options.grid:
        from dynmo.schedule.grid import MIN_WIDTH, draw

        width = max(MIN_WIDTH, shutil.get_terminal_size((120, 24)).columns)
        if console.is_terminal:
            console.print(draw(timeline, width), soft_wrap=True)
        else:
            print(draw(timeline, width).plain)
    if options.ops:
        sys.stdout.write(str(schedule))


def _table(result: dict[str, Any]) -> Table:
    from rich.table import Table

    table = Table(box=None, show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for key in (
        "span",
        "makespan",
        "bubble_ratio",
        "makespan_bubble_ratio",
        "idle_ratio",
        "lower_bound",
    ):
        table.add_row(key.replace("_", " "), f"{result[key]:.6g}")
    memory = result["peak_memory"]
    table.add_row("peak memory", f"{max(memory):.6g}", f"on rank {memory.index(max(memory))}")
    if "proven" in result:
        table.add_row("proven optimal", "yes" if result["proven"] else "no")
    if "every_message" in result:
        table.add_row("span, every message waited for", f"{result['every_message']['span']:.6g}")
    table.add_row("made in", f"{result['seconds']:.2g}", "seconds")
    return table
