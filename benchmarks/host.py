"""What a step costs in Python, beside plain torch.

The model has 12 residual blocks (LayerNorm, two linears with GELU between them), and a step has 8
microbatches of 2 x 16 tokens. Small blocks show what a framework adds to torch's kernels. On a GPU
it is the time in which a rank's one thread launches kernels. All figures are processor seconds of a
rank, all threads together, medians of sides that take turns.

one rank      A whole step with AdamW: a plain loop as in torch's tutorials, and dynmo with B and W
              together (1f1b) and apart (zb-h1). torch's pipelining has no optimizer.
two ranks     The same, the blocks cut in half, both ranks together.
middle rank   Three ranks under ZB-H1. The middle one has all blocks, and messages on both sides.
              The outer ones scale what they get, so it never waits for long. Beside it the blocks
              alone in a plain loop.
parts         Of a step on one rank and on the middle rank: F, B and W as the ops mark them, and the
              rest (messages, bookkeeping, optimizer).
profile       The functions that take longest by themselves, on one rank at the smallest size.

`more` is what dynmo adds to the plain loop for each block and microbatch. `enough` is the smallest
size from which on it adds less than 2 % to a step on one rank.

python -m benchmarks.host
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.harness import alternate, medians, run_ranks
from benchmarks.output import add_number, markdown, parser_of, print_tables, run
from benchmarks.torch_peer import TorchPeer
from dynmo.cost.layer_cost import LayerCost
from dynmo.models.sequential import Sequential
from dynmo.pipeline.options import ScheduleName, grouped
from dynmo.pipeline.pipeline import Pipeline
from dynmo.plan.options import Balance
from dynmo.runtime.comm.meeting import Meeting

CPU = torch.device("cpu")
BLOCKS, MICROBATCHES, ROWS, TOKENS, CLASSES = 12, 8, 2, 16, 8
HIDDEN = (8, 32, 128, 256, 512, 1024)
KINDS = {"one_rank": 1, "two_ranks": 2, "middle_rank": 3}
SCHEDULES: tuple[ScheduleName, ...] = ("1f1b", "zb-h1")
ENOUGH = 0.02
SHOWN = 20  # functions of the profile


class Block(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class Scale(nn.Module):
    """Takes next to no time, and trains."""

    def __init__(self) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.by


def blocks(hidden: int) -> list[nn.Module]:
    torch.manual_seed(0)
    return [Block(hidden) for _ in range(BLOCKS)]


def whole(hidden: int) -> list[nn.Module]:
    """Makes the model's layers. The last one has the classifier, too."""
    *first, last = blocks(hidden)
    return [*first, nn.Sequential(last, nn.Linear(hidden, CLASSES))]


def batch(hidden: int, device: torch.device = CPU) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    inputs = torch.randn(MICROBATCHES * ROWS, TOKENS, hidden, generator=draw)
    targets = torch.randint(0, CLASSES, inputs.shape[:2], generator=draw)
    return inputs.to(device), targets.to(device)


