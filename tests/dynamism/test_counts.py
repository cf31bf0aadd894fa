"""Counts of layers are exact and are added up on their own rank."""

from __future__ import annotations

import torch

from dynmo.dynamism.counts import Counts
from dynmo.dynamism.experts import ExpertsCase
from dynmo.dynamism.options import Experts
from dynmo.models.experts import ExpertRule, ExpertsHalf
from tests.dynamism.kept import Kept


def test_counts_add_numbers_and_tensors() -> None:
    counts, layers = Counts(2), Kept(2)
    for step in range(3):
        counts.add({0: (2, torch.tensor(step)), 1: torch.tensor([1, 2**24])})
    assert counts.total(layers, [0, 1], "counts") == [[6, 3], [3, 3 * 2**24]]
    assert counts.total(layers, [0, 1], "counts") == [[0, 0], [0, 0]], "they begin anew"


def test_layer_without_tokens_adds_no_count() -> None:
    """Such a count might be on another device than the counts of other layers."""
    half = ExpertsHalf(8, ExpertRule(3, 1, "aux-loss", 0.0, None), 0, 0.1, 0.1, 0.0)
    layers, case = Kept(1, modules=[half]), ExpertsCase(Experts(record_every=2), 3, 0.0)
    assert case.collect(0, layers) is None
    half(torch.randn(1, 7, 8))
    assert case.collect(1, layers) is None
    half(torch.randn(1, 5, 8))
    expected = case._recorded._own[0]
    assert isinstance(expected, torch.Tensor)
    assert (expected.dtype, int(expected.sum())) == (torch.int64, 7)
    shares = case.collect(2, layers)
    assert shares is not None
    assert 1.0 <= shares.shares["hottest expert"][0] <= 3.0
