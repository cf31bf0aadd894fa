"""Early exit, mixture of depths and experts beside dense at equal compute.

Model, data and evaluation are those of `benchmarks.quality`. Each technique trains for all steps.
Its compute is counted by arithmetic, in units of a dense step. F, B and W each take 2 FLOPs per
weight and token. The pairs of the causal attention are added. The shares of tokens come from the
run's log. The dense model then trains for as many steps as that compute pays for, with a
learning-rate schedule of that length. The distance is the technique's last held-out loss over this
dense run's, less 1.

The held-out loss is that of the model in use: with exits, and with blocks that select tokens by
their predictors. For early exit the log also has the loss and the speed of the same model
without exits. Both take turns on the same windows, on one thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from statistics import median
from typing import Any

from benchmarks.harness import train_each
from benchmarks.output import WIDTH, add_number, markdown, parser_of, pyplot, run
from benchmarks.quality import config_of
from dynmo.change_events import TokensEvent
from dynmo.config import Config
from dynmo.events import EvalEvent, Event
from dynmo.models.gpt import feed_forward_size
from dynmo.runtime.comm.meeting import Meeting
from dynmo.train.setup import model_of
from dynmo.train.trainer import Trainer

STEPS, HIDDEN = 1000, 128
RECORDS = 10  # steps


def _exits(**options: Any) -> dict[str, Any]:
    return {"cases": ["early_exit"], "early_exit": {"record_every": RECORDS, **options}}


def _depths(**options: Any) -> dict[str, Any]:
    return {
        "cases": ["mixture_of_depths"],
        "mixture_of_depths": {"record_every": RECORDS, **options},
    }


def _experts(**keys: Any) -> dict[str, Any]:
    return {"kind": "moe", "experts": 8, **keys}


_LOAD: dict[str, Any] = {"cases": ["experts"], "experts": {"record_every": RECORDS}}
Run = tuple[dict[str, Any], dict[str, Any]]
"""[dynamism], and more keys of [model]."""

RUNS: dict[str, dict[str, Run]] = {
    "tokens": {
        "early exit, CALM softmax 0.7": (_exits(threshold=0.7), {}),
        "early exit, CALM classifier 0.8": (_exits(confidence="classifier", threshold=0.8), {}),
        "early exit, ADP-C 0.9": (_exits(policy="adp-c", threshold=0.9), {}),
        "depths, 12.5 %, mlp": (_depths(), {}),
        "depths, 12.5 %, bce": (_depths(predictor="bce"), {}),
    },
    "experts": {
        "experts, 1 of 8, loss": (_LOAD, _experts(top_k=1)),
        "experts, 1 of 8, bias": (_LOAD, _experts(top_k=1, routing="bias")),
        "experts, 2 of 8, loss": (_LOAD, _experts(top_k=2)),
    },
}


def block_flops(config: Config, kept: float, keys: float, pairs: float) -> float:
    """Returns the FLOPs of a block's F for one token of the whole batch."""
    hidden, sequence = config.model.hidden, config.model.sequence
    m = config.model
    router, networks = (
        (m.experts * hidden, m.top_k + m.shared_experts) if m.kind == "moe" else (0, 1)
    )
    feed_forward = networks * 3 * hidden * feed_forward_size(hidden) + router
    linear = kept * (2 * hidden**2 + feed_forward) + keys * 2 * hidden**2
    return 2 * linear + pairs * 2 * sequence * hidden


