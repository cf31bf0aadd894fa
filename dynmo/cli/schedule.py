"""`dynmo schedule` makes or reads a schedule, and replays it at given costs."""

from __future__ import annotations

import contextlib
import math
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from dynmo.cli.options import CommandOptions, command
from dynmo.cli.output import check_plot, compilation_told, print_facts, print_json, save_plot
from dynmo.cost.input_file import read_text
from dynmo.cost.layer_cost import Costs, split_costs, uniform_costs
from dynmo.errors import InputError, ScheduleError
from dynmo.options import Count, NonNegative, Positive, Share
from dynmo.report.numbers import show_time
from dynmo.schedule.bounds import Objective, lower_bound
from dynmo.schedule.catalogue import (
    SCHEDULES,
    check_microbatches,
    entry,
    make,
    stage_ranks_of,
)
from dynmo.schedule.op import Schedule
from dynmo.schedule.simulator import Timeline, peak_memory, simulate

if TYPE_CHECKING:
    Name = str
else:
    Name = Literal[tuple(SCHEDULES)]

_TIMES, _SHAPE = ("tf", "tb", "tw"), ("schedule", "ranks", "microbatches")
_FIGURES = ("span", "makespan", "bubble_ratio", "makespan_bubble_ratio", "idle_ratio")


class ScheduleOptions(CommandOptions):
    schedule: Name | None = None
    """The order of F, B and W."""
    ranks: Count | None = None
    """Pipeline ranks."""
    microbatches: Count | None = None
    """Microbatches of a step."""
    from_torch_csv: Path | None = None
    """Read the schedule from torch's CSV instead of making one."""
    tf: NonNegative | None = None
    """Time of F on every rank, in any one unit (default 1)."""
    tb: NonNegative | None = None
    """Time of B, the gradient of the input (default 1)."""
    tw: NonNegative | None = None
    """Time of W, the gradient of the weights (default 1)."""
    tcomm: NonNegative | None = None
    """Time of every link (default 0)."""
    costs: Path | None = None
    """A costs file, or a run's folder, instead of the four times."""
    memory_limit: NonNegative | None = None
    """Most live activations of a rank; 1 is one F's (or the unit of --costs)."""
    objective: Objective = Objective.SPAN
    """Time to keep short: span, or makespan."""
    chunks: Count | None = None
    """Stages per rank (default: the schedule's own)."""
    w_memory: Share | None = None
    """Part of F's activations that stays until W (default 0.5)."""
    exact: Positive | None = None
    """Then let a solver better it, or prove that nothing can, for at most so many seconds."""
    grid: bool = False
    """Draw the timeline."""
    ops: bool = False
    """List every rank's ops in order (--json has them)."""
    plot: Path | None = None
    """Draw the timeline into an SVG, PNG or PDF."""
    torch_csv: Path | None = None
    """Write the schedule as torch's CSV."""

    def _problems(self) -> Iterator[str]:
        given = self.model_fields_set
        missing = next((key for key in _SHAPE if key not in given), None)
        if self.from_torch_csv is None and missing is not None:
            yield (
                f"Missing option '--{missing}'; give --schedule, --ranks and --microbatches, or "
                "--from-torch-csv FILE"
            )
        rivals = {"from_torch_csv": (*_SHAPE, "chunks"), "costs": (*_TIMES, "tcomm")}
        for source, others in rivals.items():
            for other in others:
                if source in given and other in given:
                    rival = source.replace("_", "-")
                    yield f"--{other} and --{rival} exclude each other; use one of them"
        unset = [key for key in _TIMES if key not in given]
        if 0 < len(unset) < len(_TIMES):
            yield (
                f"--{unset[0]} is missing: give --tf, --tb and --tw, or none of them for equal "
                "costs"
            )


