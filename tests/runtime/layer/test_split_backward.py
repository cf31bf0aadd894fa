"""Split, fused and plain backward have equal gradients, and keep no tensor too long."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint
from transformers.pytorch_utils import Conv1D

from dynmo.errors import RunError
from dynmo.kernels.seeds import seed_forward
from dynmo.kernels.split import SplitLinear, WeightTape
from dynmo.runtime.comm.clock import HostClock
from dynmo.runtime.layer.split_backward import Layer, Tensors
from dynmo.schedule.op import Kind
from tests.kernels import own_products
from tests.kernels.own_products import Own

MICROBATCHES = 3


class OwnLinear(nn.Linear):
    """Means something else by `forward`."""

    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


class Twice(nn.Module):
    """One module used twice: its weight has two W's a microbatch."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.line(torch.tanh(self.line(x)))


class Shared(nn.Module):
    """Two modules with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 6), nn.Linear(6, 6, bias=False)
        self.two.weight = self.one.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.two(torch.tanh(self.one(x)))


class Transposed(nn.Module):
    """Hands its linear an input that is not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(4, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.line(x.transpose(-1, -2))


class TwoInputs(nn.Module):
    """Two inputs, two outputs, and one output that is no number to differentiate."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(6, 6), nn.Linear(6, 6, bias=False)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.left(x) * y, self.right(y), x.argmax(-1)


class Deaf(nn.Module):
    """A module whose output does not depend on its second input."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(6, 6)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.line(x)


class Scale(nn.Module):
    """A user's own module that leaves its weight gradient on the tape."""

    tape: WeightTape | None = None

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.randn(6))

    def forward(self, x: Tensor) -> Tensor:
        return _ScaleFunction.apply(x, self.factor, self.tape)  # pyright: ignore[reportReturnType]


class _ScaleFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, factor: nn.Parameter, tape: WeightTape | None) -> Tensor:  # pyright: ignore
        ctx.save_for_backward(x)
        ctx.factor, ctx.tape = factor, tape
        return x * factor

    @staticmethod
    def backward(ctx, gy: Tensor):  # pyright: ignore
        (x,), factor = ctx.saved_tensors, ctx.factor

        def work() -> None:
            gradient = (gy * x).flatten(0, -2).sum(0)
            factor.grad = gradient if factor.grad is None else factor.grad + gradient

        if ctx.tape is None:
            return gy * factor, (gy * x).flatten(0, -2).sum(0), None
        ctx.tape.add(work, x, gy)
        return gy * factor, None, None


class Checkpointed(nn.Module):
    """A caught module and a linear within torch's checkpoint."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), Conv1D(6, 6))
        self.reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        if not x.requires_grad:  # torch would warn
            return self.inner(x)
        return cast(Tensor, checkpoint(self.inner, x, use_reentrant=self.reentrant))


class Frozen(nn.Module):
    """A frozen linear between two that train."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.fixed = nn.Linear(6, 6).requires_grad_(False)
        self.last = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.fixed(self.first(x)))


def numbers(*shape: int) -> Callable[[], Tensors]:
    return lambda: (torch.randn(shape),)


def ids(*shape: int) -> Callable[[], Tensors]:
    return lambda: (torch.randint(5, shape),)


@dataclass
class Case:
    make: Callable[[], nn.Module]
    inputs: Callable[[], Tensors]
    works: int  # pieces of W a microbatch leaves


