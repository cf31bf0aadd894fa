"""What layers and losses of one's own share, own or get later.

Each gives plain torch's number, or one error that names it.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune

import dynmo
from dynmo.errors import ConfigError, InputError
from dynmo.pipeline.options import grouped
from tests.pool import Pool

HERE = "tests.pipeline.test_own_kinds:"
SGD = functools.partial(torch.optim.SGD, lr=0.1)
MSE = nn.functional.mse_loss
X = torch.randn(8, 8, generator=torch.Generator().manual_seed(1))
Y = torch.zeros(8, 8)


class Do(nn.Module):
    """A linear, and what `do` makes of the module and its output."""

    def __init__(self, do: Callable[[Any, Tensor], Any], **parts: Any) -> None:
        super().__init__()
        self.linear, self.do = nn.Linear(8, 8), do
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Tensor) -> Any:
        return self.do(self, self.linear(x))


def four(*middle: Callable[[], nn.Module]) -> list[nn.Module]:
    """Linears, with other layers behind the first. Each call makes the same ones."""
    torch.manual_seed(0)
    more = [make() for make in middle]
    return [nn.Linear(8, 8), *more, *(nn.Linear(8, 8) for _ in range(3 - len(more)))]


def make(world: dynmo.World, layers: list[nn.Module], loss: Any = MSE, **options: Any) -> Any:
    given = {"microbatches": 2, "optimizer": SGD, "max_grad_norm": 0, "balance": "none"}
    return dynmo.Pipeline(dynmo.Sequential(layers, loss), world, **grouped(given | options))


def plain(layers: list[nn.Module], loss: Any = MSE, steps: int = 3) -> list[float]:
    optimizer, losses = SGD(nn.Sequential(*layers).parameters()), list[float]()
    for _ in range(steps):
        optimizer.zero_grad()
        losses.append(0.0)
        for out, target in zip(X.chunk(2), Y.chunk(2), strict=True):
            for layer in layers:
                out = layer(*out) if isinstance(out, tuple) else layer(out)
            part = loss(out, target) / 2
            part.backward()
            losses[-1] += part.item()
        optimizer.step()
    return losses


# -- what is read of another layer -----------------------------------------------------------------


def penalty(read: Callable[[Any], Tensor]) -> Any:
    layers = four()
    return layers, lambda out, target: MSE(out, target) + read(layers[0])


def reader(do: Callable[[Any, Tensor], Any]) -> list[nn.Module]:
    layers = four()
    return [layers[0], layers[1], Do(do, others=[layers[0]]), layers[3]]


READS: dict[str, Callable[[], Any]] = {
    "the loss reads": lambda: penalty(lambda layer: layer.weight.square().sum()),
    "the loss reads the parameter bias": lambda: penalty(lambda layer: layer.bias.detach().norm()),
    r"layer 2 \(Do\) reads the parameter weight": lambda: (
        reader(lambda own, x: nn.functional.linear(x, own.others[0].weight)),
        MSE,
    ),
    r"layer 2 \(Do\) reads the parameter bias": lambda: (
        reader(lambda own, x: x + own.others[0].bias.data.mean()),
        MSE,
    ),
}


@pytest.mark.parametrize("what", READS)
def test_read_of_another_layer_is_refused(world: dynmo.World, what: str) -> None:
    layers, loss = READS[what]()
    with pytest.raises(ConfigError, match=f"{what}.* of layer 0, which may be on another rank"):
        make(world, layers, loss).step(X, Y)
    with pytest.raises(ConfigError, match=f"{what}.* of layer 0"):
        make(world, *READS[what](), recompute="all").step(X, Y)


class Trainer:
    """Holds the layers, and its loss looks at shapes alone."""

    def __init__(self) -> None:
        self.layers, self.seen = four(), list[float]()

    def loss(self, out: Tensor, target: Tensor) -> Tensor:
        self.seen.append(sum(p.numel() for layer in self.layers for p in layer.parameters()))
        return MSE(out, target)


def test_loss_that_knows_the_layers_trains(world: dynmo.World) -> None:
    trainer = Trainer()
    pipeline = make(world, trainer.layers, trainer.loss)
    assert [pipeline.step(X, Y).loss for _ in range(3)] == pytest.approx(plain(four()), rel=1e-6)


# -- what a loss owns ------------------------------------------------------------------------------


class Weighted(nn.Module):
    """A loss that follows a running mean, in a buffer or with a learned weight."""

    mean: Tensor

    def __init__(self, learns: bool) -> None:
        super().__init__()
        self.log = nn.Parameter(torch.zeros(()), requires_grad=learns)
        self.register_buffer("mean", torch.ones(()))

    def forward(self, out: Tensor, target: Tensor) -> Tensor:
        loss = MSE(out, target)
        self.mean.lerp_(loss.detach(), 0.5)
        return loss / self.mean * torch.exp(-self.log)


def test_parameter_of_a_loss_is_refused(world: dynmo.World) -> None:
    with pytest.raises(ConfigError, match=r"the loss \(Weighted\) has the parameter log"):
        make(world, four(), Weighted(True))
    scale = nn.Parameter(torch.ones(()))
    with pytest.raises(ConfigError, match=r"or the loss trains a parameter of shape \[\]"):
        make(world, four(), lambda out, target: MSE(out * scale, target)).step(X, Y)


class Noisy(nn.Linear):
    """Draws from a generator of its own."""

    def __init__(self, generator: torch.Generator | None = None) -> None:
        super().__init__(8, 8)
        self.generator = generator or torch.Generator().manual_seed(3)

    def forward(self, input: Tensor) -> Tensor:
        drawn = torch.rand(input.shape, generator=self.generator)
        return super().forward(input) * (drawn > 0.5)


def stateful(world: dynmo.World, folder: str, **options: Any) -> dict[str, Any]:
    """A generator and the buffer of a loss, with moves between all steps, and a resume."""
    pipeline = make(world, four(Noisy), Weighted(False), **options)
    losses = list[float]()
    for step in range(3):
        if world.size > 1:
            pipeline.move([(1, 3), (3, 1), (1, 3)][step])
        losses.append(pipeline.step(X, Y).loss)
    pipeline.save(folder)
    again = make(world, four(Noisy), Weighted(False), resume=folder, **options)
    return {"losses": losses, "resumed": [each.step(X, Y).loss for each in (pipeline, again)]}


@pytest.mark.parametrize("options", [{"schedule": "1f1b", "recompute": "all"}, {}])
def test_generators_and_buffers_of_a_loss_are_state(
    pool: Pool, tmp_path: Path, options: dict[str, Any]
) -> None:
    wanted = plain(four(Noisy), Weighted(False), steps=4)
    for ranks in (1, 2):
        folder = str(tmp_path / str(ranks))
        for told in pool.run(HERE + "stateful", ranks, folder=folder, **options):
            assert told["losses"] == pytest.approx(wanted[:3], rel=1e-5)
            assert told["resumed"] == pytest.approx(2 * wanted[3:], rel=1e-5)


class Counted(nn.Linear):
    """Counts its steps beside its buffers, as torch's extra state."""

    def __init__(self, step: Any = 1) -> None:
        super().__init__(8, 8)
        self.step = step

    def get_extra_state(self) -> Any:
        return {"step": self.step}

    def set_extra_state(self, state: Any) -> None:
        self.step = state["step"]


