"""The partition of a layer's gradients before replicas exchange them."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from dynmo.runtime.optim.gradient_reduction import buckets, shares_of


class _Sizes(nn.Module):
    def __init__(self, sizes: list[int], low: list[int]) -> None:
        super().__init__()
        for i, size in enumerate(sizes):
            dtype = torch.bfloat16 if i in low else torch.float32
            self.register_parameter(f"p{i}", nn.Parameter(torch.empty(size, dtype=dtype)))


@given(
    st.lists(st.sampled_from([0, 1, 7, 16_384, 16_385, 50_000]), min_size=1, max_size=6),
    st.lists(st.integers(0, 5), max_size=3),
    st.integers(1, 5),
    st.sampled_from([10_000, 30_000, 100_000, 1 << 25]),
)
def test_buckets_hold_every_share_once(
    sizes: list[int], low: list[int], replicas: int, size: int
) -> None:
    module = _Sizes(sizes, low)
    shares = shares_of(module, frozenset({"p1"}), replicas)
    parts: dict[int, list[list[tuple[int, int]]]] = {
        id(p): [[] for _ in range(replicas)] for p in module.parameters()
    }
    for bucket in buckets(shares, size):
        (dtype,) = {s.parameter.dtype for s in bucket}
        assert sum(high - low for s in bucket for low, high in s.ranges) * dtype.itemsize <= size
        for s in bucket:
            for replica, (start, stop) in enumerate(s.ranges):
                parts[id(s.parameter)][replica].append((start, stop))
    for s in shares:
        for (start, stop), share in zip(s.ranges, parts[id(s.parameter)], strict=True):
            assert share, "a bucket says whether there is a gradient, though it were empty"
            filled = [part for part in share if part[0] < part[1]]
            edges = [edge for part in filled for edge in part]
            assert edges == sorted(edges)
            assert edges[1:-1:2] == edges[2::2], "one after another"
            assert (edges[:1], edges[-1:]) == (([start], [stop]) if start < stop else ([], []))


def test_frozen_parameters_are_in_no_bucket() -> None:
    module = _Sizes([5, 6], [])
    module.get_parameter("p0").requires_grad_(False)
    ((only,),) = buckets(shares_of(module, frozenset(), 2), 1 << 20)
    assert only.parameter is module.get_parameter("p1")
