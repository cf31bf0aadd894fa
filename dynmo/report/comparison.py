"""Compares the summaries and the configs of several runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from rich.table import Table

from dynmo.report.lines import busy_text
from dynmo.report.numbers import show_share
from dynmo.report.summary import Summary, cut_phases

NamedSummary = tuple[str, Summary]
# SECTION.KEY of a config, and the value of each run.
Differences = Mapping[str, Sequence[Any]]

# Number of steps after the first that are enough for a median. Largest relative difference of such
# medians on a quiet machine.
_ENOUGH, _NOISE = 4, 0.1

_SHOWN = 12  # keys that differ


def aligned(runs: Sequence[Summary]) -> list[Summary]:
    """Cuts the phases of each run wherever the work of any run changed.

    A comparison of phases is then one of the same steps.
    """
    changed = {step for run in runs for step in run.changed}
    return [replace(run, phases=cut_phases(run.done, changed)) for run in runs]


def comparison_table(runs: Sequence[NamedSummary]) -> Table:
    """Returns a column per run, each compared with the first.

    Args:
        runs: Name and summary of each run. The summaries are from `aligned`.
    """
    table = Table(title="Runs compared", title_justify="left")
    table.add_column("")
    for name, _ in runs:
        table.add_column(name, justify="right", overflow="fold")
    summaries = [run for _, run in runs]
    first, even = summaries[0], len({run.steps for run in summaries}) == 1
    rows: dict[str, Callable[[Summary], str]] = {
        "steps": lambda run: str(run.steps),
        "seconds, all steps": lambda run: f"{run.seconds:.1f}",
        "seconds, whole run": lambda run: _or_dash(run.run_seconds, ".1f"),
        "measure + decide + move": lambda run: _or_dash(_balancing(run), ".2f"),
        "speed-up" if even else "speed-up, per step": lambda run: _speed_up(first, run),
        "ranks on average": lambda run: _or_dash(run.ranks and run.ranks.mean, ".1f"),
        "last phase: s/step": lambda run: f"{run.phases[-1].seconds:.3f}",
        "last phase: speed-up": lambda run: (
            f"x{_gain(first, run):.2f}"
            if _last_change(runs, run) == _last_change(runs, first)
            else "-"
        ),
        "last phase: idle": lambda run: show_share(run.phases[-1].idle_ratio),
        "last phase: inherent bubble": lambda run: show_share(run.phases[-1].inherent_idle),
        "last phase: other idle time": lambda run: show_share(run.phases[-1].other_idle),
        "loss": lambda run: _or_dash(run.loss, ".6f"),
        "held-out loss": lambda run: _or_dash(run.held_out, ".6f"),
        "weights": lambda run: _or_dash(run.digest, ".12"),
        "buffers": lambda run: _or_dash(run.buffers_digest, ".12"),
    }
    for heading, cell in rows.items():
        table.add_row(heading, *map(cell, summaries))
    return table


def _or_dash(value: object, form: str) -> str:
    return "-" if value is None else format(value, form)


def _gain(first: Summary, run: Summary) -> float:
    """Returns how much shorter a step of the last phase is."""
    return first.phases[-1].seconds / run.phases[-1].seconds


def _last_change(runs: Sequence[NamedSummary], run: Summary) -> int:
    """Returns the step from which on the work of a run did not change any more.

    The last phases of runs of unequal length may be of other work.
    """
    changed = {step for _, each in runs for step in each.changed}
    return max((step for step in changed if step <= run.done[-1].step), default=run.done[0].step)


def _balancing(run: Summary) -> float | None:
    """Returns the seconds of balancing, moves or not."""
    parts = (run.measure_seconds, run.decide_seconds, run.move_seconds)
    known = [x for x in parts if x is not None]
    return sum(known) if known else None


def _speed_up(first: Summary, run: Summary) -> str:
    """Returns the speed-up of the whole runs.

    If the seconds of a whole run are unknown, it is the speed-up of the steps, and the text says
    so.
    """
    whole = first.run_seconds, run.run_seconds
    before, after = (first.seconds, run.seconds) if None in whole else whole
    assert before is not None
    assert after is not None
    steps = " (steps)" if None in whole else ""
    return f"x{before / first.steps * run.steps / after:.2f}{steps}"


def noise(runs: Sequence[NamedSummary], differ: Differences | None) -> str | None:
    """Says if the machine was not equally fast for all runs.

    It compares the steps that did the same work in all runs. These are the steps before the work or
    the placement of any run changed. The first step is left out, because it warms up. Runs that
    differ in more than `[balance]`, or in unknown keys (None), do not compare.
    """
    starts = {(run.done[0].step, run.done[0].layers, run.done[0].frozen) for _, run in runs}
    first, last = runs[0][1].done[0].step, min(run.phases[0].last for _, run in runs)
    if len(starts) > 1 or last - first < _ENOUGH or not _only_balance(differ):
        return None
    seconds = [
        median(step.seconds for step in run.done if first < step.step <= last) for _, run in runs
    ]
    if max(seconds) <= (1 + _NOISE) * min(seconds):
        return None
    took = " and ".join(f"{x:.3f}" for x in seconds)
    return (
        f"from step {first + 1} to {last} all did the same work, at {took} s a step: the machine "
        "was not alike, and nor are the speed-ups; compare runs of a quieter one"
    )


def _only_balance(differ: Differences | None) -> bool:
    return differ is not None and all(key.startswith("balance.") for key in differ)


def conclusion(runs: Sequence[NamedSummary], differ: Differences | None) -> str:
    """Returns the gain in the last phase and the verdict, in one sentence.

    If only `[balance]` differs, and the measured gain is far from the predicted one, the sentence
    has both. It then says if the machine was busy.
    """
    first = runs[0][1]
    gains: list[str] = []
    busy = None
    for name, run in runs[1:]:
        since = _last_change(runs, run)
        if since != _last_change(runs, first):
            continue
        measured, text = _gain(first, run), f"{name}: x{_gain(first, run):.2f}"
        predicted = _predicted(first, run, since) if _only_balance(differ) else None
        if predicted is not None and abs(measured / predicted - 1) > _NOISE:
            text = f"{name}: measured x{measured:.2f}, predicted x{predicted:.2f}"
            busy = busy_text([run for _, run in runs])
        gains.append(text)
    if not gains:
        return verdict(runs)
    return f"{'; '.join(gains)} in the last phase{f': {busy}' if busy else ''}, {verdict(runs)}"


def _predicted(first: Summary, run: Summary, since: int) -> float | None:
    """Returns the predicted speed-up of a run's moves from the first run's placement on."""
    moves = [move for move in run.rebalances if move.step >= since]
    if not moves or moves[0].source != first.phases[-1].layers:
        return None
    return 1 / math.prod(max(1 - move.predicted_gain, 1e-9) for move in moves)


def verdict(runs: Sequence[NamedSummary]) -> str:
    """Says in one line whether the numbers are the same."""
    digests = {run.digest for _, run in runs}
    if None in digests:
        return "a run has not ended: its weights cannot be compared"
    if len(digests) > 1 or len({run.loss for _, run in runs}) > 1:
        return "the runs ended with different weights"
    buffers = {run.buffers_digest for _, run in runs}
    if len(buffers - {None}) > 1:
        return (
            "same loss and same weights, but different buffers (running statistics, say): "
            "held-out losses may differ"
        )
    same = "same loss and same weights, to the last bit"
    return same if None in buffers else f"{same}, buffers included"


def differences(configs: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Returns the keys, as SECTION.KEY, in which the configs of runs differ.

    Each key has the value of each run. None means that it is not set. The name of a run is left
    out.
    """
    flat = [_flat(config) for config in configs]
    keys = sorted({key for config in flat for key in config} - {"name"})
    values = {key: [config.get(key) for config in flat] for key in keys}
    return {key: row for key, row in values.items() if any(value != row[0] for value in row)}


def _flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in config.items():
        name = f"{prefix}{key}"
        out |= _flat(value, f"{name}.") if isinstance(value, Mapping) else {name: value}
    return out


def difference_line(changes: Differences) -> str:
    if not changes:
        return "the configs are the same"
    shown = [
        f"{key} ({', '.join('not set' if value is None else str(value) for value in values)})"
        for key, values in changes.items()
    ]
    more = f" and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else ""
    return f"the configs differ in {', '.join(shown[:_SHOWN])}{more}"
