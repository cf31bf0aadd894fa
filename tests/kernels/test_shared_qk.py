"""Dense attention with one vector as query and key."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from dynmo.kernels.shared_qk import dense_attention, scale_keys, take
from tests.kernels.attention import Shape, before, check, inputs, shapes


@given(shapes)
def test_dense_attention_equals_the_plain_formula(shape: Shape) -> None:
    check(dense_attention, before(*shape[:3]), shape)


@given(shapes, st.booleans(), st.integers(0, 100))
def test_take_gathers_rows_and_scale_keys_normalizes(
    shape: Shape, strided: bool, seed: int
) -> None:
    """Rows may come from views. Row -1 gives zeros, and its key stays zero."""
    x = inputs(*shape, seed=seed)[0]
    source = torch.stack((-x, x), 2)[:, :, 1] if strided else x
    draws = torch.Generator().manual_seed(seed)
    rows = torch.randint(-1, x.numel() // x.shape[-1], (37,), generator=draws)
    q, k = torch.empty(2, 37, x.shape[-1], dtype=x.dtype)
    factors = torch.empty(37, dtype=x.dtype)
    take(source, rows, q)
    assert torch.equal(q, x.reshape(-1, x.shape[-1])[rows] * (rows >= 0)[:, None])
    scale_keys(q, 0.25, k, factors)
    torch.testing.assert_close(k, q * factors[:, None])
    torch.testing.assert_close(k.norm(dim=-1), torch.where(rows >= 0, 0.25, 0.0).double())
