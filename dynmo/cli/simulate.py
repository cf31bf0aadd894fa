"""`dynmo simulate` replays a changing workload and shows the gain of balancing."""

from __future__ import annotations

import json
import math
import time
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dynmo.cli.options import CommandOptions, command
from dynmo.cli.output import check_plot, compilation_told, print_json, print_table, save_plot
from dynmo.cli.plan_text import needed_json, print_needed
from dynmo.cli.rank_process import import_from_working_folder
from dynmo.errors import InputError
from dynmo.options import NonNegative
from dynmo.report.numbers import plus, show_mebibytes, show_share

if TYPE_CHECKING:
    from dynmo.plan.replay import ReplayResult

_ROWS, _COLUMNS = 12, 72
_OF_WORKLOAD = ("name", "steps", "ranks", "replicas", "microbatches", "schedule", "objective")


class SimulateOptions(CommandOptions):
    workload: Path
    """The workload and the policy, as TOML. Or decisions.jsonl of a run."""
    plot: Path | None = None
    """Draw the step times (.svg, .png, .pdf)."""
    fewest_ranks: NonNegative | None = None
    """Also find the fewest ranks at each moment. A step may take longer than the first by this
    share."""


@command
@compilation_told()
def simulate(options: SimulateOptions) -> None:
    import_from_working_folder()
    if options.workload.suffix == ".jsonl":
        _replay_decisions(options.workload, options.as_json)
        return
    from dynmo.plan.replay import ranks_needed, replay
    from dynmo.plan.workload import read

    tolerance, plot = options.fewest_ranks, options.plot
    workload = read(options.workload)
    check_plot(plot)
    began = time.perf_counter()
    result = replay(workload)
    needed = () if tolerance is None else ranks_needed(workload, tolerance)
    seconds = time.perf_counter() - began
    if plot is not None:
        _plot(result, plot)
    record = to_json(result, seconds)
    if options.as_json:
        print_json(record | needed_json(needed))
        return
    _print_text(result, record)
    if needed:
        print_needed(needed, workload.ranks)


# -- JSON ------------------------------------------------------------------------------------------