@command
def schedule(options: ScheduleOptions) -> None:
    check_plot(options.plot)
    read = None if options.from_torch_csv is None else _read(options.from_torch_csv)
    if read is None:
        name, ranks, microbatches = (getattr(options, key) for key in _SHAPE)
        check_microbatches(name, ranks, microbatches)
        stage_ranks = stage_ranks_of(name, ranks, options.chunks)
    else:
        name, ranks, microbatches = read.name, read.ranks, read.microbatches
        stage_ranks = read.stage_ranks
    costs, first_trainable, caps = _costs(options, stage_ranks)
    if read is not None and first_trainable:
        raise InputError(
            f"costs file {options.costs}: a frozen prefix, but torch's CSV has a backward of every "
            "stage; give costs without one"
        )
    make_named = partial(
        make,
        ranks=ranks,
        microbatches=microbatches,
        costs=costs,
        chunks=options.chunks,
        caps=caps,
        first_trainable=first_trainable,
        objective=options.objective,
    )
    is_optimized, began = read is None and entry(name).from_costs, time.perf_counter()
    with compilation_told() if is_optimized else contextlib.nullcontext():
        made = read or make_named(name)
    seconds = time.perf_counter() - began
    _check_memory(made, costs, caps, make_named)
    result: dict[str, Any] = {"schedule": name, "ranks": ranks, "microbatches": microbatches}
    proven, bound = {}, 0.0
    if options.exact is not None:
        from dynmo.schedule.automatic.exact import exact

        proof = exact(made, costs, caps=caps, objective=options.objective, seconds=options.exact)
        result["schedule"] = name if proof.schedule.ops == made.ops else "exact"
        made, bound, proven = proof.schedule, proof.bound, {"proven": proof.proven}
    waiting = timeline = simulate(made, costs)
    # The published figures of interleaving assume no wait for most messages between the last rank
    # and the first. Measured costs wait for every message.
    is_looped = result["schedule"] == "interleaved-1f1b" and len(stage_ranks) > ranks > 1
    if is_looped and options.costs is None:
        timeline = simulate(made, costs, wrap_group=ranks)
    _check_finite(timeline.makespan)
    bound = max(
        bound,
        lower_bound(costs, microbatches, first_trainable, options.objective, caps, stage_ranks),
    )
    # The bound is summed in another order than the time that reaches it. It may therefore come out
    # a rounding error above that time.
    bound = min(bound, timeline.length(options.objective))
    _check_finite(timeline.span, bound, waiting.makespan, *timeline.peak_memory)
    result |= {key: getattr(timeline, key) for key in _FIGURES}
    result |= {"lower_bound": bound, "peak_memory": timeline.peak_memory, "seconds": seconds}
    result |= proven
    if timeline is not waiting:
        keys = ("span", "makespan", "bubble_ratio")
        result["every_message"] = {key: getattr(waiting, key) for key in keys}
    if options.torch_csv is not None:
        _write_torch_csv(options.torch_csv, made)
    if options.plot is not None:
        _plot(timeline, options.plot)
    show = _print_json if options.as_json else _print_text
    show(result, made, timeline, options)


def _check_finite(*figures: float) -> None:
    if not all(map(math.isfinite, figures)):
        raise InputError(
            "the times or the memory are so large that their sum is not a number any more; "
            "choose a larger unit"
        )


# -- schedule and costs ----------------------------------------------------------------------------


def _read(path: Path) -> Schedule:
    from dynmo.schedule.torch_csv import from_torch_csv

    text = read_text(path, f"torch CSV {path}")
    try:
        return from_torch_csv(text, name="torch")
    except ScheduleError as error:
        raise ScheduleError(f"torch CSV {path}: {error}") from None


def _costs(
    options: ScheduleOptions, stage_ranks: tuple[int, ...]
) -> tuple[Costs, int, tuple[float, ...]]:
    """Returns the costs of the stages, the first trainable stage, and the limit of each rank.

    Times are those of a rank. The stages of a rank share them, and its memory, equally. A file has
    the costs of each stage, or of each rank.
    """
    ranks, w_memory, path = max(stage_ranks) + 1, options.w_memory, options.costs
    limit = math.inf if options.memory_limit is None else options.memory_limit
    share = 0.5 if w_memory is None else w_memory
    if path is None:
        given = (getattr(options, key) for key in _TIMES)
        tf, tb, tw = (1.0 if time is None else time for time in given)
        costs = uniform_costs(ranks, tf, tb, tw, options.tcomm or 0.0, share)
        return split_costs(costs, stage_ranks), 0, (limit,) * ranks
    from dynmo.cost.costs_file import read

    # The layers of a costs file are stages, or its placement says which are.
    file, stages = read(path, of_stages=True), len(stage_ranks)
    placed = (file.partition, (1,) * len(file.layers))
    counts = next((x for x in placed if x and len(x) in (stages, ranks)), None)
    if counts is None:
        raise InputError(
            f"costs file {path}: f has {len(file.layers)} entries, {stages} expected, one per "
            "stage; dynmo plan --costs places layers"
        )
    if file.has_memory and w_memory is not None:
        raise InputError(
            f"--w-memory, but costs file {path} has memory, which says it; use one of them"
        )
    holders = stage_ranks if len(counts) == stages else range(ranks)
    try:
        costs = file.stages(counts, holders, share)
    except InputError as error:
        raise InputError(f"costs file {path}: {error}") from None
    first = next(i for i, stage in enumerate(costs.stages) if stage.b or stage.w)
    held = list(zip(file.cap or (math.inf,) * len(counts), holders, strict=True))
    caps = tuple(min(limit, sum(c for c, own in held if own == rank)) for rank in range(ranks))
    if len(counts) == stages:
        return costs, first, caps
    if first:
        raise InputError(
            f"costs file {path}: a frozen prefix and several stages a rank; give one number per "
            f"stage ({stages})"
        )
    return split_costs(costs, stage_ranks), 0, caps


