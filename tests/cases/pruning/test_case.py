"""Gradual pruning: its steps, the kept weights, and their moments."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import dynmo
from dynmo import ModelOptions
from dynmo.cases.pruning import Pruning
from dynmo.cases.pruning.case import Cubic, PruningCase, find_threshold, masters
from dynmo.cases.pruning.sparse_linear import MaskedLinear, SparseLinear, linears
from dynmo.config import parse
from dynmo.errors import CheckpointError, ConfigError
from dynmo.extend import RunFacts
from dynmo.kernels.packed_weight import unpacked
from dynmo.pipeline.actions import Actions
from dynmo.pipeline.case import Change, Layers
from dynmo.pipeline.cases import CaseContext
from dynmo.pipeline.options import grouped
from dynmo.pipeline.saving import restore_layer, saved_layers
from dynmo.runtime.state import checkpoint
from dynmo.runtime.state.layer_tensors import contents
from dynmo.runtime.state.save import save as save_checkpoint
from dynmo.train.setup import model_of
from tests.cases.kept import Alone, Kept, cases_of
from tests.runtime import alone
from tests.runtime.alone import run_step

# -- when ------------------------------------------------------------------------------------------


def test_published_schedule_has_the_published_sparsities() -> None:
    """DynMo prunes at steps 3000 to 7000 of 10000. The sparsities are 52, 79 and 90 %."""
    cubic = Cubic(0.0, 0.9, 3000, 7000, 1000)
    assert cubic.steps == (3000, 4000, 5000, 6000, 7000)
    assert [round(100 * cubic.sparsity(step)) for step in cubic.steps] == [0, 52, 79, 89, 90]
    assert cubic.sparsity(2999) == 0
    assert cubic.sparsity(10**6) == 0.9
    config = {"model": {"kind": "python:a:b"}, "dynamism": {"cases": ["pruning"]}}
    (case,) = cases_of(parse(config | {"train": {"steps": 10000}}), 5)
    assert isinstance(case, PruningCase)
    assert case._schedule == cubic, "what a run gets that names no steps"


def test_the_last_step_always_prunes() -> None:
    assert Cubic(0.2, 0.8, 2, 9, 3).steps == (2, 5, 8, 9)
    assert Cubic(0.2, 0.8, 4, 4, 1).steps == (4,)
    assert Cubic(0.2, 0.8, 4, 4, 1).sparsity(4) == 0.8
    assert Cubic(0.2, 0.8, 2, 9, 3).sparsity(2) == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("steps", "given", "message"),
    [
        (10, {"start": 12, "end": 20}, "pruning.start = 12: the run has 10 steps"),
        (10, {"start": 2, "end": 20}, "pruning.end = 20: the run has 10 steps"),
        (30, {"start": 20, "end": 12}, "start = 20 is after end = 12"),
        (30, {"start": 10, "end": 12, "every": 3}, "every = 3 is more than the 2 steps"),
        (30, {"initial_sparsity": 0.95}, "0.95 is over final_sparsity = 0.9"),
        (None, {"start": 2}, "give start and end"),
    ],
)
def test_steps_that_do_not_fit_are_named(
    steps: int | None, given: dict[str, Any], message: str
) -> None:
    (problem,) = Pruning(**given).problems(RunFacts(steps=steps))
    assert message in problem


def test_matrices_are_timed_at_the_size_of_a_microbatch() -> None:
    model = ModelOptions(sequence=16)
    facts = RunFacts(steps=10, model=model, micro_batch=3)
    assert PruningCase(Pruning(), facts)._tokens == 48
    assert PruningCase(Pruning(), RunFacts(steps=10))._tokens == 1024


# -- which -----------------------------------------------------------------------------------------


class Several:
    """The collective of a rank. Each call's contribution of the other rank is added."""

    def __init__(self, others: Sequence[Tensor] = ()) -> None:
        self.others, self.asked = others, list[Tensor]()

    def sum(self, tensor: Tensor, what: str) -> Tensor:
        at = len(self.asked)
        self.asked.append(tensor.clone())
        return tensor.add_(self.others[at]) if at < len(self.others) else tensor

    sum_all = sum


