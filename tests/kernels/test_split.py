"""The split backward of single modules."""

from __future__ import annotations

import gc
from collections.abc import Callable
from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.utils.prune import l1_unstructured

from dynmo.kernels.deferral import install
from dynmo.kernels.graph import Part, leaves_of, run_split
from dynmo.kernels.products import SplitEmbedding
from dynmo.kernels.split import SplitLinear, WeightTape

SHAPES = [(5,), (4, 5), (2, 3, 5), (2, 2, 3, 5)]


def linear(bias: bool) -> nn.Linear:
    torch.manual_seed(1)
    return nn.Linear(5, 3, bias=bias)


def split(module: nn.Module, deferred: bool) -> WeightTape:
    tape = WeightTape()
    tape.deferred = deferred
    install(module, tape)
    return tape


def run(tape: WeightTape) -> int:
    work = tape.take()
    for each, _ in work:
        each()
    return len(work)


def run_b(tape: WeightTape, module: nn.Module, loss: Tensor, x: Tensor) -> Tensor | None:
    """Runs B. Returns the input's gradient."""
    products = tape.take_products()
    tape.whole = leaves_of([loss], products).whole
    part = Part(tape, list(module.parameters()), products)
    inputs = [x] if x.requires_grad else []
    return (*run_split((get_gradient_edge(loss),), (torch.ones(()),), inputs, [part]), None)[0]


def gradients(module: nn.Module) -> list[Tensor]:
    out = [p.grad for p in module.parameters() if p.grad is not None]
    assert len(out) == len([*module.parameters()])
    return out