def _check_memory(
    schedule: Schedule, costs: Costs, caps: tuple[float, ...], make_named: Callable[[str], Schedule]
) -> None:
    """Checks that no rank's peak memory is over its cap."""

    def fits(name: str) -> bool:
        with contextlib.suppress(ScheduleError):
            other = make_named(name)
            # Only schedules with as many stages can be compared at the same costs.
            if other.stage_ranks == schedule.stage_ranks:
                return all(map(_fits, peak_memory(other, costs), caps))
        return False

    peaks = peak_memory(schedule, costs)
    rank = next((r for r, peak in enumerate(peaks) if not _fits(peak, caps[r])), None)
    if rank is None:
        return
    others = [name for name in SCHEDULES if name != schedule.name and fits(name)]
    fit = f"{' and '.join(others)} would fit"
    hint = fit if others else "no other schedule of as many stages fits"
    raise ScheduleError(
        f"{schedule.name}: peak memory of rank {rank} is {peaks[rank]:.10g}, over the limit of "
        f"{caps[rank]:.10g}; {hint}"
    )


def _fits(peak: float, cap: float) -> bool:
    # A peak is a running sum. It may lie a rounding error above its number of activations.
    return peak <= cap * (1 + 1e-9)


# -- output ----------------------------------------------------------------------------------------


def _write_torch_csv(path: Path, schedule: Schedule) -> None:
    from dynmo.files import write_whole
    from dynmo.schedule.torch_csv import to_torch_csv

    try:
        write_whole(path, to_torch_csv(schedule))
    except OSError as error:
        raise InputError(f"torch CSV {path} cannot be written: {error.strerror}") from None


def _plot(timeline: Timeline, path: Path) -> None:
    from dynmo.report.schedule_figure import timeline_figure  # matplotlib takes a while

    save_plot(timeline_figure(timeline), path)


def _print_json(
    result: dict[str, Any], schedule: Schedule, timeline: Timeline, options: ScheduleOptions
) -> None:
    result["ops"] = schedule.ops
    if options.grid:
        from dynmo.schedule.grid import draw

        result["grid"] = draw(timeline).plain
    print_json(result)


def _print_text(
    result: dict[str, Any], schedule: Schedule, timeline: Timeline, options: ScheduleOptions
) -> None:
    from rich.console import Console

    console = Console()
    ranks, microbatches = result["ranks"], result["microbatches"]
    print(f"{result['schedule']}: {ranks} ranks, {microbatches} microbatches")
    if options.costs is None and options.tf is None:
        print("equal costs by default: F, B and W take 1 each (--tf, --tb, --tw, or --costs FILE)")
    print_facts(_facts(result))
    if options.grid:
        from dynmo.schedule.grid import MIN_WIDTH, draw

        width = max(MIN_WIDTH, shutil.get_terminal_size((120, 24)).columns)
        if console.is_terminal:
            console.print(draw(timeline, width), soft_wrap=True)
        else:
            print(draw(timeline, width).plain)
    if options.ops:
        sys.stdout.write(str(schedule))


def _facts(result: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    for key in (*_FIGURES, "lower_bound"):
        yield key.replace("_", " "), f"{result[key]:.6g}", ""
    memory = result["peak_memory"]
    yield "peak memory", f"{max(memory):.6g}", f"on rank {memory.index(max(memory))}"
    if "proven" in result:
        yield "proven optimal", "yes" if result["proven"] else "no", ""
    if "every_message" in result:
        yield "span, every message waited for", f"{result['every_message']['span']:.6g}", ""
    yield "made in", show_time(result["seconds"]), ""
