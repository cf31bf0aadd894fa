"""Sparse attention of models of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dynmo.cases.sparse_attention.case import attention_halves
from dynmo.cases.sparse_attention.dropped import Dropped
from dynmo.models.huggingface.layers import BlockLayer
from tests.combinations import mostly_matrix
from tests.models.huggingface.case_jobs import SHAPES, TRAIN, equal_on_ranks
from tests.models.huggingface.small import make_batch
from tests.models.huggingface.tiny import model_of
from tests.pool import Pool

KINDS: dict[str, dict[str, Any]] = {
    "hash": {"kind": "hash", "buckets": 4, "tile": 4},
    "drop": {"kind": "drop", "drop": 0.5, "tile": 4},
}
COMBINATIONS = [(kind, shape) for shape in SHAPES for kind in KINDS]


@pytest.mark.parametrize(("kind", "shape"), mostly_matrix(COMBINATIONS, [("hash", "llama")]))
def test_ranks_moves_and_a_resume_keep_the_bits(
    pool: Pool, tmp_path: Path, kind: str, shape: str
) -> None:
    """Until attention becomes sparse, the losses are those of the model alone."""
    options = {"start": 3, **KINDS[kind]}
    told = equal_on_ranks(pool, tmp_path, case="SparseAttention", options=options, shape=shape)
    plain = pool.run(TRAIN, 1, shape=shape)[0]["losses"]
    assert told["losses"][:3] == plain[:3]
    assert told["losses"][3:] != plain[3:]


def logits_of(shape: str, attention: Any, batch: dict[str, Tensor]) -> Tensor:
    layers = model_of(shape).build(range(model_of(shape).layers))
    for index in attention_halves(layers):
        half = layers[index]
        assert isinstance(half, BlockLayer)
        half.attention_function = attention
    found: Any = layers[0](**{name: each for name, each in batch.items() if name != "labels"})
    for layer in layers[1:]:
        found = layer(*found)
    return found[0] if isinstance(found, tuple) else found


# Gemma 2 caps its scores and has windows. gpt-oss has sinks. DeepSeek's values have another size.
@pytest.mark.parametrize("shape", ["llama", "gemma2", "gpt_oss", "deepseek_v3"])
def test_attention_that_drops_nothing_is_the_models_own(shape: str) -> None:
    """Also with padding, windows, capped scores and sinks."""
    batch = make_batch(0, padded=True)
    wanted, found = (logits_of(shape, each, batch) for each in (None, Dropped(0.0, 4, 0).of_pairs))
    counted = batch["attention_mask"] > 0
    torch.testing.assert_close(found[counted], wanted[counted])
    half = logits_of(shape, Dropped(0.5, 4, 0).of_pairs, batch)
    assert not torch.allclose(half[counted], wanted[counted], rtol=1e-3)