def over_ranks(
    parts: dict[int, list[Tensor]], split: int, keep: int, layers: int
) -> dict[int, list[Tensor]]:
    """What `find_threshold` keeps on two ranks, of which one has layers below `split`."""
    sides = [{i: t for i, t in parts.items() if (i < split) == first} for first in (True, False)]
    answers: list[list[Tensor]] = [[], []]
    # Each question needs the other side's answer to the same one: a pass tells one more.
    for _ in range(5):
        for which in (0, 1):
            asker = Several(answers[1 - which])
            find_threshold(sides[which], keep, layers, asker.sum)
            answers[which] = asker.asked
    out: dict[int, list[Tensor]] = {}
    for which in (0, 1):
        masks = find_threshold(sides[which], keep, layers, Several(answers[1 - which]).sum)
        out |= {i: masks.keep(i, tensors) for i, tensors in sides[which].items()}
    return out


def by_sorting(parts: dict[int, list[Tensor]], keep: int) -> dict[int, list[Tensor]]:
    """The plain way: sort all by falling magnitude, then by layer and position."""
    tensors = [(i, which, t) for i, each in sorted(parts.items()) for which, t in enumerate(each)]
    everyone = [(-abs(x), i, w, at) for i, w, t in tensors for at, x in enumerate(t.tolist())]
    out = {i: [torch.zeros_like(t, dtype=torch.bool) for t in each] for i, each in parts.items()}
    for _, layer, which, at in sorted(everyone)[: max(0, keep)]:
        out[layer][which][at] = True
    return out


values = st.one_of(st.sampled_from([0.0, -0.0, 1.0, -1.0, 1e-40, 3e38]), st.floats(-2, 2, width=32))


@given(
    parts=st.lists(st.lists(st.lists(values, max_size=12), max_size=3), min_size=1, max_size=4),
    keep=st.integers(0, 40),
    split=st.integers(0, 4),
)
def test_largest_weights_are_kept(parts: list[list[list[float]]], keep: int, split: int) -> None:
    """Layer and position decide ties, in the same way on one and on two ranks."""
    tensors = {i: [torch.tensor(t, dtype=torch.float32) for t in x] for i, x in enumerate(parts)}
    expected = by_sorting(tensors, keep)
    masks = find_threshold(tensors, keep, len(parts), Alone().sum)
    alone = {layer: masks.keep(layer, own) for layer, own in tensors.items()}
    for found in (alone, over_ranks(tensors, split, keep, len(parts))):
        for layer, keeps in found.items():
            assert all(torch.equal(a, b) for a, b in zip(keeps, expected[layer], strict=True))


def test_search_sends_a_bounded_number_of_bytes() -> None:
    """It does not grow with the number of weights."""
    asker = Several()
    find_threshold({0: [torch.randn(20000)], 1: [torch.randn(500)]}, 7000, 2, asker.sum)
    assert [len(t) for t in asker.asked] == [2048, 1024, 1024, 2]


# -- the case --------------------------------------------------------------------------------------


def case(steps: int = 10, **options: Any) -> PruningCase:
    dynamism = {"cases": ["pruning"], "pruning": options}
    (case_,) = cases_of(parse({"train": {"steps": steps}, "dynamism": dynamism}), 6)
    assert isinstance(case_, PruningCase)
    return case_


def train(pipeline: Any, pruning: PruningCase, steps: int, first: int = 0) -> list[Change | None]:
    done: list[Change | None] = []
    for step in range(first, first + steps):
        change = pruning.act(step, CaseContext(pipeline))
        done.append(change)
        if change is not None:
            Actions(pipeline).on_workload_change(change.layers)
        run_step(pipeline, step, *alone.tokens(step), lr=1e-2, max_norm=1.0)
    return done


def zeros(pipeline: Any) -> dict[tuple[int, str], Tensor]:
    named = [(i, *each) for i in range(6) for each in linears(pipeline.store.modules[i])]
    return {
        (i, name): unpacked(linear, "weight", linear.weight.detach()) == 0
        for i, name, linear in named
    }


def forms(pipeline: Any, layers: Iterable[int] = range(1, 5)) -> set[type]:
    return {type(x) for i in layers for _, x in linears(pipeline.store.modules[i])}


