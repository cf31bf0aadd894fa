"""The engine, as a user's own training loop uses it."""

from __future__ import annotations

import math
from functools import partial
from itertools import product
from typing import Any, Literal, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from dynmo.config import parse
from dynmo.errors import ConfigError, InputError, PartitionError, RunError
from dynmo.models.emulated import make_layers
from dynmo.models.loss import next_token_loss
from dynmo.models.model import Model, from_factories
from dynmo.pipeline.actions import Actions
from dynmo.plan.partition import Partition
from dynmo.runtime.comm.agreement import maxima
from dynmo.runtime.engine.batch_check import StepBatch
from dynmo.runtime.engine.engine import Engine
from dynmo.runtime.options import EngineOptions
from dynmo.train.setup import model_of
from tests.runtime.alone import (
    MICROBATCHES,
    alone,
    around,
    emulated,
    gpt,
    ids,
    pipeline,
    run_half,
    run_step,
    tokens,
)
from tests.runtime.fake_time import emulated_time
from tests.runtime.modules import Net, assert_same, gradients_of
from tests.runtime.optimizers import settings

JOBS = "tests.runtime.engine.test_engine:"


def cross_entropy(out: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(out.flatten(0, 1), targets.flatten())


def weights(pipeline: Engine) -> dict[int, list[Tensor]]:
    modules = {i: module for i, (module, _) in pipeline.store.own.items()}
    return {i: [p.detach().clone() for p in m.parameters()] for i, m in modules.items()}


def changed(pipeline: Engine, before: dict[int, list[Tensor]]) -> list[int]:
    now = weights(pipeline)
    return [i for i, values in now.items() if not all(map(torch.equal, values, before[i]))]


def test_step_equals_a_plain_backward_and_update() -> None:
    """Loss, norm and update equal those of a plain backward on the same modules."""
    pipeline = gpt()
    inputs, targets = tokens(0)
    layers = nn.Sequential(*pipeline.model.build(range(pipeline.model.layers)))
    plain = 0.0
    for x, y in zip(inputs, targets, strict=True):
        loss = cross_entropy(layers(x), y) / MICROBATCHES
        loss.backward()
        plain += loss.item()
    gradients = [[p.grad for p in m.parameters() if p.grad is not None] for m in layers]
    norms = [math.fsum(float(g.double().square().sum()) for g in of) for of in gradients]
    result = run_step(pipeline, 0, inputs, targets, lr=0.1, flag=True)
    assert result.loss == pytest.approx(plain, rel=1e-6)
    assert result.squared_norms == pytest.approx(norms, rel=1e-5)
    assert result.norm == pytest.approx(math.sqrt(sum(norms)), rel=1e-5)
    assert result.flags == (True,)
    assert 0 <= result.idle_ratio < 1
    assert result.busy[0] <= result.spans[0]
    assert min(result.kinds) > 0
    assert sum(result.kinds) == pytest.approx(sum(result.busy))


def test_wrong_number_of_microbatches_is_refused() -> None:
    """The engine would otherwise ignore half of the batch."""
    pipeline, (inputs, targets) = gpt(), tokens(0)
    for given in ((inputs.repeat(2, 1, 1), targets), (inputs, targets[:2])):
        with pytest.raises(InputError, match=r"\d microbatches, shape \[\d, 2, 8\]"):
            run_step(pipeline, 0, *given, lr=0.1)
        with pytest.raises(InputError, match="where 3 are expected"):
            pipeline.evaluate(StepBatch(*given), 3)
    run_step(pipeline, 0, inputs, targets, lr=0.1)


def test_non_contiguous_weight_trains_with_the_same_bits() -> None:
    """Weights imported from another layout may be column-major."""

    def model(turned: bool) -> Model:
        def weight() -> nn.Module:
            linear = nn.Linear(8, 8)
            if turned:
                linear.weight = nn.Parameter(linear.weight.detach().t().contiguous().t())
            return linear

        return around(weight)

    assert not model(True).build(range(3))[1].get_parameter("weight").is_contiguous()
    for dtype in (torch.float32, torch.bfloat16):  # with float32 masters there
        digests = set[str]()
        for turned in (False, True):
            linear = pipeline(model(turned), dtype=dtype)
            for step in range(3):
                run_step(linear, step, *tokens(step), lr=0.1)
            digests.add(linear.digest())
        assert len(digests) == 1


def twice() -> nn.Module:
    """Uses a weight through its module, and by itself."""

    def forward(m: Any, x: Tensor) -> Tensor:
        x = x + m.embedding((x[..., 0] > 0).long())
        y = functional.linear(torch.tanh(m.linear(x)), m.linear.weight)
        return y + functional.linear(x, m.embedding.weight)[..., :8]

    return Net(forward, embedding=nn.Embedding(16, 8), linear=nn.Linear(8, 8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weight_used_twice_in_a_layer_has_the_whole_gradient(dtype: torch.dtype) -> None:
    """The sum has one order, with split and fused backward and any accumulation."""
    model = around(twice, twice)

    text = torch.randint(256, (4, 2, 9), generator=torch.Generator().manual_seed(0))
    inputs, targets = text[..., :-1], text[..., 1:]
    states: dict[tuple[str, int], dict[str, Tensor]] = {}
    for schedule, groups in product(("1f1b", "zb-h2", "zb-v"), (1, 2)):
        partition = Partition((2, 2) if schedule == "zb-v" else (4,))
        options = EngineOptions(schedule, 4, dtype=dtype, accumulation_groups=groups)
        pipeline = Engine(alone(), model, partition, options)
        run_half(pipeline, 0, inputs, targets)
        modules = {str(i): module for i, (module, _) in pipeline.store.own.items()}
        gradients = gradients_of(nn.ModuleDict(modules))
        states[schedule, groups] = {n: g.clone() for n, g in gradients.items() if g is not None}
    plain = nn.Sequential(*(m.float() for m in model.build(range(4))))
    losses = [next_token_loss(plain(x), y) for x, y in zip(inputs, targets, strict=True)]
    torch.stack(losses).mean().backward()
    wanted = gradients_of(plain)
    for (_, groups), got in states.items():
        assert got.keys() == wanted.keys()
        assert_same(got, states["1f1b", groups])
        if dtype == torch.float32:
            torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-7)


class Turned(nn.Linear):
    """A linear of one's own that defers, and leaves its gradient as columns."""

    tape = None

    def forward(self, input: Tensor) -> Tensor:
        return cast(Tensor, _Turn.apply(input, self.weight, self))


class _Turn(torch.autograd.Function):
    columns = True

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: nn.Parameter, layer: Turned) -> Tensor:
        ctx.save_for_backward(x)
        ctx.layer = layer
        return functional.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (x,), layer, (gy,) = ctx.saved_tensors, ctx.layer, gradients

        def work() -> None:
            gradient = x.reshape(-1, x.shape[-1]).t().mm(gy.reshape(-1, gy.shape[-1])).t()
            gradient = gradient if _Turn.columns else gradient.contiguous()
            grad = layer.weight.grad
            layer.weight.grad = gradient if grad is None else grad + gradient

        layer.tape.add(work, x, gy)
        return gy.matmul(layer.weight), None, None


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_non_contiguous_gradient_gives_the_same_bits(
    optimizer: Literal["adamw", "sgd"], monkeypatch: pytest.MonkeyPatch
) -> None:
    digests = set[str]()
    for columns in (True, False):
        monkeypatch.setattr(_Turn, "columns", columns)
        model = around(partial(Turned, 8, 8, bias=False))
        engine = pipeline(model, optimizer=settings(optimizer))
        for step in range(3):
            run_step(engine, step, *tokens(step), lr=0.1)
        digests.add(engine.digest())
    assert len(digests) == 1


def test_layers_that_share_a_module_are_refused() -> None:
    one = nn.Linear(8, 8)
    with pytest.raises(ConfigError, match=r"layers 1 and 2 .*weight"):
        pipeline(around(lambda: one, lambda: one))


def test_evaluation_works_under_no_grad() -> None:
    pipeline, batch = gpt(), tokens(0)
    with torch.no_grad():
        loss = pipeline.evaluate(StepBatch(*batch), MICROBATCHES)
    assert loss == pipeline.evaluate(StepBatch(*batch), MICROBATCHES)


def test_tied_embedding_has_the_sum_of_both_gradients() -> None:
    """The gradient is the sum of the head's and the embedding's, as in plain torch."""
    pipeline = gpt(tied=True)
    layers = nn.Sequential(*pipeline.model.build(range(pipeline.model.layers)))
    owner = layers[0].get_submodule("tokens")
    layers[5].get_submodule("logits").weight = owner.weight  # pyright: ignore[reportAttributeAccessIssue]
    adamw = torch.optim.AdamW(layers.parameters(), lr=0.01, weight_decay=0.0)
    for step in range(4):
        inputs, targets = tokens(step)
        adamw.zero_grad()
        for x, y in zip(inputs, targets, strict=True):
            (cross_entropy(layers(x), y) / MICROBATCHES).backward()
        expected = float(torch.nn.utils.clip_grad_norm_(layers.parameters(), 0.5))
        adamw.step()
        result = run_step(pipeline, step, inputs, targets, lr=0.01, max_norm=0.5)
        assert result.norm == pytest.approx(expected, rel=1e-5)
    first = pipeline.store.own[0][0].get_parameter("tokens.weight")
    assert torch.equal(first, pipeline.store.own[5][0].get_parameter("logits.weight"))
    torch.testing.assert_close(first, owner.weight, rtol=1e-4, atol=1e-5)


def test_tied_weight_frozen_by_its_owner_never_trains() -> None:
    """The other use accumulates no gradient, which would count in the norm."""

    def fixed() -> nn.Module:
        return nn.Embedding(256, 8).requires_grad_(False)

    factories = [fixed, partial(nn.Linear, 8, 8), partial(nn.Linear, 8, 256, bias=False)]
    tied = [((0, "weight"), (2, "weight"))]
    pipe = pipeline(from_factories(list("abc"), factories, 0, next_token_loss, tied=tied))
    norms = {run_step(pipe, step, *tokens(0), lr=0.0).norm for step in range(3)}
    assert len(norms) == 1
    assert not pipe.store.own[2][0].get_parameter("weight").requires_grad


def test_a_tied_weight_freezes_with_its_owner() -> None:
    pipeline = gpt(tied=True)
    Actions(pipeline).freeze([0])
    before = weights(pipeline)
    run_step(pipeline, 0, *tokens(0), lr=0.1)
    assert changed(pipeline, before) == [1, 2, 3, 4, 5], "the head's norm still trains"
    head = pipeline.store.own[5][0].get_parameter("logits.weight")
    assert torch.equal(head, before[0][0])
    Actions(pipeline).unfreeze([0])
    run_step(pipeline, 1, *tokens(1), lr=0.1)
    assert not torch.equal(head, before[0][0])
    assert torch.equal(head, pipeline.store.own[0][0].get_parameter("tokens.weight"))


def test_frozen_layers_do_not_change() -> None:
    pipeline = gpt()
    before = weights(pipeline)
    Actions(pipeline).freeze([0, 1, 3])
    assert pipeline.store.frozen.layers == {0, 1, 3}
    assert pipeline.store.frozen.first_trainable == 2
    result = run_step(pipeline, 0, *tokens(0), lr=0.1)
    assert changed(pipeline, before) == [2, 4, 5]
    assert [x > 0 for x in result.squared_norms] == [False, False, True, False, True, True]
    Actions(pipeline).unfreeze([1, 3])
    run_step(pipeline, 1, *tokens(1), lr=0.1)
    assert changed(pipeline, before) == [1, 2, 3, 4, 5]
    assert pipeline.store.frozen.first_trainable == 1


def test_a_frozen_layer_keeps_its_moments() -> None:
    pipeline = gpt()
    run_step(pipeline, 0, *tokens(0), lr=0.1)
    kept = {k: v.clone() for k, v in pipeline.store.own[1][1].state().items()}
    Actions(pipeline).freeze([0, 1])
    run_step(pipeline, 1, *tokens(1), lr=0.1)
    assert_same(kept, pipeline.store.own[1][1].state())
    Actions(pipeline).unfreeze([0, 1])
    run_step(pipeline, 2, *tokens(2), lr=0.1)
    assert pipeline.store.own[1][1].state()["qkv.weight/step"] == 2


def test_freezing_all_layers_is_refused() -> None:
    pipeline = gpt()
    Actions(pipeline).freeze([0, 1, 2])
    with pytest.raises(PartitionError, match=r"freezing layers \[3, 4, 5\]"):
        Actions(pipeline).freeze([5, 3, 4])
    assert pipeline.store.frozen.layers == {0, 1, 2}
    run_step(pipeline, 0, *tokens(0), lr=0.1)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_non_finite_loss_updates_no_weight(bad: float) -> None:
    """A run that continues with better data ends like a run without the failed step."""
    pipeline, twin = gpt(), gpt()
    pipeline.optimizer_step.not_finite.stop_after = 1
    weight = pipeline.store.own[5][0].get_parameter("logits.weight").data
    kept = weight[0, 0].item()
    weight[0, 0] = bad
    with pytest.raises(RunError, match="step 0: loss"):
        run_step(pipeline, 0, *tokens(0), lr=0.1)
    weight[0, 0] = kept
    assert pipeline.digest() == twin.digest()
    for step in (1, 2):
        assert (
            run_step(pipeline, step, *tokens(step), lr=0.1).loss
            == run_step(twin, step, *tokens(step), lr=0.1).loss
        )
    assert pipeline.digest() == twin.digest()


def test_evaluation_is_the_mean_loss_and_leaves_no_trace() -> None:
    """Evaluation runs without dropout and does not affect later steps."""
    pipeline, twin = gpt(dropout=0.3), gpt(dropout=0.3)
    inputs, targets = tokens(5)
    layers = nn.Sequential(*pipeline.model.build(range(pipeline.model.layers))).eval()
    losses = [cross_entropy(layers(x), y).item() for x, y in zip(inputs, targets, strict=True)]
    mean = pytest.approx(sum(losses) / MICROBATCHES, rel=1e-6)
    assert pipeline.evaluate(StepBatch(inputs, targets), MICROBATCHES) == mean
    first = StepBatch(inputs[:1], targets[:1])
    assert pipeline.evaluate(first, 1) == pytest.approx(losses[0], rel=1e-6)
    for step in range(2):
        run_step(pipeline, step, *tokens(step), lr=0.1)
        pipeline.evaluate(StepBatch(inputs, targets), MICROBATCHES)
        run_step(twin, step, *tokens(step), lr=0.1)
    assert pipeline.digest() == twin.digest()


def test_reshape_drops_costs_of_newly_recomputed_layers() -> None:
    """The pipeline chooses the recomputed layers again after a reshape."""
    recomputed: set[int] = set()
    model = make_layers([1] * 3, [1] * 3, [1] * 3, size=8)
    steps = EngineOptions("zb-h1", MICROBATCHES, recompute=lambda *_: frozenset(recomputed))
    pipeline = Engine(alone(), model, Partition((3,)), steps)
    with emulated_time():
        run_step(pipeline, 0, ids(), ids(), lr=0.0)
    assert all(cost.f > 0 for cost in pipeline.costs())
    recomputed.add(1)
    Actions(pipeline).reshape(pipeline=1, data=1)
    assert pipeline.store.layout.recomputed == {1}
    assert [cost.f > 0 for cost in pipeline.costs()] == [True, False, True]


def test_the_digest_covers_every_bit() -> None:
    """The digest also covers a parameter without dimensions."""
    pipe = pipeline(model_of(parse({"model": {"kind": "python:tests.models.user_model:layers"}})))
    first = pipe.digest()
    scale = pipe.store.own[2][0].get_parameter("scale")
    for change in (lambda: scale.data.add_(1e-6), lambda: scale.data.neg_()):
        change()
        assert pipe.digest() != first
    scale.data.fill_(0.5)
    assert pipe.digest() == first


def test_placements_of_another_size_are_refused() -> None:
    pipeline = gpt()
    for counts in ((3, 3), (5,), (7,)):
        with pytest.raises(PartitionError, match="a placement of"):
            Actions(pipeline).move(Partition(counts))
        with pytest.raises(PartitionError, match="a placement of"):
            Engine(
                alone(), pipeline.model, Partition(counts), EngineOptions("1f1b", microbatches=2)
            )
    run_step(pipeline, 0, *tokens(0), lr=0.1)


def test_a_predicted_step_of_one_rank_is_the_sum_of_its_costs() -> None:
    """The simulator runs on measured costs. One rank does all the work."""
    pipeline = emulated(f=[1] * 3, b=[2] * 3, w=[1] * 3)
    with emulated_time():
        run_step(pipeline, 0, ids(), ids(), lr=0.0)
    plan = pipeline.schedule_maker.plan(Partition((3,)), pipeline.costs())
    assert plan.timeline.makespan == pytest.approx(MICROBATCHES * 12)
    assert maxima(pipeline.store.world, (2.5,))[0] == 2.5
    assert isinstance(pipeline.model, Model)
