"""Sequences of their own lengths against padding, in dynmo and in torch.distributed.pipelining.

The lengths are real: the Python tokens of each function of the standard library of Python 3.11, as
`ast` and `tokenize` see them, without its tests. `data/lengths/stdlib_functions.json` has 4,096 of
them, drawn with a fixed seed (`draw`). They are spread like documents: the median is far below the
mean. Longer sequences are cut at `--longest`. `quantiles` are printed.

Two ranks of one thread train a GPT of 6 blocks on `--microbatches` microbatches a step, each of one
sequence or of four. All sides have the same layers, cuts, sequences and loss. Targets of padding
are -100.

- ragged: dynmo, a list of microbatches. Each has the length of its own longest sequence.
- padded: dynmo, all microbatches have the length of the step's longest sequence.
- torch: the same padding. torch fixes the shapes at the first step, so each step has a schedule of
  its own, whose first step is not timed.

The fastest schedule of each kind counts, of 1F1B, ZB-H1 and ZB-V on each side. Steps run in turn.
Each is timed from a start together to the end of the slowest rank's last op, without an optimizer.
The speed is in counted tokens a second, which no side pads.

The limit of the arithmetic is the multiplications of the padded steps over those of the ragged
ones. Linears count, and so do the products of all positions with all.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import os
import sysconfig
import tokenize
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from random import Random
from statistics import median, quantiles
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from benchmarks.executor import timed
from benchmarks.harness import alternate, run_ranks
from benchmarks.output import main
from benchmarks.torch_peer import TorchPeer
from dynmo.config import parse
from dynmo.models.gpt import feed_forward_size
from dynmo.models.loss import next_token_loss
from dynmo.models.model import Model
from dynmo.pipeline.actions import Actions
from dynmo.plan.bisection import exact
from dynmo.plan.partition import uniform
from dynmo.runtime.comm.meeting import Meeting
from dynmo.runtime.engine.batch_check import StepBatch
from dynmo.runtime.engine.engine import Engine
from dynmo.runtime.options import EngineOptions
from dynmo.schedule.catalogue import chunks_of
from dynmo.train.setup import model_of

LENGTHS = Path(__file__).parent / "data/lengths/stdlib_functions.json"
BLOCKS, VOCABULARY, IGNORED = 6, 256, -100
OWN, PEERS = ("1f1b", "zb-h1", "zb-v"), ("1f1b", "zero-bubble", "zbv")
SHARES = (0.1, 0.25, 0.5, 0.75, 0.9, 0.99)


def draw(count: int = 4096) -> list[int]:
    """Draws the lengths of the file from the standard library of the Python that runs."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(path for path in root.rglob("*.py") if _is_library(path.relative_to(root)))
    every = [length for path in files for length in _functions(path.read_bytes())]
    return Random(0).sample(every, count)


def _is_library(path: Path) -> bool:
    return not {"test", "tests", "idle_test", "site-packages", "lib2to3"} & {*path.parts}


def _functions(source: bytes) -> Iterator[int]:
    """Yields the number of tokens of each function, from `def` to its last line."""
    starts = [token.start[0] for token in tokenize.tokenize(io.BytesIO(source).readline)]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno:
            yield sum(node.lineno <= line <= node.end_lineno for line in starts)


# -- batches ---------------------------------------------------------------------------------------

# The microbatches of a step: (inputs, targets), each [rows, length].
Step = list[tuple[Tensor, Tensor]]


def ragged_steps(steps: int, microbatches: int, rows: int, longest: int) -> list[Step]:
    """Returns steps whose microbatches have the lengths of their own longest sequences."""
    generator = torch.Generator().manual_seed(0)
    lengths = iter(min(length, longest) for length in json.loads(LENGTHS.read_text()))

    def sequence(_: int) -> Tensor:
        return torch.randint(VOCABULARY, (next(lengths) + 1,), generator=generator)

    def microbatch() -> tuple[Tensor, Tensor]:
        sequences = [sequence(row) for row in range(rows)]
        inputs = pad_sequence([x[:-1] for x in sequences], batch_first=True)
        return inputs, pad_sequence([x[1:] for x in sequences], True, IGNORED)

    return [[microbatch() for _ in range(microbatches)] for _ in range(steps)]


def padded(step: Step) -> Step:
    """Pads all microbatches to the length of the longest."""
    length = max(inputs.shape[1] for inputs, _ in step)

    def pad(tensor: Tensor, value: int) -> Tensor:
        return nn.functional.pad(tensor, (0, length - tensor.shape[1]), value=value)

    return [(pad(inputs, 0), pad(targets, IGNORED)) for inputs, targets in step]


def counted(steps: Sequence[Step]) -> int:
    return sum(int((targets != IGNORED).sum()) for step in steps for _, targets in step)


def work(steps: Sequence[Step], hidden: int) -> int:
    """Returns the multiplications of a forward pass."""
    linear = BLOCKS * hidden * (4 * hidden + 3 * feed_forward_size(hidden)) + hidden * VOCABULARY
    shapes = [inputs.shape for step in steps for inputs, _ in step]
    return sum(
        rows * (length * linear + 2 * BLOCKS * hidden * length * length) for rows, length in shapes
    )


# -- sides -----------------------------------------------------------------------------------------


