"""Fine-tuning a transformers model: dynmo beside torch.distributed.pipelining.

The model has Llama's shape and drawn weights, in float32. Two ranks of one thread train it on
`--microbatches` microbatches a step, each of `--rows` sequences. The lengths are those of
`benchmarks.ragged`. Labels are those of transformers. No side has an attention mask: padding is on
the right, and its labels do not count.

- full: all weights train.
- upper: the upper half of the blocks trains, with the output layer.
- lora-upper: adapters of peft on all linear layers of the upper half of the blocks.
- lora-all: the same in all blocks.

The sides have the same weights, lengths, loss and gradients. `same` says whether the loss and the
gradient norm of the first step agree.

- balanced: dynmo, a list of microbatches of their own lengths. Layers are where its own balancer
  places them, by their measured costs and the schedule.
- uniform: the same with as many layers on each stage.
- torch: all microbatches have the length of the step's longest, because torch fixes the shapes.
  Each schedule has the best split by search: every candidate is measured (`finetune_torch`). Stages
  of frozen layers have no backward, and a block that is on one stage is not cut into halves.
- naive: a pipeline of one microbatch, the whole padded batch. Layers are cut in two by count. So
  one rank works at a time.

All steps of a side run in turn with those of the other sides. Each step is timed from a start
together to the end of the slowest rank's last op, without an optimizer. The speed is in counted
tokens a second, which no side pads. The fastest schedule of each kind counts.

The limit of a side of dynmo is the simulator's: its schedule, replayed with the measured seconds of
each microbatch's ops. `reached` is the share of this limit.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from statistics import median
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from benchmarks.finetune_dynmo import SCHEDULES, OwnSide, balanced, own_side
from benchmarks.finetune_torch import Search, Stages, TorchSide
from benchmarks.harness import alternate, run_ranks
from benchmarks.output import add_number, markdown, parser_of, run
from benchmarks.ragged import IGNORED, LENGTHS, Step, padded
from benchmarks.torch_peer import GPIPE, PEERS
from dynmo.models.gpt import feed_forward_size
from dynmo.models.loss import count_labels
from dynmo.plan.partition import uniform
from dynmo.runtime.comm.meeting import Meeting
from dynmo.schedule.catalogue import chunks_of

CASES = ("full", "upper", "lora-upper", "lora-all")
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
SIZES = {
    "steps": (4, "steps of a round"),
    "microbatches": (8, "microbatches of a step"),
    "rows": (1, "sequences of a microbatch"),
    "longest": (512, "tokens of the longest sequence"),
    "hidden": (256, "hidden size"),
    "blocks": (8, "blocks"),
    "heads": (4, "attention heads"),
    "vocabulary": (1024, "size of the vocabulary"),
    "reach": (3, "layers by which the search moves a boundary of torch's splits"),
}
"""Options: default and meaning."""


def trained(case: str, blocks: int) -> dict[str, Any]:
    """Returns the arguments of `from_pretrained` that say what trains."""
    from peft import LoraConfig

    upper = range(blocks // 2, blocks)
    if case == "full":
        return {}
    if case == "upper":
        return {"train_last": len(upper)}
    adapted = upper if case == "lora-upper" else range(blocks)
    # Both matrices of an adapter are drawn. One of zeros would hide gradients of the other.
    lora = LoraConfig(
        r=8,
        target_modules=list(TARGETS),
        layers_to_transform=list(adapted),
        init_lora_weights=False,
    )
    return {"lora": lora}


def stages_of(case: str, sizes: dict[str, int]) -> Stages:
    from transformers import LlamaConfig

    from dynmo.models.huggingface.model import from_pretrained

    hidden, blocks = sizes["hidden"], sizes["blocks"]
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=feed_forward_size(hidden),
        num_hidden_layers=blocks,
        num_attention_heads=sizes["heads"],
        vocab_size=sizes["vocabulary"],
        max_position_embeddings=sizes["longest"],
    )
    given = trained(case, blocks)
    return Stages(from_pretrained(config, **given), from_pretrained(config, cut="blocks", **given))


def steps_of(sizes: dict[str, int]) -> list[Step]:
    """Returns steps whose microbatches have the lengths of their own longest sequences."""
    generator = torch.Generator().manual_seed(0)
    lengths = iter(min(each, sizes["longest"]) for each in json.loads(LENGTHS.read_text()))

    def microbatch() -> tuple[torch.Tensor, torch.Tensor]:
        ids = [
            torch.randint(sizes["vocabulary"], (next(lengths),), generator=generator)
            for _ in range(sizes["rows"])
        ]
        return pad_sequence(ids, batch_first=True), pad_sequence(ids, True, IGNORED)

    return [[microbatch() for _ in range(sizes["microbatches"])] for _ in range(sizes["steps"])]


def race(world: Meeting, case: str, sizes: dict[str, int], rounds: int) -> dict[str, Any]:
    """Runs on each rank."""
    stages, steps = stages_of(case, sizes), steps_of(sizes)
    model, whole = stages.model, [padded(step) for step in steps]
    own = dict[str, OwnSide]()
    for name in SCHEDULES:
        even = uniform(model.layers, world.size * chunks_of(name))
        first = own[f"uniform {name}"] = own_side(world, model, name, even, steps)
        own[f"balanced {name}"] = own_side(world, model, name, balanced(first), steps, first.costs)
    weights = [cost.seconds for cost in own["uniform zb-h1"].costs]
    cuts = [side.cut for side in own.values()]
    search = Search(stages, weights, cuts, whole[0], world.size, sizes["reach"])
    tried = {name: search.measured(schedule) for name, schedule in PEERS.items()}
    peers = {
        f"torch {name}": TorchSide(
            PEERS[name], stages, min(each, key=each.__getitem__), whole, len(whole[0])
        )
        for name, each in tried.items()
    }
    peers["naive"] = TorchSide(GPIPE, stages, uniform(model.layers, world.size), whole, 1)
    expected = own["uniform 1f1b"].loss_and_norm()
    differing = [
        name
        for name, side in peers.items()
        if not _agree(expected, side.loss_and_norm(world), tolerances=(1e-5, 1e-4))
    ]
    sides = {name: side.run for name, side in {**own, **peers}.items()}
    times = alternate(sides, rounds, warmup=1)
    return {
        "case": case,
        "loss": expected[0],
        "norm": expected[1],
        "same": not differing,
        "differing": differing,
        "positions": {
            "own": sum(x.numel() for step in steps for x, _ in step),
            "padded": sum(x.numel() for step in whole for x, _ in step),
        },
        "cuts": {name: list(side.cut.counts) for name, side in {**own, **peers}.items()},
        "searched": [
            {"schedule": name, "split": list(cut.counts), "seconds": seconds}
            for name, each in tried.items()
            for cut, seconds in each.items()
        ],
        **figures(times, own, sum(int(count_labels(y)) for step in steps for _, y in step)),
    }


def _agree(one: Sequence[float], other: Sequence[float], tolerances: Sequence[float]) -> bool:
    return all(
        abs(a - b) < share * abs(a) for a, b, share in zip(one, other, tolerances, strict=True)
    )


def figures(times: dict[str, list[float]], own: dict[str, OwnSide], tokens: int) -> dict[str, Any]:
    speeds = {name: tokens / median(seconds) for name, seconds in times.items()}
    best = {
        kind: max((name for name in speeds if name.startswith(kind)), key=speeds.__getitem__)
        for kind in ("balanced", "uniform", "torch", "naive")
    }
    limits = {name: tokens / side.limit() for name, side in own.items()}
    return {
        "tokens": tokens,
        "tokens_per_s": speeds,
        "spread": {
            name: [tokens / max(seconds), tokens / min(seconds)] for name, seconds in times.items()
        },
        "best": best,
        "over_torch": speeds[best["balanced"]] / speeds[best["torch"]],
        "over_naive": speeds[best["balanced"]] / speeds[best["naive"]],
        "over_uniform": speeds[best["balanced"]] / speeds[best["uniform"]],
        "limit_tokens_per_s": limits,
        "reached": {name: speeds[name] / limit for name, limit in limits.items()},
    }


def measure(options: argparse.Namespace) -> dict[str, Any]:
    from rich.console import Console
    from rich.progress import track

    sizes = {name: getattr(options, name) for name in SIZES}
    load = os.getloadavg()[0]
    rows = [
        run_ranks("benchmarks.finetune:race", 2, case=case, sizes=sizes, rounds=options.rounds)
        for case in track(options.case or CASES, "cases", console=Console(stderr=True))
    ]
    return {"rounds": options.rounds, "load": load, "sizes": sizes, "rows": rows}


def show(result: dict[str, Any]) -> None:
    head = ["case", "side", "layers", "tokens/s", "least", "most", "of the limit"]
    lines = list[list[str]]()
    for row in result["rows"]:
        for name, speed in row["tokens_per_s"].items():
            least, most = row["spread"][name]
            speeds = [f"{each:.0f}" for each in (speed, least, most)]
            reached = f"{row['reached'][name]:.0%}" if name in row["reached"] else ""
            cut = "+".join(map(str, row["cuts"][name]))
            lines.append([row["case"], name, cut, *speeds, reached])
    print(markdown(head, lines, "lllrrrr"))
    kinds = ("torch", "naive", "uniform")
    ratios = [
        [row["case"], *(f"{row[f'over_{kind}']:.2f}" for kind in kinds), str(row["same"])]
        for row in result["rows"]
    ]
    print("", markdown(["balanced over", *kinds, "same"], ratios), sep="\n")


def main() -> None:
    parser = parser_of(__doc__, reads=True)
    parser.add_argument(
        "--case",
        choices=CASES,
        action="append",
        help="this case alone; may be given several times (default all)",
    )
    add_number(parser, "rounds", 5, "rounds")
    for name, (default, text) in SIZES.items():
        add_number(parser, name, default, text)
    run(parser, measure, show)


if __name__ == "__main__":
    main()