@pytest.mark.parametrize("contiguous", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_split_linear_equals_a_linear(shape: tuple[int, ...], bias: bool, contiguous: bool) -> None:
    torch.manual_seed(0)
    plain, now, later = linear(bias), linear(bias), linear(bias)
    tapes = [split(now, deferred=False), split(later, deferred=True)]
    inputs: list[list[Tensor]] = [[], [], []]
    for _ in range(3):  # accumulated over microbatches
        x = torch.randn(shape) if contiguous else torch.randn((*shape[:-1], 10))[..., ::2]
        gy = torch.randn((*shape[:-1], 3))
        for module, grads in zip((plain, now, later), inputs, strict=True):
            leaf = x.detach().requires_grad_()
            y = module(leaf)
            torch.testing.assert_close(y, plain(x), rtol=0, atol=0)
            y.backward(gy)
            assert leaf.grad is not None
            grads.append(leaf.grad)
    assert later.weight.grad is None, "W ran before it was asked for"
    assert [run(tape) for tape in tapes] == [0, 3]
    for a, b, c in zip(*inputs, strict=True):
        assert torch.equal(b, c)
        torch.testing.assert_close(a, b)
    for a, b, c in zip(*map(gradients, (plain, now, later)), strict=True):
        assert torch.equal(b, c)
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("shape", [(), (4,), (2, 3), (2, 2, 3)])
def test_a_split_embedding_has_the_plain_gradients(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    plain = nn.Embedding(7, 5)
    now, later = deepcopy(plain), deepcopy(plain)
    tape = split(later, deferred=True)
    split(now, deferred=False)
    for _ in range(3):
        ids = torch.randint(7, shape)  # with repeats, in the larger shapes
        gy = torch.randn((*shape, 5))
        for module in (plain, now, later):
            assert torch.equal(module(ids), plain.weight[ids])
            module(ids).backward(gy)
    assert later.weight.grad is None
    run(tape)
    (a,), (b,), (c,) = map(gradients, (plain, now, later))
    assert torch.equal(b, c)
    torch.testing.assert_close(a, b)


def test_tape_holds_trainable_weights_only() -> None:
    module = linear(True)
    tape = split(module, deferred=True)
    x = torch.randn(4, 5, requires_grad=True)
    module.weight.requires_grad_(False)
    module(x).sum().backward()
    assert run(tape) == 0
    assert module.bias.grad is not None, "it takes its gradient in B"
    module.weight.requires_grad_(True)
    module.bias.requires_grad_(False)
    module.bias.grad = None
    module(x).sum().backward()
    assert run(tape) == 1
    assert module.bias.grad is None
    assert module.weight.grad is not None
    with torch.no_grad():
        assert not module(x).requires_grad


def test_module_without_a_tape_is_plain() -> None:
    module = linear(True)
    tape = split(module, deferred=True)
    install(module, None)
    module(torch.randn(4, 5)).sum().backward()
    assert run(tape) == 0
    assert module.weight.grad is not None


def test_install_keeps_the_module() -> None:
    """Only the class of a module is replaced. Subclasses stay as they are."""

    class Own(nn.Linear):
        pass

    plain, padded = nn.Embedding(3, 2), nn.Embedding(3, 2, padding_idx=0)
    normed = nn.Embedding(3, 2, max_norm=1.0)
    module = nn.Sequential(nn.Linear(2, 2), Own(2, 2), plain, padded, normed)
    before = dict(module.named_parameters())
    seen: list[nn.Module] = []
    module[0].register_forward_hook(lambda m, args, out: seen.append(m))
    split(module, deferred=True)
    kinds = [SplitLinear, Own, SplitEmbedding, SplitEmbedding, SplitEmbedding]
    assert all(map(isinstance, module, kinds))
    assert all(p is before[name] for name, p in module.named_parameters())
    assert list(module.state_dict()) == list(before)
    module[0](torch.randn(1, 2))
    assert seen == [module[0]]
    classes = [type(m) for m in module]
    install(module, WeightTape())  # a layer that arrives on another rank is given a new tape
    assert [type(m) for m in module] == classes


def test_tape_keeps_tensors_until_w() -> None:
    """Input and output gradient are kept until W has run."""
    module = linear(False)
    tape = split(module, deferred=True)
    x, gy = torch.randn(4, 5), torch.randn(4, 3)
    refs = [StorageWeakRef(t.untyped_storage()) for t in (x, gy)]
    gc.disable()
    try:
        y = module(x.requires_grad_())
        y.backward(gy)
        ((work, holds),) = tape.take()
        assert [tuple(t.shape) for t in holds] == [(4, 5), (4, 3)]
        del x, gy, y, holds
        assert not any(ref.expired() for ref in refs)
        work()
        del work
        assert all(ref.expired() for ref in refs)
    finally:
        gc.enable()


OTHERS: dict[str, Callable[[], nn.Module]] = {
    "spectral norm": lambda: nn.utils.spectral_norm(linear(bias=True)).eval(),
    "pruned by torch": lambda: l1_unstructured(linear(bias=True), "weight", 0.5),
    "bias pruned by torch": lambda: l1_unstructured(linear(bias=True), "bias", 0.5),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_derived_weights_are_left_to_autograd(kind: str) -> None:
    """torch derives the weight of such a module from other parameters in each forward."""
    plain, ours, x = OTHERS[kind](), OTHERS[kind](), torch.randn(4, 5)
    tape = split(ours, deferred=True)
    assert type(ours) is SplitLinear
    for module in (plain, ours):
        module(x).square().sum().backward()
    assert run(tape) == 0
    assert {n for n, _ in ours.named_parameters()} == {n for n, _ in plain.named_parameters()}
    for got, expected in zip(gradients(ours), gradients(plain), strict=True):
        assert torch.equal(got, expected)
        assert got.any()


def test_autocast_chooses_the_dtype_of_a_split_linear() -> None:
    plain, ours, x = linear(True), linear(True), torch.randn(4, 5)
    tape = split(ours, deferred=True)
    for module in (plain, ours):
        leaf = x.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            y = module(leaf)
        assert y.dtype == torch.bfloat16
        y.float().sum().backward()
        run(tape)
    for got, expected in zip(gradients(ours), gradients(plain), strict=True):
        assert torch.equal(got, expected)