def counted(world: dynmo.World, folder: str) -> int:
    pipeline = make(world, four(Counted))
    if 1 in pipeline.mesh.modules:
        pipeline.mesh.modules[1].step = 7
    if world.size > 1:
        pipeline.move((1, 3))
    pipeline.step(X, Y)
    pipeline.save(folder)
    again = make(world, four(Counted), resume=folder)
    return sum(each.mesh.modules[1].step for each in (pipeline, again) if 1 in each.mesh.modules)


def test_extra_state_moves_and_is_saved(pool: Pool, tmp_path: Path) -> None:
    for ranks in (1, 2):
        told = pool.run(HERE + "counted", ranks, folder=str(tmp_path / str(ranks)))
        assert sum(told) == 14
    with pytest.raises(ConfigError, match=r"get_extra_state .* of layer 1 returns a dict that"):
        dynmo.Sequential(four(lambda: Counted(object())))


def test_generator_of_two_layers_is_refused() -> None:
    shared = torch.Generator()
    with pytest.raises(ConfigError, match=r"layer 1 and layer 2 \(generator\) draw from one"):
        dynmo.Sequential(four(*2 * [functools.partial(Noisy, shared)]))


# -- what comes after the pipeline was made --------------------------------------------------------


def double(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    return output * 2


def hooked(world: dynmo.World, everywhere: bool) -> list[float] | str:
    layers = four()
    pipeline = make(world, layers)
    for layer in [layers[2]] if everywhere else [pipeline.mesh.modules[2]] if world.rank else []:
        layer.register_forward_hook(double)
    losses = [pipeline.evaluate(X, Y)]
    try:
        for counts in ((3, 1), (1, 3)):
            pipeline.move(counts)
            losses.append(pipeline.evaluate(X, Y))
    except dynmo.DynmoError as error:
        return str(error)
    return losses


def test_hook_moves_with_its_layer_or_is_refused(pool: Pool) -> None:
    layers = four()
    layers[2].register_forward_hook(double)
    right = MSE(nn.Sequential(*layers)(X), Y).item()
    for losses in pool.run(HERE + "hooked", 2, everywhere=True):
        assert losses == pytest.approx([right] * 3, rel=1e-6)
    for text in pool.run(HERE + "hooked", 2, everywhere=False):
        assert "layer 2 (Linear) has a hook on rank 1 that this one lacks (itself: forward" in text


def replace(layer: Any) -> None:
    layer.weight = nn.Parameter(layer.weight.detach().clone())


LATER: dict[str, Callable[[Any], object]] = {
    "the parameter scale of layer 1 .* was not there": lambda layer: layer.register_parameter(
        "scale", nn.Parameter(torch.ones(8))
    ),
    "the parameter weight of layer 1 .* was not there": replace,
    "the parameter weight of layer 1 .* has a hook": lambda layer: layer.weight.register_hook(
        lambda gradient: gradient / 2
    ),
    "the parameter weight of layer 1 .* was torch.float32": lambda layer: layer.half(),
    "the parameter new.weight of layer 1": lambda layer: layer.add_module("new", nn.Linear(2, 2)),
}


@pytest.mark.parametrize("what", LATER)
def test_parameter_that_would_not_train_is_refused_at_the_step(
    world: dynmo.World, what: str
) -> None:
    pipeline = make(world, four())
    pipeline.step(X, Y)
    LATER[what](pipeline.mesh.modules[1])
    with pytest.raises(ConfigError, match=what):
        pipeline.step(X, Y)


class Half(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight / 2


CHANGES: dict[str, Callable[[nn.Linear], object]] = {
    "pruned": lambda layer: prune.l1_unstructured(layer, "weight", amount=0.5),
    "parametrized": lambda layer: parametrize.register_parametrization(layer, "weight", Half()),
    "frozen": lambda layer: layer.register_parameter("zero", nn.Parameter(X, False)),
    "replaced buffer": lambda layer: layer.register_buffer("seen", torch.ones(3)),
    "gradients": lambda layer: layer(X).sum().backward(),
}


@pytest.mark.parametrize("what", CHANGES)
def test_changed_layer_trains_as_in_plain_torch(
    world: dynmo.World, tmp_path: Path, what: str
) -> None:
    layers, other = four(), four()
    pipeline = make(world, layers)
    CHANGES[what](layers[1])  # pyright: ignore[reportArgumentType]
    CHANGES[what](other[1])  # pyright: ignore[reportArgumentType]
    assert [pipeline.step(X, Y).loss for _ in range(3)] == pytest.approx(plain(other), rel=1e-5)
    if what in ("pruned", "parametrized"):
        with pytest.raises(ConfigError, match=r"layer 1 \(\w+\) got other parameters .* weight"):
            pipeline.save(tmp_path)


def frozen(world: dynmo.World) -> list[float]:
    """The rank of two layers freezes them as plain torch does. Then they move."""
    pipeline = make(world, four(), schedule="zb-h1")
    losses = [pipeline.step(X, Y).loss]
    for index in (0, 1):
        if index in pipeline.mesh.modules:
            pipeline.mesh.modules[index].requires_grad_(False)
    for counts in ((2, 2), (1, 3), (3, 1)):
        if world.size > 1:
            pipeline.move(counts)
        losses.append(pipeline.step(X, Y).loss)
    return losses


def test_layer_that_the_loop_freezes_moves(pool: Pool) -> None:
    (alone,) = pool.run(HERE + "frozen", 1)
    assert alone[-1] < alone[0]
    assert pool.run(HERE + "frozen", 2) == [alone] * 2


def frozen_twice(world: dynmo.World) -> list[float]:
    """Freezes layer 1 as plain torch does, and layer 0 by a call."""
    pipeline = make(world, four(), schedule="1f1b")
    losses = [pipeline.step(X, Y).loss]
    if 1 in pipeline.mesh.modules:
        pipeline.mesh.modules[1].requires_grad_(False)
    pipeline.freeze([0])
    losses.append(pipeline.step(X, Y).loss)
    pipeline.unfreeze([0])
    return [*losses, pipeline.step(X, Y).loss]


def test_layers_that_the_loop_freezes_join_the_frozen_prefix(pool: Pool) -> None:
    assert pool.run(HERE + "frozen_twice", 2) == pool.run(HERE + "frozen_twice", 1) * 2


def pruned(world: dynmo.World) -> str:
    pipeline = make(world, four())
    if 1 in pipeline.mesh.modules:
        prune.l1_unstructured(pipeline.mesh.modules[1], "weight", amount=0.5)
    before = pipeline.step(X, Y)
    with pytest.raises(ConfigError) as refused:
        pipeline.move((1, 3))
    assert pipeline.step(X, Y).loss < before.loss
    return str(refused.value)


def test_move_of_a_pruned_layer_is_refused_on_all_ranks(pool: Pool) -> None:
    for text in pool.run(HERE + "pruned", 2):
        assert text.startswith("layer 1 (Linear) got other parameters")
        assert "(new: weight_orig; gone: weight)" in text


# -- writes in place -------------------------------------------------------------------------------


class Add(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x.add_(1.0) + y


def table(own: Any, x: Tensor) -> Any:
    return own.table, x


ALIASES: dict[str, Callable[[], nn.Module]] = {
    "twice": lambda: Do(lambda own, x: (x, x)),
    "view": lambda: Do(lambda own, x: (x, x[1:2])),
    "buffer": lambda: Do(table, table=nn.Buffer(torch.ones(4, 8))),
}


def written(world: dynmo.World, what: str) -> str:
    with pytest.raises(dynmo.DynmoError) as refused:
        make(world, four(ALIASES[what], Add)).step(X, Y)
    return str(refused.value)


@pytest.mark.parametrize("what", ALIASES)
def test_write_to_an_alias_is_refused(pool: Pool, what: str) -> None:
    for ranks in (1, 2):
        for text in pool.run(HERE + "written", ranks, what=what):
            assert "layer 2 (Add) writes to its input 0 in place, which shares memory" in text


def test_columns_may_be_written_to(world: dynmo.World) -> None:
    """They lie between one another, and share no element."""

    def halves(own: Any, x: Tensor) -> Any:
        return x[:, :4], x[:, 4:]

    def both() -> list[nn.Module]:
        torch.manual_seed(0)
        return [nn.Linear(8, 8), Do(halves), Add(), nn.Linear(4, 8)]

    losses = [make(world, both()).step(X, Y).loss]
    assert losses == pytest.approx(plain(both(), steps=1), rel=1e-6)


def shrink(own: Any, x: Tensor) -> Tensor:
    own.linear.weight.data.mul_(0.5)
    return x


def clamp(own: Any, x: Tensor) -> Tensor:
    own.linear.weight.data.clamp_(-0.2, 0.2)
    return x


def test_weight_that_a_forward_writes_to(world: dynmo.World) -> None:
    """Each time is refused. Once a step is as in plain torch."""
    with pytest.raises(ConfigError, match=r"\(Do\): .* writes to its parameter 'linear.weight'"):
        make(world, four(lambda: Do(shrink))).step(X, Y)
    pipeline = make(world, four(lambda: Do(clamp)))
    losses = [pipeline.step(X, Y).loss for _ in range(3)]
    assert losses == pytest.approx(plain(four(lambda: Do(clamp))), rel=1e-5)


# -- batches and errors ----------------------------------------------------------------------------


def test_fewer_targets_than_inputs_are_refused(world: dynmo.World) -> None:
    pipeline = make(world, four(), microbatches=4)
    with pytest.raises(InputError, match="inputs has 8 rows and targets has 4"):
        pipeline.step(X, Y[:4])


def fewer(world: dynmo.World) -> str:
    loss = lambda out, target: (out - target).square().mean()  # noqa: E731
    pipeline = make(world, four(), loss, microbatches=4)
    given = (X, None) if world.rank == 0 else (None, Y[:4])
    with pytest.raises(InputError) as refused:
        pipeline.step(*given)
    return str(refused.value)


def test_fewer_targets_on_another_rank_are_refused(pool: Pool) -> None:
    for text in pool.run(HERE + "fewer", 2):
        assert "passed different numbers of rows" in text


def not_finite(world: dynmo.World, post_validation: bool) -> dict[str, Any]:
    broken = False

    def loss(out: Tensor, target: Tensor) -> Tensor:
        return MSE(out, target) * (float("nan") if broken else 1.0)

    layers = four(lambda: Do(lambda own, x: nn.functional.dropout(x, 0.1)))
    pipeline = make(world, layers, loss, post_validation=post_validation)
    losses = list[str]()
    for step in range(4):
        broken = step == 1
        losses.append(repr(pipeline.step(X, Y).loss))
    return {"steps": pipeline.steps, "losses": losses, "digest": pipeline.digest()}


def test_step_that_is_not_finite_counts_alike(pool: Pool) -> None:
    told = [
        each
        for ranks in (1, 2)
        for validates in (False, True)
        for each in pool.run(HERE + "not_finite", ranks, post_validation=validates)
    ]
    assert told[0]["steps"] == 4
    assert told[0]["losses"][1] == "nan"
    assert all(each == told[0] for each in told)


def evaluated(world: dynmo.World, replicas: int) -> list[float]:
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Embedding(64, 16), nn.Linear(16, 16), nn.Linear(16, 64)]
    pipeline = dynmo.Pipeline(
        dynmo.Sequential(layers), world, microbatches=8 // replicas, replicas=replicas
    )
    out = list[float]()
    for step in range(4):
        ids = torch.randint(64, (24, 9), generator=torch.Generator().manual_seed(step))
        mine = ids.chunk(replicas)[pipeline.mesh.replica]
        labels = mine[:, 1:].where(mine[:, 1:] % 3 > 0, torch.tensor(-100))
        out.append(pipeline.evaluate(mine[:, :-1], labels))
    return out


def test_evaluation_is_the_same_over_replicas(pool: Pool) -> None:
    (alone,) = pool.run(HERE + "evaluated", 1, replicas=1)
    assert pool.run(HERE + "evaluated", 4, replicas=4) == [alone] * 4


# -- modules that are made otherwise ---------------------------------------------------------------


def compiled(world: dynmo.World, wraps: bool) -> list[float]:
    layers = four()
    if wraps:
        layers[1] = torch.compile(layers[1], backend="eager")  # pyright: ignore[reportArgumentType, reportCallIssue]
    else:
        layers[1].compile(backend="eager")
    pipeline = make(world, layers)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's compiler has some of its own
        return [pipeline.step(X, Y).loss for _ in range(2)]


@pytest.mark.parametrize("wraps", [True, False])
def test_compiled_layer_trains(pool: Pool, wraps: bool) -> None:
    wanted = pytest.approx(plain(four(), steps=2), rel=1e-5)
    assert all(told == wanted for told in pool.run(HERE + "compiled", 2, wraps=wraps))


def in_double(world: dynmo.World) -> list[float]:
    layers: list[nn.Module] = [layer.double() for layer in four()]
    pipeline = make(world, layers, microbatches=4, schedule="1f1b")
    return [pipeline.step(X.double(), Y.double()).loss for _ in range(3)]


def test_model_in_float64_trains(pool: Pool, world: dynmo.World) -> None:
    layers = nn.Sequential(*four()).double()
    optimizer, right = SGD(layers.parameters()), list[float]()
    for _ in range(3):
        optimizer.zero_grad()
        loss = MSE(layers(X.double()), Y.double())
        loss.backward()
        optimizer.step()
        right.append(loss.item())
    for ranks in (1, 2):
        assert all(
            told == pytest.approx(right, rel=1e-12) for told in pool.run(HERE + "in_double", ranks)
        )
    with pytest.raises(ConfigError, match="weights are float64, but precision = 'bfloat16'"):
        make(world, list(layers), precision="bfloat16")


def second(world: dynmo.World, folder: str) -> dict[str, Any]:
    layers = four()
    first = make(world, layers)
    first.step(X, Y)
    first.save(folder)
    text = ""
    try:
        make(world, layers, microbatches=4)
    except ConfigError as error:
        text = str(error)
    # A checkpoint has all weights.
    return {"text": text, "loss": make(world, layers, resume=folder).step(X, Y).loss}


def test_second_pipeline_over_the_layers_of_one(pool: Pool, tmp_path: Path) -> None:
    for ranks in (1, 2):
        for told in pool.run(HERE + "second", ranks, folder=str(tmp_path / str(ranks))):
            assert told["loss"] == pytest.approx(plain(four())[1], rel=1e-5)
            assert told["text"].startswith("these layers belong to a pipeline") == (ranks > 1)


class Skipped(nn.Linear):
    """Stochastic depth."""

    def forward(self, input: Tensor) -> Tensor:
        return input if float(torch.rand(())) < 0.5 else input + super().forward(input)


def skipping(world: dynmo.World) -> dict[str, Any]:
    pipeline = make(world, four(*2 * [lambda: Skipped(8, 8)]), microbatches=4, schedule="1f1b")
    losses = list[float]()
    for step in range(10):
        if step == 3:
            pipeline.freeze([0])
        losses.append(pipeline.step(X, Y).loss)
    return {"losses": losses, "digest": pipeline.digest()}


def test_layer_that_is_left_out_behind_frozen_ones_trains(pool: Pool) -> None:
    told = [each for ranks in (1, 2, 4) for each in pool.run(HERE + "skipping", ranks)]
    assert all(each == told[0] for each in told)
    assert told[0]["losses"][-1] < told[0]["losses"][0]
