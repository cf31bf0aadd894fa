"""Split, fused and plain backward have equal gradients, and keep no tensor too long."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

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
from dynmo.runtime.layer.joint_graph import Tensors
from dynmo.runtime.layer.layer import Layer
from dynmo.schedule.op import Kind
from tests.kernels import own_products
from tests.runtime.modules import Net, gradients_of, layer_of

MICROBATCHES = 3


class OwnLinear(nn.Linear):
    """Means something else by `forward`."""

    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


def shared() -> nn.Module:
    """Two modules with one weight."""
    one, two = nn.Linear(6, 6), nn.Linear(6, 6, bias=False)
    two.weight = one.weight
    return Net(lambda m, x: m.two(torch.tanh(m.one(x))), one=one, two=two)


def two_inputs() -> nn.Module:
    """Two inputs, two outputs, and one output that is no number to differentiate."""
    parts = {"left": nn.Linear(6, 6), "right": nn.Linear(6, 6, bias=False)}
    return Net(lambda m, x, y: (m.left(x) * y, m.right(y), x.argmax(-1)), **parts)


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


def checkpointed(use_reentrant: bool) -> nn.Module:
    """A caught module and a linear within torch's checkpoint."""

    def run(module: Any, x: Tensor) -> Any:
        if not x.requires_grad:  # torch would warn
            return module.inner(x)
        return checkpoint(module.inner, x, use_reentrant=use_reentrant)

    return Net(run, inner=nn.Sequential(nn.Linear(6, 6), nn.Tanh(), Conv1D(6, 6)))


def frozen_part() -> nn.Module:
    """A frozen linear between two that train."""
    fixed = nn.Linear(6, 6).requires_grad_(False)
    return nn.Sequential(nn.Linear(6, 6), fixed, nn.Linear(6, 6))


def numbers(*shapes: tuple[int, ...]) -> Callable[[], Tensors]:
    return lambda: tuple(torch.randn(shape) for shape in shapes)


def own(run: own_products.Product, *shapes: tuple[int, ...]) -> Callable[[], nn.Module]:
    return lambda: own_products.Own(run, *shapes)


Case = tuple[Callable[[], nn.Module], Callable[[], Tensors], int]
"""Makes a module and its inputs. Pieces of W that a microbatch leaves."""

ROWS, IDS = numbers((3, 6)), lambda: (torch.randint(5, (2, 7)),)
CASES: dict[str, Case] = {
    "linear": (lambda: nn.Linear(6, 4), ROWS, 1),
    "linear without bias": (lambda: nn.Linear(6, 4, bias=False), ROWS, 1),
    "linear 3-D": (lambda: nn.Linear(6, 4), numbers((2, 3, 6)), 1),
    "linear 4-D": (lambda: nn.Linear(6, 4), numbers((2, 2, 3, 6)), 1),
    "subclass of linear": (lambda: OwnLinear(6, 4), ROWS, 1),
    # The input is not contiguous.
    "transposed": (
        lambda: Net(lambda m, x: m.line(x.transpose(-1, -2)), line=nn.Linear(4, 6)),
        numbers((2, 4, 3)),
        1,
    ),
    "embedding": (lambda: nn.Embedding(5, 4), IDS, 1),
    "embedding with padding": (lambda: nn.Embedding(5, 4, padding_idx=2), IDS, 1),
    "used twice": (
        lambda: Net(lambda m, x: m.line(torch.tanh(m.line(x))), line=nn.Linear(6, 6)),
        ROWS,
        1,
    ),
    "shared weight": (shared, ROWS, 1),
    "two inputs": (two_inputs, numbers((3, 6), (3, 6)), 2),
    "without influence": (
        lambda: Net(lambda m, x, y: m.line(x), line=nn.Linear(6, 6)),
        numbers((3, 6), (3, 6)),
        1,
    ),
    "own tape": (Scale, numbers((2, 3, 6)), 1),
    "two products": (own(own_products.twice, (6, 6)), ROWS, 1),
    "product and more": (own(own_products.by_itself, (6, 6)), ROWS, 0),
    "product of a weight with itself": (own(own_products.squared, (6, 6)), ROWS, 0),
    "expanded weight": (own(own_products.expanded, (1, 6)), ROWS, 0),
    "slope": (own(own_products.slope, (3, 8, 8)), numbers((3, 8)), 0),
    "checkpoint": (own(own_products.checkpointed, (6, 6), (6, 6)), ROWS, 1),
    "reentrant checkpoint": (own(own_products.checkpointed_reentrant, (6, 6), (6, 6)), ROWS, 0),
    "linears in a checkpoint": (lambda: checkpointed(use_reentrant=False), ROWS, 2),
    "linears in a reentrant checkpoint": (lambda: checkpointed(use_reentrant=True), ROWS, 0),
    "frozen part": (frozen_part, ROWS, 2),
    "norm only": (lambda: nn.LayerNorm(6), ROWS, 0),
    "batch norm": (
        lambda: nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)),
        numbers((4, 6)),
        2,
    ),
    "nothing to train": (nn.Tanh, ROWS, 0),
    "dropout": (lambda: nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5)), ROWS, 1),
}


