"""CSR arithmetic, compared with the dense matrix."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from dynmo.cases.pruning.csr import Csr, pack, sddmm_, spmm, sum_tokens, unpack

sizes = st.integers(1, 24)
tokens = st.sampled_from([0, 1, 7, 16, 64, 65, 130])
shares = st.sampled_from([0.0, 0.05, 0.3, 0.8, 1.0])


def drawn(rows: int, columns: int, share: float, seed: int) -> tuple[Csr, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    kept = torch.rand(rows, columns, generator=generator) < share
    dense = torch.randn(rows, columns, generator=generator, dtype=torch.float64) * kept
    return Csr.of(kept), dense[kept], dense


def filled(csr: Csr, values: Tensor) -> Tensor:
    out = torch.zeros(csr.shape[0] * csr.shape[1], dtype=values.dtype)
    out[csr.positions()] = values
    return out.view(csr.shape)


@given(sizes, sizes, shares, st.integers(0, 100))
def test_transposed_rows_hold_the_weights(rows: int, columns: int, share: float, seed: int) -> None:
    csr, values, dense = drawn(rows, columns, share, seed)
    assert csr.shape == (rows, columns)
    assert torch.equal(filled(csr, values), dense)
    assert (csr.positions().diff() > 0).all()
    flipped, order = csr.transposed()
    assert flipped.shape == (columns, rows)
    assert torch.equal(filled(flipped, values[order.long()]), dense.t())
    assert (flipped.positions().diff() > 0).all()


@given(tokens, sizes, st.booleans())
def test_packed_tokens_unpack(count: int, features: int, contiguous: bool) -> None:
    x = torch.randn(count, features) if contiguous else torch.randn(count, 2 * features)[:, ::2]
    packed = pack(x)
    assert packed.is_contiguous()
    assert packed.shape[1] == features
    assert packed.shape[2] <= 64
    filling = packed.transpose(1, 2).reshape(-1, features)[count:]
    assert not filling.any()
    assert torch.equal(unpack(packed, x.shape), x)
    torch.testing.assert_close(sum_tokens(packed), x.sum(0), rtol=1e-4, atol=1e-4)


@given(sizes, sizes, tokens, shares, st.integers(0, 100))
@example(9, 250, 20, 0.9, 0)  # rows with more kept weights than one batch of dot products
@example(9, 250, 70, 0.9, 0)
def test_products_equal_those_of_the_dense_matrix(
    rows: int, columns: int, count: int, share: float, seed: int
) -> None:
    csr, values, dense = drawn(rows, columns, share, seed)
    generator = torch.Generator().manual_seed(seed)
    x, g = (torch.randn(count, n, generator=generator).double() for n in (columns, rows))
    torch.testing.assert_close(unpack(spmm(csr, values, pack(x)), (count, rows)), x @ dense.t())
    for out in (values.clone(), torch.zeros_like(values)):
        expected = out + (g.t() @ x).flatten()[csr.positions()]
        sddmm_(csr, pack(g), pack(x), out)
        torch.testing.assert_close(out, expected)


@given(st.integers(1, 150), st.integers(1, 150), st.integers(0, 100))
def test_bits_of_a_token_do_not_depend_on_other_tokens(few: int, more: int, seed: int) -> None:
    csr, values, _ = drawn(7, 30, 0.5, seed)
    x = torch.randn(few + more, 30, generator=torch.Generator().manual_seed(seed))
    whole = unpack(spmm(csr, values.float(), pack(x)), (few + more, 7))
    part = unpack(spmm(csr, values.float(), pack(x[:few])), (few, 7))
    assert torch.equal(whole[:few], part)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_computed_in_float32(dtype: torch.dtype) -> None:
    csr, values, _ = drawn(30, 20, 0.4, 0)
    low, (x, g) = values.to(dtype), (pack(torch.randn(70, n).to(dtype)) for n in (20, 30))
    assert torch.equal(spmm(csr, low, x), spmm(csr, low.float(), x.float()).to(dtype))
    ours, theirs = (torch.zeros(len(values)) for _ in range(2))
    sddmm_(csr, g, x, ours)
    sddmm_(csr, g.float(), x.float(), theirs)
    assert torch.equal(ours, theirs)
    assert sum_tokens(x).dtype == torch.float32
