"""Experts of models of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import dynmo
from dynmo.errors import ConfigError
from dynmo.huggingface import from_pretrained
from tests.combinations import mostly_matrix
from tests.models.huggingface.case_jobs import TRAIN, equal_on_ranks, save_shape
from tests.models.huggingface.tiny import config as tiny
from tests.pool import JobFailed, Pool

SHAPES: dict[str, dict[str, Any]] = {
    "mixtral": {},
    "qwen3_moe": {"decoder_sparse_step": 1},
    "deepseek_v3": {"first_k_dense_replace": 1},
}
OPTIONS: dict[str, Any] = {"record_every": 1, "place_every": 2, "least_gain": 0.0}


@pytest.mark.matrix
@pytest.mark.parametrize("shape", SHAPES)
def test_any_number_of_ranks_has_the_losses_of_transformers(
    pool: Pool, tmp_path: Path, shape: str
) -> None:
    folder = save_shape(shape, tmp_path / "model", **SHAPES[shape])
    given: dict[str, Any] = {"shape": folder, "pipeline": {"max_grad_norm": 0}}
    told = equal_on_ranks(pool, tmp_path / "saved", case="Experts", options=OPTIONS, **given)
    # Each weight's gradient is added up over the microbatches in one product after another.
    assert told["losses"] == pytest.approx(pool.run(TRAIN, 1, **given)[0]["losses"], rel=1e-6)


@pytest.mark.parametrize("shape", mostly_matrix(SHAPES, ["mixtral"]))
def test_spread_experts_keep_the_bits(pool: Pool, tmp_path: Path, shape: str) -> None:
    """Experts are placed anew every other step. transformers loads what is exported."""
    given: dict[str, Any] = {"case": "Experts", "options": OPTIONS, "shape": shape}
    given["config"] = SHAPES[shape]
    pipeline: dict[str, Any] = {"microbatches": 2, "replicas": 2, "reduction_slots": 2}
    folder = tmp_path / "model"
    alone = pool.run(TRAIN, 2, pipeline=pipeline, export=str(folder), **given)[0]
    for ranks in (2, 4):
        assert pool.run(TRAIN, ranks, pipeline=pipeline | {"expert": 2}, **given)[0] == alone
    loaded: Any = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not {*loaded[1]["missing_keys"], *loaded[1]["unexpected_keys"]}
    own = from_pretrained(folder, cases=[dynmo.Experts()])
    state = {n: x for each in own.build(range(own.layers)) for n, x in each.state_dict().items()}
    for name, value in loaded[0].state_dict().items():
        apart = [each for key, each in state.items() if key.rpartition(".")[0] == name]
        assert torch.equal(torch.stack(apart) if apart else state[name], value)


@pytest.mark.matrix
def test_spread_experts_are_not_exported(pool: Pool, tmp_path: Path) -> None:
    pipeline: dict[str, Any] = {"microbatches": 2, "replicas": 2, "expert": 2}
    given: dict[str, Any] = {"case": "Experts", "shape": "mixtral", "pipeline": pipeline}
    with pytest.raises(JobFailed, match=r"parallel\.expert = 1"):
        pool.run(TRAIN, 2, export=str(tmp_path / "model"), **given)


def test_experts_with_biases_are_refused() -> None:
    with pytest.raises(ConfigError, match="GptOssExperts have biases, turned weights"):
        from_pretrained(tiny("gpt_oss"), cases=[dynmo.Experts()])
