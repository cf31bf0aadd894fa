"""Egeria: plasticity, and when layers freeze and thaw."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from copy import deepcopy
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from dynmo.cases.freezing.egeria import (
    Egeria,
    Freezing,
    dequantised,
    plasticity,
    quantised,
    relations,
    slope,
)
from dynmo.change_events import ChangeEvent
from dynmo.config import parse
from dynmo.errors import ConfigError
from dynmo.event_log import read
from dynmo.events import StepResult
from dynmo.extend import RunFacts
from dynmo.kernels.seeds import seed_forward
from dynmo.pipeline.actions import Actions
from dynmo.pipeline.case import Signals
from dynmo.pipeline.cases import CaseContext
from tests.cases.kept import Kept
from tests.equality import RANDOM_MOVES, run, same
from tests.equality import config as small_run
from tests.pool import Pool
from tests.runtime import alone
from tests.runtime.alone import run_step

# Freezes 4 layers at step 13 and 5 right after, and thaws when the rate has halved.
OPTIONS = {"policy": "egeria", "every": 1, "window": 3, "refresh": 8, "tolerance": 0.3, "thaw": 0.5}


LONG = {"global_batch": 6, "max_grad_norm": 1.0, "decay": "linear", "min_lr_ratio": 0.001}


def config(
    ranks: int, schedule: str = "zb-h1", balance: dict[str, Any] | None = None, **options: Any
) -> dict[str, Any]:
    moves = {"balancer": RANDOM_MOVES, "every": 2}
    base = small_run(ranks, schedule, balance or moves, False, True)
    base["train"] |= LONG | {"steps": 24}
    base["dynamism"] = {"cases": ["freezing"], "freezing": OPTIONS | options}
    return base | {"seed": 3, "checkpoint": {"every": 8}}


# -- measuring -------------------------------------------------------------------------------------


def test_slope_is_the_least_squares_slope() -> None:
    assert slope([3.0]) == 0.0
    assert slope([1.0, 3.0, 5.0]) == 2.0
    values = [0.3, 0.1, 0.7, 0.2, 0.9]
    assert slope(values) == pytest.approx(np.polyfit(range(5), values, 1)[0], rel=1e-12)


def test_plasticity_is_the_similarity_preserving_loss() -> None:
    """The expected value is computed with numpy from the reference's weights."""
    torch.manual_seed(0)
    then, x = nn.Linear(6, 5), torch.randn(2, 4, 6)
    reference = quantised(then)
    now = deepcopy(then)
    with torch.no_grad():
        now.weight += 0.1 * torch.randn_like(now.weight)
    weights = {name: w.double().numpy() for name, w in dequantised(reference).items()}

    def similar(weight: Any, bias: Any) -> Any:
        a = x.double().numpy().reshape(8, 6) @ weight.T + bias
        gram = a @ a.T
        return gram / np.linalg.norm(gram, axis=1, keepdims=True)

    live = similar(now.weight.detach().double().numpy(), now.bias.detach().double().numpy())
    expected = np.square(live - similar(weights["weight"], weights["bias"])).sum() / 64
    pairs = ((each, relations(each(x))) for each in (now, then))
    got, by_int8 = (plasticity(each, reference, (x,), r, (0, 0, 0)) for each, r in pairs)
    assert got == pytest.approx(expected, rel=1e-4)
    assert got > 100 * by_int8