def own_sides(
    world: Meeting, model: Model, steps: Sequence[Step], whole: Sequence[Step]
) -> tuple[dict[str, Callable[[], float]], list[float]]:
    """Returns dynmo's sides, and the measured seconds of each layer by which all sides are cut."""
    microbatches = len(steps[0])
    engines = {
        name: Engine(
            world,
            model,
            uniform(model.layers, world.size * chunks_of(name)),
            EngineOptions(name, microbatches=microbatches),
        )
        for name in OWN
    }
    first = engines["zb-h1"]
    for _ in range(3):
        _run(world, first, [_stacked(step) for step in whole])
    layers = first.costs()
    weights = [cost.seconds for cost in layers]
    sides = dict[str, Callable[[], float]]()
    for name, engine in engines.items():
        Actions(engine).move(exact(weights, world.size * chunks_of(name)))
        Actions(engine).replan(layers)
        sides[f"ragged {name}"] = partial(_run, world, engine, [_listed(step) for step in steps])
        sides[f"padded {name}"] = partial(_run, world, engine, [_stacked(step) for step in whole])
    return sides, weights


def has_same_loss(world: Meeting, model: Model, step: Step) -> bool:
    """Returns whether a list and its padded form have the same loss."""
    engine = Engine(
        world,
        model,
        uniform(model.layers, world.size),
        EngineOptions("1f1b", microbatches=len(step)),
    )
    ragged, whole = (
        engine.evaluate(StepBatch(inputs, targets), len(step))
        for inputs, targets in (_listed(step), _stacked(padded(step)))
    )
    return abs(ragged - whole) < 1e-5 * whole


def _listed(step: Step) -> tuple[list[tuple[Tensor]], list[Tensor]]:
    return [(inputs,) for inputs, _ in step], [targets for _, targets in step]


def _stacked(step: Step) -> tuple[Tensor, Tensor]:
    return torch.stack([inputs for inputs, _ in step]), torch.stack([y for _, y in step])


def _run(world: Meeting, engine: Engine, batches: Sequence[tuple[Any, Any]]) -> float:
    """Returns the seconds of all steps."""
    return sum(timed(world, engine, *batch)() for batch in batches)


def torch_sides(
    model: Model, weights: Sequence[float], whole: Sequence[Step]
) -> dict[str, Callable[[], float]]:
    """Returns torch's schedules, with one set of modules each and a schedule for each step."""
    sides = dict[str, Callable[[], float]]()
    for name in PEERS:
        made = dict[int, nn.Module]()

        def build(stage: int, stages: int, made: dict[int, nn.Module] = made) -> nn.Module:
            own = exact(weights, stages).range_of(stage)
            if stage not in made:
                layers = enumerate(model.build(own))
                made[stage] = nn.Sequential(*(layer for index, layer in layers if index in own))
            return made[stage]

        flat = [
            (torch.cat([x for x, _ in step]), torch.cat([y for _, y in step])) for step in whole
        ]
        peers = [TorchPeer(name, len(whole[0]), build, x, y, next_token_loss) for x, y in flat]
        sides[f"torch {name}"] = partial(_sum_of, peers)
    return sides


def _sum_of(peers: Sequence[TorchPeer]) -> float:
    return sum(peer.step() for peer in peers)


def race(
    world: Meeting,
    steps: int,
    microbatches: int,
    rows: int,
    longest: int,
    rounds: int,
    hidden: int,
) -> dict[str, Any]:
    """Runs on each rank."""
    sizes = {"blocks": BLOCKS, "hidden": hidden, "heads": hidden // 64, "sequence": longest}
    model = model_of(parse({"model": sizes}))
    own = ragged_steps(steps, microbatches, rows, longest)
    whole = [padded(step) for step in own]
    sides, weights = own_sides(world, model, own, whole)
    sides |= torch_sides(model, weights, whole)
    times = alternate(sides, rounds, warmup=1)
    tokens = counted(own)
    speeds = {name: tokens / median(seconds) for name, seconds in times.items()}
    best = {
        kind: max((name for name in speeds if name.startswith(kind)), key=speeds.__getitem__)
        for kind in ("ragged", "padded", "torch")
    }
    positions = [sum(x.numel() for step in each for x, _ in step) for each in (own, whole)]
    return {
        "rows": rows,
        "same": has_same_loss(world, model, own[0]),
        "tokens": tokens,
        "positions": {"ragged": positions[0], "padded": positions[1]},
        "tokens_per_s": speeds,
        "spread": {
            name: [tokens / max(seconds), tokens / min(seconds)] for name, seconds in times.items()
        },
        "best": best,
        "speedup_over_padded": speeds[best["ragged"]] / speeds[best["padded"]],
        "speedup_over_torch": speeds[best["ragged"]] / speeds[best["torch"]],
        "limit_of_positions": positions[1] / positions[0],
        "limit": work(whole, hidden) / work(own, hidden),
    }


def measure(options: argparse.Namespace) -> dict[str, Any]:
    lengths = [min(length, options.longest) for length in json.loads(LENGTHS.read_text())]
    cuts = quantiles(lengths, n=100, method="inclusive")
    return {
        "quantiles": {str(share): cuts[round(100 * share) - 1] for share in SHARES},
        "mean": sum(lengths) / len(lengths),
        "longest": options.longest,
        "rounds": options.rounds,
        "load": os.getloadavg()[0],
        "microbatches": options.microbatches,
        "hidden": options.hidden,
        "by_rows": {
            str(rows): run_ranks(
                "benchmarks.ragged:race",
                2,
                steps=max(1, options.steps // rows),
                microbatches=options.microbatches,
                rows=rows,
                longest=options.longest,
                rounds=options.rounds,
                hidden=options.hidden,
            )
            for rows in (1, 4)
        },
    }


if __name__ == "__main__":
    main(
        __doc__ or "",
        measure,
        [
            ("rounds", 5, "rounds"),
            ("steps", 4, "steps of a round, one with four sequences a microbatch"),
            ("microbatches", 8, "microbatches of a step"),
            ("longest", 512, "tokens of the longest sequence"),
            ("hidden", 256, "hidden size, a multiple of 64"),
        ],
    )