@pytest.mark.parametrize("criterion", ["global", "local"])
def test_pruned_weights_never_return(criterion: str) -> None:
    pipeline = alone.gpt()
    pruning = case(start=1, end=4, every=1, criterion=criterion, dense_below=0.7)
    before = train(pipeline, pruning, 2)
    assert before == [None, None], "at step 1 the schedule still says 0"
    gone = {key: torch.zeros_like(x) for key, x in zeros(pipeline).items()}
    seen: list[set[type]] = []
    for step, wanted in ((2, 0.9 * 19 / 27), (3, 0.9 * 26 / 27), (4, 0.9), (5, 0.9)):
        (change,) = train(pipeline, pruning, 1, first=step)
        assert (change is None) == (step == 5)
        now = zeros(pipeline)
        within = [range(1, 5)] if criterion == "global" else [[layer] for layer in range(1, 5)]
        for layers in within:
            held = [now[key] for key in now if key[0] in layers]
            pruned, total = sum(int(x.sum()) for x in held), sum(x.numel() for x in held)
            assert abs(pruned - wanted * total) <= 0.5
        assert all(bool((now[key] >= gone[key]).all()) for key in now), "a pruned weight came back"
        gone = now
        seen.append(forms(pipeline))
    assert MaskedLinear in seen[0]
    assert seen[2] == {SparseLinear}
    assert not forms(pipeline, (0, 5)) & {SparseLinear, MaskedLinear}
    for index in range(1, 5):
        for key, moment in CaseContext(pipeline).moments(index).items():
            if "exp_avg" in key:
                parameter = pipeline.store.modules[index].get_parameter(key.rpartition("/")[0])
                assert moment.shape == parameter.shape
    for cost, whole in list(zip(pipeline.costs(), alone.gpt().costs(), strict=True))[1:5]:
        assert cost.parameters < 0.25 * whole.parameters
        assert cost.optimizer_bytes < 0.25 * whole.optimizer_bytes


@pytest.mark.parametrize("dense_below", [0.0, 1.0])
def test_both_forms_train_like_a_masked_dense_model(dense_below: float) -> None:
    """The reference masks weights, gradients and moments of plain modules by hand."""
    pipeline, plain = alone.gpt(), alone.gpt()
    pruning = case(start=1, end=3, every=1, initial_sparsity=0.3, dense_below=dense_below)
    masks: dict[tuple[int, str], Tensor] = {}
    for step in range(6):
        train(pipeline, pruning, 1, first=step)
        # The masks of this step, read off after it: what stayed is not 0.
        masks = {k: ~x for k, x in zeros(pipeline).items() if step >= 1 and 0 < k[0] < 5}
        for index in range(6):
            moments = CaseContext(plain).moments(index)
            for name, linear in linears(plain.store.modules[index]):
                mask = masks.get((index, name))
                if mask is not None:
                    linear.weight.data.mul_(mask)
                    for key in ("exp_avg", "exp_avg_sq"):
                        moments[f"{name}.weight/{key}"].mul_(mask)
        outcome = alone.run_half(plain, step, *alone.tokens(step))
        for (index, name), mask in masks.items():
            weight = plain.store.modules[index].get_submodule(name).weight
            assert isinstance(weight, nn.Parameter)
            assert weight.grad is not None
            weight.grad.mul_(mask)
        alone.end_step(plain, step, outcome, lr=1e-2, max_norm=1.0)
    for index in range(6):
        theirs = dict(linears(plain.store.modules[index]))
        for name, linear in linears(pipeline.store.modules[index]):
            wanted = theirs[name].weight.detach()
            torch.testing.assert_close(
                unpacked(linear, "weight", linear.weight.detach()), wanted, rtol=1e-3, atol=2e-5
            )


def test_frozen_layers_are_not_pruned() -> None:
    pipeline, pruning = alone.gpt(), case(start=0, end=2, every=1)
    Actions(pipeline).freeze([0, 1, 2])
    changes = [each for each in train(pipeline, pruning, 3) if each is not None]
    assert [each.layers for each in changes] == [(3, 4), (3, 4)]
    assert not forms(pipeline, (1, 2)) & {SparseLinear, MaskedLinear}
    assert changes[1].what.startswith("pruned to sparsity 0.8999 (global magnitude; layers 0.")
    assert changes[1].what.endswith("linears run sparse")


def test_measured_threshold_is_saved() -> None:
    pipeline, pruning = alone.gpt(), case(start=0, end=2, every=1, dense_below="measured")
    change = train(pipeline, pruning, 2)[1]
    assert change is not None
    assert "; sparse pays from " in change.what
    state = json.loads(json.dumps(pruning.state()))
    assert list(state["measured"]) == ["128x16", "16x16", "16x64", "48x16"]
    assert change.options == {"dense_below": state["measured"]}
    later = case(start=0, end=2, every=1, dense_below="measured")
    later.load(state | {"measured": dict.fromkeys(state["measured"], 0.0)})
    train(pipeline, later, 1, first=2)
    assert forms(pipeline) == {SparseLinear}, "it measured again"


