"""The cache of frozen layers' outputs has the same bits, within its memory limit."""

from __future__ import annotations

import re
from collections.abc import Hashable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dynmo
from dynmo.cases.freezing.cache import OutputCache
from dynmo.cases.freezing.case import make
from dynmo.cases.freezing.options import Freezing
from dynmo.cases.freezing.prefix import PrefixCase
from dynmo.errors import ConfigError, InputError
from dynmo.models.loss import next_token_loss
from dynmo.models.model import from_factories
from dynmo.pipeline.actions import Actions
from dynmo.pipeline.case_options import RunFacts
from dynmo.pipeline.cases import Cases
from dynmo.runtime.engine.batch_check import StepBatch
from dynmo.runtime.layer.layer import Layer
from dynmo.runtime.layer.stage import FrozenPrefix
from dynmo.schedule.op import Kind
from tests.runtime.alone import MICROBATCHES, advance, around, pipeline, tokens
from tests.runtime.modules import Net, draw, layer_of

WIDTH, ROWS = 6, 3
SIZE = ROWS * WIDTH * 4  # bytes of an output


class Counting(nn.Linear):
    """Counts how often it runs."""

    calls = 0

    def forward(self, input: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(input)


class Dropping(nn.Dropout):
    """Draws, but not in evaluation."""


class Tracking(nn.Module):
    """A module whose buffer counts in training."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen += 1
        return x * 2


def layers(*modules: nn.Module) -> list[Layer]:
    return [layer_of(module, i) for i, module in enumerate(modules)]


def counting(count: int = 3) -> list[Layer]:
    torch.manual_seed(0)
    return layers(*(Counting(WIDTH, WIDTH) for _ in range(count)))


def calls(counted: list[Layer]) -> list[int]:
    return [getattr(layer.module, "calls", 0) for layer in counted]


class Cache(OutputCache):
    """Counts the F's of layers that it spared."""

    spared = 0

    def run(self, prefix: FrozenPrefix, samples: Hashable | None) -> tuple[Tensor, ...]:
        outputs = super().run(prefix, samples)
        self.spared += prefix.skipped
        return outputs


def roomy() -> Cache:
    return Cache(1 << 20)


def run(
    cache: Cache,
    counted: list[Layer],
    key: int | None,
    step: int = 0,
    training: bool = True,
    x: Tensor | None = None,
) -> Tensor:
    for layer in counted:
        layer.module.train(training)
    x = draw(key or 0, ROWS, WIDTH) if x is None else x
    (y,) = cache.run(FrozenPrefix(counted, 0, (x,), step, training), key)
    return y


def bare(counted: list[Layer], key: int) -> Tensor:
    x = draw(key, ROWS, WIDTH)
    for layer in counted:
        x = layer.module(x)
    return x.detach()


def test_cached_layers_do_not_run_twice() -> None:
    counted, cache = counting(), roomy()
    expected = {key: bare(counted, key) for key in (1, 2)}
    before = calls(counted)
    for step, key in enumerate((1, 2, 1, 1, 2)):
        assert torch.equal(run(cache, counted, key, step), expected[key])
    assert calls(counted) == [n + 2 for n in before], "each key once"
    assert (cache.spared, cache.bytes) == (3 * 3, 2 * SIZE)
    assert [[mark[0] for mark in layer.marks] for layer in counted] == [[Kind.F] * 5] * 3, (
        "the profiler sees every microbatch"
    )
    assert all(mark[1] == mark[2] for layer in counted[:-1] for mark in layer.marks[2:])


def test_evaluation_and_training_outputs_are_cached_separately() -> None:
    counted = layers(nn.Linear(WIDTH, WIDTH), Net(lambda m, x: x + m.training))
    cache = roomy()
    trained = run(cache, counted, 1)
    assert torch.equal(run(cache, counted, 1, training=False) + 1, trained)
    assert torch.equal(run(cache, counted, 1), trained)
    assert cache.spared == 2


def test_cache_keeps_the_first_outputs_within_the_limit() -> None:
    """Epochs repeat in order, so an evicted output would be the next one needed."""
    counted, cache = counting(), Cache(2 * SIZE + SIZE // 2)
    for _ in range(3):
        for key in range(4):
            run(cache, counted, key)
            assert cache.bytes <= 2 * SIZE + SIZE // 2
    assert (cache.spared, cache.bytes) == (2 * 2 * 3, 2 * SIZE)
    assert calls(counted) == [2 + 3 * 2] * 3


def test_batch_without_keys_is_not_cached() -> None:
    counted, cache = counting(), roomy()
    for _ in range(2):
        run(cache, counted, None)
    assert (calls(counted), cache.bytes, cache.spared) == ([2, 2, 2], 0, 0)


def test_cached_outputs_stay_valid_as_layers_freeze_and_move() -> None:
    """F continues after the cached layer. The deeper output then replaces the old one."""
    counted, cache = counting(4), roomy()
    for layer in counted:
        # As any layer that has run: its sizes are known.
        layer.forward(0, (draw(0, ROWS, WIDTH),), 0, graph=False)
    expected, before = bare(counted, 1), calls(counted)
    run(cache, counted[:2], 1)
    cache.forget([2, 3])
    cache.hold({0, 1, 2, 3})
    assert torch.equal(run(cache, counted, 1), expected)
    assert calls(counted) == [n + 1 for n in before]
    assert cache.bytes == SIZE
    cache.hold({2, 3})  # 0 and 1 have moved to the rank in front
    y = run(cache, counted[2:], 1, x=bare(counted[:2], 1))
    assert torch.equal(y, expected)
    assert calls(counted)[2:] == [n + 1 for n in before[2:]]


@pytest.mark.parametrize("changed", [0, 1, 2])
def test_changed_layer_drops_its_cached_outputs(changed: int) -> None:
    counted, cache = counting(), roomy()
    run(cache, counted, 1)
    with torch.no_grad():
        counted[changed].module.get_parameter("weight").add_(1)
    cache.forget([changed])
    assert (cache.bytes, calls(counted)) == (0, [1, 1, 1])
    assert torch.equal(run(cache, counted, 1), bare(counted, 1))
    cache.hold({0, 1})
    assert cache.bytes == 0, "the layer with the output has moved"


def test_newly_received_layer_runs_once() -> None:
    """Plans need the sizes of the layer."""
    counted, cache = counting(), roomy()
    expected = run(cache, counted, 1)
    counted[0] = layer_of(counted[0].module, 0)
    for _ in range(2):
        assert torch.equal(run(cache, counted, 1), expected)
    assert calls(counted) == [2, 2, 2]
    assert counted[0].meter.output_bytes == SIZE


def test_cached_output_cannot_be_overwritten() -> None:
    counted, cache = counting(), roomy()
    expected = bare(counted, 1)
    for _ in range(3):
        y = run(cache, counted, 1)
        assert torch.equal(y, expected)
        y.detach().zero_()


def test_a_view_is_cached_without_its_base() -> None:
    for view, size in (
        (lambda _, x: x.t(), 3 * WIDTH),
        (lambda _, x: x[:, 1:4], 9),
        (lambda _, x: x[:1].expand(7, WIDTH), 7 * WIDTH),
    ):
        counted = layers(nn.Linear(WIDTH, WIDTH), Net(view))
        cache = roomy()
        first, second = run(cache, counted, 1), run(cache, counted, 1)
        assert torch.equal(first, second)
        assert cache.spared == 2
        kept = [y.untyped_storage() for entry in cache._entries.values() for y in entry.tensors]
        assert sum(y.nbytes() for y in kept) == cache.bytes == 4 * size


def test_random_or_changing_outputs_are_refused() -> None:
    dropping = layers(nn.Linear(WIDTH, WIDTH), Dropping(0.5))
    tracking = layers(nn.Linear(WIDTH, WIDTH), Tracking())
    with pytest.raises(ConfigError, match=r"layer 1 \(Dropping\) .*random"):
        run(roomy(), dropping, 1)
    with pytest.raises(ConfigError, match=r"layer 1 \(Tracking\) .*'seen'"):
        run(roomy(), tracking, 1)
    for stack in (dropping, tracking):
        cache = roomy()
        first, second = (run(cache, stack, 1, training=False) for _ in range(2))
        assert torch.equal(first, second)
        assert cache.spared == 2, "in evaluation it is the same each time"
    # Drawing does no harm if steps do not come again. But an evaluation sees what a training
    # forward has written.
    run(roomy(), dropping, None)
    with pytest.raises(ConfigError, match="writes to its buffer"):
        run(roomy(), tracking, None)


def losses_and_calls(cache_bytes: int) -> tuple[list[float], list[int], tuple[int, int]]:
    """Epochs of two steps: two with four frozen layers, one with one, two with four."""
    counting = partial(Counting, WIDTH, WIDTH)
    ends = partial(nn.Embedding, 256, WIDTH), partial(nn.Linear, WIDTH, 256)
    factories = [ends[0], *[counting] * 3, ends[1]]
    engine = pipeline(
        from_factories(list("abcde"), factories, 0, next_token_loss), post_validation=True
    )
    case = make(Freezing(schedule=[(1000, 1)], cache_bytes=cache_bytes), RunFacts(layers=5))
    cases = Cases([case], engine)
    cases.take_over(engine)
    losses: list[float] = []
    for step in range(10):
        if step in (0, 6):
            Actions(engine).freeze(range(4))
        if step == 4:
            Actions(engine).unfreeze(range(1, 4))
        cases.take_samples([(step % 2, j) for j in range(MICROBATCHES)], MICROBATCHES)
        advance(engine, step, *tokens(step % 2), lr=1e-2)
        cases.take_samples([(9, j) for j in range(MICROBATCHES)], MICROBATCHES)
        losses.append(engine.evaluate(StepBatch(*tokens(9)), MICROBATCHES))
    run = [getattr(module, "calls", 0) for module in engine.store.modules]
    assert isinstance(case, PrefixCase)
    return losses, run, (cases.skipped, 0 if case.cache is None else case.cache.bytes)


def test_pipeline_with_a_cache_has_the_same_losses() -> None:
    losses, run, _ = losses_and_calls(0)
    cached, fewer, (spared, held) = losses_and_calls(1 << 20)
    assert cached == losses
    each = 2 * MICROBATCHES
    assert run == [0, *[10 * each] * 3, 0]
    # Per frozen phase: two steps and one evaluation, each once. All training between the two: the
    # two steps and their evaluations.
    assert fewer == [0, *[2 * 3 * MICROBATCHES + 2 * each] * 3, 0]
    # The embedding stayed frozen. Its kept outputs gave way to outputs from further behind, and
    # were made once more after these.
    assert spared == 3 * (run[1] - fewer[1]) + (10 * each - 2 * 3 * MICROBATCHES)
    assert held == 3 * MICROBATCHES * 2 * 8 * WIDTH * 4


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ([1, 2], "samples has 2 entries, but the batch has 3 microbatches"),
        (5, "samples: 'int' object is not iterable; give a list"),
        ([[1], [2], [3]], "samples: unhashable type: 'list'; give a list"),
    ],
)
def test_wrong_samples_are_refused(samples: Any, message: str) -> None:
    cases = Cases([], pipeline(around()))
    with pytest.raises(InputError, match=re.escape(message)):
        cases.take_samples(samples, 3)


