"""Which blocks a probe cuts into halves."""

from __future__ import annotations

import pytest

from dynmo.models.huggingface.cut import halves_of
from tests.combinations import mostly_matrix
from tests.models.huggingface.test_structure import structure

WHOLE = [
    ("phi", "resid_dropout runs twice"),
    ("cohere", "its two modules take the same hidden states (parallel attention)"),
    ("beam", "the hidden states change even where a module adds nothing"),
    ("doge", "the block has parameters of its own"),
]


@pytest.mark.parametrize(("kind", "reason"), mostly_matrix(WHOLE, WHOLE[1::2]))
def test_blocks_stay_whole(kind: str, reason: str) -> None:
    assert halves_of(structure(kind), 0) == reason