def step_flops(config: Config, shares: Sequence[float]) -> float:
    """Returns the FLOPs of F, B and W for one token.

    B of the attention takes twice its F, and it has no W.
    """
    m, cases = config.model, config.dynamism.cases
    exits: tuple[int, ...] = (
        config.dynamism.early_exit.exits_of(m.blocks) if "early_exit" in cases else ()
    )
    depths = config.dynamism.mixture_of_depths
    routed = depths.routed_blocks(m.blocks) if "mixture_of_depths" in cases else ()
    remaining, total = 1.0, 3 * 2 * m.vocab * m.hidden
    for block in range(m.blocks):
        kept = depths.capacity if block in routed else remaining
        sides = (kept, kept, kept**2) if block in routed else (kept, 1.0, kept)
        total += 3 * block_flops(config, *sides)
        if block in exits:
            total += 3 * 2 * m.vocab * m.hidden * remaining
            remaining -= dict(zip(exits, shares, strict=True))[block]
    # The head computes the tokens that remain.
    return total - 3 * 2 * m.vocab * m.hidden * (1 - remaining)


def compute_of(config: Config, events: Sequence[Event]) -> list[float]:
    """Returns the compute up to the end of each step, in dense steps."""
    dense = step_flops(config_of(1, 0, {}, 1, 1, config.model.hidden), ())
    records = [
        (e.step, e.shares["exited"])
        for e in events
        if isinstance(e, TokensEvent) and "exited" in e.shares
    ]
    exits: tuple[int, ...] = (
        config.dynamism.early_exit.exits_of(config.model.blocks)
        if "early_exit" in config.dynamism.cases
        else ()
    )
    total, done = 0.0, list[float]()
    for step in range(config.train.steps):
        # A record describes the steps before it. No token leaves before the first record.
        shares = next(
            (shares for at, shares in records if at > step),
            records[-1][1] if records else [0.0] * len(exits),
        )
        started = step >= config.dynamism.early_exit.start_of(config.train.steps)
        total += step_flops(config, shares if started else [0.0] * len(exits)) / dense
        done.append(total)
    return done


