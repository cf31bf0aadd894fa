"""One long run: a model that is pruned and whose tokens exit early, balanced and static in turn.

Two ranks of one thread train a GPT on text. Both sides have the same model, data and seed. They
take turns of some steps, so that both meet the same machine, and the first one of a turn changes.
Steps have no barrier (post-validation), so the run also tells how often a step is taken back.

The pruning follows DynMo's paper in time: from 3/10 to 7/10 of the run in steps of 1/10, to 90 %.
"""

from __future__ import annotations

import argparse
import math
import time
from statistics import fmean
from typing import Any

from benchmarks.harness import OPTIMIZER, run_ranks
from benchmarks.output import (
    WIDTH,
    add_number,
    legend_above,
    markdown,
    parser_of,
    pyplot,
    run,
)
from dynmo.change_events import ChangeEvent, RebalanceEvent
from dynmo.config import parse
from dynmo.events import Event, PostValidationEvent, RollbackEvent, StepResult
from dynmo.runtime.comm.meeting import Meeting
from dynmo.train.setup import model_of
from dynmo.train.trainer import Trainer

RANKS, MICROBATCHES = 2, 4
SIDES = {"static": {"balancer": "none"}, "balanced": {"balancer": "exact", "every": "auto"}}


def settings(steps: int, blocks: int, hidden: int, sequence: int) -> dict[str, Any]:
    tenth = max(1, steps // 10)
    return {
        "model": {"blocks": blocks, "hidden": hidden, "heads": 4, "sequence": sequence},
        "train": {
            **OPTIMIZER,
            "steps": steps,
            "global_batch": MICROBATCHES,
            "micro_batch": 1,
            "max_grad_norm": 1.0,
        },
        "parallel": {"pipeline": RANKS},
        "pipeline": {"schedule": "zb-auto", "post_validation": True},
        "dynamism": {
            "cases": ["pruning", "early_exit"],
            "pruning": {"start": 3 * tenth, "end": 7 * tenth, "every": tenth},
            "early_exit": {
                "start": tenth,
                "threshold": 0.1,
                "exits": [blocks // 4 - 1, blocks // 2 - 1],
            },
        },
        "trace": {"steps": 0},
    }


def train(world: Meeting, steps: int, turn: int, **sizes: int) -> dict[str, Any]:
    """Runs on each rank: both sides, a turn of steps each."""
    base = settings(steps, **sizes)
    events: dict[str, list[Event]] = {name: [] for name in SIDES}
    trainers: dict[str, Trainer] = {}
    for name, balance in SIDES.items():
        config = parse(base | {"balance": balance})
        listen = events[name].append
        trainers[name] = Trainer(config, world, model_of(config), None, listen=listen)
    seconds: dict[str, list[float]] = {name: [] for name in SIDES}
    for index, start in enumerate(range(0, steps, turn)):
        for name in list(SIDES)[:: 1 if index % 2 else -1]:
            world.barrier("the turn to start")
            before = time.perf_counter()
            for _ in range(min(turn, steps - start)):
                trainers[name].turn()
            trainers[name].settle()  # both sides talk on the same channels
            world.barrier("the turn to end")
            seconds[name].append(time.perf_counter() - before)
    digests = [trainers[name].finish(sum(seconds[name])).weights_digest for name in SIDES]
    return {
        "steps": steps,
        "turn": turn,
        "same_weights": len(set(digests)) == 1,
        **{name: _account(events[name], seconds[name], turn) for name in SIDES if events[name]},
    }


def _account(events: list[Event], seconds: list[float], turn: int) -> dict[str, Any]:
    losses = [event.loss for event in events if isinstance(event, StepResult)]
    rollbacks = [event for event in events if isinstance(event, RollbackEvent)]
    return {
        "seconds": math.fsum(seconds),
        "seconds_of_turns": seconds,
        "losses_of_turns": [fmean(losses[i : i + turn]) for i in range(0, len(losses), turn)],
        "moves": [
            {"step": event.step, "to": list(event.target), "bytes": event.moved_bytes}
            for event in events
            if isinstance(event, RebalanceEvent)
        ],
        "changes": [event.step for event in events if isinstance(event, ChangeEvent)],
        "rollbacks": [event.step for event in rollbacks],
        "moved": sum(isinstance(event, RebalanceEvent) for event in events),
        "taken_back": len(rollbacks),
        "barriers": [event.step for event in events if isinstance(event, PostValidationEvent)],
    }


def measure(options: argparse.Namespace) -> dict[str, Any]:
    result = run_ranks(
        "benchmarks.long_run:train",
        RANKS,
        steps=options.steps,
        turn=options.turn,
        blocks=options.blocks,
        hidden=options.hidden,
        sequence=options.sequence,
    )
    static, balanced = (result[name] for name in SIDES)
    last = -(-options.steps * 3 // 10 // options.turn)
    return result | {
        "speedup": static["seconds"] / balanced["seconds"],
        "speedup_at_end": math.fsum(static["seconds_of_turns"][-last:])
        / math.fsum(balanced["seconds_of_turns"][-last:]),
    }


def table(result: dict[str, Any]) -> str:
    rows = [
        [
            name,
            f"{result[name]['seconds']:.0f}",
            f"{result[name]['losses_of_turns'][-1]:.3f}",
            str(result[name]["moved"]),
            str(result[name]["taken_back"]),
        ]
        for name in SIDES
    ]
    return markdown(["side", "seconds", "loss at the end", "moves", "steps taken back"], rows)


def draw(result: dict[str, Any]) -> dict[str, Any]:
    """Draws the milliseconds of a step and the loss of both sides."""
    plt = pyplot()
    figure, (above, below) = plt.subplots(2, 1, figsize=(WIDTH, 4.2), sharex=True)
    turn = result["turn"]
    for name, colour, line in zip(SIDES, ("#d55e00", "#0072b2"), ("--", "-"), strict=True):
        side = result[name]
        steps = [turn * (i + 0.5) for i in range(len(side["seconds_of_turns"]))]
        milliseconds = [1000 * seconds / turn for seconds in side["seconds_of_turns"]]
        above.plot(steps, milliseconds, line, color=colour, label=name, linewidth=1)
        below.plot(steps, side["losses_of_turns"], line, color=colour, linewidth=1)
    moves = [move["step"] for move in result["balanced"]["moves"]]
    above.plot(
        moves,
        [0.02] * len(moves),
        "k|",
        label="a move of layers",
        transform=above.get_xaxis_transform(),
    )
    above.set(ylabel="ms a step", ylim=(0, None))
    legend_above(figure, len(SIDES) + 1)
    below.set(xlabel="step", ylabel="loss")
    return {"long_run": figure}


def show(result: dict[str, Any]) -> None:
    print(f"{table(result)}\n")
    print(f"balanced is x{result['speedup']:.2f} as fast, x{result['speedup_at_end']:.2f} at last")


def main() -> None:
    parser = parser_of(__doc__, draws=True, reads=True)
    add_number(parser, "steps", 10_000, "of each side")
    add_number(parser, "turn", 100, "steps of a side before the other one goes on")
    add_number(parser, "blocks", 4, "blocks of the model")
    add_number(parser, "hidden", 128, "hidden size")
    add_number(parser, "sequence", 192, "tokens of a sequence")
    run(parser, measure, show, draw)


if __name__ == "__main__":
    main()