def test_plasticity_samples_tokens_evenly() -> None:
    a = torch.randn(3, 100, 4)
    rows = a.reshape(300, 4)[[i * 300 // 64 for i in range(64)]].double()
    assert torch.equal(relations(a), nn.functional.normalize(rows @ rows.t(), dim=1))
    assert relations((torch.arange(3), torch.ones(5))).shape == (5, 5)
    linear, x = nn.Linear(4, 4, bias=False), torch.randn(8, 4)
    module = nn.Sequential(linear, nn.Dropout(0.5))
    with torch.no_grad():  # int8 without a rounding error
        linear.weight.copy_(torch.randint(-127, 128, (4, 4)))
        linear.weight[:, 0] = 127
    seed_forward(torch.device("cpu"), 5, 6, 7, 0)
    assert plasticity(module, quantised(module), (x,), relations(module(x)), (5, 6, 7)) == 0.0


def test_reference_is_int8_with_a_scale_per_row() -> None:
    linear = nn.Linear(7, 3)
    module = nn.Sequential(linear, nn.LayerNorm(3), nn.Embedding(4, 3))
    with torch.no_grad():
        linear.weight[1] = 0.0
        linear.weight[2] *= 1000
    kept = quantised(module)
    assert kept["egeria/0.weight/int8"].dtype == torch.int8
    back = dequantised(kept)
    assert list(back) == [name for name, _ in module.named_parameters()]
    for name, parameter in module.named_parameters():
        error = (back[name] - parameter).abs()
        if parameter.dim() == 1:
            assert not error.any()
        else:
            assert (error <= parameter.abs().amax(1, keepdim=True) / 127 * 0.501).all()


def test_pruned_weights_may_be_empty_or_of_another_shape() -> None:
    module, x = nn.Module(), torch.ones(2, 3)
    module.register_parameter("weight", nn.Parameter(torch.empty(1, 0)))
    assert dequantised(quantised(module))["weight"].shape == (1, 0)
    wider = quantised(nn.Linear(3, 4))
    assert np.isnan(plasticity(nn.Linear(3, 3), wider, (x,), relations(x), (0, 0, 0)))


# -- deciding --------------------------------------------------------------------------------------


def egeria(most: int = 3, **options: Any) -> Egeria:
    usual = Freezing(unit="half", every=1, start=0, window=3, tolerance=0.2, refresh=8, thaw=0.1)
    return Egeria(usual.model_copy(update=options), most, seed=0)


class Moving(Kept):
    """Four linear layers, one after another. Layer i stops changing after its time."""

    def __init__(self, times: list[int]) -> None:
        torch.manual_seed(1)
        self.linears: list[nn.Module] = [nn.Linear(6, 6) for _ in range(4)]
        super().__init__(modules=self.linears)
        self.times = times

    def steps(self, case: Egeria, steps: Iterable[int], rate: float = 1.0) -> Any:
        """Returns what the last step did."""
        return [self.step(case, step, rate) for step in steps][-1]

    def step(self, case: Egeria, step: int, rate: float = 1.0) -> Any:
        change = case.act(step, self)
        generator = torch.Generator().manual_seed(9)
        x = torch.randn(1, 16, 6, generator=generator)
        for layer, module in enumerate(self.linears):
            with torch.no_grad():
                if step < self.times[layer]:
                    draws = torch.Generator().manual_seed(10 * step + layer)
                    fresh = torch.randn(6, 6, generator=draws)
                    assert isinstance(module, nn.Linear)
                    module.weight.mul_(0.9).add_(fresh, alpha=0.2)
                x = module(x)
        case.observe(Signals(step, 1.0, (1.0,) * 4, rate))
        return change


def test_front_layers_freeze_once_they_settle() -> None:
    """Layer 2 settles before layer 1 and waits for it."""
    layers, case = Moving([1000] * 4), egeria()
    layers.steps(case, range(60))
    assert not layers.frozen, "all change"
    layers, case = Moving([10, 30, 20, 1000]), egeria()
    frozen: dict[int, int] = {}
    for step in range(60):
        layers.step(case, step)
        for layer in layers.frozen:
            frozen.setdefault(layer, step)
    assert sorted(frozen) == [0, 1, 2]
    assert 10 < frozen[0] < 20
    assert 30 < frozen[1] == frozen[2] < 40
    assert not layers.tensors[0], "a frozen layer needs no reference"
    assert layers.tensors[3] == {}, "what may never freeze needs none either"


@given(st.integers(1, 4), st.integers(2, 4), st.integers(0, 12), st.integers(0, 5))
def test_first_possible_freeze_step_matches_the_config_check(
    every: int, window: int, longer: int, start: int
) -> None:
    """The plasticity varies less and less, so it is stale as early as possible."""
    refresh, layers, readings = window * every + longer, Moving([0] * 4), count()
    case = egeria(every=every, window=window, refresh=refresh, start=start, tolerance=0.99)
    given: dict[str, Any] = {
        "every": every,
        "window": window,
        "refresh": refresh,
        "start": start,
    }
    freezing = parse(config(1) | {"dynamism": {}}).dynamism.freezing.model_copy(update=given)
    possible = freezing.first_stale_step(1000)
    assert possible is not None
    with pytest.MonkeyPatch.context() as patch:
        falls = lambda *_: (-0.5) ** (next(readings) // 3)  # noqa: E731
        patch.setattr("dynmo.cases.freezing.egeria.plasticity", falls)
        for step in range(possible + 1):
            assert not layers.frozen
            layers.step(case, step)
    assert layers.frozen
    assert freezing.first_stale_step(possible + 1) == possible
    assert freezing.first_stale_step(possible) is None, "too short a run"
    if refresh < possible:
        says = f"refresh = {refresh}: nothing can freeze in a run of {possible} steps; .* refresh$"
        run = RunFacts(steps=possible)
        named = Freezing(policy="egeria", **given)
        assert any(re.search(says, line) for line in named.problems(run))


def test_layers_without_weights_freeze_with_the_next() -> None:
    """They have no plasticity. After the last weight they do not count as trainable."""
    for last, frozen in ((nn.Linear(6, 6), {0, 1, 2}), (nn.Identity(), {0})):
        layers, case = Moving([10, 0, 10, 0]), egeria(most=3)
        first, _, third, _ = layers.linears
        layers.modules = layers.linears = [first, nn.Identity(), third, last]
        case.check(layers.modules)
        layers.steps(case, range(40))
        assert layers.frozen == frozen


def test_layers_thaw_when_the_learning_rate_falls() -> None:
    layers, case = Moving([10, 10, 10, 1000]), egeria()
    layers.steps(case, range(30))
    assert layers.frozen == {0, 1, 2}
    assert layers.step(case, 30, rate=0.11) is None
    change = layers.steps(case, (31, 32), rate=0.1)
    assert change.layers == (0, 1, 2)
    assert change.what == "layers 0 to 2 train again (Egeria, learning rate 0.1 after 1)"
    assert not layers.frozen
    layers.steps(case, range(33, 50), rate=0.1)
    assert layers.frozen == {0, 1, 2}, "they settle again"
    layers, case = Moving([10, 10, 10, 1000]), egeria(thaw=0.0)
    layers.steps(case, range(30))
    layers.steps(case, range(30, 40), rate=0.0)
    assert layers.frozen == {0, 1, 2}


def test_egeria_continues_from_its_state() -> None:
    whole, layers = egeria(), Moving([10, 20, 30, 1000])
    first, cut = egeria(), Moving([10, 20, 30, 1000])
    second = egeria()
    for step in range(50):
        layers.step(whole, step)
        if step == 13:
            second.load(json.loads(json.dumps(first.state())))
        cut.step(first if step < 13 else second, step)
        assert cut.frozen == layers.frozen
    assert layers.frozen == {0, 1, 2}
    assert second.state() == whole.state()


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"window": 30, "refresh": 100}, ["dynamism.freezing.window = 30", "24 steps"]),
        ({"start": 20}, ["dynamism.freezing.window = 3", "start = 20", "24 steps"]),
        ({"window": 5, "every": 4, "refresh": 20}, ["dynamism.freezing.window = 5", "24 steps"]),
        ({"window": 1}, ["dynamism.freezing.window"]),
        ({"refresh": 2}, ["dynamism.freezing.refresh = 2", "refresh = 3"]),
        ({"tolerance": 1.5}, ["dynamism.freezing.tolerance"]),
        ({"thaw": 1.0}, ["dynamism.freezing.thaw"]),
        ({"unit": "layer"}, ["dynamism.freezing.unit", "'half' or 'block'"]),
        (
            {"policy": "autofreeze", "every": 20},
            ["dynamism.freezing.every = 20", "step 40", "24 steps"],
        ),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        parse(config(1, **options))
    assert all(word in str(error.value) for word in parts), error.value
    assert "\n" not in str(error.value)


# -- the same everywhere ---------------------------------------------------------------------------


@pytest.mark.matrix  # test_compose.py runs the case every day
@pytest.mark.parametrize(
    "options",
    [{}, {"unit": "block", "max_layers": 3}, {"policy": "autofreeze", "every": 3, "unit": "block"}],
    ids=str,
)
def test_digest_is_equal_on_any_ranks_under_moves(pool: Pool, options: dict[str, Any]) -> None:
    expected = run(pool, config(1, "1f1b", {"balancer": "none"}, **options))[0]
    assert max(expected["frozen"]) > 0, "nothing froze: this shows nothing"
    if options.get("policy", "egeria") == "egeria":
        assert expected["frozen"][-1] == 0, "nothing thawed"
    for ranks, schedule in ((2, "zb-v"), (3, "zb-h2")):
        results = run(pool, config(ranks, schedule, **options))
        assert results[0]["frozen"] == expected["frozen"]
        same(results, expected)
        assert len({tuple(x) for x in results[0]["layers"]}) > 3, "the layers did not move"


@pytest.mark.matrix
def test_resumed_run_equals_the_uninterrupted_run(pool: Pool, tmp_path: Path) -> None:
    """The run stops between two references, while layers are frozen. Other ranks resume it."""
    folders = [tmp_path / name for name in ("whole", "parts")]
    for folder in folders:
        folder.mkdir()
    whole, parts = map(str, folders)
    expected = run(pool, config(1), "train_in", folder=whole)
    first = run(pool, config(2), "train_in", folder=parts, stop_after=11)
    second = run(pool, config(1), "train_in", folder=parts, resume=True, stop_after=18)
    assert first[0]["steps"] < 15
    assert second[0]["steps"] < 22
    third = run(pool, config(3), "train_in", folder=parts, resume=True)
    assert {r["weights_digest"] for r in third} == {expected[0]["weights_digest"]}
    events = [list(read(folder / "events.jsonl")) for folder in folders]
    frozen = [[e.frozen for e in each if isinstance(e, StepResult)] for each in events]
    assert frozen[0] == frozen[1]
    assert len({*frozen[0]}) == 3
    changes = [[e.what for e in each if isinstance(e, ChangeEvent)] for each in events]
    assert changes[0] == changes[1]


def test_thawed_layers_keep_their_optimizer_state() -> None:
    pipeline = alone.gpt()
    context = CaseContext(pipeline)
    for step in range(3):
        run_step(pipeline, step, *alone.tokens(step), lr=1e-2)
    before = {name: t.clone() for name, t in context.moments(1).items()}
    weights = [p.detach().clone() for p in pipeline.store.modules[1].parameters()]
    assert float(before["qkv.weight/step"]) == 3
    context.kept(1)["mine"] = torch.arange(3)
    Actions(pipeline).freeze([0, 1])
    run_step(pipeline, 3, *alone.tokens(3), lr=1e-2)
    Actions(pipeline).unfreeze([0, 1])
    assert all(torch.equal(t, before[name]) for name, t in context.moments(1).items())
    now = pipeline.store.modules[1].parameters()
    assert all(torch.equal(a, b) for a, b in zip(now, weights, strict=True))
    assert context.kept(1)["mine"].tolist() == [0, 1, 2]
    run_step(pipeline, 4, *alone.tokens(4), lr=1e-2)
    assert float(context.moments(1)["qkv.weight/step"]) == 4
    context.rebuild(1, {name: 2 * t for name, t in context.moments(1).items()})
    assert float(context.moments(1)["qkv.weight/step"]) == 8
    assert context.kept(1)["mine"].tolist() == [0, 1, 2]
    assert context.own == [*range(pipeline.model.layers)]
