"""Ranks that leave a running run and come back: costs, gains, the same bits.

    python -m benchmarks.elastic [--json]

Each row is a run of `dynmo train` that goes from 4 ranks to 2 and back to 4 (`elastic.reshape_at`),
beside the same run that keeps its ranks. Processes that leave end, and the launcher starts new
ones. `pause` is how long all ranks stand still, from the decision until the ranks are set up anew.
It is mostly the making of process groups: the model is a small GPT. `start` is how long a new
process takes until it may join, while the run goes on (`elastic.reshape_at` waits for it).

The last part is `elastic.repack` by itself. Three quarters of the layers freeze for the middle half
of the run. The layers sleep instead of computing, so that 4 ranks do not share 2 cores. The sides:

    static      4 ranks, layers stay
    balanced    4 ranks, layers move: a step becomes shorter while layers are frozen
    repacked    as many ranks as a step of the first phase needs: a step stays as long

`gpu_seconds` are ranks times seconds of the steps. `kept` is the throughput of the repacked run's
slowest phase over that of its first one (medians). The limit for `saved_over_static` by
arithmetic is half of the run times the share of ranks that leave.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.harness import train
from benchmarks.output import markdown, parser_of, run, show
from dynmo.pipeline.case import Change, Dynamism, Layers

ROOT = Path(__file__).parents[1]
STEPS, DOWN, UP = 30, 8, 16
RANKS, FEWER = 4, 2

ROWS: dict[str, dict[str, Any]] = {
    "plain": {},
    "freezing": {"dynamism": {"cases": ["freezing"], "freezing": {"schedule": [[4, 3], [20, 5]]}}},
    "pruning": {
        "dynamism": {
            "cases": ["pruning"],
            "pruning": {"initial_sparsity": 0.5, "start": 2, "end": 26, "every": 6},
        }
    },
    "experts": {"model": {"kind": "moe", "experts": 4}, "dynamism": {"cases": ["experts"]}},
    "post-validation": {"pipeline": {"post_validation": True}, "train": {"max_grad_norm": 1.0}},
    "replicas": {"parallel": {"pipeline": 2, "replicas": 2}, "train": {"reduction_slots": 2}},
    "ZeRO-1": {
        "parallel": {"pipeline": 2, "replicas": 2, "zero": 1},
        "train": {"reduction_slots": 2},
    },
}

# Settings of the run that decides by itself.
LAYERS, AUTO_STEPS, FROZEN, THAWED = 16, 80, 20, 60


class FreezeForAWhile(Dynamism):
    """Freezes the first three quarters of the layers, and thaws them later."""

    name = "freeze_for_a_while"

    def act(self, step: int, layers: Layers) -> Change | None:
        """See `Dynamism.act`."""
        frozen = tuple(range(layers.count * 3 // 4))
        if step == FROZEN:
            layers.freeze(frozen)
            return Change(frozen, f"froze layers 0 to {frozen[-1]}")
        if step == THAWED:
            layers.unfreeze(frozen)
            return Change(frozen, f"layers 0 to {frozen[-1]} train again")
        return None

    def acts(self, step: int) -> bool:
        """See `Dynamism.acts`."""
        return step in (FROZEN, THAWED)


def last(events: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    """Returns the last event of a kind."""
    return next(event for event in reversed(events) if event["event"] == kind)


def merged(base: dict[str, Any], *others: dict[str, Any]) -> dict[str, Any]:
    """Merges several parts of a config. Later parts have precedence."""
    out = dict(base)
    for other in others:
        for key, section in other.items():
            out[key] = {**out.get(key, {}), **section}
    return out


def resized(row: str) -> dict[str, Any]:
    """Measures one line of the table.

    It compares a run whose ranks leave and come back with a run whose ranks stay.
    """
    config = merged(
        {
            "model": {"blocks": 4, "hidden": 256, "heads": 4, "sequence": 64},
            "data": {"source": f"file:{ROOT / 'LICENSE'}"},
            "train": {"steps": STEPS, "global_batch": 16, "micro_batch": 2},
            "parallel": {"pipeline": RANKS},
            "balance": {"balancer": "none"},
        },
        ROWS[row],
    )
    data = config["parallel"].get("replicas", 1)
    shapes = [[DOWN, FEWER // data, data], [UP, RANKS // data, data]]
    events = train(merged(config, {"elastic": {"reshape_at": shapes}}))
    still = train(config)
    down, up = last(events, "repack"), last(events, "grow")
    before = next(e for e in events if e["event"] == "step" and e["step"] == UP - 1)
    same = ("loss", "weights_digest", "buffers_digest")
    return {
        "row": row,
        "left": down["left"],
        "joined": up["joined"],
        "pause_down": down["seconds"],
        "pause_up": up["seconds"],
        "waited": max(0.0, up["time"] - before["time"] - up["seconds"]),
        "moved_down": down["moved_bytes"],
        "moved_up": up["moved_bytes"],
        "same": all(last(events, "end")[key] == last(still, "end")[key] for key in same),
        "returned": last(events, "end")["gpu_seconds_returned"],
    }


def automatic() -> dict[str, Any]:
    """Measures a run that decides by itself how many ranks it has.

    Also measures a run that keeps its ranks.
    """
    config = {
        "model": {"kind": "emulated", "layers": LAYERS, "f": 0.003, "b": 0.003, "w": 0.003},
        "data": {"source": f"file:{ROOT / 'LICENSE'}"},
        "train": {"steps": AUTO_STEPS, "global_batch": 16, "micro_batch": 1},
        "parallel": {"pipeline": RANKS},
        "balance": {"every": "auto"},
        "dynamism": {"cases": ["python:benchmarks.elastic:FreezeForAWhile"]},
    }
    none = {"balance": {"balancer": "none"}}
    sides = {
        "static": train(merged(config, none)),
        "balanced": train(config),
        "repacked": train(merged(config, {"elastic": {"repack": True}})),
    }
    events = sides["repacked"]
    changes = [e for e in events if e["event"] in ("repack", "grow")]
    measured = {e["id"]: e["measured_gain"] for e in events if e["event"] == "rebalance_result"}
    used = {name: gpu_seconds(each) for name, each in sides.items()}
    steps = {
        name: [e["seconds"] for e in each if e["event"] == "step"] for name, each in sides.items()
    }
    fewest = min((e["ranks_after"] for e in changes), default=RANKS)
    return {
        "changes": [change(e, measured.get(e["id"])) for e in changes],
        "gpu_seconds": used,
        "step_seconds": {name: sum(each) for name, each in steps.items()},
        "ranks": used["repacked"] / sum(steps["repacked"]),
        "saved_over_static": 1 - used["repacked"] / used["static"],
        "limit": (THAWED - FROZEN) / AUTO_STEPS * (1 - fewest / RANKS),
        "saved_over_balanced": 1 - used["repacked"] / used["balanced"],
        "kept": median(steps["repacked"][1:FROZEN])
        / median(steps["repacked"][FROZEN + 5 : THAWED]),
        "same": len({last(each, "end")["weights_digest"] for each in sides.values()}) == 1,
    }


def change(event: dict[str, Any], measured: float | None) -> dict[str, Any]:
    """Describes what a change of ranks did."""
    grows = event["event"] == "grow"
    return {
        "step": event["step"],
        "from": event["ranks_before"],
        "to": event["ranks_after"],
        "pause": event["seconds"],
        "predicted_gain": event["predicted_gain"] if grows else -event["predicted_slowdown"],
        "measured_gain": measured,
        "reason": event["reason"],
    }


def gpu_seconds(events: list[dict[str, Any]]) -> float:
    """Returns ranks times seconds of the steps."""
    ranks, total = RANKS, 0.0
    for event in events:
        if event["event"] in ("repack", "grow"):
            ranks = event["ranks_after"]
        elif event["event"] == "step":
            total += ranks * event["seconds"]
    return total


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measures every row, and the run that decides by itself."""
    rows: list[dict[str, Any]] = []
    chosen = options.only or [*ROWS, "automatic"]
    for row in (row for row in ROWS if row in chosen):
        print(f"{row}: 4 to 2 to 4 ranks, and 4 ranks", file=sys.stderr)
        rows.append(resized(row))
    if "automatic" not in chosen:
        return {"rows": rows}
    print("elastic.repack, and 4 ranks", file=sys.stderr)
    return {"rows": rows, "automatic": automatic()}


def table(rows: list[dict[str, Any]]) -> str:
    """Returns the table in Markdown."""
    head = [
        "run",
        "pause 4 to 2",
        "pause 2 to 4",
        "wait for new processes",
        "moved",
        "same weights",
    ]
    lines: list[list[str]] = []
    for x in rows:
        moved = f"{x['moved_down'] / 2**20:.1f} + {x['moved_up'] / 2**20:.1f} MiB"
        pauses = [f"{x[key]:.2f} s" for key in ("pause_down", "pause_up", "waited")]
        lines.append([x["row"], *pauses, moved, "yes" if x["same"] else "NO"])
    return markdown(head, lines)


if __name__ == "__main__":
    parser = parser_of(__doc__)
    parser.add_argument(
        "--only",
        choices=[*ROWS, "automatic"],
        action="append",
        help="this row, or the run that decides by itself; several times",
    )
    run(parser, measure, show)
