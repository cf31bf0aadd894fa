"""Modules that multiply by their own parameters, beside plain torch."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

import dynmo
from dynmo.kernels.deferral import install
from dynmo.kernels.split import SplitLinear, WeightTape
from tests.kernels.own_products import Own, experts, grouped, matmul
from tests.kernels.test_split import gradients, run, run_b, split


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, **options: bool) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(width, heads, **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, x, x, need_weights=False)[0]


class Scaled(nn.Embedding):
    """As Gemma's embedding."""

    def forward(self, input: Tensor) -> Tensor:
        return 3.0 * super().forward(input)


def check(module: nn.Module, inputs: list[Tensor], expected: int | None) -> None:
    """Outputs and gradients have the bits of plain torch.

    W gives so many parameters, if it is known.
    """
    plain = copy.deepcopy(module)
    tape = split(module, deferred=True)
    tape.taking = False
    for x in inputs:
        ours, theirs = (x.detach().clone().requires_grad_(x.is_floating_point()) for _ in range(2))
        y, wanted = module(ours), plain(theirs)
        assert torch.equal(y, wanted)
        wanted.square().sum().backward()
        tape.taking, tape.taken = True, set()
        own = run_b(tape, module, y.square().sum(), ours)
        tape.taking = False
        assert expected in (None, len(tape.taken))
        run(tape)
        if x.is_floating_point():
            assert own is not None
            assert torch.equal(own, gradient(theirs))
    assert all(map(torch.equal, gradients(module), gradients(plain)))


def gradient(tensor: Tensor) -> Tensor:
    assert tensor.grad is not None
    return tensor.grad


@given(st.integers(1, 4).map(lambda n: 4 * n), st.integers(1, 40), st.integers(1, 3))
def test_products_have_the_bits_of_torch(width: int, rows: int, microbatches: int) -> None:
    torch.manual_seed(rows)
    one, two = (Own(each, (3, 8, width)) for each in (experts, grouped))
    others = (Own(matmul, (width, 12), (8, 12)), Conv1D(12, width))
    for module, parameters in ((one, 1), (two, 1), (others[0], 2), (others[1], 2)):
        check(module, [torch.randn(rows, width) for _ in range(microbatches)], parameters)
    inputs = [torch.randn(rows, 2, width) for _ in range(microbatches)]
    check(Attention(width, 2), inputs, 4)


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "whole": lambda w: w,
    "transpose": lambda w: w.t(),
    "first rows": lambda w: w[:5],
    "last rows": lambda w: w[3:],
    "columns": lambda w: w[:, 2:7],
    "every second row": lambda w: w[::2],
    "every second column": lambda w: w[1:, 1::2],
    "slice of a transpose": lambda w: w.t()[2:, :6],
    "other shape": lambda w: w.view(4, 16)[1:],
    "strides of its own": lambda w: w.as_strided((3, 4), (8, 2), w.storage_offset() + 9),
}
WAYS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "linear": lambda x, w: functional.linear(x, w.t()),
    "matmul": lambda x, w: x @ w,
    "mm": lambda x, w: torch.mm(x, w),
    "addmm": lambda x, w: torch.addmm(_BIASES[w.shape[1]], x, w),
}
_BIASES = [nn.Parameter(torch.arange(float(width))) for width in range(17)]


@pytest.mark.parametrize("offset", [0, 64])
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("way", WAYS)
def test_any_part_of_a_parameter_anywhere_in_its_storage(way: str, view: str, offset: int) -> None:
    """The parameter is one of two that were cut from one tensor."""

    def run(matrices: Any, x: Tensor) -> Tensor:
        matrix = VIEWS[view](matrices[0])
        return WAYS[way](x[:, : len(matrix)], matrix)

    module = Own(run)
    fused = torch.randn(2 * 64, generator=torch.Generator().manual_seed(0))
    module.matrices.append(nn.Parameter(fused[offset : offset + 64].view(8, 8)))
    assert module.matrices[0].storage_offset() == offset
    check(module, [torch.randn(5, 8) for _ in range(3)], 1 + (way == "addmm"))