def test_a_load_drops_outputs_of_the_weights_before(tmp_path: Path) -> None:
    torch.manual_seed(0)
    layers = [nn.Embedding(16, 8), nn.Linear(8, 8), nn.Linear(8, 16)]
    ids = torch.randint(16, (4, 9), generator=torch.Generator().manual_seed(1))
    batch, samples = (ids[:, :-1], ids[:, 1:]), ["a", "b"]
    with dynmo.init(device="cpu") as world:
        case = dynmo.Freezing(schedule=[[1, 2]], cache_bytes=1 << 20)
        made = dynmo.Pipeline(dynmo.Sequential(layers), world, microbatches=2, cases=[case])
        for _ in range(3):
            made.step(*batch, samples=samples)
        made.save(tmp_path)
        state = made.state_dict()
        made.load_state_dict({name: 2 * weight for name, weight in state.items()})
        skipped = made.measured.account().spared_forwards
        doubled = made.evaluate(*batch, samples=samples)
        assert doubled == made.evaluate(*batch)
        made.load(tmp_path)
        assert made.evaluate(*batch, samples=samples) == made.evaluate(*batch) != doubled
        assert made.measured.account().spared_forwards >= skipped > 0


def test_a_failed_load_leaves_the_cases_as_they_were(tmp_path: Path) -> None:
    class Refusing(dynmo.Dynamism):
        name, checks = "refusing", 0

        def act(self, step: int, layers: dynmo.Layers) -> None:
            return None

        def check(self, modules: Sequence[nn.Module]) -> None:
            self.checks += 1
            if self.checks == 2:
                raise ValueError("not again")

    with dynmo.init(device="cpu") as world:
        model = dynmo.Sequential([nn.Linear(4, 4) for _ in range(3)], nn.functional.mse_loss)
        made = dynmo.Pipeline(model, world, microbatches=2, cases=[Refusing()])
        batch = torch.ones(4, 4), torch.zeros(4, 4)
        made.step(*batch)
        made.save(tmp_path)
        with pytest.raises(ValueError, match="not again"):
            made.load(tmp_path)
        made.step(*batch)
