"""`dynmo simulate` replays a changing workload and shows the gain of balancing."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dynmo.cli import ranks
from dynmo.cli.compiling import compilation_told
from dynmo.cli.options import command
from dynmo.cli.plot import check_plot, save_plot
from dynmo.cli.rank_process import import_from_working_folder
from dynmo.errors import InputError

if TYPE_CHECKING:
    from rich.table import Table

    from dynmo.plan.workload import ReplayResult, StepTime

_ROWS, _COLUMNS = 12, 72


@dataclass(frozen=True)
class SimulateOptions:
    """The options of `dynmo simulate`."""

    workload: Annotated[
        Path,
        typer.Argument(
            help="The workload and the policy, as TOML. Or decisions.jsonl of a run.",
            show_default=False,
        ),
    ]
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Draw the step times (.svg, .png, .pdf; needs the extra plot)."
        ),
    ] = None
    fewest_ranks: Annotated[
        float | None,
        typer.Option(
            metavar="SHARE",
            min=0.0,
            help="Also find the fewest ranks at each moment. A step may take longer than the "
            "first by this share.",
        ),
    ] = None
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False


@command
@compilation_told()
def simulate(options: SimulateOptions) -> None:
    import_from_working_folder()
    if options.workload.suffix == ".jsonl":
        _replay_decisions(options.workload, options.as_json)
        return
    from dynmo.plan.ranks_needed import ranks_needed
    from dynmo.plan.workload import replay
    from dynmo.plan.workload_file import read

    tolerance, plot = options.fewest_ranks, options.plot
    if tolerance is not None:
        ranks.check_tolerance(tolerance)
    workload = read(options.workload)
    if plot is not None:
        check_plot(plot)
    began = time.perf_counter()
    result = replay(workload)
    needed = () if tolerance is None else ranks_needed(workload, tolerance)
    seconds = time.perf_counter() - began
    if plot is not None:
        _plot(result, plot)
    if options.as_json:
        print(json.dumps(to_json(result, seconds) | ranks.needed_json(needed), allow_nan=False))
    else:
        _print_text(result, seconds)
        if needed:
            ranks.print_needed(needed, workload.ranks)


def to_json(result: ReplayResult, seconds: float) -> dict[str, Any]:
    """Returns the result as JSON, in seconds and bytes.

    `speedup` is that of the whole run with its moves against a static placement. `perfect_speedup`
    is that of perfect balance.
    """
    workload = result.workload
    total = {
        "seconds": result.seconds,
        "static_seconds": result.static_seconds,
        "perfect_seconds": result.perfect_seconds,
        "speedup": _ratio(result.static_seconds, result.seconds),
        "perfect_speedup": _ratio(result.static_seconds, result.perfect_seconds),
        "bound": result.bound,
        "idle_ratio": _idle(result.policy),
        "static_idle_ratio": _idle(result.static),
        "perfect_idle_ratio": _idle(result.perfect),
        "rebalances": len(result.moves),
        "moved_layers": sum(x.layers for x in result.moves),
        "moved_bytes": sum(x.moved_bytes for x in result.moves),
        "move_seconds": sum(x.seconds for x in result.moves),
    }
    return {
        "name": workload.name,
        "layers": workload.layers,
        "steps": workload.steps,
        "ranks": workload.ranks,
        "replicas": workload.replicas,
        "microbatches": workload.microbatches,
        "schedule": workload.schedule,
        "objective": str(workload.objective),
        "policy": asdict(workload.policy),
        "phases": [asdict(phase) for phase in result.phases],
        "rebalances": [asdict(x) for x in result.rebalances],
        "total": total,
        "seconds": seconds,
    }


def _ratio(whole: float, part: float) -> float:
    return whole / part if part else 1.0


def _idle(steps: Sequence[StepTime]) -> float:
    """Returns the idle ratio of the whole run. Steps are weighted by their seconds."""
    whole = sum(x.seconds for x in steps)
    return sum(x.seconds * x.idle_ratio for x in steps) / whole if whole else 0.0


# -- text ------------------------------------------------------------------------------------------


def _print_text(result: ReplayResult, seconds: float) -> None:
    from dynmo.cli.console import console_for_tables

    workload = result.workload
    copies = f" x {workload.replicas} replicas" if workload.replicas > 1 else ""
    print(
        f"{workload.name}: {workload.layers} layers on {workload.ranks} ranks{copies}, "
        f"{workload.microbatches} microbatches of {workload.schedule}, {workload.steps} steps; "
        f"{workload.policy.balancer} every {workload.policy.every} steps\n"
    )
    console_for_tables().print(_phases(result))
    print()
    for line in picture(result):
        print(line)
    print()
    for line in _verdict(result):
        print(line)
    print(f"simulated in {seconds:.2f} s")


def _phases(result: ReplayResult) -> Table:
    from rich.table import Table

    table = Table()
    for heading in (
        "steps",
        "s/step",
        "static",
        "perfect",
        "speed-up",
        "at most",
        "idle",
        "static idle",
        "moves",
        "MiB",
    ):
        table.add_column(heading, justify="right")
    table.add_column("layers", overflow="fold")
    for phase in result.phases:
        speedup, most = _ratio(phase.static, phase.seconds), _ratio(phase.static, phase.perfect)
        table.add_row(
            f"{phase.first}-{phase.last}",
            *(f"{x:.4g}" for x in (phase.seconds, phase.static, phase.perfect)),
            *(f"x{x:.3f}" for x in (speedup, most)),
            *(f"{x:.1%}" for x in (phase.idle_ratio, phase.static_idle_ratio)),
            str(phase.moved_layers),
            f"{phase.moved_bytes / 2**20:,.1f}",
            "+".join(map(str, phase.partition)),
        )
    return table


def _verdict(result: ReplayResult) -> list[str]:
    moves = result.moves
    size, lost = sum(x.moved_bytes for x in moves), sum(x.seconds for x in moves)
    layers = sum(x.layers for x in moves)
    whole, static, perfect = result.seconds, result.static_seconds, result.perfect_seconds
    return [
        f"policy   {whole:.4g} s, {_idle(result.policy):.1%} idle; {len(moves)} rebalances moved "
        f"{layers} layers, {size / 2**20:,.1f} MiB in {lost:.3g} s (of {len(result.rebalances)} "
        "proposed)",
        f"static   {static:.4g} s, {_idle(result.static):.1%} idle: the policy is "
        f"x{_ratio(static, whole):.3f}",
        f"perfect  {perfect:.4g} s, {_idle(result.perfect):.1%} idle: at most "
        f"x{_ratio(static, perfect):.3f}",
        f"bound    x{result.bound}: whole layers over an even placement, "
        f"ceil({result.workload.layers} / {result.workload.ranks})",
    ]


def picture(result: ReplayResult) -> list[str]:
    """Draws step time over steps: s static, * the policy, - perfect, | a rebalance.

    A column is the mean of its steps.
    """
    count = result.workload.steps
    columns = min(_COLUMNS, count)
    cuts = [(count * i // columns, count * (i + 1) // columns) for i in range(columns)]
    series = [("s", result.static), ("-", result.perfect), ("*", result.policy)]
    means = [
        (mark, [sum(x.seconds for x in steps[a:b]) / (b - a) for a, b in cuts])
        for mark, steps in series
    ]
    top = max(max(values) for _, values in means) or 1.0
    rows = [[" "] * columns for _ in range(_ROWS + 1)]
    for mark, values in means:
        for column, value in enumerate(values):
            rows[_ROWS - round(_ROWS * value / top)][column] = mark
    labels = [
        f"{top * (_ROWS - i) / _ROWS:9.4g}" if i % 4 == 0 else " " * 9 for i in range(_ROWS + 1)
    ]
    lines = [f"{label} |{''.join(row).rstrip()}" for label, row in zip(labels, rows, strict=True)]
    moved = {x.step for x in result.moves}
    ticks = "".join("|" if any(a <= step < b for step in moved) else " " for a, b in cuts).rstrip()
    lines += [" " * 10 + "+" + "-" * columns, f"    moves  {ticks}".rstrip()]
    return [
        *lines,
        f"           steps 0 to {count - 1}; seconds a step: s static, * policy, - perfect",
    ]


# -- decisions of a run ----------------------------------------------------------------------------


def _replay_decisions(path: Path, as_json: bool) -> None:
    """Prints each decision of a run, its reason, and whether the answer is the same again."""
    from rich.table import Table

    from dynmo.cli.console import console_for_tables
    from dynmo.plan.decisions import ask_again
    from dynmo.plan.situation import read_records

    rows = [(record, *ask_again(record)) for record in read_records(path)]
    if not rows:
        raise InputError(f"{path} has no decisions")
    if as_json:
        decisions = [
            {
                "step": record.situation.step,
                "kind": record.kind,
                "decided": record.answer,
                "again": answer,
                "reason": reason,
            }
            for record, answer, reason in rows
        ]
        same = all(record.answer == answer for record, answer, _ in rows)
        print(json.dumps({"decisions": decisions, "same": same}, allow_nan=False))
        return
    table = Table(title=f"{path}: {len(rows)} decisions", title_justify="left")
    for heading in ("step", "what", "again", "why"):
        table.add_column(heading, justify="right" if heading == "step" else "left")
    for record, answer, reason in rows:
        same = "the same" if answer == record.answer else f"differs: {json.dumps(answer)}"
        table.add_row(str(record.situation.step), record.kind, same, reason)
    console_for_tables().print(table)


# -- plot ------------------------------------------------------------------------------------------


def _plot(result: ReplayResult, path: Path) -> None:
    from matplotlib.figure import Figure  # not pyplot: no window, no state

    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    steps = range(result.workload.steps)
    for label, series, colour in (
        ("static", result.static, "tab:red"),
        ("policy", result.policy, "tab:blue"),
        ("perfect", result.perfect, "tab:gray"),
    ):
        axes.step(steps, [x.seconds for x in series], where="post", label=label, color=colour)
    for x in result.moves:
        axes.axvline(x.step, color="tab:blue", alpha=0.2, linewidth=1)
    axes.set(
        xlabel="step",
        ylabel="seconds a step (predicted)",
        ylim=(0, None),
        title=result.workload.name,
    )
    axes.legend()
    save_plot(figure, path)