def test_a_configured_threshold_is_not_measured() -> None:
    """In a resumed run, the config takes precedence over a saved measurement."""
    pipeline = alone.gpt()
    given = {"128x16": 0.0, "16x16": 1.0, "16x64": 0.0, "48x16": 1.0}
    pruning = case(start=0, end=1, every=1, dense_below=given)
    change = train(pipeline, pruning, 2)[1]
    assert change is not None
    assert change.layers == (1, 2, 3, 4)
    assert change.options == {}, "nothing to record"
    pruned = [x for i in range(1, 5) for _, x in linears(pipeline.store.modules[i])]
    sparse = {f"{x.out_features}x{x.in_features}": isinstance(x, SparseLinear) for x in pruned}
    assert sparse == {size: threshold == 0.0 for size, threshold in given.items()}
    pruning.load({"sparsity": 0.9, "measured": {"128x16": 0.5, "7x7": 0.5}})
    assert pruning.state()["measured"] == {"7x7": 0.5} | given


def test_forecast_follows_the_pruning_schedule() -> None:
    pruning = case(start=0, end=4, every=2, dense_below=0.75)
    assert [f.step for f in pruning.forecast(0)] == [2, 4]
    # At 79 and 90 %, of what it takes now.
    assert [f.f for f in pruning.forecast(0)] == pytest.approx([0.2125, 0.1])
    train(alone.gpt(), pruning, 3)
    (left,) = pruning.forecast(2)
    assert (left.step, left.layers) == (4, (1, 2, 3, 4))
    assert left.w == pytest.approx(0.1 / 0.2125)


def test_model_without_prunable_weights_is_refused() -> None:
    layers: Layers = Kept(modules=[nn.Linear(2, 2), nn.RMSNorm(2), nn.Linear(2, 2)])
    for act in (lambda: case().act(0, layers), lambda: case().check(layers.modules)):
        with pytest.raises(ConfigError, match=r"dynamism\.pruning: no layer"):
            act()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision_has_masters(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """With ZeRO-1, replicas must gather the state of a layer, which takes time."""
    model = model_of(parse({"model": {"blocks": 2, "hidden": 16, "heads": 2, "sequence": 8}}))
    pipeline = alone.pipeline(model, dtype=dtype)
    run_step(pipeline, 0, *alone.tokens(0), lr=0.1)
    asked, context = list[int](), CaseContext(pipeline)
    whole = context.moments

    def moments(layer: int) -> dict[str, Tensor]:
        asked.append(layer)
        return whole(layer)

    monkeypatch.setattr(context, "moments", moments)
    kept = {key.rpartition("/")[2] for key in masters(2, context)}
    assert (asked, kept) == (([], set()) if dtype == torch.float32 else ([2], {"master"}))


def test_a_checkpoint_of_another_model_is_refused() -> None:
    pipeline, other = alone.gpt(), alone.gpt(hidden=32)
    train(pipeline, case(start=0, end=1, every=1), 2)
    tensors = contents(pipeline.store.modules[1], CaseContext(pipeline).moments(1))
    weight = r"layer 1 \(blocks\.0\.attention\): qkv\.weight"
    with pytest.raises(CheckpointError, match=rf"{weight} is sparse, but not of 96 x 32"):
        restore_layer(other, 1, tensors)


def test_restored_pruned_model_is_equal(tmp_path: Path) -> None:
    for dense_below in (0.0, 1.0):
        pipeline, other = alone.gpt(), alone.gpt()
        train(pipeline, case(start=0, end=1, every=1, dense_below=dense_below), 3)
        world, layers = pipeline.store.world, saved_layers(pipeline)
        folder = tmp_path / str(dense_below)
        saved = save_checkpoint(world, folder, 3, pipeline.model.names, layers, {}, 1)
        for index in range(6):
            manifest = checkpoint.load_manifest(saved.path, index)
            tensors = checkpoint.load_layer(saved.path, manifest, torch.device("cpu"))
            restore_layer(other, index, tensors)
        assert other.digest() == pipeline.digest()
        for each in (pipeline, other):
            run_step(each, 3, *alone.tokens(3), lr=1e-2)
        assert other.digest() == pipeline.digest()


def test_optimizer_must_work_element_by_element() -> None:
    layers = [nn.Linear(4, 4) for _ in range(3)]
    model = dynmo.Sequential(layers, loss=nn.functional.mse_loss)
    options: dict[str, Any] = {"cases": [dynmo.Pruning(start=0, end=2)], "microbatches": 2}
    with (
        dynmo.init(device="cpu") as world,
        pytest.raises(ConfigError, match=r"dynamism\.pruning: Adafactor does not work element"),
    ):
        dynmo.Pipeline(
            model, world, optimizer=partial(torch.optim.Adafactor, lr=0.05), **grouped(options)
        )
