"""Loads of the experts of a router that trains, for each routing.

A small GPT with experts (4 blocks, 2 of 8 experts) trains on the standard library's sources. A step
has 4 sequences of 128 bytes in one microbatch. The log has the tokens of each expert, layer and
step.

    none       the largest scores, without a loss that evens the load
    aux-loss   the same with the loss of Switch and Mixtral, weight 0.01
    sinkhorn, auction   a balanced assignment of each microbatch (`benchmarks.balanced_routing`)

Loads are sums over windows of 8 steps: 4,096 tokens, as many as a microbatch of the paper has.
`hottest` and `coldest` are over the mean expert, `difference` is hottest less coldest. All are
means over layers. `steady` is the mean over the windows of the second half. `exponent` is that of
Zipf's law with the same hottest expert, over 64 steps. `drift` is the correlation over experts of a
window's loads with those so many steps later. `loss` is the held-out loss.

The second table replays the loads in `benchmarks.experts`, beside loads that its model draws for
the same shape. 8 windows in a row are the tokens of 8 replicas at one moment. The next 8 windows
are the next moment. A recorded layer stands for 8 blocks in a row, so that 32 blocks run on 8
stages. The loads are real. The times are simulated.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from benchmarks import harness
from benchmarks.expert_loads import Counts, draw_counts
from benchmarks.experts import BLOCKS, SKEWS, compare
from benchmarks.experts import table as gains_table
from benchmarks.output import add_number, markdown, parser_of, run
from dynmo.cases.experts.case import experts_of
from dynmo.change_events import TokensEvent
from dynmo.config import parse
from dynmo.events import EvalEvent, Event
from dynmo.pipeline.case import Change, Dynamism, Layers, TokenShares
from dynmo.runtime.comm.meeting import Meeting
from dynmo.train.setup import model_of
from dynmo.train.trainer import Trainer

STEPS, HIDDEN, RECORDED, EXPERTS = 5000, 64, 4, 8
WINDOW, REPLICAS = 8, 8
GROUPS = ((4, 0), (4, 1), (8, 0), (8, 1))  # replicas of a group, more places for experts on each
MARKS = (8, 104, 1000, 5000)  # steps whose window is shown, and the last
LAGS = (10, 100, 1000)
ROUTINGS: dict[str, dict[str, Any]] = {
    "none": {"routing": "aux-loss", "router_loss": 0.0},
    "aux-loss": {"routing": "aux-loss"},
    "sinkhorn": {"routing": "sinkhorn"},
    "auction": {"routing": "auction"},
}
REPLAYED = ("none", "aux-loss", "sinkhorn")  # the auction leaves nothing to gain

Loads = NDArray[np.int64]
"""[step or window, layer, expert] tokens."""


# -- training --------------------------------------------------------------------------------------


class LoadRecord(Dynamism):
    """Writes the tokens of each expert to the log, on one rank."""

    name = "load_record"

    def act(self, step: int, layers: Layers) -> Change | None:
        """See `Dynamism.act`."""
        return None

    def collect(self, step: int, layers: Layers) -> TokenShares | None:
        """See `Dynamism.collect`."""
        indices, rows = experts_of(layers.modules), list[list[float]]()
        for index in indices:
            router: Any = layers.modules[index].router
            load, router.load = router.load, 0
            if not isinstance(load, Tensor):
                return None
            rows.append(load.tolist())
        by_expert = zip(*rows, strict=True)
        return TokenShares(tuple(indices), {str(i): list(each) for i, each in enumerate(by_expert)})


def train(world: Meeting, steps: int, model: dict[str, Any], hidden: int) -> dict[str, Any]:
    """Trains on the one rank. The loads of the last step are not in the log."""
    config = parse(
        {
            "model": {
                "kind": "moe",
                "blocks": RECORDED,
                "hidden": hidden,
                "heads": 4,
                "sequence": 128,
                "experts": EXPERTS,
                **model,
            },
            "train": {
                **harness.OPTIMIZER,
                "steps": steps + 1,
                "global_batch": 4,
                "micro_batch": 4,
                "lr": 2e-3,
                "warmup": steps // 20,
                "eval_every": steps + 1,
                "eval_batches": 16,
            },
            "balance": {"balancer": "none"},
            "dynamism": {"cases": ["python:benchmarks.router_loads:LoadRecord"]},
            "trace": {"steps": 0},
        }
    )
    events: list[Event] = []
    Trainer(config, world, model_of(config), None, listen=events.append).run()
    tokens = [e for e in events if isinstance(e, TokensEvent)]
    return {
        "loss": next(e.loss for e in events if isinstance(e, EvalEvent)),
        "loads": [list(zip(*e.shares.values(), strict=True)) for e in tokens],
    }


def train_each(world: Meeting, steps: int, hidden: int) -> dict[str, Any]:
    """Trains with each routing, on the one rank."""
    return {name: train(world, steps, model, hidden) for name, model in ROUTINGS.items()}


# -- loads -----------------------------------------------------------------------------------------


def spread_of(loads: Loads) -> dict[str, float]:
    """Returns the hottest and the coldest expert over the mean, averaged over all but experts."""
    shares = loads / loads.mean(-1, keepdims=True)
    return {
        "hottest": float(shares.max(-1).mean()),
        "coldest": float(shares.min(-1).mean()),
        "difference": float((shares.max(-1) - shares.min(-1)).mean()),
    }


def summed(loads: Loads, each: int) -> Loads:
    """Sums over so many steps or windows, without what is left over."""
    count = len(loads) // each
    return loads[: count * each].reshape(count, each, *loads.shape[1:]).sum(1)


def drift(loads: Loads, lag: int) -> float | None:
    """Returns the mean correlation of a window with the one `lag` steps later."""
    rolling = np.cumsum(np.concatenate([np.zeros_like(loads[:1]), loads]), 0)
    windows = (rolling[WINDOW:] - rolling[:-WINDOW])[len(loads) // 2 :: WINDOW]
    later = (rolling[WINDOW:] - rolling[:-WINDOW])[len(loads) // 2 + lag :: WINDOW]
    if not len(later):
        return None
    a, b = (x - x.mean(-1, keepdims=True) for x in (windows[: len(later)], later))
    norms = np.sqrt((a * a).sum(-1) * (b * b).sum(-1))
    known = norms > 0  # a perfectly even load has no correlation
    return float(((a * b).sum(-1)[known] / norms[known]).mean()) if known.any() else None


def exponent_of(hottest: float) -> float:
    """Returns the exponent of Zipf's law whose most popular expert has this load."""
    low, high = 0.0, 20.0
    for _ in range(60):
        middle = (low + high) / 2
        most = EXPERTS / sum((i + 1) ** -middle for i in range(EXPERTS))
        low, high = (middle, high) if most < hottest else (low, middle)
    return low