@dataclass
class Result:
    outputs: list[Tensors]
    inputs: list[Tensors]
    weights: dict[str, Tensor | None]


def with_gradients(inputs: Tensors) -> Tensors:
    return tuple(x.detach().requires_grad_(x.is_floating_point()) for x in inputs)


def split(module: nn.Module, inputs: list[Tensors], gradients: list[Tensors], mode: str) -> Result:
    """Runs BW, or B with each W at the end, or each W one later."""
    layer = layer_of(module)
    outputs = [run_f(layer, *with_gradients(x), j=j) for j, x in enumerate(inputs)]
    result = Result(outputs, [], {})
    pending: list[int] = []
    for j, g in enumerate(gradients):
        result.inputs.append(layer.backward_input(j, g, deferred=mode != "BW"))
        if mode == "W one later" and pending:
            layer.backward_weight(pending.pop())
        pending += [j] if mode != "BW" else []
    for j in pending:
        layer.backward_weight(j)
    result.weights = gradients_of(module)
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
    result.weights = gradients_of(module)
    return result


def same(one: Result, other: Result, **tolerance: float) -> None:
    close = partial(torch.testing.assert_close, **tolerance)
    close([*one.outputs, *one.inputs], [*other.outputs, *other.inputs])
    close(one.weights, other.weights)


@pytest.mark.parametrize("name", CASES)
def test_split_fused_and_plain_backward_have_equal_gradients(name: str) -> None:
    make, draw, _ = CASES[name]
    torch.manual_seed(5)
    module = make()
    inputs = [draw() for _ in range(MICROBATCHES)]
    probe = copy.deepcopy(module)(*inputs[0])
    outputs = (probe,) if isinstance(probe, Tensor) else probe
    shapes = [y.shape for y in outputs if y.is_floating_point()]
    gradients = [tuple(torch.randn(shape) for shape in shapes) for _ in range(MICROBATCHES)]
    expected = plain(copy.deepcopy(module), inputs, gradients)
    whole = split(copy.deepcopy(module), inputs, gradients, "BW")
    same(whole, expected, rtol=0, atol=0)
    for mode in ("W last", "W one later"):
        same(split(copy.deepcopy(module), inputs, gradients, mode), whole, rtol=0, atol=0)


@pytest.mark.parametrize("name", CASES)
def test_expected_parameters_are_deferred_to_w(name: str) -> None:
    make, draw, works = CASES[name]
    layer = layer_of(make())
    outputs = run_f(layer, *with_gradients(draw()))
    layer.backward_input(0, tuple(torch.ones_like(y) for y in outputs if y.requires_grad), True)
    assert len(layer._weight_work.get(0, ())) == works
    modules = layer.module.named_modules()
    linears = {f"{n}.weight".lstrip(".") for n, m in modules if isinstance(m, SplitLinear)}
    done = {name for name, g in gradients_of(layer.module).items() if g is not None}
    assert not works or not done & linears, "a linear's weight gradient is W, not B"
    layer.backward_weight(0)
    for name, p in layer.module.named_parameters():
        assert (p.grad is not None) == p.requires_grad, name