CASES: dict[str, Case] = {
    "linear": Case(lambda: nn.Linear(6, 4), numbers(3, 6), 1),
    "linear without bias": Case(lambda: nn.Linear(6, 4, bias=False), numbers(3, 6), 1),
    "linear 3-D": Case(lambda: nn.Linear(6, 4), numbers(2, 3, 6), 1),
    "linear 4-D": Case(lambda: nn.Linear(6, 4), numbers(2, 2, 3, 6), 1),
    "subclass of linear": Case(lambda: OwnLinear(6, 4), numbers(3, 6), 1),
    "transposed": Case(Transposed, numbers(2, 4, 3), 1),
    "embedding": Case(lambda: nn.Embedding(5, 4), ids(2, 7), 1),
    "embedding with padding": Case(lambda: nn.Embedding(5, 4, padding_idx=2), ids(2, 7), 1),
    "used twice": Case(Twice, numbers(3, 6), 2),
    "shared weight": Case(Shared, numbers(3, 6), 2),
    "two inputs": Case(TwoInputs, lambda: (torch.randn(3, 6), torch.randn(3, 6)), 2),
    "without influence": Case(Deaf, lambda: (torch.randn(3, 6), torch.randn(3, 6)), 1),
    "own tape": Case(Scale, numbers(2, 3, 6), 1),
    "two products": Case(lambda: Own(own_products.twice, (6, 6)), numbers(3, 6), 2),
    "product and more": Case(lambda: Own(own_products.by_itself, (6, 6)), numbers(3, 6), 0),
    "product of a weight with itself": Case(
        lambda: Own(own_products.squared, (6, 6)), numbers(3, 6), 0
    ),
    "expanded weight": Case(lambda: Own(own_products.expanded, (1, 6)), numbers(3, 6), 0),
    "slope": Case(lambda: Own(own_products.slope, (3, 8, 8)), numbers(3, 8), 0),
    "checkpoint": Case(lambda: Own(own_products.checkpointed, (6, 6), (6, 6)), numbers(3, 6), 1),
    "reentrant checkpoint": Case(
        lambda: Own(own_products.checkpointed_reentrant, (6, 6), (6, 6)), numbers(3, 6), 1
    ),
    "linears in a checkpoint": Case(lambda: Checkpointed(use_reentrant=False), numbers(3, 6), 2),
    "linears in a reentrant checkpoint": Case(
        lambda: Checkpointed(use_reentrant=True), numbers(3, 6), 2
    ),
    "frozen part": Case(Frozen, numbers(3, 6), 2),
    "norm only": Case(lambda: nn.LayerNorm(6), numbers(3, 6), 0),
    "batch norm": Case(
        lambda: nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)), numbers(4, 6), 2
    ),
    "nothing to train": Case(nn.Tanh, numbers(3, 6), 0),
    "dropout": Case(lambda: nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5)), numbers(3, 6), 1),
}


@dataclass
class Result:
    outputs: list[Tensors]
    inputs: list[Tensors]
    weights: dict[str, Tensor]


def layer_of(module: nn.Module) -> Layer:
    return Layer(3, module, HostClock(), seed=0)


def with_gradients(inputs: Tensors) -> Tensors:
    return tuple(x.detach().requires_grad_(x.is_floating_point()) for x in inputs)


def split(module: nn.Module, inputs: list[Tensors], gradients: list[Tensors], mode: str) -> Result:
    """Runs BW, or B with each W at the end, or each W one later."""
    layer = layer_of(module)
    result = Result([], [], {})
    for j, x in enumerate(inputs):
        leaves = with_gradients(x)
        result.outputs.append(run_f(layer, *leaves, j=j))
    for j, g in enumerate(gradients):
        result.inputs.append(layer.backward_input(j, g, deferred=mode != "BW"))
        if mode == "W one later" and j:
            layer.backward_weight(j - 1)
    for j in (
        range(len(gradients))
        if mode == "W last"
        else [len(gradients) - 1]
        if mode == "W one later"
        else []
    ):
        layer.backward_weight(j)
    result.weights = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    return result


def plain(module: nn.Module, inputs: list[Tensors], gradients: list[Tensors]) -> Result:
    """torch's own backward, with the same random numbers."""
    result = Result([], [], {})
    for j, (x, g) in enumerate(zip(inputs, gradients, strict=True)):
        leaves = with_gradients(x)
        seed_forward(torch.device("cpu"), 0, 0, 3, j)
        out = module(*leaves)
        outputs = (out,) if isinstance(out, Tensor) else out
        torch.autograd.backward([y for y in outputs if y.is_floating_point()], list(g))
        result.outputs.append(tuple(y.detach() for y in outputs))
        given = [t for t in leaves if t.requires_grad]
        there = [t.grad is not None for t in given]
        values = [torch.zeros_like(t) if t.grad is None else t.grad for t in given]
        result.inputs.append((*values, *([] if all(there) else [torch.tensor(there)])))
    result.weights = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    return result


