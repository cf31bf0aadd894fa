"""Jobs of the ranks of `test_batch.py`: dictionaries with masks, and labels of -100."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import dynmo

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


def train(
    world: dynmo.World,
    replicas: int = 1,
    schedule: str = "zb-h1",
    as_list: bool = False,
    moves: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Trains 4 steps. Ranks in the middle of a pipeline have no data."""
    count = 4 // replicas
    pipeline = dynmo.Pipeline(
        dynmo.Sequential(make_layers()),
        world,
        microbatches=count,
        replicas=replicas,
        schedule=schedule,
        reduction_slots=2,
        optimizer=dynmo.SGD(lr=0.1, momentum=0.9, weight_decay=0.0),
        max_grad_norm=0,
        **options,
    )
    losses, counted = list[float](), list[float]()

    def own(step: int) -> Any:
        if not pipeline.needs_data:
            return None
        batch = cut(make_batch(step), replicas)[pipeline.replica]
        return cut(batch, count) if as_list else batch

    for step in range(4):
        if moves and step == 2:
            counts = list(pipeline.partition.counts)
            counts[0], counts[-1] = counts[0] + counts[-1] - 1, 1
            pipeline.move(counts)
        for result in pipeline.advance(own(step)):
            losses.append(result.loss)
            counted.append(result.counted)
    losses += [result.loss for result in pipeline.drain()]

    def metrics(output: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"right": (output.argmax(-1) == labels).sum(), "tokens": (labels != -100).sum()}

    evaluated, sums = pipeline.evaluate(own(0), metrics=metrics)
    return {
        "losses": losses,
        "counted": counted[:1],
        "evaluated": evaluated,
        "sums": sums,
        "weights": pipeline.digest(),
    }
