"""Trains the layers of a drawn case: in plain torch, and with dynmo.

A script that repeats a failure has this file in it, so it imports nothing of the tests.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import dynmo
from dynmo.pipeline.options import grouped

ROWS, SEQUENCE, WIDTH = 2, 3, 8


def sgd_of(names: dict[str, Any]) -> partial[torch.optim.SGD]:
    """A sum over all elements has larger gradients. It would diverge, and any last digit count."""
    lr = 0.001 if getattr(names["loss"], "reduction", "") == "sum" else 0.05
    return partial(torch.optim.SGD, lr=lr, momentum=0.9, weight_decay=0.01)


def batch_of(case: dict[str, Any], step: int) -> dict[str, Tensor]:
    """A new batch. Layers may write to it."""
    generator = torch.Generator().manual_seed(1000 * case["seed"] + step)
    shape = (ROWS * case["options"]["microbatches"], SEQUENCE, WIDTH)
    names = ["x", "labels", *(["given"] if case["inputs"] == "dictionary" else [])]
    return {name: torch.randn(shape, generator=generator) for name in names}


def run_change(line: str, layer: nn.Module, names: dict[str, Any]) -> None:
    exec(line, {**names, "layer": layer})


class Plain:
    """Plain torch: a loop over the microbatches, as in any tutorial."""

    def __init__(self, names: dict[str, Any], case: dict[str, Any]) -> None:
        self._names, self._case = names, case
        torch.manual_seed(case["seed"])
        self._make()
        self._saved: Any = None
        self._frozen = set[nn.Parameter]()

    def _make(self) -> None:
        self.layers: list[nn.Module] = self._names["make"]()
        for (owner, weight), (user, own) in self._case["tied"]:
            setattr(self.layers[user], own, getattr(self.layers[owner], weight))
        self.model = nn.ModuleList(self.layers)
        self.optimizer = sgd_of(self._names)(self.model.parameters())

    def _losses(self, step: int) -> list[Tensor]:
        count = self._case["options"]["microbatches"]
        parts = {name: whole.chunk(count) for name, whole in batch_of(self._case, step).items()}
        losses = list[Tensor]()
        for at in range(count):
            given = {name: part[at] for name, part in parts.items()}
            target = given.pop("labels")
            out: Any = self.layers[0](**given)
            for layer in self.layers[1:]:
                out = layer(*out) if isinstance(out, tuple | list) else layer(out)
            loss = self._names["loss"](out, target)
            if torch.is_grad_enabled():
                scale = 1 if getattr(self._names["loss"], "reduction", "") == "sum" else count
                (loss / scale).backward()
            losses.append(loss.detach())
        return losses

    def _mean(self, losses: list[Tensor]) -> float:
        total = float(sum(losses))
        summed = getattr(self._names["loss"], "reduction", "") == "sum"
        return total if summed else total / len(losses)

    def step(self, number: int) -> float:
        self.optimizer.zero_grad()
        losses = self._losses(number)
        if limit := self._case["options"]["max_grad_norm"]:
            nn.utils.clip_grad_norm_(self.model.parameters(), limit)
        self.optimizer.step()
        return self._mean(losses)

    def evaluate(self, number: int) -> float:
        modes = [(part, part.training) for part in self.model.modules()]
        self.model.eval()
        with torch.no_grad():
            loss = self._mean(self._losses(number))
        for part, mode in modes:
            part.training = mode
        return loss

    def move(self, number: int) -> None:
        pass

    def change(self, index: int, line: str) -> None:
        run_change(line, self.layers[index], self._names)

    def freeze(self, layers: list[int], frozen: bool = True) -> None:
        held = {p for index in layers for p in self.layers[index].parameters()}
        if frozen:
            self._frozen = {p for p in held if p.requires_grad}
        for parameter in self._frozen:
            parameter.requires_grad_(not frozen)

    def _generators(self) -> list[torch.Generator]:
        several = [vars(part).values() for part in self.model.modules()]
        own = [value for values in several for value in values]
        return [x for x in [*own, *self._names.values()] if isinstance(x, torch.Generator)]

    def save(self) -> None:
        states = [x.get_state().clone() for x in self._generators()]
        loss = self._names["loss"]
        of_loss = loss.state_dict() if isinstance(loss, nn.Module) else {}
        # dynmo's checkpoints have all buffers, since a resume continues the unbroken run.
        buffers = dict(self.model.named_buffers())
        self._saved = copy.deepcopy(
            (self.model.state_dict(), self.optimizer.state_dict(), of_loss, states, buffers)
        )

    def load(self) -> None:
        model, optimizer, of_loss, states, buffers = copy.deepcopy(self._saved)
        self.model.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)
        if of_loss:
            self._names["loss"].load_state_dict(of_loss)
        for name, buffer in buffers.items():
            path, _, key = name.rpartition(".")
            owned = self.model.get_submodule(path)._buffers
            if (kept := owned.get(key)) is None:
                owned[key] = buffer
            else:
                kept.copy_(buffer)
        for generator, state in zip(self._generators(), states, strict=True):
            generator.set_state(state)

    def resume(self) -> None:
        torch.manual_seed(self._case["seed"] + 1)
        self._make()
        self.load()

    def state(self) -> dict[str, Tensor]:
        state = self.model.state_dict()
        return {name: x for name, x in state.items() if isinstance(x, Tensor)}


class Pipelined:
    """The same with dynmo."""

    def __init__(
        self, names: dict[str, Any], case: dict[str, Any], world: dynmo.World, folder: Path
    ) -> None:
        self._names, self._case, self._world, self._folder = names, case, world, folder
        self._make(case["seed"])

    def _make(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.layers: list[nn.Module] = self._names["make"]()
        tied: Any = [tuple(map(tuple, pair)) for pair in self._case["tied"]]
        model = dynmo.Sequential(self.layers, self._names["loss"], tied=tied)
        self.pipeline = dynmo.Pipeline(
            model,
            self._world,
            optimizer=sgd_of(self._names),
            balance="none",
            **grouped(self._case["options"]),
        )

    def _batch(self, number: int) -> Any:
        batch = batch_of(self._case, number)
        return (batch,) if len(batch) > 2 else (batch["x"], batch["labels"])

    def step(self, number: int) -> float:
        return self.pipeline.step(*self._batch(number)).loss

    def evaluate(self, number: int) -> float:
        return self.pipeline.evaluate(*self._batch(number))

    def move(self, number: int) -> None:
        layers, stages = len(self.layers), self.pipeline.mesh.partition.stages
        cuts = list(combinations(range(1, layers), stages - 1))
        edges = [0, *cuts[number % len(cuts)], layers]
        self.pipeline.move([b - a for a, b in pairwise(edges)])

    def change(self, index: int, line: str) -> None:
        """Changes a layer on all ranks. Its weights are on one of them."""
        held = self.pipeline.mesh.modules.get(index)
        if held is None and "torch.no_grad" in line:
            return
        for layer in {id(x): x for x in (self.layers[index], held) if x is not None}.values():
            run_change(line, layer, self._names)

    def freeze(self, layers: list[int]) -> None:
        self.pipeline.freeze(layers)

    def unfreeze(self, layers: list[int]) -> None:
        self.pipeline.unfreeze(layers)

    def save(self) -> None:
        self.pipeline.save(self._folder)

    def load(self) -> None:
        self.pipeline.load(self._folder)

    def resume(self) -> None:
        self._make(self._case["seed"] + 1)
        self.pipeline.load(self._folder)

    def state(self) -> dict[str, Tensor]:
        return self.pipeline.state_dict(everywhere=True)


def run_plan(
    trained: Plain | Pipelined, case: dict[str, Any], done: Callable[[list[Any]], None]
) -> dict[str, Any]:
    """Runs a plan. Returns the losses of steps and evaluations, and weights and buffers."""
    losses, step, saved = list[float](), 0, 0
    for event in case["plan"]:
        name, *arguments = event
        if name == "step":
            losses.append(trained.step(step))
            step += 1
        elif name == "evaluate":
            losses.append(trained.evaluate(step))
        elif name == "unfreeze" and isinstance(trained, Plain):
            trained.freeze(*arguments, frozen=False)
        else:
            saved = step if name == "save" else saved
            step = saved if name in ("load", "resume") else step
            getattr(trained, name)(*arguments)
        done(event)
    state = {name: x.detach().double().flatten().tolist() for name, x in trained.state().items()}
    return {"losses": losses, "state": state}