def same(one: Result, other: Result, exactly: bool) -> None:
    compare = (
        torch.equal
        if exactly
        else (lambda a, b: a.shape == b.shape and torch.allclose(a, b, rtol=1e-5, atol=1e-6))
    )
    for ours, theirs in ((one.outputs, other.outputs), (one.inputs, other.inputs)):
        for a, b in zip(ours, theirs, strict=True):
            assert all(compare(x, y) for x, y in zip(a, b, strict=True))
    assert one.weights.keys() == other.weights.keys()
    assert all(compare(g, other.weights[name]) for name, g in one.weights.items())


@pytest.mark.parametrize("name", CASES)
def test_split_fused_and_plain_backward_have_equal_gradients(name: str) -> None:
    case = CASES[name]
    torch.manual_seed(5)
    module = case.make()
    inputs = [case.inputs() for _ in range(MICROBATCHES)]
    probe = copy.deepcopy(module)(*inputs[0])
    shapes = [
        y.shape for y in ((probe,) if isinstance(probe, Tensor) else probe) if y.is_floating_point()
    ]
    gradients = [tuple(torch.randn(shape) for shape in shapes) for _ in range(MICROBATCHES)]
    expected = plain(copy.deepcopy(module), inputs, gradients)
    whole = split(copy.deepcopy(module), inputs, gradients, "BW")
    same(whole, expected, exactly=False)
    for mode in ("W last", "W one later"):
        same(split(copy.deepcopy(module), inputs, gradients, mode), whole, exactly=True)


@pytest.mark.parametrize("name", CASES)
def test_expected_parameters_are_deferred_to_w(name: str) -> None:
    case = CASES[name]
    layer = layer_of(case.make())
    outputs = run_f(layer, *with_gradients(case.inputs()))
    layer.backward_input(0, tuple(torch.ones_like(y) for y in outputs if y.requires_grad), True)
    assert len(layer._weight_work.get(0, ())) == case.works
    done = {n for n, p in layer.module.named_parameters() if p.grad is not None}
    split_weights = {
        f"{n}.weight".lstrip(".")
        for n, m in layer.module.named_modules()
        if isinstance(m, SplitLinear)
    }
    assert not done & split_weights, "a linear's weight gradient is W, not B"
    layer.backward_weight(0)
    trained = {n for n, p in layer.module.named_parameters() if p.requires_grad}
    assert {n for n, p in layer.module.named_parameters() if p.grad is not None} == trained


