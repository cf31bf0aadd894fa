"""The comparison of a block with its halves on real values."""

from __future__ import annotations

import pytest
import torch

from dynmo.errors import ConfigError
from tests.models.huggingface.tiny import model_of


def test_halves_that_compute_other_numbers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of()
    monkeypatch.setattr(
        "dynmo.models.huggingface.cut.AddsNothing.forward",
        lambda self, *args, **kwargs: (torch.ones(1), None) if self._elements else torch.ones(1),
    )
    with pytest.raises(ConfigError, match=r"block 0 \(LlamaDecoderLayer\): its halves compute"):
        model.build(range(model.layers))


def test_a_rank_with_one_half_has_nothing_to_compare(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "dynmo.models.huggingface.building.check_halves", lambda *_: pytest.fail("compared")
    )
    model_of().build((2, 3))
