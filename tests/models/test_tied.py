"""Weights that two layers of `dynmo.Sequential` share."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import dynmo
from dynmo import ModelOptions, load_model
from dynmo.errors import ConfigError
from tests.combinations import mostly_matrix
from tests.models.tied_layers import TIED, batch, layers, plain
from tests.pool import Pool
from tests.test_own_models import run

JOBS = "tests.models.tied_layers:"


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


@pytest.mark.parametrize(
    ("tied", "told"),
    [
        (
            [],
            r"layers 2 and 3 share the parameter linear\.weight; give each layer its own, or say "
            + re.escape(f"dynmo.Sequential(..., tied={TIED[::-1]})"),
        ),
        ([(0, 5)], r"tied has \(0, 5\); give pairs like"),
        ([*TIED, ((0, "weight"), (6, "weight"))], "tied names layer 6, but the layers are 0 to 5"),
        (
            [((0, "weight"), (5, "weight"))],
            "tied names weight of layer 5, which has no such parameter; it has linear.weight",
        ),
        (
            [((0, "weight"), (1, "weight"))],
            r"weight of layer 0, which is float32 \[11, 8\], and weight of layer 1, which is float",
        ),
        (
            [TIED[0], ((2, "weight"), (5, "linear.weight"))],
            "gives linear.weight of layer 5 to two owners",
        ),
        (
            [TIED[0], ((5, "linear.weight"), (2, "weight"))],
            "gives linear.weight of layer 5 to two owners",
        ),
        ([((0, "weight"), (0, "weight"))], "gives weight of layer 0 to two owners"),
    ],
)
@pytest.mark.parametrize("factories", [False, True])
def test_bad_pairs_are_refused(world: dynmo.World, tied: Any, told: str, factories: bool) -> None:
    made: Any = layers()
    if factories:
        made = [lambda layer=layer: layer for layer in made]
    with pytest.raises(ConfigError, match=told) as refused:
        dynmo.Pipeline(dynmo.Sequential(made, tied=tied), world, microbatches=3)
    assert "\n" not in str(refused.value)


def test_one_module_in_two_layers_is_refused() -> None:
    shared = nn.Linear(4, 4)
    made = [nn.Sequential(shared), nn.Sequential(shared, nn.ReLU())]
    tied: Any = [((0, f"0.{name}"), (1, f"0.{name}")) for name in ("weight", "bias")]
    with pytest.raises(ConfigError, match="belong to one module; give each layer a module"):
        dynmo.Sequential(made, tied=tied)


def test_function_of_a_run_returns_tied_layers(pool: Pool) -> None:
    kind = "tests.models.tied_layers:of_bytes"
    one, other = (run(pool, kind, ranks, train={"steps": 2}) for ranks in (1, 2))
    assert one["digest"] == other["digest"]
    modules = load_model(ModelOptions(kind=f"python:{kind}")).build(())
    assert all(parameter.is_meta for module in modules for parameter in module.parameters())
