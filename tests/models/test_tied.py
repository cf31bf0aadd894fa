"""Weights that two layers of `dynmo.Sequential` share."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import dynmo
from dynmo import ModelOptions, load_model
from dynmo.errors import ConfigError
from dynmo.pipeline.options import grouped
from tests.combinations import mostly_matrix
from tests.pool import Pool
from tests.test_own_models import run

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
    torch.manual_seed(0)
    first, second, last = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
    block, head = Head(WIDTH), Head(vocabulary)
    made = [nn.Embedding(vocabulary, WIDTH), first, second, block, last, head]
    block.linear.weight = second.weight
    head.linear.weight = made[0].get_parameter("weight")
    return made


def of_bytes() -> dynmo.Sequential:
    return dynmo.Sequential(layers(256), tied=TIED)


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(VOCABULARY, (2, BATCH, 5), generator=generator)
    return ids[0], ids[1]


def plain() -> tuple[list[float], nn.Module]:
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
    options |= {
        "optimizer": dynmo.AdamW(lr=0.01, betas=(0.9, 0.95), weight_decay=0.0),
        "max_grad_norm": 0,
    }
    options |= {"replicas": replicas, "resume": folder if resumes else None}
    model = dynmo.Sequential(made, tied=TIED)
    pipeline = dynmo.Pipeline(model, world, microbatches=3 // replicas, **grouped(options))
    losses = list[float]()
    for step in range(pipeline.steps, STEPS):
        if step == 2 and moves:
            counts = list(pipeline.mesh.partition.counts)
            pipeline.move([6 - len(counts) + 1] + [1] * (len(counts) - 1))
        rows = BATCH // replicas
        own = [x[pipeline.mesh.replica * rows :][:rows] for x in batch(step)]
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


JOBS = "tests.models.test_tied:"


@pytest.fixture(scope="module")
def world() -> Iterator[dynmo.World]:
    with dynmo.init(device="cpu") as world:
        yield world


@pytest.fixture(scope="module")
def alone(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("tied")
    return pool.run(JOBS + "train", 1, folder=str(folder))[0] | {"folder": str(folder)}


def test_tied_weights_train_as_in_plain_torch(alone: dict[str, Any]) -> None:
    """The gradient of each use is summed over the microbatches first. So the last bits differ."""
    losses, model = plain()
    assert alone["losses"] == pytest.approx(losses, rel=1e-6)
    for key, value in model.state_dict().items():
        torch.testing.assert_close(torch.tensor(alone["state"][key]), value, rtol=1e-5, atol=1e-6)
    assert alone["tied"]
    assert alone["loaded"]


RUNS: list[tuple[int, dict[str, Any]]] = [
    (2, {"schedule": "zb-v", "moves": True, "factories": True}),
    (2, {"resumes": True}),
    (3, {"replicas": 3, "zero": 1, "reduction_slots": 3}),
    (2, {"precision": "bfloat16", "moves": True}),
    (2, {"schedule": "zb-auto", "moves": True}),
    (3, {"schedule": "zb-v"}),
]


@pytest.mark.parametrize(("ranks", "options"), mostly_matrix(RUNS, RUNS[:4]))
def test_any_ranks_have_the_bits_of_one(
    pool: Pool, alone: dict[str, Any], ranks: int, options: dict[str, Any]
) -> None:
    same = alone
    numeric = {key: options[key] for key in ("reduction_slots", "precision") if key in options}
    if numeric:
        same = pool.run(JOBS + "train", 1, **numeric)[0]
    if "resumes" in options:
        options = options | {"folder": alone["folder"]}
    for told in pool.run(JOBS + "train", ranks, **options):
        assert told["losses"] == same["losses"][-len(told["losses"]) :]
        assert told["weights"] == same["weights"]
        assert told["tied"]
        assert told["loaded"]


def test_shared_parameters_are_untied_over_one_memory(world: dynmo.World) -> None:
    modules = layers()
    head, table = modules[5].get_submodule("linear"), modules[0].get_parameter("weight")
    pipeline = dynmo.Pipeline(dynmo.Sequential(modules, tied=TIED), world, microbatches=3)
    assert head.weight is not table
    pipeline.step(*batch(0))
    assert head.get_parameter("weight").data_ptr() == table.data_ptr()


def test_frozen_owner_freezes_both(world: dynmo.World) -> None:
    modules = layers()
    modules[0].requires_grad_(False)
    model = dynmo.Sequential(modules, tied=TIED)
    before = modules[0].get_parameter("weight").clone()
    dynmo.Pipeline(model, world, microbatches=3).step(*batch(0))
    assert torch.equal(modules[5].get_parameter("linear.weight"), before)


FIRST, HEAD, TWO = (0, "weight"), (5, "linear.weight"), "to two owners"
BAD: list[tuple[list[Any], str]] = [
    (
        [],
        "layers 2 and 3 share the parameter linear.weight; give each layer its own, or say "
        f"dynmo.Sequential(..., tied={TIED[::-1]})",
    ),
    ([(0, 5)], "tied has (0, 5); give pairs like"),
    ([*TIED, (FIRST, (6, "weight"))], "tied names layer 6, but the layers are 0 to 5"),
    ([(FIRST, (5, "weight"))], "weight of layer 5, which has no such parameter; it has linear"),
    (
        [(FIRST, (1, "weight"))],
        "0, which is float32 [11, 8], and weight of layer 1, which is float",
    ),
    ([TIED[0], ((2, "weight"), HEAD)], f"gives linear.weight of layer 5 {TWO}"),
    ([TIED[0], (HEAD, (2, "weight"))], f"gives linear.weight of layer 5 {TWO}"),
    ([(FIRST, FIRST)], f"gives weight of layer 0 {TWO}"),
]


@pytest.mark.parametrize(("tied", "told"), BAD)
@pytest.mark.parametrize("factories", [False, True])
def test_bad_pairs_are_refused(world: dynmo.World, tied: Any, told: str, factories: bool) -> None:
    made: Any = layers()
    if factories:
        made = [lambda layer=layer: layer for layer in made]
    with pytest.raises(ConfigError, match=re.escape(told)) as refused:
        dynmo.Pipeline(dynmo.Sequential(made, tied=tied), world, microbatches=3)
    assert "\n" not in str(refused.value)


def test_one_module_in_two_layers_is_refused() -> None:
    shared = nn.Linear(4, 4)
    made = [nn.Sequential(shared), nn.Sequential(shared, nn.ReLU())]
    tied: Any = [((0, f"0.{name}"), (1, f"0.{name}")) for name in ("weight", "bias")]
    with pytest.raises(ConfigError, match="belong to one module; give each layer a module"):
        dynmo.Sequential(made, tied=tied)


def test_function_of_a_run_returns_tied_layers(pool: Pool) -> None:
    kind = "tests.models.test_tied:of_bytes"
    one, other = (run(pool, kind, ranks, train={"steps": 2}) for ranks in (1, 2))
    assert one["digest"] == other["digest"]
    modules = load_model(ModelOptions(kind=f"python:{kind}")).build(())
    assert all(parameter.is_meta for module in modules for parameter in module.parameters())
