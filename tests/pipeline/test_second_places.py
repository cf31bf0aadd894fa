"""Parameters with a second place beside a layer's modules: plain torch's numbers, or a refusal.

A step, a save and a load keep the layer's tensors. A move gives it new ones.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dynmo
from dynmo.errors import ConfigError
from dynmo.kernels.split import SplitLinear
from dynmo.runtime.layer.reads import second_place_of
from tests.pipeline.test_own_kinds import MSE, SGD, X, Y, make, plain
from tests.pool import Pool

HERE = "tests.pipeline.test_second_places:"


class Keeps(nn.Module):
    """Multiplies with `read`, which `prepare` makes beside the parameter."""

    read: Any

    def __init__(self, prepare: Callable[[Any], Any], read: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 8) / 4)
        self.read = read
        prepare(self)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.weight[:8] + x @ self.read(self))


def in_a_list(own: Any) -> None:
    own.kept = [own.weight]


def in_a_closure(own: Any) -> None:
    weight = own.weight
    own.get = lambda: weight


def in_a_view(own: Any) -> None:
    own.view = own.weight.detach()[8:]


def in_a_buffer(own: Any) -> None:
    own.register_buffer("lower", own.weight.detach()[8:])


def in_a_parameter(own: Any) -> None:
    own.other = nn.Parameter(own.weight.detach())


KINDS: dict[str, tuple[Callable[[Any], None], Callable[[Any], Tensor]]] = {
    r"keeps its parameter weight in kept\[0\], too": (in_a_list, lambda own: own.kept[0][8:]),
    r"keeps its parameter weight in get \(weight\)": (in_a_closure, lambda own: own.get()[8:]),
    "keeps its parameter weight in view": (in_a_view, lambda own: own.view),
    "one memory for its parameter weight and its buffer lower": (
        in_a_buffer,
        lambda own: own.lower,
    ),
    "one memory for its parameter other and its parameter weight": (
        in_a_parameter,
        lambda own: own.other[8:],
    ),
}


def layers_of(what: str) -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Linear(8, 8), Keeps(*KINDS[what]), nn.Linear(8, 8)]


def train(world: dynmo.World, what: str, folder: str) -> list[Any]:
    """Trains, goes back to a checkpoint, and moves the layer."""
    pipeline = make(world, layers_of(what))
    told: list[Any] = [pipeline.step(X, Y).loss]
    pipeline.save(folder)
    told += [pipeline.step(X, Y).loss for _ in range(2)]
    pipeline.load(folder)
    told += [pipeline.step(X, Y).loss for _ in range(2)]
    with pytest.raises(ConfigError, match=f"layer 1 .*{what}.*; .*, or let no layer move") as error:
        pipeline.move([2, 1] if pipeline.mesh.partition.counts == (1, 2) else [1, 2])
    return [*told, pipeline.step(X, Y).loss, str(error.value)]


@pytest.mark.parametrize("what", KINDS)
def test_second_place_of_a_parameter(pool: Pool, tmp_path: Path, what: str) -> None:
    one, two = pool.run(f"{HERE}train", 2, what=what, folder=str(tmp_path / "run"))
    first, *after = plain(layers_of(what), steps=4)
    assert one == two
    assert one[:-1] == pytest.approx([first, *after[:2], *after], rel=1e-5)


def balanced(world: dynmo.World) -> str:
    with pytest.raises(ConfigError) as error:
        make(world, layers_of(next(iter(KINDS))), balance="exact")
    return str(error.value)


def test_balancer_refuses_it_before_the_first_step(pool: Pool) -> None:
    one, two = pool.run(f"{HERE}balanced", 2)
    assert one == two
    assert one.endswith('read self.weight instead, or let no layer move (balance="none")')


def test_buffer_that_a_forward_writes_to_has_one_place(world: dynmo.World) -> None:
    class Counts(nn.Linear):
        def __init__(self) -> None:
            super().__init__(8, 8)
            self.register_buffer("count", torch.zeros(()))
            self.register_buffer("mean", torch.zeros(()))
            self.seen = {"count": self.count, "mean": self.mean}

        def forward(self, input: Tensor) -> Tensor:
            self.count += 1
            return super().forward(input) / self.count

    what = r"keeps its buffer count in seen\['count'\], too, .*; read self.count instead$"
    with pytest.raises(ConfigError, match=rf"layer 1 \(Counts\) {what}"):
        make(world, [nn.Linear(8, 8), Counts()]).step(X, Y)


class Turned(nn.Linear):
    """Keeps a view of a weight that dynmo makes contiguous."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.weight = nn.Parameter(torch.randn(8, 8).t())
        self.view = self.weight.detach()[:4]


def test_view_of_a_tensor_that_gets_other_memory_is_refused(world: dynmo.World) -> None:
    what = r"\(Turned\) keeps its parameter weight in view, too, .*; read self.weight instead$"
    with pytest.raises(ConfigError, match=what):
        make(world, [nn.Linear(8, 8), Turned()])
    view, kept = (
        r"keeps its parameter weight in view",
        r"keeps its parameter weight in kept\[0\], too",
    )
    with pytest.raises(ConfigError, match=view):
        make(world, layers_of(view), precision="bfloat16")
    make(world, layers_of(kept), precision="bfloat16").step(X, Y)


