"""Random loops of one's own: dictionaries, lengths, labels of -100, and torch's optimizers.

python -m tests.fuzz.loops --cases 500 --seed 1

Each case trains with `dynmo.Pipeline` on some ranks, and on one rank with an ordinary backward.
Losses, counts, sums of an evaluation and weights must have the same bits.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any, cast

import torch
from torch import Tensor, nn

import dynmo
from dynmo.pipeline.options import grouped
from dynmo.schedule.catalogue import AUTO, SCHEDULES, chunks_of, shapes_of
from dynmo.train.compile_ahead import prepare
from tests.fuzz.draws import fits
from tests.fuzz.layers import LAYERS, VOCAB, WIDTH
from tests.pool import JobFailed, Pool

RANKS = 4
ROWS = 3  # of a microbatch. Two could be taken for a pair.
_KINDS = [name for name, kind in LAYERS.items() if not kind.writes and not kind.draws]
_UNSHARDED = ("adafactor", "muon")


def draw(seed: int, number: int) -> dict[str, Any]:
    """Returns the arguments of `train` for one case, and its number of ranks."""
    random = Random(seed * 1_000_003 + number)
    layers = [random.choice(_KINDS) for _ in range(random.randrange(1, 6))]
    replicas = random.choice([1, 1, 1, 2, 2, 4])
    pipeline = min(random.choice({1: [2, 3, 4], 2: [1, 2]}.get(replicas, [1])), len(layers) + 2)
    each = random.choice([1, 2, 3, 4])
    total = each * replicas
    schedules = [
        name
        for name in SCHEDULES
        if pipeline * chunks_of(name, None) <= len(layers) + 2
        and (name != "interleaved-1f1b" or not each % pipeline)
    ]
    optimizer = random.choice(["AdamW", "SGD", "adamw", "sgd", "radam", "adafactor", "muon"])
    low = all(LAYERS[name].low for name in layers)
    options: dict[str, Any] = {
        "schedule": random.choice(schedules),
        "replicas": replicas,
        "post_validation": random.random() < 0.3,
        "zero": random.choice([0, 1]) if replicas > 1 and optimizer not in _UNSHARDED else 0,
        "recompute": random.choice(["none", "none", "all"]),
    }
    groups = [n for n in range(1, total + 1) if fits(n, replicas, total)]
    same: dict[str, Any] = {
        "reduction_slots": random.choice(groups),
        "precision": random.choice(["float32"] * 4 + ["bfloat16"]) if low else "float32",
        "max_grad_norm": random.choice([0.0, 0.3, 1.0]),
        "clip_scope": random.choice(["global", "local"]),
    }
    case: dict[str, Any] = {
        "ranks": pipeline * replicas,
        "seed": random.randrange(1000),
        "layers": layers,
        "total": total,
        "steps": random.choice([2, 3, 4]),
        "form": random.choice(["dictionary", "list", "list", "tensors"]),
        "masked": random.random() < 0.7,
        "tied": random.random() < 0.2,
        "optimizer": optimizer,
        "groups": random.random() < 0.5,
        "frozen": random.randrange(len(layers) + 1) if random.random() < 0.3 else 0,
        "eval_part": random.random() < 0.3,
        "moves": random.random() < 0.5,
        "options": options,
        "same": same,
    }
    if Random(f"auto {seed} {number}").random() < 0.3:
        options["schedule"] = AUTO
    same["head_tokens"] = random.choice([None, None, 1, 5, 8, 100])
    return case


class Embed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCAB, WIDTH)

    def forward(self, input_ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        angles = torch.arange(input_ids.shape[1], device=mask.device).unsqueeze(1) / (WIDTH + 1)
        return self.table(input_ids), mask, angles.cos().to(self.table.weight.dtype)


class Masked(nn.Module):
    """Runs a layer, keeps what the mask excludes, and hands mask and table on."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.dropout = layer, nn.Dropout(0.5)

    def forward(self, x: Tensor, mask: Tensor, table: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = self.dropout(self.layer(x)) * table
        return torch.where(mask.unsqueeze(-1) > 0, y, x), mask, table


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, VOCAB)

    def forward(self, x: Tensor, mask: Tensor, table: Tensor) -> Tensor:
        del mask, table
        return self.linear(x)

    def inputs_of_a_piece(self, others: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return others


def _make_layers(names: Sequence[str], eval_part: bool) -> list[nn.Module]:
    torch.manual_seed(0)
    layers = [Embed(), *(Masked(LAYERS[name].make()) for name in names), Head()]
    for layer in layers[1:-1]:
        masked = cast(Masked, layer)
        masked.dropout.train(not eval_part)
    return layers


def _make_batch(case: dict[str, Any], step: int) -> list[dict[str, Tensor]]:
    """The microbatches of all replicas."""
    generator = torch.Generator().manual_seed(1000 * case["seed"] + step)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    length, batch = number(4, 9), list[dict[str, Tensor]]()
    for _ in range(case["total"]):
        shape = (ROWS, number(4, 9) if case["form"] == "list" else length)
        ids = torch.randint(VOCAB, shape, generator=generator)
        labels = torch.randint(VOCAB, shape, generator=generator)
        if case["masked"]:
            counted = torch.rand(shape, generator=generator) < number(0, 3) / 2
            labels = labels.where(counted, torch.tensor(-100))
        mask = torch.randint(2, shape, generator=generator)
        batch.append({"input_ids": ids, "mask": mask, "labels": labels})
    batch[-1]["labels"][0, 0] = 1  # at least one counts
    return batch


def _optimizer(name: str) -> Any:
    adamw = partial(torch.optim.AdamW, lr=1e-2)
    return {
        "AdamW": dynmo.AdamW(lr=1e-2),
        "SGD": dynmo.SGD(lr=1e-2),
        "adamw": adamw,
        "sgd": partial(torch.optim.SGD, lr=1e-2, momentum=0.9, nesterov=True),
        "radam": partial(torch.optim.RAdam, lr=1e-2),
        "adafactor": partial(torch.optim.Adafactor, lr=1e-2),
        "muon": adamw,
    }[name]


def _groups(case: dict[str, Any]) -> Any:
    def of(name: str, parameter: Tensor) -> dict[str, Any]:
        options: dict[str, Any] = {}
        if case["groups"] and name.endswith("bias"):
            options["weight_decay"] = 0.0
        if case["optimizer"] == "muon" and parameter.dim() == 2:
            options["optimizer"] = partial(torch.optim.Muon, lr=1e-2)
        return options

    return of if case["groups"] or case["optimizer"] == "muon" else None


def train(world: dynmo.World, case: dict[str, Any], reference: bool = False) -> dict[str, Any]:
    """Trains one case. The reference is one rank, where nothing moves."""
    options: dict[str, Any] = {"schedule": "1f1b"} if reference else case["options"]
    replicas = options.get("replicas", 1)
    count, layers = case["total"] // replicas, _make_layers(case["layers"], case["eval_part"])
    last = len(layers) - 1
    tied: Any = [((0, "table.weight"), (last, "linear.weight"))] if case["tied"] else []
    pipeline = dynmo.Pipeline(
        dynmo.Sequential(layers, tied=tied),
        world,
        microbatches=count,
        optimizer=_optimizer(case["optimizer"]),
        balance="none",
        seed=case["seed"],
        **grouped({"groups": _groups(case), **case["same"], **options}),
    )
    shapes = shapes_of(options["schedule"], pipeline.mesh.shape[0], count, last + 1)
    if case["frozen"] and not case["tied"]:
        pipeline.freeze(range(case["frozen"]))
    rate = torch.optim.lr_scheduler.LinearLR(pipeline.optimizer, total_iters=3)
    random, results = Random(case["seed"]), list[dynmo.StepResult]()

    def own(step: int) -> Any:
        several = _make_batch(case, step)[pipeline.mesh.replica * count :][:count]
        if not pipeline.needs_data:
            return ()
        if case["form"] == "list":
            return (several,)
        whole = {name: torch.cat([each[name] for each in several]) for name in several[0]}
        if case["form"] == "dictionary":
            return (whole,)
        targets = whole.pop("labels")
        return whole, targets

    for step in range(case["steps"]):
        if case["moves"] and not reference and pipeline.mesh.partition.stages > 1:
            schedule = random.choice(shapes) if len(shapes) > 1 else None
            stages = pipeline.mesh.partition.stages
            if schedule is not None:
                stages = pipeline.mesh.shape[0] * chunks_of(schedule)
            cuts = sorted(random.sample(range(1, last + 1), stages - 1))
            edges = [0, *cuts, last + 1]
            pipeline.move([b - a for a, b in pairwise(edges)], cast(Any, schedule))
        results += pipeline.advance(*own(step))
        rate.step()
    results += pipeline.drain()

    def metrics(logits: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"right": (logits.argmax(-1) == labels).sum(), "all": (labels != -100).sum()}

    sums = pipeline.evaluate(*own(0), metrics=metrics).metrics
    return {
        "losses": [result.loss for result in results],
        "counted": [result.counted for result in results],
        "norms": [result.gradient_norm for result in results],
        "sums": sums,
        "weights": pipeline.digest(),
    }


def run_case(pool: Pool, case: dict[str, Any]) -> str | None:
    """Returns what differs from one rank, or None."""
    function = "tests.fuzz.loops:train"
    given = {name: case[name] for name in case if name != "ranks"}
    (expected,) = pool.run(function, 1, case=given, reference=True)
    for rank, told in enumerate(pool.run(function, case["ranks"], case=given)):
        for name, value in expected.items():
            if repr(told[name]) != repr(value):
                return f"{name} on rank {rank}: {told[name]}, on one rank {value}"
    return None


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line. Returns 1 if a case failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.loops", description=__doc__)
    parser.add_argument("--cases", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0)
    options = parser.parse_args(arguments)
    prepare()
    failed, start = 0, time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        pool = Pool(RANKS, Path(folder, "stderr"))
        for number in range(options.first, options.first + options.cases):
            case = draw(options.seed, number)
            try:
                difference = run_case(pool, case)
            except JobFailed as error:
                difference = str(error)
                pool.close()  # the next case gets new ranks
            if difference is not None:
                failed += 1
                print(f"case {number}: {difference}\n    {case}", flush=True)
            if number % 20 == 19:
                done = number + 1 - options.first
                print(f"{done} of {options.cases}, {failed} failed", file=sys.stderr, flush=True)
        pool.close()
    seconds, equal = time.monotonic() - start, options.cases - failed
    print(f"{options.cases} loops, {equal} equal, {failed} failed, {seconds:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