def train(
    world: Meeting,
    steps: int,
    dynamism: dict[str, Any],
    model: dict[str, Any],
    evaluations: int,
    batches: int,
    hidden: int,
) -> dict[str, Any]:
    """Runs on the one rank."""
    config = config_of(steps, 0, dynamism, evaluations, batches, hidden, model)
    events: list[Event] = []
    Trainer(config, world, model_of(config), None, listen=events.append).run()
    compute = compute_of(config, events)
    evaluated = [e for e in events if isinstance(e, EvalEvent)]
    with_exits = [
        e for e in evaluated if e.dense_tokens_per_s is not None and e.tokens_per_s is not None
    ]
    last = with_exits[-1] if with_exits else None
    tokens = [e for e in events if isinstance(e, TokensEvent)]
    return {
        "steps": steps,
        "curve": [[compute[e.step], e.loss] for e in evaluated],
        "loss": evaluated[-1].loss,
        "compute": compute[-1],
        "shares": dict(tokens[-1].shares) if tokens else {},
        "loss_without_exits": None if last is None else last.dense_loss,
        # One evaluation takes a moment only, so this is the median of the later half.
        "evaluation_speedup": median([_gain(e) for e in with_exits[len(with_exits) // 2 :]])
        if with_exits
        else None,
    }


def _gain(event: EvalEvent) -> float:
    assert event.tokens_per_s is not None
    assert event.dense_tokens_per_s is not None
    return event.tokens_per_s / event.dense_tokens_per_s


def measure(
    what: str,
    steps: int,
    jobs: int = 1,
    evaluations: int = 24,
    batches: int = 16,
    hidden: int = HIDDEN,
) -> dict[str, Any]:
    """Trains all runs of `RUNS[what]`."""
    common = {"evaluations": evaluations, "batches": batches, "hidden": hidden}
    plain: Run = ({}, {})
    asked = [
        {"steps": steps, "dynamism": dynamism, "model": model}
        for dynamism, model in (plain, *RUNS[what].values())
    ]
    run_each = partial(train_each, "benchmarks.learning:train", jobs=jobs)
    dense, *techniques = run_each([x | common for x in asked], what="techniques")
    lengths = [max(1, round(run["compute"])) for run in techniques]
    same = [{"steps": length, "dynamism": {}, "model": {}} | common for length in lengths]
    rows = [
        {"name": name, **run, "dense": against, "distance": run["loss"] / against["loss"] - 1}
        for name, run, against in zip(
            RUNS[what], techniques, run_each(same, what="dense"), strict=True
        )
    ]
    return {"steps": steps, "hidden": hidden, "dense": dense, "rows": rows}


def table(result: dict[str, Any]) -> str:
    """Returns the table in Markdown, as docs/reference/results/loss.md shows it."""
    head = [
        "run",
        "compute, dense steps",
        "held-out loss",
        "dense, equal compute",
        "distance",
        "without exits",
        "evaluation",
    ]
    lines: list[list[str]] = []
    dense = result["dense"]
    lines.append(["dense", f"{dense['compute']:.0f}", f"{dense['loss']:.3f}", "", "", "", ""])
    for row in result["rows"]:
        without, faster = row["loss_without_exits"], row["evaluation_speedup"]
        exits = ("", "") if without is None else (f"{without:.3f}", f"x{faster:.2f}")
        numbers = (
            f"{row['compute']:.0f}",
            f"{row['loss']:.3f}",
            f"{row['dense']['loss']:.3f}",
            f"{row['distance']:+.1%}",
        )
        lines.append([row["name"], *numbers, *exits])
    return markdown(head, lines)


def draw(result: dict[str, Any]) -> dict[str, Any]:
    """Draws the held-out loss by compute: a panel a case, the dense run in each."""
    plt = pyplot()
    styles = (("#0072b2", "-", "o"), ("#d55e00", "--", "s"), ("#009e73", "-.", "^"))
    cases = list(dict.fromkeys(row["name"].split(",")[0] for row in result["rows"]))
    figure, grid = plt.subplots(
        len(cases), figsize=(WIDTH, 2.8 * len(cases)), sharex=True, sharey=True, squeeze=False
    )
    panels = grid[:, 0]
    for axes, case in zip(panels, cases, strict=True):
        axes.plot(
            *zip(*result["dense"]["curve"], strict=True),
            color="black",
            linestyle=":",
            label=f"dense: {result['dense']['loss']:.3f}",
        )
        shown = [row for row in result["rows"] if row["name"].startswith(case)]
        for row, (colour, line, marker) in zip(shown, styles, strict=False):
            name = row["name"].removeprefix(f"{case}, ")
            axes.plot(
                *zip(*row["curve"], strict=True),
                color=colour,
                linestyle=line,
                label=f"{name}: {row['loss']:.3f}",
            )
            axes.plot(row["dense"]["steps"], row["dense"]["loss"], marker, color=colour)
        axes.plot([], [], "ko", markerfacecolor="white", label="dense, equal compute")
        axes.set(title=case, ylabel="held-out loss, nats a byte")
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    panels[-1].set_xlabel("compute, in dense steps")
    late = [
        loss
        for run in (result["dense"], *result["rows"])
        for _, loss in run["curve"][len(run["curve"]) // 4 :]
    ]
    panels[0].set_ylim(min(late) - 0.05, max(late) + 0.05)
    name = "learning_experts" if cases == ["experts"] else "learning"
    return {name: figure}


def main() -> None:
    parser = parser_of(__doc__, draws=True, reads=True)
    parser.add_argument(
        "--what",
        choices=list(RUNS),
        default="tokens",
        help="cases that choose tokens, or experts (default tokens)",
    )
    add_number(parser, "steps", STEPS, "of each technique")
    add_number(parser, "jobs", 1, "runs at once, a core each")
    add_number(parser, "hidden", HIDDEN, "hidden size of the model")
    run(
        parser,
        lambda x: measure(x.what, x.steps, x.jobs, hidden=x.hidden),
        lambda result: print(table(result)),
        draw,
    )


if __name__ == "__main__":
    main()
