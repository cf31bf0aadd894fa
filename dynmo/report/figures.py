"""Pictures of a run, by matplotlib. The report, the dashboard and the documents draw with them.

Every picture reads in grey and by people who see no red: hatches and dashes say the same as
colours. Legends stand above the data.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from dynmo.events import EvalEvent, StepResult
from dynmo.report.numbers import plus
from dynmo.report.passes import draw_rows, rows_of, traced_rows
from dynmo.report.run_record import RunRecord
from dynmo.schedule.catalogue import stage_ranks_of

_SHADES = ("#dbe7f3", "#f5e3c8", "#d9ecd9", "#efdbe6")
_DASHES = ("-", "--", "-.", ":")
_INK = ("#1f5f99", "#b3541e", "#2c6e49", "#7b3f6b")
_WIDE, _NARROW = 8.4, 4.1  # inches
_MOST = 600  # points of a line; a screen shows no more

Points = tuple[Sequence[float], Sequence[float]]


@dataclass(frozen=True)
class Picture:
    """A figure and what it is about.

    Attributes:
        key: Name that is used in the page's addresses.
        note: How to read it, in one sentence.
        lines: Values of each line at each x, for reading them off. None where it has no point.
    """

    key: str
    title: str
    note: str
    figure: Figure
    x: Sequence[float] = ()
    lines: Mapping[str, Sequence[float | None]] = field(default_factory=dict[str, Sequence[float]])


def pictures(run: RunRecord) -> list[Picture]:
    """Draws all pictures that a run has data for."""
    drawn = (make(run) for make in _PICTURES)
    return [picture for picture in drawn if picture is not None]


def _axes(height: float = 2.4, width: float = _NARROW) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots()
    _tidy(axes)
    return figure, axes


def _tidy(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=9)
    axes.xaxis.label.set_fontsize(9)
    axes.yaxis.label.set_fontsize(9)


def _legend(axes: Axes, columns: int = 3) -> None:
    handles, labels = axes.get_legend_handles_labels()
    once = dict(zip(labels, handles, strict=True))
    axes.figure.legend(
        once.values(),
        once.keys(),
        loc="outside upper left",
        ncols=columns,
        fontsize=9,
        frameon=False,
    )


def _by_step(axes: Axes, steps: Sequence[float]) -> None:
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.set_xlim(min(steps) - 0.5, max(steps) + 0.5)


def thin(xs: Sequence[float], ys: Sequence[float]) -> Points:
    """Returns means of equal parts of a line, so that it has at most `_MOST` points."""
    size = math.ceil(len(xs) / _MOST)
    if size < 2:
        return xs, ys
    parts = range(0, len(xs), size)
    return (
        [xs[start] for start in parts],
        [math.fsum(part) / len(part) for start in parts if (part := ys[start : start + size])],
    )


def _line(
    run: RunRecord,
    key: str,
    title: str,
    note: str,
    values: Callable[[StepResult], float | None],
    unit: str,
) -> Picture | None:
    """Draws one value of each step."""
    pairs = [(step.step, value) for step in run.steps if (value := values(step)) is not None]
    pairs = [(step, value) for step, value in pairs if math.isfinite(value)]
    if not pairs:
        return None
    xs, ys = thin(*zip(*pairs, strict=True))
    figure, axes = _axes()
    axes.plot(xs, ys, color=_INK[0], linewidth=1.2, marker="o" if len(xs) == 1 else None)
    axes.set_ylabel(unit)
    _by_step(axes, xs)
    return Picture(key, title, note, figure, xs, {unit: ys})


# -- learning and speed ----------------------------------------------------------------------------


def loss(run: RunRecord) -> Picture | None:
    pairs = [(step.step, step.loss) for step in run.steps if math.isfinite(step.loss)]
    if not pairs:
        return None
    xs, ys = thin(*zip(*pairs, strict=True))
    figure, axes = _axes()
    axes.plot(xs, ys, color=_INK[0], linewidth=1.2, label="training")
    held_out = [(event.step, event.loss) for event in run.all(EvalEvent)]
    if held_out:
        axes.plot(*zip(*held_out, strict=True), "s--", color=_INK[1], ms=4, label="held out")
        _legend(axes)
    axes.set_ylabel("loss")
    _by_step(axes, xs)
    return Picture("loss", "Loss", "Mean loss of each step.", figure, xs, {"loss": ys})


def gradient_norm(run: RunRecord) -> Picture | None:
    return _line(
        run,
        "gradient-norm",
        "Gradient norm",
        "Norm of all gradients before clipping.",
        lambda step: step.gradient_norm,
        "gradient norm",
    )


def speed(run: RunRecord) -> Picture | None:
    return _line(
        run,
        "speed",
        "Speed",
        "Tokens per second of each step, padding left out.",
        lambda step: step.tokens_per_s or None,
        "tokens/s",
    )


def draw_idleness(axes: Axes, run: RunRecord) -> tuple[Sequence[float], dict[str, list[float]]]:
    """Draws the idle share of each step: the schedule's own, and the rest above it.

    Returns:
        The steps, and both shares in percent.
    """
    steps = [float(step.step) for step in run.steps]
    whole = [100 * step.idle_ratio for step in run.steps]
    own = [100 * (step.inherent_idle or 0.0) for step in run.steps]
    xs, idle = thin(steps, whole)
    inherent = [min(pair) for pair in zip(thin(steps, own)[1], idle, strict=True)]
    other = [all_ - part for all_, part in zip(idle, inherent, strict=True)]
    # A step is as wide as the way to the next one.
    ends, low, high = [*xs, xs[-1] + 1], [*inherent, inherent[-1]], [*idle, idle[-1]]
    axes.fill_between(ends, low, step="post", color="#9a9a9a", linewidth=0, label="inherent bubble")
    style = {"facecolor": "#e3a587", "edgecolor": "#8a3b12", "hatch": "....", "linewidth": 0}
    axes.fill_between(ends, low, high, step="post", label="other idle time", **style)
    for event in run.summary.rebalances:
        axes.axvline(event.step, color="black", linestyle=":", linewidth=1)
    axes.set_ylabel("idle, %")
    axes.set_ylim(0, max(10.0, *high) * 1.05)
    _by_step(axes, xs)
    return xs, {"inherent bubble, %": inherent, "other idle time, %": other}


def idleness(run: RunRecord) -> Picture | None:
    figure, axes = _axes()
    xs, lines = draw_idleness(axes, run)
    _legend(axes)
    return Picture(
        "idleness",
        "Idle time",
        "The schedule idles as long even if stages are equal (grey). The rest is imbalance, "
        "messages and other processes. Dotted: layers moved.",
        figure,
        xs,
        dict(lines),
    )


# -- layers on ranks -------------------------------------------------------------------------------


def _ranks_of(run: RunRecord, step: StepResult) -> Sequence[int]:
    """Returns the pipeline rank of each stage of a step. Ranks may have left or joined before."""
    plan, stages = run.plan, len(step.layers)
    ranks = len(step.busy) // run.replicas or run.option("parallel", "pipeline")
    if plan is not None and len(plan.stage_ranks) == stages and plan.mesh.pipeline == ranks:
        return plan.stage_ranks
    schedule = run.option("pipeline", "schedule")
    if isinstance(schedule, str) and isinstance(ranks, int) and 0 < ranks < stages:
        for name in (schedule, "v-auto"):
            try:
                found = stage_ranks_of(name, ranks, stages // ranks)
            except ValueError:
                continue
            if len(found) == stages:
                return found
    return range(stages)


def _placed(step: StepResult) -> tuple[object, ...]:
    return step.layers, step.frozen, len(step.busy)


def layers_on_ranks(run: RunRecord) -> Picture | None:
    """Draws which rank has which layers at each step, and which layers are frozen."""
    steps = run.steps
    kept = [steps[0], *(b for a, b in pairwise(steps) if _placed(a) != _placed(b))]
    first, last = steps[0].step, steps[-1].step + 1
    figure, axes = _axes(height=2.8)
    ends = [*(step.step for step in kept[1:]), last]
    for step, end in zip(kept, ends, strict=True):
        begin, counts, frozen, low = step.step, step.layers, step.frozen, 0
        for count, rank in zip(counts, _ranks_of(run, step), strict=True):
            shade = _SHADES[rank % len(_SHADES)]
            axes.fill_between([begin, end], low, low + count, color=shade, linewidth=0)
            axes.plot([begin, end], [low, low], color="#444444", linewidth=0.8)
            if (end - begin) * 12 > last - first and count * 12 > sum(counts):
                text = f"{rank}" if len(counts) > 4 or len(kept) > 3 else f"rank {rank}"
                axes.text(
                    (begin + end) / 2, low + count / 2, text, ha="center", va="center", size=9
                )
            low += count
        if frozen:
            axes.fill_between(
                [begin, end],
                0,
                frozen,
                facecolor="none",
                edgecolor="#666666",
                hatch="///",
                linewidth=0,
                label="frozen",
            )
        axes.plot([begin, begin], [0, low], color="#444444", linewidth=0.8)
    axes.set_ylabel("layer")
    axes.set_ylim(0, max(sum(step.layers) for step in kept))
    axes.yaxis.set_major_locator(MaxNLocator(6, integer=True))
    _by_step(axes, [first, last])
    if any(step.frozen for step in kept):
        _legend(axes)
    return Picture(
        "layers",
        "Layers on ranks",
        "A band has the layers of one rank: halves of blocks, the embedding first, the head last.",
        figure,
    )


def _limits(run: RunRecord, ranks: int) -> Sequence[int]:
    """Returns the limit of each rank. Those of a list are for the ranks of each replica."""
    limit = run.memory_limit
    if limit is None or isinstance(limit, int):
        return () if limit is None else (limit,) * ranks
    each = [bytes_ for bytes_ in limit for _ in range(run.replicas)]
    return each if len(each) == ranks else ()


def memory(run: RunRecord) -> Picture | None:
    """Draws the most memory of each rank beside its limit."""
    rows = [step.memory for step in run.steps if step.memory and any(step.memory)]
    if not rows:
        return None
    ranks = len(rows[-1])
    peak = [max(row[rank] for row in rows if len(row) == ranks) / 2**20 for rank in range(ranks)]
    limits = _limits(run, ranks)
    figure, axes = _axes(height=max(1.6, 0.9 + 0.22 * ranks))
    axes.barh(range(ranks), peak, color="#9ecbef", edgecolor="#1f5f99", height=0.6, label="most")
    if limits:
        axes.plot([x / 2**20 for x in limits], range(ranks), "k|", ms=14, mew=2, label="limit")
        _legend(axes)
    axes.set_yticks(range(0, ranks, math.ceil(ranks / 16)))
    axes.invert_yaxis()
    axes.set_ylabel("rank")
    axes.set_xlabel("MiB")
    axes.xaxis.set_major_locator(MaxNLocator(5))
    device = run.summary.device
    resident = " On a CPU it is resident memory, Python and torch included." * (device == "cpu")
    return Picture("memory", "Memory", f"The most memory of each rank in a step.{resident}", figure)


# -- one step --------------------------------------------------------------------------------------


def timeline(run: RunRecord) -> Picture | None:
    """Draws a step as it was measured above the same step as it was planned."""
    traced = traced_rows(run)
    measured, planned = traced[1:] if traced else ([], [])
    if not planned and run.plan is not None:
        planned = rows_of(run.plan.timeline)
    named = (("measured", measured), ("planned", planned))
    panels = [(name, rows) for name, rows in named if rows]
    if not panels:
        return None
    until = max(end for _, rows in panels for row in rows for *_, end in row)
    height = sum(0.75 + 0.28 * min(len(rows), 16) for _, rows in panels) + 0.5
    figure = Figure(figsize=(_WIDE, height), layout="constrained")
    grid = figure.subplots(len(panels), sharex=True, squeeze=False)[:, 0]
    for axes, (name, rows) in zip(grid, panels, strict=True):
        _tidy(axes)
        draw_rows(axes, rows, until, numbers=len(rows) <= 16)
        axes.set_title(name, loc="left", fontsize=9)
    grid[-1].set_xlabel("seconds")
    _legend(grid[0], columns=4)
    which = f"Step {traced[0]}. " if traced else ""
    return Picture(
        "timeline",
        "One step",
        f"{which}Planned: the schedule under the costs that the run measured. White: idle. The "
        "trace has every pass (ui.perfetto.dev).",
        figure,
    )


_PICTURES: tuple[Callable[[RunRecord], Picture | None], ...] = (
    timeline,
    layers_on_ranks,
    idleness,
    loss,
    gradient_norm,
    speed,
    memory,
)


def compared(runs: Sequence[RunRecord]) -> list[Picture]:
    """Draws the losses and the speeds of several runs in one picture each."""
    values: dict[str, Callable[[StepResult], float]] = {
        "seconds of a step": lambda step: step.seconds,
        "loss": lambda step: step.loss,
        "idle, %": lambda step: 100 * step.idle_ratio,
    }
    named: dict[str, RunRecord] = {}
    for run in runs:
        again = sum(other.name == run.name for other in named.values())
        named[f"{run.name} ({again + 1})" if again else run.name] = run
    return [_together(named, *each) for each in values.items()]


def _together(
    runs: Mapping[str, RunRecord], title: str, value: Callable[[StepResult], float]
) -> Picture:
    figure, axes = _axes()
    steps = [step.step for run in runs.values() for step in run.steps]
    size = math.ceil((max(steps) - min(steps) + 1) / _MOST)
    means: dict[str, dict[int, float]] = {}
    for number, (name, run) in enumerate(runs.items()):
        parts: dict[int, list[float]] = {}
        for step in run.steps:
            if math.isfinite(value(step)):
                parts.setdefault(step.step // size * size, []).append(value(step))
        means[name] = {x: math.fsum(part) / len(part) for x, part in sorted(parts.items())}
        style = _DASHES[number % len(_DASHES)]
        colour = _INK[number % len(_INK)]
        ys = [*means[name].values()]
        axes.plot([*means[name]], ys, style, color=colour, linewidth=1.2, label=_short(name))
    xs = sorted({x for own in means.values() for x in own})
    axes.set_ylabel(title)
    if xs:
        _by_step(axes, xs)
        _legend(axes, columns=2)
    words = "; ".join(f"{name}: {plus(x.summary.phases[-1].layers)}" for name, x in runs.items())
    return Picture(
        f"compared-{title.split()[0].strip(',')}",
        title[0].upper() + title[1:],
        f"Layers at the end: {words}.",
        figure,
        xs,
        {name: [own.get(x) for x in xs] for name, own in means.items()},
    )


def _short(name: str) -> str:
    text = name if len(name) <= 24 else f"{name[:11]}…{name[-12:]}"
    # matplotlib leaves labels that begin with an underscore out of legends.
    return (" " if text.startswith("_") else "") + text.replace("$", r"\$")
