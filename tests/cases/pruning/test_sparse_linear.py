"""The pruned linear layer, compared with a masked dense layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from dynmo.cases.pruning import crossover
from dynmo.cases.pruning.crossover import make_pruned, measure_crossover, seconds
from dynmo.cases.pruning.sparse_linear import (
    MaskedLinear,
    SparseLinear,
    linears,
    prune,
    survivors,
)
from dynmo.kernels.deferral import install
from dynmo.kernels.packed_weight import dense_parameters, take_forms, unpacked
from dynmo.kernels.split import SplitLinear
from tests.kernels.test_split import gradients, run, split


def pair(
    rows: int, columns: int, keep: Tensor, sparse: bool, bias: bool = True
) -> tuple[nn.Linear, nn.Linear]:
    """A dense linear whose dropped weights are 0, and the same pruned."""
    torch.manual_seed(3)
    plain, pruned = nn.Linear(columns, rows, bias), nn.Linear(columns, rows, bias)
    pruned.load_state_dict(plain.state_dict())
    plain.weight.data.mul_(keep.view(rows, columns))
    prune(pruned, keep, sparse, {})
    return plain, pruned


def some(total: int, share: float, seed: int = 0) -> Tensor:
    return torch.rand(total, generator=torch.Generator().manual_seed(seed)) < share


def dense_weight(linear: nn.Linear) -> Tensor:
    return unpacked(linear, "weight", linear.weight.detach())


def kept_gradient(linear: nn.Linear) -> Tensor:
    """[out, in], 0 where pruned."""
    assert linear.weight.grad is not None
    if not isinstance(linear, SparseLinear):
        return linear.weight.grad
    out = torch.zeros(linear.out_features * linear.in_features, dtype=linear.weight.dtype)
    out[linear.csr.positions()] = linear.weight.grad[0]
    return out.view(linear.out_features, linear.in_features)


@given(
    size=st.tuples(st.integers(1, 24), st.integers(1, 24)),
    leading=st.sampled_from([(1,), (7,), (2, 3), (2, 2, 5), (0,), (16,), (64,), (130,)]),
    share=st.sampled_from([0.0, 0.05, 0.3, 0.8, 1.0]),
    bias=st.booleans(),
    contiguous=st.booleans(),
    sparse=st.booleans(),
    tape=st.sampled_from(["none", "now", "later"]),
    seed=st.integers(0, 5),
)
def test_pruned_layer_equals_the_masked_dense_layer(
    size: tuple[int, int],
    leading: tuple[int, ...],
    share: float,
    bias: bool,
    contiguous: bool,
    sparse: bool,
    tape: str,
    seed: int,
) -> None:
    rows, columns = size
    keep = some(rows * columns, share, seed)
    plain, pruned = pair(rows, columns, keep, sparse, bias)
    taken = split(pruned, deferred=tape == "later")
    if tape == "none":
        install(pruned, None)
    assert type(pruned) is (SparseLinear if sparse else MaskedLinear)
    taken.taken = set()  # a layer warns of weights that its tape does not take
    for microbatch in range(2):
        torch.manual_seed(microbatch)
        step = 1 if contiguous else 2
        x = torch.randn(*leading, step * columns)[..., ::step]
        gy = torch.randn(*leading, rows)
        ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
        y = pruned(ours)
        assert y.is_contiguous()
        torch.testing.assert_close(y, plain(theirs), rtol=1e-5, atol=1e-5)
        y.backward(gy)
        plain(theirs).backward(gy)
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-5)
    assert tape == "none" or any(pruned.weight is each for each in taken.taken)
    run(taken)
    assert plain.weight.grad is not None
    expected = plain.weight.grad * keep.view(rows, columns)
    torch.testing.assert_close(kept_gradient(pruned), expected, rtol=1e-4, atol=1e-4)
    if bias:
        torch.testing.assert_close(pruned.bias.grad, plain.bias.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("sparse", [True, False])
def test_deferred_w_has_the_same_bits(sparse: bool) -> None:
    """The bits depend neither on the alignment of memory nor on the number of tokens."""
    linears = [pair(24, 40, some(960, 0.2), sparse)[1] for _ in range(3)]
    for which, linear in enumerate(linears):
        tape = split(linear, deferred=which > 0)
        for microbatch in range(3):
            x = torch.randn(700, 40, generator=torch.Generator().manual_seed(microbatch))
            shifted = torch.empty(700 * 40 + which)[which:].view(700, 40).copy_(x).requires_grad_()
            linear(shifted).square().sum().backward()
            if which == 1:
                run(tape)
        run(tape)
    first, *others = map(gradients, linears)
    for other in others:
        assert all(map(torch.equal, other, first))


def test_a_frozen_layer_still_gives_its_input_gradient() -> None:
    plain, pruned = pair(6, 9, some(54, 0.5), True)
    tape = split(pruned, deferred=False)
    pruned.requires_grad_(False)
    x, z = (torch.ones(4, 9, requires_grad=True) for _ in range(2))
    pruned(x).sum().backward()
    plain(z).sum().backward()
    torch.testing.assert_close(x.grad, z.grad)
    assert pruned.weight.grad is None
    assert not tape.take()


def test_moments_are_pruned_with_their_weights() -> None:
    linear: Any = SplitLinear(4, 3, bias=False)
    weight = linear.weight.detach().clone()
    first, second = some(12, 0.7), some(int(some(12, 0.7).sum()), 0.5, seed=1)
    moments = {"exp_avg": weight * 2, "exp_avg_sq": weight.square(), "step": torch.tensor(3.0)}
    sparse = prune(linear, first, True, moments)
    sparse = prune(linear, second, True, sparse)
    left = weight.flatten()[first][second]
    assert torch.equal(survivors(linear), left)
    assert linear.weight.shape == (1, len(left))
    assert torch.equal(sparse["exp_avg"], 2 * left[None])
    assert torch.equal(sparse["exp_avg_sq"], left.square()[None])
    assert float(sparse["step"]) == 3

    masked: Any = SplitLinear(4, 3, bias=False)
    masked.weight = nn.Parameter(weight.clone())
    dense = prune(masked, second, False, prune(masked, first, False, moments))
    assert torch.equal(dense_weight(masked), dense_weight(linear))
    assert torch.equal(dense["exp_avg"], 2 * dense_weight(linear))
    # From under a mask into CSR, dropping nothing more.
    pruned = prune(masked, torch.ones(len(left), dtype=torch.bool), True, dense)
    assert isinstance(masked, SparseLinear)
    assert torch.equal(masked.weight, linear.weight)
    assert torch.equal(masked.col, linear.col)
    assert torch.equal(pruned["exp_avg"], sparse["exp_avg"])


def test_pruned_weights_stay_zero_under_adamw() -> None:
    _, linear = pair(8, 8, some(64, 0.3), False)
    adamw = torch.optim.AdamW(linear.parameters(), lr=0.1, fused=True)
    for _ in range(3):
        linear(torch.randn(5, 8)).square().sum().backward()
        adamw.step()
    assert isinstance(linear, MaskedLinear)
    dropped = linear.weight[~linear.kept_mask]
    assert not dropped.view(torch.int32).any(), "not even a negative zero"


def test_memory_falls_with_the_weights() -> None:
    linear = make_pruned(256, 256, 0.9)
    assert isinstance(linear, SparseLinear)
    held = (linear.weight, linear.crow, linear.col)
    assert sum(t.nbytes for t in held) < 0.25 * 256 * 256 * 4
    linear(torch.ones(2, 256, requires_grad=True)).sum().backward()
    linear.to("meta")
    assert (linear._csr, linear._flipped) == (None, None), "cached indices"


def test_plain_linears_are_listed_by_name() -> None:
    class Own(nn.Linear):
        pass

    inner = nn.Sequential(Own(2, 2), nn.Linear(2, 3))
    module = nn.Sequential(nn.Linear(2, 2), nn.Embedding(3, 2), inner, nn.RMSNorm(3))
    assert [name for name, _ in linears(module)] == ["0", "2.1"]
    assert [name for name, _ in linears(nn.Linear(2, 2))] == [""]
    derived = nn.utils.spectral_norm(nn.Linear(2, 2))
    assert not list(linears(derived)), "what its weight is made from is not pruned"


def test_autocast_chooses_the_dtype_of_a_masked_layer() -> None:
    _, masked = pair(4, 6, torch.arange(24) % 3 > 0, False)
    x = torch.randn(3, 6, requires_grad=True)
    split(masked, deferred=False)
    assert type(masked) is MaskedLinear
    with torch.autocast("cpu", torch.bfloat16):
        y = masked(x)
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    assert masked.weight.grad is not None
    assert torch.equal(masked.weight.grad != 0, masked.kept_mask)


def test_take_forms_adopts_the_form_of_received_layers() -> None:
    """A layer on the meta device receives a pruned layer."""
    source = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3))
    prune(source[0], some(20, 0.4), True, {})  # pyright: ignore[reportArgumentType]
    prune(source[1], some(12, 0.9), False, {})  # pyright: ignore[reportArgumentType]
    with torch.device("meta"):
        target = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3))
    take_forms(target, dict(source.named_buffers()))
    shapes = [{name: x.shape for name, x in each.named_parameters()} for each in (target, source)]
    assert shapes[0] == shapes[1]
    assert [type(x) for x in target] == [SparseLinear, MaskedLinear]
    assert {n for n, _ in target.named_buffers()} == {n for n, _ in source.named_buffers()}
    dense = {name: tuple(t.shape) for name, t in dense_parameters(source)}
    assert list(dense) == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert dense["0.weight"] == (4, 5)
    with pytest.raises(
        ValueError, match=r"0\.weight is packed here \(SparseLinear\) and not there"
    ):
        take_forms(target, {})


@pytest.mark.parametrize("damage", ["rows", "columns", "order", "count"])
def test_take_forms_refuses_damaged_weights(damage: str) -> None:
    linear = make_pruned(4, 5, 0.5)
    crow, col = (t.clone() for t in linear.buffers())
    if damage == "rows":
        crow = torch.cat((crow, crow[-1:]))
    elif damage == "columns":
        col[0] = 5
    elif damage == "order":
        crow[1] = 11
    else:
        col = col[1:]
    with pytest.raises(ValueError, match="weight is sparse, but not of 4 x 5"):
        take_forms(nn.Linear(5, 4), {"crow": crow, "col": col})


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_rounds_once(dtype: torch.dtype, deferred: bool) -> None:
    """F and B are computed in float32 and rounded once."""
    low, wide = (make_pruned(48, 40, 0.8, dtype=kind) for kind in (dtype, torch.float32))
    for each in (low, wide):
        each.bias = nn.Parameter(torch.zeros(48, dtype=each.weight.dtype))
    wide.weight.data = low.weight.data.float()
    tape = split(low, deferred)
    generator = torch.Generator().manual_seed(0)
    for _ in range(2):
        x, gy = (torch.randn(3, 17, n, generator=generator).to(dtype) for n in (40, 48))
        narrow, full = x.clone().requires_grad_(), x.float().requires_grad_()
        y, expected = low(narrow), wide(full)
        assert torch.equal(y, expected.detach().to(dtype))
        y.backward(gy)
        expected.backward(gy.float())
        run(tape)
        assert full.grad is not None
        torch.testing.assert_close(narrow.grad, full.grad.to(dtype), rtol=0, atol=0)
    ours, theirs = gradients(low), gradients(wide)
    assert {each.dtype for each in ours} == {torch.float32}
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


def test_crossover_is_the_break_even_sparsity(monkeypatch: pytest.MonkeyPatch) -> None:
    """The times are made up, and then measured."""

    def given_times(linear: nn.Linear, tokens: int) -> float:
        dense = linear.out_features * linear.in_features
        return 3 * linear.weight.numel() / dense if isinstance(linear, SparseLinear) else 1.0

    with monkeypatch.context() as patch:
        patch.setattr(crossover, "seconds", given_times)
        assert measure_crossover(64, 64, 8) == pytest.approx(2 / 3, abs=1 / 64)
    assert 0 < measure_crossover(32, 32, 16) <= 1


def test_timing_leaves_the_layer_unchanged() -> None:
    linear = make_pruned(8, 8, 0.5)
    assert seconds(linear, 4) > 0
    assert linear.weight.grad is None
