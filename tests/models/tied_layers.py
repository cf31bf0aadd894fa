"""Layers that share weights, for `test_tied.py`: embedding and head, and two blocks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import dynmo

VOCABULARY, WIDTH, BATCH, STEPS = 11, 8, 9, 4
TIED: Any = [((0, "weight"), (5, "linear.weight")), ((2, "weight"), (3, "linear.weight"))]


class Head(nn.Module):
    """A linear layer under a name of its own."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


def layers(vocabulary: int = VOCABULARY) -> list[nn.Module]:
    """Modules that share two parameters."""
    torch.manual_seed(0)
    made = [
        nn.Embedding(vocabulary, WIDTH),
        nn.Linear(WIDTH, WIDTH),
        nn.Linear(WIDTH, WIDTH),
        Head(WIDTH),
        nn.Linear(WIDTH, WIDTH),
        Head(vocabulary),
    ]
    for (owner, owner_name), (user, name) in TIED:
        made[user].get_submodule(name.rpartition(".")[0]).weight = made[owner].get_parameter(
            owner_name
        )
    return made


def of_bytes() -> dynmo.Sequential:
    """The model of a run from a file."""
    return dynmo.Sequential(layers(256), tied=TIED)


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(VOCABULARY, (2, BATCH, 5), generator=generator)
    return ids[0], ids[1]


def plain() -> tuple[list[float], nn.Module]:
    """Trains modules that use one parameter twice, in plain torch."""
    model = nn.Sequential(*layers())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, betas=(0.9, 0.95), weight_decay=0.0)
    losses = list[float]()
    for step in range(STEPS):
        optimizer.zero_grad()
        parts = list[float]()
        for inputs, targets in zip(*(x.split(3) for x in batch(step)), strict=True):
            loss = functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
            (loss / 3).backward()
            parts.append(float(loss.detach()))
        optimizer.step()
        losses.append(sum(parts) / 3)
    return losses, model


def train(
    world: dynmo.World,
    moves: bool = False,
    folder: str | None = None,
    resumes: bool = False,
    factories: bool = False,
    replicas: int = 1,
    **options: Any,
) -> dict[str, Any]:
    """Trains 4 steps. Saves after the second one to `folder`, or goes on from there."""
    made: Any = layers()
    if factories:
        made = [lambda layer=layer: layer for layer in made]
    pipeline = dynmo.Pipeline(
        dynmo.Sequential(made, tied=TIED),
        world,
        microbatches=3 // replicas,
        replicas=replicas,
        optimizer=dynmo.AdamW(lr=0.01, weight_decay=0.0),
        max_grad_norm=0,
        resume=folder if resumes else None,
        **options,
    )
    losses = list[float]()
    for step in range(pipeline.steps, STEPS):
        if step == 2 and moves:
            counts = list(pipeline.partition.counts)
            pipeline.move([6 - len(counts) + 1] + [1] * (len(counts) - 1))
        rows = BATCH // replicas
        own = [x[pipeline.replica * rows :][:rows] for x in batch(step)]
        losses.append(pipeline.step(own[0], own[1]).loss)
        if step == 1 and folder is not None and not resumes:
            pipeline.save(folder)
    state = pipeline.state_dict(everywhere=True)
    weights = pipeline.digest()
    pipeline.load_state_dict({key: value + 1 for key, value in state.items()})
    changed = pipeline.state_dict(everywhere=True)
    return {
        "losses": losses,
        "weights": weights,
        "tied": torch.equal(state["0.weight"], state["5.linear.weight"]),
        "loaded": all(torch.equal(changed[key], value + 1) for key, value in state.items()),
        "state": {key: value.tolist() for key, value in state.items()},
    }