@contextmanager
def no_collection() -> Iterator[None]:
    """Memory that is released must go by itself, as when the executor runs."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def run_f(layer: Layer, *inputs: Tensor, j: int = 0, finish: Any = None) -> Tensors:
    return layer.forward(j, inputs, 0, finish=finish)


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
    assert not layer._graphs
    assert not layer._weight_work


@pytest.mark.parametrize("recompute", [False, True])
def test_inner_activations_are_kept_until_b_unless_recomputed(recompute: bool) -> None:
    """Memory that only B needs is not kept for W. An example is the input of a tanh."""
    seen: list[StorageWeakRef] = []

    def watched(_: nn.Module, x: Tensor) -> Tensor:
        y = torch.tanh(x)
        seen.append(StorageWeakRef(y.untyped_storage()))
        return y * 1.5

    layer = layer_of(nn.Sequential(nn.Linear(6, 6), Net(watched), nn.Linear(6, 6)))
    layer.recompute = recompute
    with no_collection():
        run_f(layer, torch.randn(3, 6, requires_grad=recompute))
        assert [ref.expired() for ref in seen] == [recompute]
        layer.backward_input(0, (torch.randn(3, 6),), deferred=True)
        assert [ref.expired() for ref in seen] == [True] * (1 + recompute)
        layer.backward_weight(0)


def test_run_to_compare_leaves_the_products_of_f() -> None:
    """The first F runs again if it writes to a buffer beside the model's state."""

    def count(module: nn.Module, x: Tensor) -> Tensor:
        module.get_buffer("seen").add_(1)
        return module.get_submodule("line")(x)

    module, x = Net(count, line=nn.Linear(6, 4)), torch.randn(3, 6)
    module.register_buffer("seen", torch.zeros(()), persistent=False)
    layer = Layer(3, module, HostClock(), 0, others=dict)
    run_f(layer, x)
    assert module.get_buffer("seen") == 1, "a run to compare with leaves no trace"
    layer.backward_input(0, (torch.ones(3, 4),), deferred=True)
    layer.backward_weight(0)
    expected = torch.ones(4, 3) @ x
    torch.testing.assert_close(gradients_of(module)["line.weight"], expected, rtol=0, atol=0)


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


def test_input_of_a_layer_that_writes_to_it_is_released_after_f() -> None:
    """The graph saves a copy, and the input itself may go."""
    layer = layer_of(nn.Sequential(nn.ReLU(inplace=True), nn.Linear(6, 6)))
    for measured in (False, True):
        with no_collection():
            ref, (y,) = start(layer, torch.randn(3, 6).requires_grad_())
            assert ref.expired() == measured
            layer.backward_input(0, (torch.ones_like(y),), deferred=True)
            layer.backward_weight(0)


def test_a_late_write_to_the_input_is_named() -> None:
    def late(_: nn.Module, x: Tensor) -> Tensor:
        calls.append(len(calls))
        return torch.sin(x.add_(1) if len(calls) == 3 else x)

    calls: list[int] = []
    layer = layer_of(nn.Sequential(Net(late), nn.Linear(6, 6)))
    for j in range(2):
        run_f(layer, torch.randn(3, 6).requires_grad_(), j=j)
    with pytest.raises(RunError, match="writes to its input or to a parameter in place, which"):
        run_f(layer, torch.randn(3, 6).requires_grad_(), j=2)


def test_late_write_to_the_input_of_a_linear_is_refused() -> None:
    def late(m: Any, x: Tensor) -> Tensor:
        hidden = 2 * m.one(x)
        y = m.two(hidden)
        hidden.add_(1)
        return y

    layer = layer_of(Net(late, one=nn.Linear(6, 6), two=nn.Linear(6, 6)))
    run_f(layer, torch.randn(3, 6))
    with pytest.raises(RuntimeError, match="the input of a linear was written to in place"):
        layer.backward_input(0, (torch.ones(3, 6),), deferred=True)


def test_bias_waits_with_its_weight() -> None:
    layer = layer_of(nn.Linear(6, 4))
    run_f(layer, torch.randn(3, 6))
    layer.backward_input(0, (torch.ones(3, 4),), deferred=True)
    assert set(gradients_of(layer.module).values()) == {None}
    layer.backward_weight(0)
    bias = gradients_of(layer.module)["bias"]
    torch.testing.assert_close(bias, torch.full((4,), 3.0))


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
    assert layer.meter.activation_bytes == 0, "frozen linears keep weights, not inputs"
    (gx,) = layer.backward_input(0, (torch.ones_like(y),), deferred=True)
    one, two = (p for name, p in layer.module.named_parameters() if name.endswith("weight"))
    torch.testing.assert_close(gx, torch.ones(3, 6) @ two @ one)
    assert not layer._weight_work
    assert layer.meter.stash_bytes == 0
    layer.backward_weight(0)
    assert all(p.grad is None for p in layer.module.parameters())


def test_frozen_prefix_keeps_no_graph() -> None:
    """The layer keeps no bytes for a backward."""
    layer = layer_of(nn.Sequential(nn.Linear(6, 6), nn.Tanh()).requires_grad_(False))
    with no_collection():
        x = torch.randn(3, 6)
        ref = StorageWeakRef(x.untyped_storage())
        (y,) = layer.forward(0, (x,), 0, graph=False)
        del x
        assert y.grad_fn is None
        assert not y.requires_grad
        assert ref.expired()
    assert layer.meter.activation_bytes == layer.meter.stash_bytes == 0
    assert layer.meter.output_bytes == 72


