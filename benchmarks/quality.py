"""The effect of the dynamic techniques on held-out loss, by case.

The data are the standard library's sources. The model has four blocks of the demo's width
(`--hidden`). A step has 8 sequences of 128 bytes. One process runs it, because any ranks give the
same bits (tests/test_equality.py). Every run sees the same data in the same order. It is evaluated
on the same held-out windows, with the technique as it is at that moment. The distance is the last
held-out loss over the dense run's, less 1. Its limits were written before the runs.

Sparse attention is held against the same model with shared queries and keys that leaves no pair
out. The distance is thus the sparsity's and not the sharing's. That model's own distance to dense
is a row too. The dense run under other seeds shows how much chance alone does.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from benchmarks.harness import OPTIMIZER, train_each
from benchmarks.output import (
    WIDTH,
    add_number,
    markdown,
    parser_of,
    pyplot,
    run,
)
from dynmo.change_events import ChangeEvent
from dynmo.config import Config, parse
from dynmo.events import EvalEvent, Event
from dynmo.runtime.comm.meeting import Meeting
from dynmo.train.setup import model_of
from dynmo.train.trainer import Trainer

STEPS, HIDDEN = 400, 256
SHARED = "shared keys, all pairs"


def freezing(**options: Any) -> dict[str, Any]:
    return {"cases": ["freezing"], "freezing": options}


def pruning(sparsity: float) -> dict[str, Any]:
    return {"cases": ["pruning"], "pruning": {"final_sparsity": sparsity}}


def attention(**options: Any) -> dict[str, Any]:
    return {"cases": ["sparse_attention"], "sparse_attention": options}


def runs(steps: int) -> dict[str, tuple[str, float | None, dict[str, Any]]]:
    """Returns all runs by name.

    Up to half of the ten layers freeze.
    """
    third = steps // 3
    adaptive = {"start": steps // 10, "max_layers": 5}
    return {
        "dense": ("dense", None, {}),
        "freezing, schedule": ("dense", 0.02, freezing(schedule=[[third, 3], [2 * third, 5]])),
        "freezing, AutoFreeze": (
            "dense",
            0.02,
            freezing(policy="autofreeze", every=max(1, steps // 20), **adaptive),
        ),
        "freezing, Egeria": (
            "dense",
            0.02,
            freezing(policy="egeria", every=max(1, steps // 120), refresh=steps // 4, **adaptive),
        ),
        "pruning, 50 %": ("dense", 0.02, pruning(0.5)),
        "pruning, 75 %": ("dense", 0.02, pruning(0.75)),
        "pruning, 90 %": ("dense", 0.05, pruning(0.9)),
        SHARED: ("dense", None, attention(kind="drop", drop=0.0)),
        "hash, 4 buckets, half the blocks": (
            SHARED,
            0.02,
            attention(buckets=4, start=third, blocks=[1, 3]),
        ),
        "hash, 4 buckets, all blocks": (SHARED, 0.05, attention(buckets=4, start=third)),
        "hash, 16 buckets, half the blocks": (
            SHARED,
            0.05,
            attention(buckets=16, start=third, blocks=[1, 3]),
        ),
    }


def chosen(steps: int, only: Sequence[str]) -> dict[str, tuple[str, float | None, dict[str, Any]]]:
    """Selects the named runs of `runs`, and the runs that they are held against."""
    every = runs(steps)
    wanted = {*only, *(every[name][0] for name in only)} or every.keys()
    # The run with shared keys is itself held against dense.
    wanted = {*wanted, *(every[name][0] for name in wanted)}
    return {name: run for name, run in every.items() if name in wanted}


def config_of(
    steps: int,
    seed: int,
    dynamism: dict[str, Any],
    evaluations: int,
    batches: int,
    hidden: int = HIDDEN,
    model: dict[str, Any] | None = None,
) -> Config:
    """Returns the config of a technique's run."""
    return parse(
        {
            "seed": seed,
            "model": {"blocks": 4, "hidden": hidden, "heads": 4, "sequence": 128} | (model or {}),
            "train": {
                **OPTIMIZER,
                "steps": steps,
                "global_batch": 8,
                "micro_batch": 4,
                "lr": 2e-3,
                "warmup": steps // 20,
            }
            | {"eval_every": max(1, steps // evaluations), "eval_batches": batches},
            "balance": {"balancer": "none"},
            "dynamism": dynamism,
            "trace": {"steps": 0},
        }
    )


def train(
    world: Meeting,
    steps: int,
    seed: int,
    dynamism: dict[str, Any],
    evaluations: int,
    batches: int,
    hidden: int = HIDDEN,
) -> dict[str, Any]:
    """Runs on the one rank."""
    config = config_of(steps, seed, dynamism, evaluations, batches, hidden)
    events: list[Event] = []
    result = Trainer(config, world, model_of(config), None, listen=events.append).run()
    return {
        "curve": [[e.step + 1, e.loss] for e in events if isinstance(e, EvalEvent)],
        "changes": [[e.step, e.what] for e in events if isinstance(e, ChangeEvent)],
        "digest": result.weights_digest,
    }


def compare(by_technique: dict[str, dict[str, Any]], steps: int) -> list[dict[str, Any]]:
    """Returns a row for each run of `runs` that was measured.

    A row has the last held-out loss, and its distance to the run that it is held against.
    """
    out: list[dict[str, Any]] = []
    for name, (against, limit, dynamism) in runs(steps).items():
        if name not in by_technique:
            continue
        loss, reference = by_technique[name]["curve"][-1][1], by_technique[against]["curve"][-1][1]
        distance = loss / reference - 1
        row = {"name": name, "loss": loss, "against": against, "distance": distance, "limit": limit}
        out.append(
            row
            | {"within": None if limit is None else distance <= limit, "dynamism": dynamism}
            | by_technique[name]
        )
    return out


def measure(
    steps: int,
    seeds: int,
    jobs: int = 1,
    evaluations: int = 24,
    batches: int = 16,
    hidden: int = HIDDEN,
    only: Sequence[str] = (),
) -> dict[str, Any]:
    """Trains the runs and compares them."""
    common = {"steps": steps, "evaluations": evaluations, "batches": batches, "hidden": hidden}
    techniques = chosen(steps, only)
    asked: list[dict[str, Any]] = [
        {"seed": 0, "dynamism": dynamism} for _, _, dynamism in techniques.values()
    ]
    asked += [{"seed": seed, "dynamism": {}} for seed in range(1, seeds)]
    done = train_each("benchmarks.quality:train", [x | common for x in asked], jobs, "runs")
    by_technique = dict(zip(techniques, done, strict=False))
    return {
        "steps": steps,
        "hidden": hidden,
        "rows": compare(by_technique, steps),
        "dense_by_seed": [
            run["curve"][-1][1] for run in (by_technique["dense"], *done[len(techniques) :])
        ],
    }


def table(result: dict[str, Any]) -> str:
    """Returns the table in Markdown, as docs/reference/results/loss.md shows it."""
    head = ["run", "held-out loss", "held against", "distance", "limit", "changes at steps"]
    lines: list[list[str]] = []
    for row in result["rows"]:
        own = row["against"] == row["name"]
        limit = "" if row["limit"] is None else f"{row['limit']:.0%}"
        at = [str(step) for step, _ in row["changes"]]
        shown = ", ".join(at if len(at) <= 5 else [*at[:3], "..", at[-1]])
        against, distance = ("", "") if own else (row["against"], f"{row['distance']:+.1%}")
        lines.append([row["name"], f"{row['loss']:.3f}", against, distance, limit, shown])
    return markdown(head, lines, "lrlrrl")


def draw(result: dict[str, Any]) -> dict[str, Any]:
    """Draws the held-out loss by step: a panel for each technique."""
    plt = pyplot()
    rows = result["rows"]
    panels = (
        ("freezing", "dense", "freezing"),
        ("pruning", "dense", "pruning"),
        ("sparse attention", SHARED, "hash"),
    )
    styles = (("#0072b2", "-"), ("#d55e00", "--"), ("#009e73", "-."))
    figure, all_axes = plt.subplots(
        len(panels), figsize=(WIDTH, 2.3 * len(panels)), sharex=True, sharey=True
    )
    for axes, (title, reference, start) in zip(all_axes, panels, strict=True):
        shown = [row for row in rows if row["name"] == reference or row["name"].startswith(start)]
        shown.sort(key=lambda row: row["name"] != reference)
        for row, (colour, line) in zip(shown, (("black", ":"), *styles), strict=True):
            name = row["name"].removeprefix(f"{start}, ")
            axes.plot(
                *zip(*row["curve"], strict=True),
                color=colour,
                linestyle=line,
                label=f"{name}: {row['loss']:.3f}",
            )
        axes.set(title=title, ylabel="held-out loss, nats a byte")
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    all_axes[-1].set_xlabel("step")
    # The large fall of the first steps would leave no room for the differences.
    late = [
        loss for row in rows for step, loss in row["curve"] if step >= rows[0]["curve"][-1][0] / 5
    ]
    all_axes[0].set_ylim(min(late) - 0.05, max(late) + 0.05)
    return {"quality": figure}


def main() -> None:
    parser = parser_of(__doc__, draws=True, reads=True)
    add_number(parser, "steps", STEPS, "of each run")
    add_number(parser, "seeds", 3, "dense runs, one a seed")
    add_number(parser, "jobs", 1, "runs at once, a core each")
    add_number(parser, "hidden", HIDDEN, "hidden size of the model")
    parser.add_argument(
        "--only",
        choices=list(runs(STEPS)),
        action="append",
        help="this run, beside what it is held against; several times",
    )

    def measured(options: argparse.Namespace) -> dict[str, Any]:
        if options.only and options.plot:
            parser.error("--plot draws all runs; leave out --only")
        given = {"jobs": options.jobs, "hidden": options.hidden, "only": options.only or ()}
        return measure(options.steps, options.seeds, **given)

    run(
        parser,
        measured,
        lambda result: print(table(result)),
        draw,
    )


if __name__ == "__main__":
    main()
