"""The optimizer of one layer equals torch's optimizer over the whole model."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from dynmo.config.sections import TrainSection
from dynmo.runtime.engine.peak_memory import Watch
from dynmo.runtime.optim import fused
from dynmo.runtime.optim.optimizer import (
    _BLOCKS_AT_ONCE,
    NORM_BLOCK,
    Share,
    block_sums,
    clip_factor,
    fold_blocks,
    share_ranges,
    squared_norm,
)
from dynmo.runtime.optim.parameter_groups import Group
from dynmo.runtime.optim.precision import INITIAL, WINDOW, LossScaler, make_scaler
from dynmo.runtime.optim.trial import Make
from tests.runtime.modules import assert_same, draw
from tests.runtime.optimizers import invert, optimizer_of
from tests.runtime.optimizers import step as step_of

ADAMW = partial(fused.AdamW, weight_decay=0.2, betas=(0.8, 0.9), eps=1e-6)


def layers() -> list[nn.Module]:
    torch.manual_seed(0)
    second = nn.Sequential(nn.LayerNorm(5), nn.Linear(5, 7))
    return [nn.Embedding(9, 5), second, nn.Tanh(), nn.Linear(7, 9, bias=False)]


def whole(modules: list[nn.Module], fused: bool) -> torch.optim.AdamW:
    """torch's optimizer over all layers at once."""
    groups = [
        {"params": [p for p in parameters(modules) if p.dim() >= 2], "weight_decay": 0.2},
        {"params": [p for p in parameters(modules) if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=0.1, betas=(0.8, 0.9), eps=1e-6, fused=fused)


def parameters(modules: Sequence[nn.Module]) -> list[nn.Parameter]:
    return [p for m in modules for p in m.parameters()]


def give(modules: Sequence[nn.Module], step: int) -> None:
    """The same gradients for modules of the same shapes."""
    random = torch.Generator().manual_seed(step)
    for p in parameters(modules):
        gradient = torch.randn(p.shape, generator=random)
        p.grad = gradient if p.requires_grad else None


def assert_close(ours: Sequence[nn.Module], theirs: Sequence[nn.Module], **options: Any) -> None:
    torch.testing.assert_close(parameters(ours), parameters(theirs), **options)


def same_bits(ours: Sequence[nn.Module], theirs: Sequence[nn.Module]) -> bool:
    pairs = zip(parameters(ours), parameters(theirs), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def test_layer_optimizer_equals_torch_over_the_whole_model() -> None:
    """Bit for bit with the fused kernel, and within rounding of the plain one."""
    ours, theirs, plain = layers(), layers(), layers()
    optimizers = [optimizer_of(m, ADAMW) for m in ours]
    others = [(theirs, whole(theirs, fused=True)), (plain, whole(plain, fused=False))]
    for step in range(5):
        lr = 0.1 / (step + 1)
        for modules in (ours, theirs, plain):
            give(modules, step)
        for optimizer in optimizers:
            step_of(optimizer, lr, 1.0)
        for _, adamw in others:
            for group in adamw.param_groups:
                group["lr"] = lr
            adamw.step()
    assert same_bits(ours, theirs)
    assert_close(ours, plain, rtol=1e-5, atol=1e-6)
    for optimizer in optimizers:
        optimizer.drop_gradients()
    assert all(p.grad is None for p in parameters(ours))


def test_the_scale_multiplies_the_gradients() -> None:
    ours, theirs = layers(), layers()
    give(ours, 0)
    give(theirs, 0)
    torch._foreach_mul_([p.grad for p in parameters(theirs) if p.grad is not None], 0.3)
    for a, b in zip(ours, theirs, strict=True):
        step_of(optimizer_of(a, ADAMW), 0.1, 0.3)
        step_of(optimizer_of(b, ADAMW), 0.1, 1.0)
    assert same_bits(ours, theirs)


def test_frozen_parameters_do_not_change() -> None:
    """The moments that they had stay for thawing."""
    module = nn.Linear(4, 4)
    optimizer = optimizer_of(module, ADAMW)
    give([module], 0)
    step_of(optimizer, 0.1, 1.0)
    weight = module.weight.detach().clone()
    state = {k: v.clone() for k, v in optimizer.state().items()}
    module.weight.requires_grad_(False)
    for step in (1, 2):
        give([module], step)
        step_of(optimizer, 0.1, 1.0)
    assert torch.equal(module.weight, weight)
    for key, value in optimizer.state().items():
        assert torch.equal(value, state[key]) == key.startswith("weight/")
    assert state["weight/step"] == 1
    module.weight.requires_grad_(True)
    give([module], 3)
    step_of(optimizer, 0.1, 1.0)
    assert optimizer.state()["weight/step"] == 2
    assert not torch.equal(module.weight, weight)


@pytest.mark.parametrize(
    ("own", "theirs"),
    [
        (ADAMW, partial(torch.optim.AdamW, betas=(0.8, 0.9), eps=1e-6)),
        (
            partial(fused.SGD, weight_decay=0.2, momentum=0.9),
            partial(torch.optim.SGD, momentum=0.9),
        ),
    ],
)
def test_late_gradient_starts_its_own_step_count(own: Make, theirs: Any) -> None:
    """Each parameter trains like a parameter with its own torch optimizer."""
    torch.manual_seed(0)
    early, late = (nn.Parameter(torch.randn(size)) for size in ((3, 4), (5, 2)))
    module = nn.ParameterDict({"early": early, "late": late})
    alone = {key: nn.Parameter(p.detach().clone()) for key, p in module.items()}
    expected = {k: theirs([p], lr=0.1, weight_decay=0.2, fused=True) for k, p in alone.items()}
    ours = optimizer_of(module, own)
    for step in range(4):
        for key in ("early", "late") if step >= 2 else ("early",):
            gradient = torch.randn_like(alone[key])
            module[key].grad, alone[key].grad = gradient.clone(), gradient
            expected[key].step()
        step_of(ours, 0.1)
        ours.drop_gradients()
    for key, p in alone.items():
        assert torch.equal(module[key], p)


def test_loaded_state_continues_with_the_same_bits() -> None:
    first = nn.Linear(4, 4)
    optimizer = optimizer_of(first, ADAMW)
    for step in range(3):
        give([first], step)
        step_of(optimizer, 0.1, 1.0)
    second = copy.deepcopy(first)
    restored = optimizer_of(second, ADAMW)
    restored.load({key: value.clone() for key, value in optimizer.state().items()})
    moments = ("step", "exp_avg", "exp_avg_sq")
    assert set(optimizer.state()) == {f"{n}/{m}" for n in ("weight", "bias") for m in moments}
    for step in range(3, 6):
        for module, each in ((first, optimizer), (second, restored)):
            give([module], step)
            step_of(each, 0.1, 1.0)
    assert same_bits([first], [second])
    fresh = optimizer_of(copy.deepcopy(first), ADAMW)
    assert fresh.state() == {}


def test_layer_without_parameters_has_no_state() -> None:
    optimizer = optimizer_of(nn.Tanh(), ADAMW)
    step_of(optimizer, 0.1, 1.0)
    optimizer.load({})
    assert optimizer.state() == {}
    assert optimizer.state_bytes == 0


def test_shared_parameters_are_updated_by_their_owner() -> None:
    module = nn.Linear(4, 4)
    optimizer = optimizer_of(module, ADAMW, shared=frozenset({"weight"}))
    give([module], 0)
    before = module.weight.detach().clone()
    step_of(optimizer, 0.1, 1.0)
    assert torch.equal(module.weight, before)
    assert {key.split("/")[0] for key in optimizer.state()} == {"bias"}


def test_state_bytes_count_two_moments() -> None:
    """After the first step, each parameter also has a step counter."""
    module = nn.Linear(4, 4)
    optimizer = optimizer_of(module, ADAMW)
    assert optimizer.state_bytes == 2 * 4 * 20
    give([module], 0)
    step_of(optimizer, 0.1, 1.0)
    assert optimizer.state_bytes == 2 * 4 * 20 + 2 * 4
    assert optimizer_of(nn.Linear(4, 4).requires_grad_(False), ADAMW).state_bytes == 0


def test_weight_decay_applies_to_matrices_only() -> None:
    assert [Group().spares(dims) for dims in range(4)] == [True, True, False, False]
    module = nn.Linear(4, 4)
    for p in module.parameters():
        nn.init.ones_(p)
        p.grad = torch.zeros_like(p)
    step_of(optimizer_of(module, ADAMW), 0.5, 1.0)
    torch.testing.assert_close(module.weight.detach(), torch.full((4, 4), 1 - 0.5 * 0.2))
    assert torch.equal(module.bias.detach(), torch.ones(4))


@pytest.mark.parametrize("size", [1, 1000, NORM_BLOCK, NORM_BLOCK + 1, 3 * NORM_BLOCK + 17])
def test_squared_norm(size: int) -> None:
    gradient = torch.randn(size)
    total = squared_norm([gradient])
    assert total == pytest.approx(float(gradient.double().square().sum()), rel=1e-6)
    assert squared_norm([None, gradient.view(1, -1), None]) == total
    assert squared_norm([]) == 0.0
    assert squared_norm([torch.zeros(0)]) == 0.0


def test_squared_norm_of_shards_has_the_same_bits() -> None:
    """Shards may be cut at any block boundary."""
    torch.manual_seed(1)
    gradient = torch.randn(7 * NORM_BLOCK + 5) * torch.logspace(-4, 4, 7 * NORM_BLOCK + 5)
    expected = squared_norm([gradient])
    for cuts in ([1], [3], [2, 5], [1, 2, 3, 4, 5, 6, 7]):
        bounds = [0, *(c * NORM_BLOCK for c in cuts), len(gradient)]
        parts = [gradient[a:b] for a, b in pairwise(bounds)]
        assert squared_norm(parts) == expected
    matrix = gradient[: 4 * NORM_BLOCK].view(256, -1)
    assert squared_norm([matrix]) == squared_norm([gradient[: 4 * NORM_BLOCK]])


def test_clip_factor() -> None:
    assert clip_factor(5.0, 0.0) == 1.0
    assert clip_factor(0.5, 1.0) == 1.0
    assert clip_factor(1.0, 1.0) == 1.0
    assert clip_factor(4.0, 1.0) == pytest.approx(0.25)
    assert clip_factor(math.inf, 1.0) == 0.0
    gradients = [torch.randn(30), torch.randn(5, 5)]
    clipped = [nn.Parameter(torch.zeros_like(g)) for g in gradients]
    for p, g in zip(clipped, gradients, strict=True):
        p.grad = g.clone()
    torch.nn.utils.clip_grad_norm_(clipped, 0.5)
    factor = clip_factor(math.sqrt(squared_norm(gradients)), 0.5)
    torch.testing.assert_close([p.grad for p in clipped], [g * factor for g in gradients])


# -- shares (ZeRO-1), masters, taking back ---------------------------------------------------------

BOTH = [ADAMW, partial(fused.SGD, weight_decay=0.2, momentum=0.7)]
PLAIN_SGD = partial(fused.SGD, weight_decay=0.2)


def large() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(150, 333), nn.LayerNorm(7), nn.Linear(130, 401, bias=False))


@given(st.lists(st.integers(0, 5 * NORM_BLOCK), max_size=6), st.integers(1, 5))
def test_shares_are_whole_blocks_and_even(sizes: list[int], count: int) -> None:
    shares = [share_ranges(sizes, Share(i, count)) for i in range(count)]
    held = [0] * count
    for which, size in enumerate(sizes):
        at = 0
        for i in range(count):
            low, high = shares[i][which]
            if low < high:
                assert low == at
                assert low % NORM_BLOCK == 0
                at = high
                held[i] += -(-(high - low) // NORM_BLOCK)
        assert at == size
    assert max(held) - min(held) <= 1


@pytest.mark.parametrize("make", BOTH)
@pytest.mark.parametrize("count", [2, 3])
def test_sharded_update_has_the_bits_of_the_whole(make: Make, count: int) -> None:
    whole_module, shared_module = large(), large()
    one = optimizer_of(whole_module, make)
    parts = [optimizer_of(shared_module, make, share=Share(i, count)) for i in range(count)]
    for step in range(4):
        give([whole_module], step)
        give([shared_module], step)
        gradients = [p.grad for p in shared_module.parameters() if p.grad is not None]
        assert fold_blocks(
            b
            for name, g in zip(parts[0].shares, gradients, strict=True)
            for o in parts
            for b in block_sums(g.reshape(-1)[slice(*o.shares[name].extent)])
        ) == squared_norm(gradients)
        step_of(one, 0.1, 0.9)
        for part in parts:
            step_of(part, 0.1, 0.9)
    assert same_bits([whole_module], [shared_module])
    assert sum(part.state_bytes for part in parts) >= one.state_bytes
    assert max(part.state_bytes for part in parts) < one.state_bytes


NO_PAST = [partial(ADAMW, betas=betas) for betas in ((0.0, 0.9), (0.8, 0.0))]


@pytest.mark.parametrize("make", [*BOTH, PLAIN_SGD, *NO_PAST])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("first", [True, False])
def test_restore_is_exact_and_invert_is_close(make: Make, dtype: torch.dtype, first: bool) -> None:
    """A rolled back and repeated step equals a single step with the second scale."""
    modules = plain, kept, inverted = [large().to(dtype) for _ in range(3)]
    optimizers = one, restored, other = [optimizer_of(m, make) for m in modules]
    for p in parameters(modules):
        p.grad_dtype = torch.float32

    def gradients(step: int) -> None:
        for module in modules:
            give([module], step)

    if not first:
        gradients(0)
        for optimizer in optimizers:
            step_of(optimizer, 0.01)
    gradients(1)
    before = {key: value.clone() for key, value in restored.state().items()}
    shares = [*restored.shares.values()]
    for share in shares:
        share.keep()
    step_of(restored, 0.01)
    for share in shares:
        share.restore()
    assert_same(restored.state(), before)
    assert same_bits([kept], [plain])
    step_of(other, 0.01)
    invert(other, 0.01)
    assert set(other.state()) == set(before)
    for optimizer in (one, restored, other):
        step_of(optimizer, 0.01, 0.5)
    assert same_bits([plain], [kept])
    rtol, atol = (1e-5, 1e-6) if dtype is torch.float32 else (1e-2, 1e-3)
    assert_close([plain], [inverted], rtol=rtol, atol=atol)


def test_float32_master_accumulates_small_steps() -> None:
    module = nn.Linear(4, 4)
    nn.init.ones_(module.weight)
    masters = {name: p.detach().clone() for name, p in module.named_parameters()}
    module.to(torch.bfloat16)
    optimizer = optimizer_of(module, masters=masters)
    for p in module.parameters():
        p.grad_dtype = torch.float32
    for _ in range(100):
        for p in module.parameters():
            p.grad = torch.ones(p.shape)
        step_of(optimizer, 1e-4)
    master = optimizer.state()["weight/master"]
    torch.testing.assert_close(master, torch.full((4, 4), 0.99), rtol=1e-4, atol=0)
    assert torch.equal(module.weight.detach(), master.bfloat16())
    loaded = optimizer_of(module)
    loaded.load(optimizer.state())
    assert torch.equal(loaded.state()["weight/master"], master)


def test_saved_momentum_is_dropped_without_momentum() -> None:
    """In-place rollback would otherwise divide by a momentum of 0."""
    module = nn.Linear(4, 4)
    optimizer = optimizer_of(module, fused.SGD)
    named = module.named_parameters()
    optimizer.load({f"{name}/momentum_buffer": torch.ones_like(p) for name, p in named})
    for _ in range(3):
        before = module.weight.detach().clone()
        for p in module.parameters():
            p.grad = torch.full_like(p, 0.5)
        step_of(optimizer, 0.1)
        invert(optimizer, 0.1)
        torch.testing.assert_close(module.weight.detach(), before)


def test_inverse_leaves_no_negative_square() -> None:
    """The square of the gradient is taken out of a moment that was 0."""
    module = nn.Linear(64, 64)
    optimizer = optimizer_of(module)
    for p in module.parameters():
        p.grad = torch.zeros_like(p)
    step_of(optimizer, 0.1)
    give([module], 1)
    step_of(optimizer, 0.1)
    invert(optimizer, 0.1)
    assert float(optimizer.state()["weight/exp_avg_sq"].min()) >= 0


def test_momentum_that_begins_later_has_a_place_in_shares() -> None:
    group = Group(fused.SGD)
    assert group.moments(1) == ("momentum_buffer",)
    assert group.is_cut("momentum_buffer", 1)
    assert group.state_bytes((4, 4), 4) == 0


def test_squared_norm_takes_little_memory() -> None:
    """It squares one part at a time."""
    gradient = draw(0, 40 * _BLOCKS_AT_ONCE // 16, NORM_BLOCK)
    with Watch() as watch:
        sums = block_sums(gradient)
    assert watch.excess(0) < 1.1 * _BLOCKS_AT_ONCE * NORM_BLOCK * 4 < gradient.nbytes
    assert sums == gradient.square().sum(1).tolist()


@given(st.lists(st.booleans(), max_size=60), st.integers(1, 5), st.integers(0, 60))
def test_scale_halves_on_overflow_and_doubles_after_a_window(
    steps: list[bool], window: int, stop: int
) -> None:
    """A loaded scaler continues like one that never stopped."""
    scaler, expected, good = LossScaler(INITIAL, window), INITIAL, 0
    for step, finite in enumerate(steps):
        if step == stop:
            saved = json.loads(json.dumps(scaler.state()))
            scaler = LossScaler(INITIAL, window)
            scaler.load(saved)
        if not finite and not scaler.skips:
            assert expected == 1
            return
        scaler.observe(finite)
        good = good + 1 if finite else 0
        expected = expected / 2 if not finite else 2 * expected if good == window else expected
        good %= window
        assert scaler.scale == expected >= 1


def test_saved_count_above_a_shorter_window_doubles_the_scale() -> None:
    scaler = LossScaler(INITIAL, 3)
    scaler.load({"scale": 8.0, "good": 5})
    scaler.observe(True)
    assert scaler.scale == 16


def test_float16_is_scaled_by_default() -> None:
    assert TrainSection().loss_scale_window == WINDOW
    assert make_scaler(torch.float16, None, 7).dynamic
    assert make_scaler(torch.bfloat16, "dynamic", 7).dynamic
    for scaler, scale in (
        (make_scaler(torch.float32, None, 7), 1),
        (make_scaler(torch.float16, 1024.0, 7), 1024),
    ):
        assert not scaler.dynamic
        assert not scaler.skips
        scaler.observe(True)
        scaler.load({"scale": 4.0, "good": 0})
        assert scaler.scale == scale
