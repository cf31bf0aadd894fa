"""Jobs of the ranks of `test_ragged.py`: lengths that vary, and tables that are handed on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import dynmo
from dynmo.runtime.comm.meeting import Meeting as RuntimeWorld
from tests.pipeline.jobs import make
from tests.pipeline.named_batches import VOCABULARY, Head, run

HIDDEN = 8


class Embed(nn.Module):
    """Makes hidden states, and a table of angles that every block gets."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)

    def forward(self, input_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        angles = torch.arange(input_ids.shape[1]).unsqueeze(1) / torch.arange(1, HIDDEN + 1)
        return self.embedding(input_ids), angles.cos(), angles.sin()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN)
        self.norm = nn.LayerNorm(HIDDEN)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        turned = self.norm(x) * cosine + x.roll(1, -1) * sine
        return x + self.linear(turned).tanh(), cosine, sine


def make_layers() -> list[nn.Module]:
    torch.manual_seed(0)
    return [Embed(), *(Block() for _ in range(4)), Head()]


def make_batch(step: int, microbatches: int) -> list[dict[str, Tensor]]:
    """Rows of 3 with lengths of their own. Some steps have equal lengths: longer, then shorter."""
    generator = torch.Generator().manual_seed(step)
    lengths = [(5, 2, 7, 1), (4, 4, 4, 4), (6, 6, 6, 6), (3, 9, 3, 2), (1, 1, 1, 1)][step % 5]
    batch = list[dict[str, Tensor]]()
    for j in range(microbatches):
        ids = torch.randint(VOCABULARY, (3, lengths[j % 4]), generator=generator)
        batch.append({"input_ids": ids, "labels": ids.roll(1, 1)})
    return batch


def train(
    world: dynmo.World, replicas: int = 1, moves: bool = False, steps: int = 6, **options: Any
) -> dict[str, Any]:
    """Trains on lists of microbatches."""

    def share(step: int, replica: int, replicas: int) -> list[dict[str, Tensor]]:
        return make_batch(step, 4)[replica * 4 // replicas :][: 4 // replicas]

    at = (1, 4) if moves else ()
    pipeline, told = run(world, make_layers(), share, replicas, at, steps, **options)
    return told | {
        "weights": pipeline.digest(),
        "evaluated": pipeline.evaluate(share(0, pipeline.mesh.replica, replicas)),
        "activations": [cost.activation_bytes for cost in pipeline.measured.costs()],
    }


@contextmanager
def counting() -> Iterator[dict[str, int]]:
    """Counts what this rank sends: tensors and their bytes."""
    sent = {"messages": 0, "bytes": 0}
    send = RuntimeWorld.send

    def counted(self: RuntimeWorld, tensor: Tensor, *given: Any, **options: Any) -> Any:
        sent["messages"] += 1
        sent["bytes"] += tensor.nbytes
        return send(self, tensor, *given, **options)

    with mock.patch.object(RuntimeWorld, "send", counted):
        yield sent


def alike(world: dynmo.World, as_list: bool, steps: int = 3) -> dict[str, int]:
    """Counts what steps of equal shapes send, from a list or from tensors."""
    pipeline = dynmo.Pipeline(dynmo.Sequential(make_layers()), world, microbatches=4)
    several = make_batch(1, 4)
    whole = {name: torch.cat([each[name] for each in several]) for name in several[0]}
    with counting() as sent:
        for _ in range(steps):
            pipeline.step(several if as_list else whole)
    return sent


class Fickle(nn.Linear):
    """Its output gets a gradient in every microbatch but the first."""

    calls = 0

    def forward(self, input: Tensor) -> Tensor:
        Fickle.calls += 1
        out = super().forward(input)
        return out.detach() if Fickle.calls == 1 else out


def fickle(world: dynmo.World) -> str:
    torch.manual_seed(0)
    layers = [nn.Linear(2, 2), Fickle(2, 2), nn.Linear(2, 2)]
    Fickle.calls = 0
    pipeline = make(world, layers, microbatches=3, schedule="1f1b")
    pipeline.step(torch.ones(3, 2), torch.ones(3, 2))
    return pipeline.digest()
