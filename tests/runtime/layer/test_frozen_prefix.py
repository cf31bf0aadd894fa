"""F of frozen layers, of which a case may skip the first ones."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from dynmo.runtime.layer.layer import Layer
from dynmo.runtime.layer.stage import FrozenPrefix
from dynmo.schedule.op import Kind
from tests.runtime.modules import Net, draw, layer_of

X = draw(0, 3, 6)


def layers(*modules: nn.Module) -> list[Layer]:
    return [layer_of(module, i + 4) for i, module in enumerate(modules)]


def linears(count: int) -> list[Layer]:
    torch.manual_seed(0)
    return layers(*(nn.Linear(6, 6) for _ in range(count)))


def prefix(given: list[Layer], training: bool = True) -> FrozenPrefix:
    return FrozenPrefix(given, 2, (X,), 0, training)


@pytest.mark.parametrize("skip", [0, 1, 2, 3])
def test_layers_behind_the_skipped_ones_run(skip: int) -> None:
    given = linears(3)
    outputs: list[Tensor] = [X]
    for layer in given:
        outputs.append(layer.module(outputs[-1]))
    frozen = prefix(given)
    (y,) = frozen.run((outputs[skip].detach(),), skip)
    assert torch.equal(y, outputs[-1])
    assert (frozen.layers, frozen.microbatch, frozen.skipped) == ((4, 5, 6), 2, skip)
    assert [[kind for kind, *_ in layer.marks] for layer in given] == [[Kind.F]] * 3
    seconds = [end - start for layer in given for _, start, end, _ in layer.marks]
    assert seconds[: max(0, skip - 1)] == [0.0] * max(0, skip - 1)
    assert all(each > 0 for each in seconds[max(0, skip - 1) :])


def test_layers_that_have_run_are_measured() -> None:
    given = linears(3)
    assert prefix(given).measured == 0
    prefix(given[:2]).run((X,))
    assert prefix(given).measured == 2
    assert prefix(given[:2]).measured == 2


def test_drawing_and_writing_layers_are_named() -> None:
    def write(module: nn.Module, x: Tensor) -> Tensor:
        module.get_buffer("seen").add_(1)
        return x

    writing = Net(write)
    writing.register_buffer("seen", torch.zeros(()))
    own = Net(lambda m, x: x)
    vars(own)["generator"] = torch.Generator()
    for modules, drew, wrote in (
        ([nn.Linear(6, 6)], None, None),
        ([nn.Linear(6, 6), nn.Dropout(0.5)], "layer 5 (Dropout)", None),
        ([nn.Dropout(0.5), writing], "layer 4 (Dropout)", ("layer 5 (Net)", "seen")),
        ([own], "layer 4 (Net)", None),
    ):
        frozen = prefix(layers(*modules))
        frozen.run((X,))
        assert (frozen.drew, frozen.wrote) == (drew, wrote)