def test_measured_bytes_match_a_hand_computation() -> None:
    """Linears keep inputs until B and output gradients until W. tanh keeps its output."""
    layer = layer_of(nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 5)))
    run_f(layer, torch.randn(3, 6))
    layer.backward_input(0, (torch.randn(3, 5),), deferred=True)
    assert layer.meter.activation_bytes == max(4 * (3 * 6 + 3 * 4), layer.meter.stash_bytes)
    assert layer.meter.stash_bytes == 4 * (3 * 6 + 3 * 4 + 3 * 4 + 3 * 5)
    assert layer.meter.output_bytes == 4 * 3 * 5


def test_forward_without_training_keeps_measured_sizes() -> None:
    layer = layer_of(nn.Linear(6, 4))
    run_f(layer, torch.randn(3, 6))
    layer.backward_input(0, (torch.randn(3, 4),), deferred=False)
    before = layer.meter.activation_bytes, layer.meter.stash_bytes
    assert all(before)
    layer.forward(0, (torch.randn(3, 6),), 0, graph=False)
    assert (layer.meter.activation_bytes, layer.meter.stash_bytes) == before
    layer.forget_sizes()
    assert (layer.meter.activation_bytes, layer.meter.stash_bytes) == (0, 0)


def test_error_names_its_layer() -> None:
    def broken(_: Tensor) -> None:
        raise ArithmeticError("no gradient today")

    def finish(y: Tensor) -> Tensor:
        y = y.clone()
        y.register_hook(broken)
        return y

    layer = layer_of(nn.Linear(6, 4))
    with pytest.raises(RuntimeError) as wrong:
        run_f(layer, torch.randn(3, 5))
    assert wrong.value.__notes__ == ["in F of layer 3"]
    (y,) = run_f(layer, torch.randn(3, 6), j=1, finish=finish)
    with pytest.raises(ArithmeticError) as wrong:
        layer.backward_input(1, (torch.ones_like(y),), deferred=True)
    assert wrong.value.__notes__ == ["in B of layer 3"]


@pytest.mark.parametrize("recompute", [False, True])
def test_loss_may_have_no_gradient(recompute: bool) -> None:
    """Then nothing trains, as in a layer whose output the next one ignores."""
    layer = layer_of(nn.Linear(6, 4))
    layer.recompute = recompute
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
def test_hook_that_a_forward_puts_on_its_input_runs_once(recompute: bool) -> None:
    def halved(_: nn.Module, x: Tensor) -> Tensor:
        if x.requires_grad:
            x.register_hook(lambda gradient: 0.5 * gradient)
        return 3 * x

    layer = layer_of(Net(halved))
    layer.recompute = recompute
    for j in range(2):
        run_f(layer, torch.ones(3, 6, requires_grad=True), j=j)
        (gx,) = layer.backward_input(j, (torch.ones(3, 6),), deferred=False)
        assert torch.equal(gx, torch.full((3, 6), 1.5))


@pytest.mark.parametrize("recompute", [False, True])
def test_constant_outputs_stay_constant(recompute: bool) -> None:
    """They have no gradient. A gradient that comes and goes is zeros while it is away."""

    def tables(_: nn.Module, x: Tensor, table: Tensor, ids: Tensor) -> Any:
        y = x * table
        return (y if ids[0] else y.detach()), table, ids

    layer = layer_of(Net(tables))
    layer.recompute = recompute
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
    for j in range(2):
        outputs = run_f(layer, *given, torch.tensor([j]), j=j)
        assert [y.requires_grad for y in outputs] == [True, False, False]


def test_gradient_that_comes_late_beside_another_is_refused() -> None:
    def late(_: nn.Module, x: Tensor, ids: Tensor) -> Any:
        return x, x * 2 if ids[0] else x.detach()

    layer, x = layer_of(Net(late)), torch.randn(3, 6, requires_grad=True)
    run_f(layer, x, torch.tensor([0]))
    with pytest.raises(RunError, match=r"layer 3 \(Net\) returned an output that requires a"):
        run_f(layer, x, torch.tensor([1]), j=1)


@pytest.mark.parametrize("ragged", [False, True])
def test_only_inputs_of_other_shapes_have_other_outputs(ragged: bool) -> None:
    """And only in a ragged step."""

    layer = layer_of(Net(lambda _, x: x.unbind()))
    layer.begin()
    if ragged:
        layer.outputs.expect_ragged()
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