def columns() -> nn.Module:
    """Two parameters that lie between one another."""
    module, whole = nn.Module(), torch.zeros(8, 8)
    module.left, module.right = nn.Parameter(whole[:, :4]), nn.Parameter(whole[:, 4:])
    return module


def parts() -> nn.Module:
    """Two parameters that lie side by side in one memory."""
    module = nn.Module()
    module.up, module.gate = map(nn.Parameter, torch.zeros(2, 8, 8))
    return module


def calls_itself() -> nn.Module:
    module: Any = nn.Sequential(nn.Linear(8, 8))
    module.again = module[0].forward
    module.kept = [module[0], torch.zeros(8)]
    return module


def derived() -> nn.Module:
    """A class over one of dynmo's, which follows a change of its weights by itself."""
    module: Any = type("Derived", (SplitLinear,), {})(8, 8)
    module._copies = {0: module.weight}
    return module


@pytest.mark.parametrize(
    "layer",
    [
        derived(),
        nn.LSTM(8, 8),
        nn.utils.spectral_norm(nn.Linear(8, 8)),
        nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)),
        parts(),
        columns(),
        calls_itself(),
    ],
)
def test_layer_without_a_second_place_may_move(layer: nn.Module) -> None:
    assert second_place_of(layer, [name for name, _ in layer.named_parameters()]) is None


def tied(world: dynmo.World) -> list[float]:
    """Trains a layer with two parameters that are one weight, and moves it."""
    torch.manual_seed(0)
    layers = [nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), nn.Linear(8, 8)]
    model = dynmo.Sequential(layers, MSE, tied=[((1, "0.weight"), (1, "1.weight"))])
    pipeline = dynmo.Pipeline(model, world, microbatches=2, optimizer=SGD, balance="none")
    losses = [pipeline.step(X, Y).loss]
    if world.size > 1:
        pipeline.move([2, 1] if pipeline.mesh.partition.counts == (1, 2) else [1, 2])
    return [*losses, *(pipeline.step(X, Y).loss for _ in range(2))]


def test_tied_parameters_of_one_layer_move(pool: Pool) -> None:
    assert pool.run(f"{HERE}tied", 2) == pool.run(f"{HERE}tied", 1) * 2


# -- other ways in which a weight leaves a layer ---------------------------------------------------


class HandsOn(nn.Linear):
    def forward(self, input: Tensor) -> Any:
        return super().forward(input), self.weight


class Adds(nn.Linear):
    def forward(self, x: Tensor, *others: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return torch.tanh(super().forward(x) + others[0].sum(0)), *others


class Last(nn.Linear):
    def forward(self, x: Tensor, *others: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().forward(x) + others[0].mean()


def test_weight_that_is_handed_on_is_evaluated(world: dynmo.World) -> None:
    torch.manual_seed(0)
    layers = [HandsOn(8, 8), Adds(8, 8), Last(8, 8)]
    losses = plain(copy.deepcopy(layers), steps=2)
    pipeline = make(world, layers)
    assert pipeline.evaluate(X, Y) == pytest.approx(losses[0], rel=1e-6)
    assert [pipeline.step(X, Y).loss for _ in range(2)] == pytest.approx(losses, rel=1e-6)


class CountsAndHandsOn(HandsOn):
    calls = 0

    def forward(self, input: Tensor) -> Any:
        self.calls += 1
        y, weight = super().forward(input)
        return y / self.calls, weight


def test_weight_that_is_handed_on_hides_no_count(world: dynmo.World) -> None:
    with pytest.raises(ConfigError, match="writes to its attribute 'calls'"):
        make(world, [CountsAndHandsOn(8, 8), Last(8, 8)]).step(X, Y)


class Hooked(nn.Linear):
    """Halves the gradient of its input, and writes to what runs it again in the first step."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.register_buffer("count", torch.zeros(()), persistent=False)
        self.calls = 0

    def forward(self, input: Tensor) -> Tensor:
        self.calls += 1
        self.count += 1
        input.register_hook(lambda gradient: 0.5 * gradient)
        return super().forward(input)


def test_hook_on_an_input_runs_once(world: dynmo.World) -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(8, 8), Hooked(), nn.Linear(8, 8)]
    losses = plain(copy.deepcopy(layers))
    pipeline = make(world, layers)
    assert [pipeline.step(X, Y).loss for _ in range(3)] == pytest.approx(losses, rel=1e-6)


class Slope(nn.Linear):
    """Hands on the slope of an energy."""

    def forward(self, input: Tensor) -> Tensor:
        return torch.func.grad(lambda x: torch.tanh(super(Slope, self).forward(x)).sum())(input)


def test_layer_may_use_torch_func(world: dynmo.World) -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(8, 8), Slope(8, 8), nn.Linear(8, 8)]
    losses = plain(copy.deepcopy(layers))
    pipeline = make(world, layers)
    assert [pipeline.step(X, Y).loss for _ in range(3)] == pytest.approx(losses, rel=1e-6)