def describe(name: str, done: dict[str, Any], steps: int) -> dict[str, Any]:
    """Returns a row of the first table."""
    loads: Loads = np.array(done["loads"], dtype=np.int64)
    windows = summed(loads, WINDOW)
    ends = sorted({min(len(windows), mark // WINDOW) for mark in (*MARKS, steps)})
    late = windows[len(windows) // 2 :]
    moments = summed(late, min(REPLICAS, len(late)))
    return {
        "routing": name,
        "loss": done["loss"],
        "at": [
            {"step": WINDOW * end}
            | spread_of(windows[end - 1])
            | {"loads": windows[end - 1].tolist()}
            for end in ends
        ],
        "steady": spread_of(late),
        "one_step": spread_of(loads[len(loads) // 2 :]),
        "moment": spread_of(moments),
        "by_layer": [spread_of(late[:, i]) for i in range(late.shape[1])],
        "exponent": exponent_of(spread_of(moments)["hottest"]),
        "drift": {str(lag): drift(loads, lag) for lag in LAGS},
    }


# -- cost traces -----------------------------------------------------------------------------------


def counts_of(loads: Loads) -> list[list[Counts]]:
    """Returns the tokens by moment and block, as `benchmarks.experts` takes them."""
    windows = summed(loads, WINDOW)
    moments = windows[: len(windows) // REPLICAS * REPLICAS].reshape(
        -1, REPLICAS, RECORDED, EXPERTS
    )
    each = BLOCKS // RECORDED
    return [
        [counts for layer in moment.swapaxes(0, 1).tolist() for counts in [layer] * each]
        for moment in moments
    ]


def gains(name: str, counts: Sequence[Sequence[Counts]]) -> list[dict[str, Any]]:
    """Returns the rows of the second table for these tokens."""
    return [{"loads": name} | compare(counts, *group) for group in GROUPS]


def measure(steps: int, hidden: int, moments: int) -> dict[str, Any]:
    """Trains with each routing, and replays the loads of the last moments."""
    runs = harness.run_ranks("benchmarks.router_loads:train_each", 1, steps=steps, hidden=hidden)
    rows = list[dict[str, Any]]()
    for skew in SKEWS:
        drawn = draw_counts(BLOCKS, skew, moments, experts=EXPERTS, replicas=REPLICAS)
        rows += gains(f"model, skew {skew}", drawn)
    for name in REPLAYED:
        recorded = counts_of(np.array(runs[name]["loads"], dtype=np.int64))
        rows += gains(f"recorded, {name}", recorded[-moments:])
    return {
        "steps": steps,
        "hidden": hidden,
        "moments": moments,
        "routings": [describe(name, done, steps) for name, done in runs.items()],
        "rows": rows,
    }


# -- output ----------------------------------------------------------------------------------------


def table(result: dict[str, Any]) -> str:
    """Returns the loads in Markdown."""
    marks = [x["step"] for x in result["routings"][0]["at"]]
    head = ["routing", *(f"hottest, step {step:,}" for step in marks)]
    head += ["hottest", "coldest", "difference", "exponent"]
    lags = [str(lag) for lag in LAGS if any(x["drift"][str(lag)] for x in result["routings"])]
    head += [*(f"drift, {lag} steps" for lag in lags), "loss"]
    lines: list[list[str]] = []
    for x in result["routings"]:
        steady = [f"{x['steady'][key]:.2f}" for key in ("hottest", "coldest", "difference")]
        drifts = ["" if c is None else f"{c:.2f}" for c in (x["drift"][lag] for lag in lags)]
        lines.append(
            [
                x["routing"],
                *(f"{at['hottest']:.2f}" for at in x["at"]),
                *steady,
                f"{x['exponent']:.2f}",
                *drifts,
                f"{x['loss']:.3f}",
            ]
        )
    return markdown(head, lines)


def recorded_table(result: dict[str, Any]) -> str:
    """Returns the gains of the sides in Markdown."""
    return gains_table(result["rows"], "loads")


def show(result: dict[str, Any]) -> None:
    print(f"{table(result)}\n\nsimulated: speed-up over static\n\n{recorded_table(result)}")


def main() -> None:
    parser = parser_of(__doc__, reads=True)
    add_number(parser, "steps", STEPS, "of each routing")
    add_number(parser, "hidden", HIDDEN, "hidden size of the model")
    add_number(parser, "moments", 24, "of the replay: the last ones of the run")
    run(parser, lambda x: measure(x.steps, x.hidden, x.moments), show)


if __name__ == "__main__":
    main()
