"""Mixture of depths in models of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import dynmo
from dynmo.huggingface import from_pretrained, save_pretrained
from dynmo.models.huggingface.model import HuggingFaceModel
from dynmo.runtime.comm.meeting import Meeting
from tests.combinations import mostly_matrix
from tests.models.huggingface.case_jobs import SHAPES, TRAIN, equal_on_ranks, save_shape
from tests.models.huggingface.small import make_batch
from tests.models.huggingface.tiny import config as tiny
from tests.pool import Pool

PREDICTORS: dict[str, dict[str, Any]] = {
    "mlp": {"predictor": "mlp"},
    "bce": {"predictor": "bce"},
    "threshold": {"predictor": "mlp", "threshold_from": 3},
}
COMBINATIONS = [(predictor, shape) for shape in SHAPES for predictor in PREDICTORS]


@pytest.mark.parametrize(
    ("predictor", "shape"), mostly_matrix(COMBINATIONS, [("threshold", "llama")])
)
def test_ranks_moves_and_a_resume_keep_the_bits(
    pool: Pool, tmp_path: Path, predictor: str, shape: str
) -> None:
    options = {"capacity": 0.5, "every": 2, **PREDICTORS[predictor]}
    told = equal_on_ranks(pool, tmp_path, case="MixtureOfDepths", options=options, shape=shape)
    plain = pool.run(TRAIN, 1, shape=shape)[0]["losses"]
    assert all(a != b for a, b in zip(told["losses"], plain, strict=True))


@pytest.mark.matrix
@pytest.mark.parametrize("shape", SHAPES)
def test_all_tokens_have_the_numbers_of_the_model_alone(
    pool: Pool, tmp_path: Path, shape: str
) -> None:
    options = {"capacity": 1.0, "every": 2}
    folder = save_shape(shape, tmp_path)
    given: dict[str, Any] = {"shape": folder, "pipeline": {"max_grad_norm": 0}}
    routed = pool.run(TRAIN, 1, case="MixtureOfDepths", options=options, **given)[0]["losses"]
    assert routed == pool.run(TRAIN, 1, **given)[0]["losses"]


def layers_of(capacity: float, seed: int = 0) -> list[torch.nn.Module]:
    cases = [dynmo.MixtureOfDepths(capacity=capacity, every=1)]
    model = from_pretrained(tiny("llama"), cases=cases, seed=seed)
    return [layer.eval() for layer in model.build(range(model.layers))]


def logits(layers: list[torch.nn.Module], *given: Tensor | None) -> Tensor:
    found: Any = layers[0](*given)
    for layer in layers[1:]:
        found = layer(*found)
    return found


@pytest.mark.parametrize("seed", [0, 1])
def test_samples_of_a_packed_row_stay_apart(seed: int) -> None:
    """A sample gets what it gets in a row of its own, also where its neighbours are left out."""
    layers, ids = layers_of(0.5, seed), torch.randint(3, 90, (2, 8))
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]] * 2)
    both = logits(layers, ids, None, positions)
    first, second = logits(layers, ids[:, :3]), logits(layers, ids[:, 3:])
    torch.testing.assert_close(both, torch.cat((first, second), 1))


def test_padding_changes_nothing() -> None:
    layers, ids = layers_of(0.5), torch.randint(3, 90, (2, 8))
    mask = torch.ones_like(ids)
    mask[0, 5:] = 0
    short = logits(layers, ids[:1, :5])
    torch.testing.assert_close(logits(layers, ids, mask)[:1, :5], short)


def exported(world: Meeting, folder: str) -> dict[str, Any]:
    """What transformers, and dynmo, load of an export."""
    cases = [dynmo.MixtureOfDepths(capacity=0.5, every=2)]
    model = from_pretrained(tiny("llama"), cases=cases)
    pipeline = dynmo.Pipeline(model, world, microbatches=4, cases=cases, steps=3)
    pipeline.step(make_batch(0, padded=False))
    save_pretrained(pipeline, folder)
    plain: Any = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    again = from_pretrained(folder, cases=cases)
    assert isinstance(again, HuggingFaceModel)
    state = pipeline.state_dict()
    loaded = {
        n: x for each in again.build(range(again.layers)) for n, x in each.state_dict().items()
    }
    return {
        "missing": sorted(plain[1]["missing_keys"]),
        "unexpected": sorted(plain[1]["unexpected_keys"]),
        "equal": state.keys() == loaded.keys()
        and all(torch.equal(state[name], loaded[name]) for name in state),
    }


def test_an_export_has_the_routers_beside_the_model(pool: Pool, tmp_path: Path) -> None:
    job = "tests.cases.mixture_of_depths.test_hugging_face:exported"
    (told,) = pool.run(job, 1, folder=str(tmp_path / "model"))
    assert told["missing"] == []
    assert told["unexpected"] == [
        *(f"depth_routers.1.predictor.{at}.{name}" for at in (0, 2) for name in ("bias", "weight")),
        "depth_routers.1.weight.weight",
    ]
    assert told["equal"]
