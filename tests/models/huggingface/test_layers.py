"""The arguments of blocks, which a rank makes once for each microbatch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import dynmo
from dynmo.models.huggingface.layers import SharedModel
from tests.models.huggingface.small import make_batch, shared_model_of
from tests.models.huggingface.tiny import VOCABULARY, model_of


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    counted: list[int] = []
    run = SharedModel._run

    def count(self: SharedModel, *arguments: Any) -> Any:
        counted.append(1)
        return run(self, *arguments)

    monkeypatch.setattr(SharedModel, "_run", count)
    return counted


@pytest.mark.parametrize(("padded", "expected"), [(False, 0), (True, 4)])
def test_shared_model_runs_once_a_microbatch(runs: list[int], padded: bool, expected: int) -> None:
    with dynmo.init(device="cpu") as world:
        pipeline = dynmo.Pipeline(model_of(), world, microbatches=4)
        pipeline.step(make_batch(0, padded))
        runs.clear()
        pipeline.step(make_batch(1, padded))
        assert len(runs) == expected


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_positions_need_no_mask(kind: str) -> None:
    """A batch of packed rows has the loss of its samples alone."""
    alone = torch.randint(VOCABULARY, (8, 6), generator=torch.Generator().manual_seed(0))
    labels = torch.cat((torch.full((8, 1), -100), alone[:, 1:]), dim=1)
    positions = torch.arange(6).repeat(4, 2)
    batch = {"input_ids": alone, "labels": labels}
    rows = {name: each.reshape(4, 12) for name, each in batch.items()}
    with dynmo.init(device="cpu") as world:
        pipeline = dynmo.Pipeline(model_of(kind), world, microbatches=2)
        wanted = pipeline.evaluate(batch)
        assert pipeline.evaluate(rows | {"position_ids": positions}) == pytest.approx(wanted)
        assert pipeline.evaluate(rows) != pytest.approx(wanted, rel=1e-4)


def test_a_mask_that_was_written_to_counts(runs: list[int]) -> None:
    shared_model = shared_model_of(model_of())
    hidden, mask = torch.zeros(3, 5, 32), torch.ones(3, 5, dtype=torch.int64)
    first = shared_model.arguments(0, hidden, mask, None)
    assert shared_model.arguments(1, hidden.clone(), mask, None)[1].keys() == first[1].keys()
    assert len(runs) == 1
    mask[0, 0] = 0
    other = shared_model.arguments(0, hidden, mask, None)
    assert len(runs) == 2
    assert first[1]["attention_mask"] is None
    assert other[1]["attention_mask"] is not None
    shared_model.arguments(0, torch.zeros(2, 5, 32), mask[:2], None)
    assert len(runs) == 3
