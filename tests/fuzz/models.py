"""Models and a dynamic case of one's own for the random test (`tests/fuzz`).

A model's name says what it is made of, so that a configuration alone replays it:

    model.kind = "python:tests.fuzz.models:modules__lstm__batch_norm"

is an embedding, an LSTM layer, a batch norm layer and a head. The words before the layers are in
`FORMS`, those of the layers in `LAYERS` of `layers.py`.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from dynmo.models.loss import next_token_loss
from dynmo.pipeline.case import Change, Dynamism, Layers, Signals
from tests.fuzz.layers import LAYERS, VOCAB, WIDTH, square_linear

# -- several tensors between layers --------------------------------------------------------------


class Fan(nn.Module):
    """Hands on its input and more tensors.

    They are floats that train, integers, booleans and constants.
    """

    def __init__(self, count: int) -> None:
        super().__init__()
        self.linear, self._count = square_linear(), count

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = self.linear(x)
        kinds: tuple[Callable[[], Tensor], ...] = (
            lambda: torch.tanh(y),
            lambda: y.detach().argmax(-1),
            lambda: y.detach() > 0,
            lambda: y.detach().float().mean(),
            lambda: y[..., 0],
            lambda: y.detach().argmin(-1).to(torch.int32),
            lambda: y.detach().argmin(-1).to(torch.int16),
        )
        return x, *(kinds[i % len(kinds)]() for i in range(self._count))


class Carrying(nn.Module):
    """Runs a module on the first of several tensors.

    The others are handed on as they are.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
        return self.module(x), *others


class Mix(nn.Module):
    """Adds the other tensors that have its input's shape, and changes them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = square_linear()

    def forward(self, x: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
        floats = [y for y in others if y.is_floating_point() and y.shape == x.shape]
        x = x + self.linear(sum(floats, x))
        return x, *(
            0.5 * y + x if y.is_floating_point() and y.shape == x.shape else y for y in others
        )


class Head(nn.Module):
    """A loss on logits. Of several tensors, all floats count.

    With `auxiliary`, a second number goes to the loss.
    """

    def __init__(self, auxiliary: bool) -> None:
        super().__init__()
        self.linear, self._auxiliary = nn.Linear(WIDTH, VOCAB), auxiliary

    def forward(self, x: Tensor, *others: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        for other in others:
            if other.is_floating_point():
                x = x + 0.1 * (other if other.dim() != 2 else other.unsqueeze(-1))
        logits = self.linear(x)
        return (logits, x.float().square().mean()) if self._auxiliary else logits


def _smooth(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(
        logits.float().flatten(0, -2), targets.flatten(), label_smoothing=0.1
    )


def _with_auxiliary(output: tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
    return next_token_loss(output[0], targets) + 0.01 * output[1]


class FlatLoss(nn.CrossEntropyLoss):
    """A loss that is a module with a tensor of its own."""

    def __init__(self) -> None:
        super().__init__(weight=torch.linspace(0.5, 1.5, VOCAB))

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return super().forward(input.float().flatten(0, -2), target.flatten())


LOSSES: dict[str, Callable[[], Any]] = {
    "": lambda: None,
    "smooth": lambda: _smooth,
    "auxiliary": lambda: _with_auxiliary,
    "module": FlatLoss,
}
FORMS = ("modules", "factories")


def model_of(name: str) -> Callable[[], Any]:
    """The function that makes the model called so.

    Args:
        name: A form, and a loss behind an underscore if it is not the default one; the layers, each
            behind two underscores. `fan_N` hands on N more tensors from there on, and `mix` uses
            them.

    Returns:
        A function as `model.kind = "python:..."` wants it.

    Raises:
        AttributeError: A word of the name is not known.
    """
    head, *parts = name.split("__")
    form, _, loss = head.partition("_")
    known = form in FORMS and loss in LOSSES
    if not known or not all(
        w in LAYERS or w == "mix" or w.removeprefix("fan_").isdigit() for w in parts
    ):
        raise AttributeError(name)
    makers: list[Callable[[], nn.Module]] = [partial(nn.Embedding, VOCAB, WIDTH)]
    several = False
    for word in parts:
        if word in LAYERS:
            make = LAYERS[word].make
            makers.append(partial(_carrying, make) if several else make)
        elif word == "mix":
            makers.append(Mix)
        else:
            makers.append(partial(Fan, int(word.removeprefix("fan_"))))
            several = True
    makers.append(partial(Head, loss == "auxiliary"))

    def make_model() -> Any:
        layers = makers if form == "factories" else [make() for make in makers]
        return (layers, LOSSES[loss]()) if loss else layers

    return make_model


def _carrying(make: Callable[[], nn.Module]) -> nn.Module:
    return Carrying(make())


# -- a case that stops the run -------------------------------------------------------------------


class StopAfter(Dynamism):
    """Asks for a stop after a step, on the first rank only.

    It uses the signal that a launcher sends.
    """

    name = "stop"

    def __init__(self, step: int) -> None:
        self._step = step

    def act(self, step: int, layers: Layers) -> Change | None:
        return None

    def acts(self, step: int) -> bool:
        return False

    def observe(self, signals: Signals) -> None:
        if signals.step == self._step and os.environ.get("RANK", "0") == "0":
            os.kill(os.getpid(), signal.SIGTERM)


def __getattr__(name: str) -> Callable[[], Any]:
    """The case `StopAfter_3` stops after step 3. Every other name is a model's."""
    prefix, _, step = name.partition("_")
    if prefix == "StopAfter" and step.isdigit():
        return partial(StopAfter, int(step))
    return model_of(name)