@contextmanager
def no_collection() -> Iterator[None]:
    """Memory that is released must go by itself, as when the executor runs."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def run_f(layer: Layer, *inputs: Tensor, j: int = 0, finish: Any = None) -> Tensors:
    return layer.forward(j, inputs, 0, graph=True, need_input=True, finish=finish)


def start(layer: Layer, x: Tensor) -> tuple[StorageWeakRef, Tensors]:
    """Runs F. Returns a weak reference to the storage of its input, and its outputs."""
    return StorageWeakRef(x.untyped_storage()), run_f(layer, x)


@pytest.mark.parametrize("measured", [False, True])
def test_stashes_are_released(measured: bool) -> None:
    """The first F of a layer copies its input and keeps the copy."""
    for module, until_w in ((nn.Linear(6, 6), True), (nn.LayerNorm(6), False)):
        layer = layer_of(module)
        if measured:
            run_f(layer, torch.randn(3, 6))
            layer.backward_input(0, (torch.randn(3, 6),), deferred=True)
            layer.backward_weight(0)
        with no_collection():
            ref, outputs = start(layer, torch.randn(3, 6))
            gradients = (torch.randn(3, 6),)
            refs = [ref, StorageWeakRef(gradients[0].untyped_storage())]
            assert not ref.expired()
            del outputs
            layer.backward_input(0, gradients, deferred=True)
            del gradients
            assert [ref.expired() for ref in refs] == [not until_w or not measured, not until_w]
            layer.backward_weight(0)
            assert all(ref.expired() for ref in refs)
    assert not layer._saved
    assert not layer._weight_work


def test_inner_activations_are_released_after_b() -> None:
    """Memory that only B needs is not kept for W. An example is the input of a tanh."""
    seen: list[StorageWeakRef] = []

    class Watched(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = torch.tanh(x)
            seen.append(StorageWeakRef(y.untyped_storage()))
            return y * 1.5

    layer = layer_of(nn.Sequential(nn.Linear(6, 6), Watched(), nn.Linear(6, 6)))
    with no_collection():
        run_f(layer, torch.randn(3, 6))
        assert not seen[0].expired()
        layer.backward_input(0, (torch.randn(3, 6),), deferred=True)
        assert seen[0].expired()
        layer.backward_weight(0)


@pytest.mark.parametrize("requires_grad", [False, True])
def test_input_that_no_graph_saves_is_released_after_f(requires_grad: bool) -> None:
    """Tanh saves its output alone."""
    linear = nn.Linear(6, 6)
    layer = layer_of(nn.Sequential(nn.Tanh(), linear))
    for measured in (False, True):
        with no_collection():
            x = torch.randn(3, 6, requires_grad=requires_grad)
            ref, (y,) = start(layer, x.detach().requires_grad_(requires_grad))
            inner = torch.tanh(x.detach())
            del x
            assert ref.expired() == measured, "the first microbatch is measured"
            gradients = layer.backward_input(0, (torch.ones_like(y),), deferred=True)
            layer.backward_weight(0)
        expected = (1 - inner**2) * linear.weight.detach().sum(0)
        torch.testing.assert_close(gradients, (expected,) if requires_grad else ())


def test_clear_drops_microbatches_in_flight() -> None:
    layer = layer_of(nn.Linear(6, 6))
    with no_collection():
        ref, outputs = start(layer, torch.randn(3, 6))
        del outputs
        layer.clear()
        assert ref.expired()
    assert not layer.marks


def test_frozen_layer_above_a_trainable_layer_runs_b_only() -> None:
    """The layer has no W and no stash."""
    layer = layer_of(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)).requires_grad_(False))
    (y,) = run_f(layer, torch.randn(3, 6, requires_grad=True))
    assert layer.activation_bytes == 0, "frozen linears keep weights, not inputs"
    (gx,) = layer.backward_input(0, (torch.ones_like(y),), deferred=True)
    one, two = (p for name, p in layer.module.named_parameters() if name.endswith("weight"))
    torch.testing.assert_close(gx, torch.ones(3, 6) @ two @ one)
    assert not layer._weight_work
    assert layer.stash_bytes == 0
    layer.backward_weight(0)
    assert all(p.grad is None for p in layer.module.parameters())


def test_frozen_prefix_keeps_no_graph() -> None:
    """The layer keeps no bytes for a backward."""
    layer = layer_of(nn.Sequential(nn.Linear(6, 6), nn.Tanh()).requires_grad_(False))
    with no_collection():
        x = torch.randn(3, 6)
        ref = StorageWeakRef(x.untyped_storage())
        (y,) = layer.forward(0, (x,), 0, graph=False, need_input=False, finish=None)
        del x
        assert y.grad_fn is None
        assert not y.requires_grad
        assert ref.expired()
    assert layer.activation_bytes == layer.stash_bytes == 0
    assert layer.output_bytes == 72


def test_measured_bytes_match_a_hand_computation() -> None:
    """Linears keep inputs until B and output gradients until W. tanh keeps its output."""
    layer = layer_of(nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 5)))
    run_f(layer, torch.randn(3, 6))
    layer.backward_input(0, (torch.randn(3, 5),), deferred=True)
    assert layer.activation_bytes == max(4 * (3 * 6 + 3 * 4), layer.stash_bytes)
    assert layer.stash_bytes == 4 * (3 * 6 + 3 * 4 + 3 * 4 + 3 * 5)
    assert layer.output_bytes == 4 * 3 * 5


def test_forward_without_training_keeps_measured_sizes() -> None:
    layer = layer_of(nn.Linear(6, 4))
    run_f(layer, torch.randn(3, 6))
    layer.backward_input(0, (torch.randn(3, 4),), deferred=False)
    before = layer.activation_bytes, layer.stash_bytes
    assert all(before)
    layer.forward(0, (torch.randn(3, 6),), 0, graph=False, need_input=False, finish=None)
    assert (layer.activation_bytes, layer.stash_bytes) == before
    layer.forget_sizes()
    assert (layer.activation_bytes, layer.stash_bytes) == (0, 0)


class Broken(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        raise ArithmeticError("no gradient today")


def test_error_names_its_layer() -> None:
    layer = layer_of(nn.Linear(6, 4))
    with pytest.raises(RuntimeError) as wrong:
        run_f(layer, torch.randn(3, 5))
    assert wrong.value.__notes__ == ["in F of layer 3"]
    (y,) = run_f(layer, torch.randn(3, 6), j=1, finish=cast(Any, Broken).apply)
    with pytest.raises(ArithmeticError) as wrong:
        layer.backward_input(1, (torch.ones_like(y),), deferred=True)
    assert wrong.value.__notes__ == ["in B of layer 3"]


@pytest.mark.parametrize("recompute", [False, True])
def test_loss_may_have_no_gradient(recompute: bool) -> None:
    """Then nothing trains, as in a layer whose output the next one ignores."""
    layer = layer_of(nn.Linear(6, 4))
    layer.switch_recompute(recompute)
    for j in range(2):
        x = torch.randn(3, 6, requires_grad=True)
        run_f(layer, x, j=j, finish=lambda y, j=j: (y if j else y.detach()).square().mean())
    gx, there = layer.backward_input(0, (torch.ones(()),), deferred=False)
    assert not there.item()
    assert not gx.any()
    assert all(p.grad is None for p in layer.module.parameters())
    gx, there = layer.backward_input(1, (torch.ones(()),), deferred=False)
    assert there.item()
    assert gx.any()


@pytest.mark.parametrize("recompute", [False, True])
def test_constant_outputs_stay_constant(recompute: bool) -> None:
    """They have no gradient. A gradient that comes and goes is zeros while it is away."""

    class Tables(nn.Module):
        def forward(self, x: Tensor, table: Tensor, ids: Tensor, keep: bool = True) -> Any:
            y = x * table
            return (y if ids[0] else y.detach()), table, ids

    layer = layer_of(Tables())
    layer.switch_recompute(recompute)
    table = torch.randn(3, 6)
    for j in range(2):
        x = torch.randn(3, 6, requires_grad=True)
        outputs = run_f(layer, x, table, torch.tensor([1 - j]), j=j)
        assert [y.requires_grad for y in outputs] == [True, False, False]
    for j in range(2):
        (gx,) = layer.backward_input(j, (torch.ones(3, 6),), deferred=True)
        assert torch.equal(gx, torch.zeros(3, 6) if j else table)
    layer.begin()
    given = (torch.randn(3, 6, requires_grad=True), table)
    assert not any(y.requires_grad for y in run_f(layer, *given, torch.tensor([0])))
    with pytest.raises(RunError, match=r"layer 3 \(Tables\) returned an output that requires a"):
        run_f(layer, *given, torch.tensor([1]), j=1)


@pytest.mark.parametrize("ragged", [False, True])
def test_only_inputs_of_other_shapes_have_other_outputs(ragged: bool) -> None:
    """And only in a ragged step."""

    class Rows(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            return x.unbind()

    layer = layer_of(Rows())
    layer.begin()
    if ragged:
        layer.expect_ragged()
    long, short = (torch.randn(rows, 6, requires_grad=True) for rows in (3, 2))
    run_f(layer, long)
    with nullcontext() if ragged else pytest.raises(RunError, match="in microbatch 1, and"):
        run_f(layer, short.detach(), j=1)


def test_each_op_records_one_mark() -> None:
    """The mark of a BW lists its share of W separately."""
    layer = layer_of(nn.Linear(6, 4))
    for j, deferred in enumerate((True, False)):
        run_f(layer, torch.randn(3, 6), j=j)
        layer.backward_input(j, (torch.randn(3, 4),), deferred)
        if deferred:
            layer.backward_weight(j)
    assert [mark[0] for mark in layer.marks] == [Kind.F, Kind.B, Kind.W, Kind.F, Kind.BW]
    assert [len(mark[3]) for mark in layer.marks] == [0, 0, 0, 0, 1]
    for _, begin, end, inside in layer.marks:
        assert begin <= end
        assert all(begin <= a <= b <= end for a, b in inside)
