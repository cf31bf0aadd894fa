"""Dense attention with one vector as query and key."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from dynmo.cases.sparse_attention.shared import dense_attention, rows_of, scale_keys
from tests.cases.sparse_attention.masked import Shape, before, check, inputs, shapes


@given(shapes)
def test_dense_attention_equals_the_plain_formula(shape: Shape) -> None:
    check(dense_attention, before(*shape[:3]), shape)


@given(shapes, st.booleans())
def test_rows_are_copied_and_keys_are_normalised(shape: Shape, strided: bool) -> None:
    """Rows may come from views. A row of zeros has a key of zeros."""
    x = inputs(*shape)[0]
    q = rows_of(torch.stack((-x, x), 2)[:, :, 1] if strided else x)
    assert torch.equal(q, torch.cat((x.flatten(0, 2), torch.zeros(1, shape[3]))))
    k, factors = scale_keys(q, 0.25)
    torch.testing.assert_close(k, q * factors[:, None])
    lengths = torch.full((len(q),), 0.25, dtype=x.dtype)
    lengths[-1] = 0
    torch.testing.assert_close(k.norm(dim=-1), lengths)