def loss(output: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(output.flatten(0, 1), targets.flatten())


def processor(run: Callable[[], object]) -> float:
    """Returns the seconds that this process computes in a call."""
    start = time.process_time()
    run()
    return time.process_time() - start


# -- the sides -------------------------------------------------------------------------------------


def loop(hidden: int, steps: bool, device: torch.device = CPU) -> Callable[[], None]:
    """Returns a loop without any framework. With `steps` it has an optimizer."""
    model, (inputs, targets) = nn.Sequential(*whole(hidden)).to(device), batch(hidden, device)
    adamw = torch.optim.AdamW(model.parameters(), lr=0.0)

    def step() -> None:
        for x, y in zip(inputs.split(ROWS), targets.split(ROWS), strict=True):
            (loss(model(x), y) / MICROBATCHES).backward()
        if steps:
            adamw.step()
        adamw.zero_grad()

    return step


def blocks_alone(hidden: int) -> Callable[[], None]:
    """Returns a loop over the blocks of the middle rank, with an optimizer."""
    model, (inputs, _) = nn.Sequential(*blocks(hidden)), batch(hidden)
    adamw = torch.optim.AdamW(model.parameters(), lr=0.0)

    def step() -> None:
        for x in inputs.split(ROWS):
            model(x.detach().requires_grad_()).backward(x)
        adamw.step()
        adamw.zero_grad()

    return step


def peer(hidden: int, device: torch.device = CPU) -> Callable[[], object]:
    """Returns forward and backward of torch's 1F1B."""

    def build(stage: int, stages: int) -> nn.Module:
        layers, each = whole(hidden), BLOCKS // stages
        return nn.Sequential(*layers[stage * each : (stage + 1) * each]).to(device)

    return TorchPeer("1f1b", MICROBATCHES, build, *batch(hidden, device), loss).step


def own(
    world: Meeting, layers: Sequence[nn.Module], schedule: ScheduleName, **given: Any
) -> Pipeline:
    model, optimizer = Sequential(layers, loss), partial(torch.optim.AdamW, lr=0.0)
    return Pipeline(
        model,
        world,
        microbatches=MICROBATCHES,
        schedule=schedule,
        optimizer=optimizer,
        **grouped(given),
    )


# -- what the ranks run ----------------------------------------------------------------------------


def one_rank(world: Meeting, hidden: int, rounds: int) -> dict[str, Any]:
    given = batch(hidden)
    pipelines = {name: own(world, whole(hidden), name) for name in SCHEDULES}
    sides = {"plain torch": loop(hidden, steps=True), "torch 1f1b": peer(hidden)}
    sides |= {f"dynmo {name}": partial(x.step, *given) for name, x in pipelines.items()}
    seconds = in_turn(sides, rounds)
    return compared(seconds, "plain torch", "dynmo 1f1b") | {
        "parts": {
            name: parts(x.measured.costs(), seconds[f"dynmo {name}"])
            for name, x in pipelines.items()
        }
    }


def two_ranks(world: Meeting, hidden: int, rounds: int) -> dict[str, Any]:
    given = batch(hidden)
    sides: dict[str, Callable[[], object]] = {"torch 1f1b": peer(hidden)}
    sides |= {
        f"dynmo {name}": partial(own(world, whole(hidden), name).step, *given) for name in SCHEDULES
    }
    alone = in_turn({"plain torch": loop(hidden, steps=True)}, rounds)
    return compared(alone | of_all(world, in_turn(sides, rounds)), "plain torch", "dynmo 1f1b")


def middle_rank(world: Meeting, hidden: int, rounds: int) -> dict[str, Any]:
    """The figures of rank 1, on all ranks."""
    layers = [Scale(), *blocks(hidden), nn.Linear(hidden, CLASSES)]
    pipeline = own(world, layers, "zb-h1", balance=Balance(balancer="none", initial=(1, BLOCKS, 1)))
    seconds = in_turn({"dynmo zb-h1": partial(pipeline.step, *batch(hidden))}, rounds)
    costs, told = pipeline.measured.costs()[1:-1], torch.zeros(2, dtype=torch.float64)
    if world.rank == 1:
        told[0] = seconds["dynmo zb-h1"]
        told[1] = in_turn({"alone": blocks_alone(hidden)}, rounds)["alone"]
    world.sum(told, "the middle rank's figures")
    seconds = {"plain torch": told[1].item(), "dynmo zb-h1": told[0].item()}
    return compared(seconds, "plain torch", "dynmo zb-h1") | {
        "parts": {"zb-h1": parts(costs, seconds["dynmo zb-h1"])}
    }


def profile(world: Meeting, hidden: int, rounds: int) -> list[dict[str, Any]]:
    """Returns the functions that take longest, in seconds by themselves and in all.

    They count for each block and microbatch, as the profiler sees them, which slows calls down.
    """
    step = partial(own(world, whole(hidden), "1f1b").step, *batch(hidden))
    for _ in range(16):  # the first steps also measure, and decide on a move
        step()
    with cProfile.Profile() as profiler:
        for _ in range(rounds):
            step()
    stats: dict[Any, Any] = vars(pstats.Stats(profiler))["stats"]
    calls = rounds * BLOCKS * MICROBATCHES
    rows = sorted(stats.items(), key=lambda row: -row[1][2])[:SHOWN]
    return [
        {
            "function": f"{Path(file).stem}.{name}" if file != "~" else name,
            "calls": count / calls,
            "own": own_seconds / calls,
            "all": all_seconds / calls,
        }
        for (file, _, name), (_, count, own_seconds, all_seconds, _) in rows
    ]


def in_turn(sides: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Returns the median seconds that this process computes in each side."""
    timed = {name: partial(processor, side) for name, side in sides.items()}
    return medians(alternate(timed, rounds, warmup=4))


def of_all(world: Meeting, seconds: dict[str, float]) -> dict[str, float]:
    """Returns the sums over the ranks."""
    sums = torch.tensor(list(seconds.values()), dtype=torch.float64)
    world.sum(sums, "the ranks' figures")
    return dict(zip(seconds, sums.tolist(), strict=True))


def compared(seconds: dict[str, float], plain: str, ours: str) -> dict[str, Any]:
    return {
        "seconds": seconds,
        "over_plain": {name: each / seconds[plain] for name, each in seconds.items()},
        "more": (seconds[ours] - seconds[plain]) / BLOCKS / MICROBATCHES,
    }


def parts(costs: Sequence[LayerCost], seconds: float) -> dict[str, float]:
    """Returns the seconds of F, B, W and of all else, for each block and microbatch."""
    each = {key: sum(getattr(cost, key) for cost in costs) / BLOCKS for key in "fbw"}
    return each | {"rest": seconds / BLOCKS / MICROBATCHES - sum(each.values())}


# -- figures ---------------------------------------------------------------------------------------


def measure(options: argparse.Namespace) -> dict[str, Any]:
    rounds = options.rounds
    sizes = [hidden for hidden in HIDDEN if hidden <= options.largest]
    found = {
        kind: [
            {"hidden": hidden}
            | run_ranks(f"benchmarks.host:{kind}", ranks, hidden=hidden, rounds=rounds)
            for hidden in sizes
        ]
        for kind, ranks in KINDS.items()
    }
    slow = [x for x in found["one_rank"] if x["over_plain"]["dynmo 1f1b"] >= 1 + ENOUGH]
    largest = max((x["hidden"] for x in slow), default=0)
    return found | {
        "enough": min((hidden for hidden in sizes if hidden > largest), default=None),
        "profile": run_ranks("benchmarks.host:profile", 1, hidden=sizes[0], rounds=rounds),
    }


def tables(result: dict[str, Any]) -> dict[str, str]:
    """Returns the figures of each kind of ranks and the profile, in Markdown."""
    head = ["function", "calls", "by itself, us", "in all, us"]
    rows = [
        [f"`{x['function']}`", f"{x['calls']:.1f}", micro(x["own"]), micro(x["all"])]
        for x in result["profile"]
    ]
    of_ranks = {kind.replace("_", " "): table(result[kind]) for kind in KINDS}
    return of_ranks | {"profile": markdown(head, rows)}


def table(sizes: Sequence[dict[str, Any]]) -> str:
    """Returns a kind's figures by size, in Markdown."""
    first = sizes[0]
    names, parted = list(first["seconds"])[1:], list(first.get("parts", {}))
    head = ["hidden", "plain torch, ms", *(f"{name}, over it" for name in names), "more, us"]
    head += [f"{name}: F, B, W, rest, us" for name in parted]
    rows = [
        [
            str(x["hidden"]),
            f"{1e3 * x['seconds']['plain torch']:.1f}",
            *(f"{x['over_plain'][name]:.2f}" for name in names),
            micro(x["more"]),
            *(", ".join(map(micro, x["parts"][name].values())) for name in parted),
        ]
        for x in sizes
    ]
    return markdown(head, rows, "r" * len(head))


def micro(seconds: float) -> str:
    return f"{1e6 * seconds:.0f}"


def show(result: dict[str, Any]) -> None:
    print_tables(tables(result))
    print(f"less than {ENOUGH:.0%} on one rank from hidden {result['enough']} on")


if __name__ == "__main__":
    parser = parser_of(__doc__, reads=True)
    add_number(parser, "rounds", 11, "steps of each side")
    add_number(parser, "largest", HIDDEN[-1], "largest hidden size")
    run(parser, measure, show)