# Steps from a parameter to a matrix. Each takes a number, and a tensor of two or three dimensions.
STEPS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "transposed": lambda w, n: w.transpose(n % w.dim(), -1),
    "rows": lambda w, n: w[n % len(w) :],
    "columns": lambda w, n: w[..., : max(1, w.shape[-1] - n)],
    "every second": lambda w, n: w[n % len(w) :: 2],
    "one of many": lambda w, n: w[n % len(w)] if w.dim() == 3 else w,
    "expanded": lambda w, n: w[..., :1].expand(*w.shape[:-1], n + 1),
    "viewed": lambda w, n: w.reshape(-1, w.shape[-1]),
    "turned": lambda w, n: w.reshape(w.shape[-1], -1),
    "strided": lambda w, n: (
        w.as_strided((3, 2), (n + 1, 1), w.storage_offset())
        if w.is_contiguous() and w.numel() > 9
        else w
    ),
    "overlapping": lambda w, n: w.unfold(0, min(2, len(w)), 1)[..., 0],
    "unsqueezed": lambda w, n: w.unsqueeze(0)[0],
    "scaled": lambda w, n: w * (n + 1),
    "copied": lambda w, n: w.contiguous(),
    "chunk": lambda w, n: w.chunk(2, -1)[0],
    "itself": lambda w, n: w,
}


@given(
    st.lists(st.tuples(st.sampled_from(sorted(STEPS)), st.integers(0, 3)), max_size=4),
    st.sampled_from(sorted(WAYS)),
    st.sampled_from([(8, 8), (3, 8, 6), (4, 6)]),
    st.sampled_from([0, 40]),
    st.sampled_from([torch.float32, torch.float64]),
)
def test_drawn_parts_of_a_parameter_have_the_bits_of_torch(
    steps: list[tuple[str, int]], way: str, shape: tuple[int, ...], offset: int, dtype: torch.dtype
) -> None:
    """Views of views, and what is no view."""

    def matrix_of(weight: Tensor) -> Tensor:
        for name, n in steps:
            reached = STEPS[name](weight, n)
            if reached.numel() and reached.dim() > 1:
                weight = reached
        return weight if weight.dim() == 2 else weight.reshape(len(weight), -1)

    def run(matrices: Any, x: Tensor) -> Tensor:
        matrix = matrix_of(matrices[0])
        if way == "addmm":
            return torch.addmm(_BIAS[: matrix.shape[1]].to(dtype), x, matrix)
        return WAYS[way](x, matrix)

    module = Own(run)
    size = math.prod(shape)
    generator = torch.Generator().manual_seed(0)
    fused = torch.randn(size + 2 * 40, generator=generator, dtype=dtype)
    module.matrices.append(nn.Parameter(fused[offset : offset + size].view(shape)))
    width = len(matrix_of(module.matrices[0]))
    check(module, [torch.randn(5, width, dtype=dtype) for _ in range(2)], None)


_BIAS = torch.arange(64.0)


@pytest.mark.parametrize("kind", [nn.Embedding, Scaled])
def test_embeddings_with_padding_or_a_scale_wait(kind: type[nn.Embedding]) -> None:
    module = kind(10, 4, padding_idx=2)
    check(module, [torch.randint(0, 10, (3, 5)) for _ in range(3)], 1)
    assert not gradient(module.weight)[2].any()


def test_matrix_made_from_a_parameter_gets_its_gradient_in_b() -> None:
    check(Own(lambda matrices, x: x @ (2 * matrices[0]), (4, 4)), [torch.randn(3, 4)], 0)


def test_attention_attends() -> None:
    """torch's function is called without its question for modes, and computes the same."""
    check(Attention(8, 2, bias=False, batch_first=True), [torch.randn(2, 5, 8)] * 2, 2)


def test_registered_class_replaces_a_module() -> None:
    class Mine(nn.Linear):
        pass

    class SplitMine(Mine, SplitLinear):
        pass

    with pytest.raises(dynmo.DynmoError, match="must be a subclass of Mine"):
        dynmo.register_split(Mine, SplitLinear)
    dynmo.register_split(Mine, SplitMine)
    module = Mine(3, 3)
    check(module, [torch.randn(2, 3)], 2)
    assert type(module) is SplitMine


def test_caught_module_keeps_the_signature_of_its_forward() -> None:
    module = nn.MultiheadAttention(4, 2)
    before = inspect.signature(module.forward)
    install(module, WeightTape())
    assert inspect.signature(module.forward) == before