def to_json(result: ReplayResult, seconds: float) -> dict[str, Any]:
    """Returns the result as JSON, in seconds and bytes.

    `speedup` is that of the whole run with its moves against a static placement. `perfect_speedup`
    is that of perfect balance.
    """
    workload = result.workload
    sides = {"": result.policy, "static_": result.static, "perfect_": result.perfect}
    whole = {name: math.fsum(x.seconds for x in steps) for name, steps in sides.items()}
    # Steps are weighted by their seconds.
    idle = {
        f"{name}idle_ratio": _ratio(sum(x.seconds * x.idle_ratio for x in steps), whole[name], 0.0)
        for name, steps in sides.items()
    }
    static, perfect = whole["static_"], whole["perfect_"]
    total = {
        "seconds": result.seconds,
        "static_seconds": static,
        "perfect_seconds": perfect,
        "speedup": _ratio(static, result.seconds),
        "perfect_speedup": _ratio(static, perfect),
        "bound": -(-len(workload.names) // workload.ranks),
        **idle,
        **_moved(result, 0, workload.steps),
    }
    starts = [*(moment.step for moment in workload.layers.moments), workload.steps]
    return {
        **{key: getattr(workload, key) for key in _OF_WORKLOAD},
        "layers": len(workload.names),
        "policy": workload.policy.model_dump(),
        "phases": [_phase(result, *each) for each in pairwise(starts)],
        "rebalances": [asdict(x) for x in result.rebalances],
        "total": total,
        "seconds": seconds,
    }


def _ratio(whole: float, part: float, otherwise: float = 1.0) -> float:
    return whole / part if part else otherwise


def _phase(result: ReplayResult, first: int, stop: int) -> dict[str, Any]:
    """Returns means over the steps in which the costs stay, without moves."""
    mine, static, perfect = (
        [math.fsum(column) / (stop - first) for column in zip(*steps[first:stop], strict=True)]
        for steps in (result.policy, result.static, result.perfect)
    )
    return {
        "first": first,
        "last": stop - 1,
        "seconds": mine[0],
        "static": static[0],
        "perfect": perfect[0],
        "idle_ratio": mine[1],
        "static_idle_ratio": static[1],
        **_moved(result, first, stop),
        "partition": result.partitions[stop - 1],
    }


def _moved(result: ReplayResult, first: int, stop: int) -> dict[str, Any]:
    moves = [x for x in result.moves if first <= x.step < stop]
    return {
        "rebalances": len(moves),
        "moved_layers": sum(x.layers for x in moves),
        "moved_bytes": sum(x.moved_bytes for x in moves),
        "move_seconds": math.fsum(x.seconds for x in moves),
    }


# -- text ------------------------------------------------------------------------------------------


def _print_text(result: ReplayResult, record: dict[str, Any]) -> None:
    workload, total = result.workload, record["total"]
    moved = show_mebibytes(total["moved_bytes"])
    copies = f" x {workload.replicas} replicas" if workload.replicas > 1 else ""
    print(
        f"{workload.name}: {record['layers']} layers on {workload.ranks} ranks{copies}, "
        f"{workload.microbatches} microbatches of {workload.schedule}, {workload.steps} steps; "
        f"{workload.policy.balancer} every {workload.policy.every} steps\n"
    )
    print_table([_row(phase) for phase in record["phases"]])
    print("", *picture(result), "", sep="\n")
    print(
        f"policy   {total['seconds']:.4g} s, {total['idle_ratio']:.1%} idle; {total['rebalances']} "
        f"rebalances moved {total['moved_layers']} layers, {moved} MiB in "
        f"{total['move_seconds']:.3g} s (of {len(result.rebalances)} proposed)\n"
        f"static   {total['static_seconds']:.4g} s, {total['static_idle_ratio']:.1%} idle: the "
        f"policy is x{total['speedup']:.3f}\n"
        f"perfect  {total['perfect_seconds']:.4g} s, {total['perfect_idle_ratio']:.1%} idle: at "
        f"most x{total['perfect_speedup']:.3f}\n"
        f"bound    x{total['bound']}: whole layers over an even placement, "
        f"ceil({record['layers']} / {workload.ranks})\n"
        f"simulated in {record['seconds']:.2f} s"
    )


def _row(phase: dict[str, Any]) -> dict[str, str]:
    static = phase["static"]
    return {
        "steps": f"{phase['first']}-{phase['last']}",
        "s/step": f"{phase['seconds']:.4g}",
        "static": f"{static:.4g}",
        "perfect": f"{phase['perfect']:.4g}",
        "speed-up": f"x{_ratio(static, phase['seconds']):.3f}",
        "at most": f"x{_ratio(static, phase['perfect']):.3f}",
        "idle": show_share(phase["idle_ratio"]),
        "static idle": show_share(phase["static_idle_ratio"]),
        "moves": str(phase["moved_layers"]),
        "MiB": show_mebibytes(phase["moved_bytes"]),
        "layers": plus(phase["partition"]),
    }


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
    from dynmo.plan.decide import read_records

    rows = [(record, record.again()) for record in read_records(path)]
    if not rows:
        raise InputError(f"{path} has no decisions")
    if as_json:
        decisions = [
            {
                "step": record.problem.work.step,
                "kind": record.rules.kind,
                "decided": record.answer,
                "again": again.answer,
                "reason": again.verdict.reason,
            }
            for record, again in rows
        ]
        same = all(record.answer == again.answer for record, again in rows)
        print_json({"decisions": decisions, "same": same})
        return
    print_table(
        [
            {
                "step": str(record.problem.work.step),
                "what": record.rules.kind,
                "again": "the same"
                if again.answer == record.answer
                else f"differs: {json.dumps(again.answer)}",
                "why": again.verdict.reason,
            }
            for record, again in rows
        ],
        f"{path}: {len(rows)} decision" + "s" * (len(rows) != 1),
    )


# -- plot ------------------------------------------------------------------------------------------


def _plot(result: ReplayResult, path: Path) -> None:
    from matplotlib.figure import Figure  # not pyplot: no window, no state

    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    steps = range(result.workload.steps)
    for label, series, colour, line in (
        ("static", result.static, "tab:red", "--"),
        ("policy", result.policy, "tab:blue", "-"),
        ("perfect", result.perfect, "black", ":"),
    ):
        seconds = [x.seconds for x in series]
        axes.step(steps, seconds, line, where="post", label=label, color=colour)
    for x in result.moves:
        axes.axvline(x.step, color="tab:blue", alpha=0.2, linewidth=1)
    axes.set(
        xlabel="step",
        ylabel="seconds a step (predicted)",
        ylim=(0, None),
        title=result.workload.name,
    )
    figure.legend(loc="outside upper right", ncols=3)
    save_plot(figure, path)
