"""Attention within hash buckets, compared with masked dense attention."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dynmo.cases.sparse_attention import hashed_triton
from dynmo.cases.sparse_attention.hashed import (
    BucketPlan,
    draw_directions,
    hash_attention,
    hash_buckets,
    plan_buckets,
    staircase,
)
from dynmo.errors import ConfigError
from tests.cases.sparse_attention.masked import Shape, before, check, inputs, reference, run, shapes


def seen_in_buckets(buckets: Tensor) -> Tensor:
    each = buckets.transpose(1, 2)
    batch, heads, sequence = each.shape
    return (each[..., :, None] == each[..., None, :]) & before(batch, sequence, heads)


def computed(plan: BucketPlan, tile: int) -> int:
    """The pairs that the tiles compute."""
    return sum(
        chunk.buckets * sum((each.stop - each.start) * each.end for each in tiles)
        for chunk in plan.chunks
        for tiles in [staircase(chunk.length - 1, tile, torch.float32)]
    )


@given(shapes, st.integers(1, 9), st.integers(1, 40), st.integers(0, 5))
def test_hashed_attention_equals_masked_dense_attention(
    shape: Shape, count: int, tile: int, skew: int
) -> None:
    """A higher `skew` fills the first bucket. The last buckets are then often empty."""
    chosen = torch.rand(shape[:3], generator=torch.Generator().manual_seed(count)) ** (1 + skew)
    buckets = (chosen * count).long()
    check(lambda x, v: hash_attention(x, v, buckets, count, tile), seen_in_buckets(buckets), shape)


def test_several_chunks_of_buckets_equal_masked_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows do not fit into one chunk. Buckets have from one to dozens of rows."""
    monkeypatch.setattr("dynmo.cases.sparse_attention.hashed._CHUNK_ROWS", 128)
    shape = (1, 200, 2, 4)
    buckets = (torch.rand(shape[:3], generator=torch.Generator().manual_seed(0)) ** 3 * 16).long()
    plan, pairs = plan_buckets(buckets, 16), int(seen_in_buckets(buckets).sum())
    assert len(plan.chunks) > 3
    assert pairs < computed(plan, 4) < 1.5 * pairs
    check(lambda x, v: hash_attention(x, v, buckets, 16, 4), seen_in_buckets(buckets), shape)


def test_strided_float32_inputs_are_accepted() -> None:
    """The inputs are views of one projection's output, as in the model."""
    draws = torch.Generator().manual_seed(1)
    packed = torch.randn(2, 200, 2, 3, 16, generator=draws, requires_grad=True)
    x, v = packed.unbind(2)
    buckets = hash_buckets(x, draw_directions(3, 16, 8, 5))
    out, expected = hash_attention(x, v, buckets, 8), reference(x, v, seen_in_buckets(buckets))
    ours, theirs = (torch.autograd.grad(y.square().sum(), packed)[0] for y in (out, expected))
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@given(shapes, st.integers(1, 8), st.integers(0, 100))
def test_bucket_is_the_argmax_of_the_projections(shape: Shape, half: int, seed: int) -> None:
    x = inputs(*shape, seed=seed)[0]
    directions = draw_directions(shape[2], shape[3], 2 * half, seed)
    torch.testing.assert_close(directions.norm(dim=1), torch.ones(shape[2], half))
    z = torch.einsum("bnhd,hdm->bnhm", x, directions.double())
    buckets = hash_buckets(x, directions)
    # Two may be equal but for the order of a sum.
    chosen = torch.cat((z, -z), -1).gather(-1, buckets[..., None])[..., 0]
    torch.testing.assert_close(chosen, z.abs().amax(-1))
    # A key is in the bucket of its query.
    assert torch.equal(hash_buckets(4 * x, directions), buckets)


def test_bucket_ties_take_the_first() -> None:
    x = torch.tensor([[1.0, -1.0], [-1.0, 1.0], [0.0, 0.0], [-1.0, -1.0]]).view(1, 4, 1, 2)
    assert hash_buckets(x, torch.eye(2)[None]).flatten().tolist() == [0, 1, 0, 2]


@given(st.integers(0, 2**62))
def test_draws_follow_from_the_seed(seed: int) -> None:
    torch.rand(1)  # whatever state the default generator is in
    assert torch.equal(draw_directions(2, 4, 6, seed), draw_directions(2, 4, 6, seed))
    assert not torch.equal(draw_directions(2, 4, 6, seed), draw_directions(2, 4, 6, seed + 1))


def test_repeated_run_has_the_same_bits() -> None:
    drawn = inputs(2, 300, 2, 16, dtype=torch.float32)
    buckets = hash_buckets(drawn[0], draw_directions(2, 16, 16, 0))
    first, *others = (run(lambda x, v: hash_attention(x, v, buckets, 16), *drawn) for _ in range(3))
    assert all(torch.equal(first[key], other[key]) for other in others for key in first)


@pytest.mark.parametrize("tile", [8, 32])
def test_tiles_of_other_buckets_are_skipped(tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """F needs two products per tile, and B needs four. B also recomputes the scores."""
    done = 0
    bmm = torch.bmm

    def counting(a: Tensor, b: Tensor) -> Tensor:
        nonlocal done
        done += a.shape[0] * a.shape[1] * a.shape[2] * b.shape[2]
        return bmm(a, b)

    sequence, size = 512, 16
    x, v, g = inputs(1, sequence, 2, size, dtype=torch.float32)
    buckets = hash_buckets(x, draw_directions(2, size, 16, 0))
    planned = computed(plan_buckets(buckets, 16), tile)
    pairs = int(seen_in_buckets(buckets).sum())
    x, v = x.requires_grad_(), v.requires_grad_()
    monkeypatch.setattr(torch, "bmm", counting)
    out = hash_attention(x, v, buckets, 16, tile)
    assert done == 2 * planned * size
    out.backward(g)
    assert done == 7 * planned * size
    dense = 2 * sequence * (sequence - 1) // 2
    assert pairs < 0.12 * dense
    assert planned < {8: 1.7, 32: 2.5}[tile] * pairs


@pytest.mark.gpu
def test_cuda_agrees_with_the_cpu() -> None:
    drawn = inputs(2, 300, 3, 24, dtype=torch.float32)
    buckets = hash_buckets(drawn[0], draw_directions(3, 24, 16, 0))
    expected, actual = (
        run(lambda x, v: hash_attention(x, v, buckets.to(x.device), 16), *(t.to(on) for t in drawn))
        for on in ("cpu", "cuda")
    )
    torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-4)


def test_a_missing_triton_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hashed_triton, "triton", None)
    x, v, _ = inputs(1, 4, 1, 2)
    with pytest.raises(ConfigError, match="needs Triton"):
        hashed_triton.hash_attention(x, v, torch.zeros(1, 4, 1, dtype=torch.int64), 1e-6)
