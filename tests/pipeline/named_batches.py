"""Jobs of the ranks of `test_batch.py`: dictionaries with masks, and labels of -100."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import dynmo
from dynmo.pipeline.options import grouped

VOCABULARY, BATCH, LENGTH = 16, 12, 5


class Embed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 8)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
        return self.embedding(input_ids), attention_mask


class Mix(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        return x + self.linear(x).tanh() * mask.unsqueeze(-1), mask


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, VOCABULARY)

    def forward(self, x: Tensor, *_: Tensor) -> Tensor:
        return self.linear(x)


def make_layers() -> list[nn.Module]:
    torch.manual_seed(0)
    return [Embed(), *(Mix() for _ in range(4)), Head()]


def make_batch(step: int) -> dict[str, Tensor]:
    """Rows [12, 5]. Microbatches of 3 rows count 6, 15, 0 and 12 targets."""
    generator = torch.Generator().manual_seed(step)

    def draw(most: int) -> Tensor:
        return torch.randint(most, (BATCH, LENGTH), generator=generator)

    labels = draw(VOCABULARY)
    labels[0:3, :3] = -100
    labels[6:9] = -100
    labels[11, :3] = -100
    return {"input_ids": draw(VOCABULARY), "attention_mask": draw(2), "labels": labels}


def cut(batch: dict[str, Tensor], count: int) -> list[dict[str, Tensor]]:
    parts = {name: each.chunk(count) for name, each in batch.items()}
    return [{name: each[j] for name, each in parts.items()} for j in range(count)]


def plain_losses(
    layers: nn.ModuleList,
    optimizer: torch.optim.Optimizer,
    batches: Iterable[list[dict[str, Tensor]]],
    max_norm: float = math.inf,
) -> list[float]:
    """Trains in plain torch, as transformers' `num_items_in_batch` weighs tokens."""
    losses = list[float]()
    for batch in batches:
        total = torch.stack([(each["labels"] != -100).sum() for each in batch]).sum()
        optimizer.zero_grad()
        loss = torch.zeros(())
        for each in batch:
            out: Any = [value for name, value in each.items() if name != "labels"]
            for layer in layers:
                out = layer(*out)
            labels = each["labels"].flatten()
            part = functional.cross_entropy(out.flatten(0, 1), labels, reduction="sum")
            (part / total).backward()
            loss += part.detach() / total
        nn.utils.clip_grad_norm_(layers.parameters(), max_norm)
        optimizer.step()
        losses.append(float(loss))
    return losses


def run(
    world: dynmo.World,
    layers: list[nn.Module],
    share: Callable[[int, int, int], Any],
    replicas: int = 1,
    moves: Sequence[int] = (),
    steps: int = 4,
    **options: Any,
) -> tuple[dynmo.Pipeline, dict[str, Any]]:
    """Trains on the shares of each step's batch. Layers move before the steps `moves`."""
    given = {"schedule": "zb-h1", "reduction_slots": 2, "microbatches": 4 // replicas} | options
    pipeline = dynmo.Pipeline(dynmo.Sequential(layers), world, replicas=replicas, **grouped(given))
    results = list[dynmo.StepResult]()
    for step in range(steps):
        if step in moves:
            first, *rest, last = pipeline.mesh.partition.counts
            counts = [first + last - 1, *rest, 1]
            pipeline.move(counts if step == moves[0] else counts[::-1])
        own = share(step, pipeline.mesh.replica, replicas)
        results += pipeline.advance(own if pipeline.needs_data else None)
    results += pipeline.drain()
    return pipeline, {"losses": [result.loss for result in results], "counted": results[0].counted}


def train(
    world: dynmo.World,
    replicas: int = 1,
    as_list: bool = False,
    moves: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Trains 4 steps. Ranks in the middle of a pipeline have no data."""

    def share(step: int, replica: int, replicas: int) -> Any:
        batch = cut(make_batch(step), replicas)[replica]
        return cut(batch, 4 // replicas) if as_list else batch

    def metrics(output: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"right": (output.argmax(-1) == labels).sum(), "tokens": (labels != -100).sum()}

    options |= {"optimizer": dynmo.SGD(lr=0.1, momentum=0.9, weight_decay=0.0), "max_grad_norm": 0}
    at = (2,) if moves else ()
    pipeline, told = run(world, make_layers(), share, replicas, at, **options)
    own = share(0, pipeline.mesh.replica, replicas) if pipeline.needs_data else None
    found = pipeline.evaluate(own, metrics=metrics)
    return told | {"evaluated": found.loss, "sums": found.metrics, "weights": pipeline.digest()}
