"""`Pipeline.state_dict`, `load_state_dict`, and the outputs of `evaluate`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from dynmo.cases.freezing import Freezing
from dynmo.cases.freezing.case import make
from dynmo.cases.pruning.sparse_linear import prune
from dynmo.errors import CheckpointError
from dynmo.kernels.packed_weight import unpacked
from dynmo.pipeline.actions import Actions
from dynmo.pipeline.case_options import RunFacts
from dynmo.pipeline.cases import CaseContext, Cases
from dynmo.pipeline.whole_model import WholeModel
from dynmo.runtime.comm.meeting import Meeting
from dynmo.runtime.engine.batch_check import StepBatch
from tests.pipeline.whole_model import SMALL, layers, same, trained
from tests.pool import Pool
from tests.runtime.alone import MICROBATCHES, gpt, pipeline, run_step, tokens

JOBS = "tests.pipeline.whole_model:"


def test_state_of_one_rank_is_that_of_the_given_modules(world: Meeting) -> None:
    modules = layers()
    pipeline = trained(world, modules)
    state, own = pipeline.state_dict(), nn.Sequential(*modules).state_dict()
    assert same(state, own)
    pipeline.step(torch.ones(8, 4), torch.ones(8, 3))
    assert not same(state, own), "the state is a copy"


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        pytest.param(2, {}, id="2 ranks"),
        pytest.param(2, {"schedule": "zb-v"}, id="zb-v"),
        pytest.param(2, {"precision": "bfloat16"}, id="bfloat16"),
        pytest.param(4, {"replicas": 2}, id="2 replicas"),
    ],
)
@pytest.mark.parametrize("job", ["gathered", "loaded"])
def test_state_is_gathered_from_and_loaded_on_all_ranks(
    pool: Pool, job: str, ranks: int, options: dict[str, Any]
) -> None:
    for seen in pool.run(JOBS + job, ranks, **options):
        assert all(seen.values()), seen


def test_state_that_does_not_fit_changes_nothing(pool: Pool) -> None:
    messages = [
        "the state lacks '2.first.bias'; give the state of this model's layers",
        "the state has '4.weight', which this model has not; leave it out",
        "'2.first.bias' is [9] in the state, [8] in this model",
        "'2.first.bias' of the state is a list, no tensor",
        "the state is None on rank 0; give rank 0 the dict that state_dict returned",
    ]
    assert pool.run(JOBS + "refused", 2) == [[[message, True] for message in messages]] * 2


@pytest.mark.parametrize("kind", ["tied", "zero", "experts", "pending"])
def test_state_of_models_with_other_options(pool: Pool, kind: str) -> None:
    for seen in pool.run(JOBS + "special", 2, kind=kind):
        assert seen["state"], "as without the option"
        assert seen["loaded"]
        assert seen["weights"]
        keys = [name for name in seen["keys"] if name.startswith("blocks.0.feed_forward.")]
        experts = [f"blocks.0.feed_forward.down.{expert}" for expert in range(4)]
        assert keys[-4:] == experts if kind == "experts" else len(keys) == 3
        if kind == "tied":
            told = "'embedding.tokens.weight' and 'head.logits.weight' are one weight"
            assert seen["error"].startswith(told)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sparse", [True, False])
def test_pruned_weights_are_dense_and_stay_pruned(sparse: bool, dtype: torch.dtype) -> None:
    engine = pipeline(gpt(**SMALL).model, dtype=dtype)
    run_step(engine, 0, *tokens(0), lr=0.1)
    whole = WholeModel(engine).state_dict()
    key, linear = "blocks.0.attention.proj.weight", engine.store.modules[1].get_submodule("proj")
    assert isinstance(linear, nn.Linear)
    keep = whole[key].flatten() > 0
    moments = CaseContext(engine).moments(1)
    own = {name.rpartition("/")[2]: t for name, t in moments.items() if name.startswith("proj.")}
    rest = {name: t for name, t in moments.items() if not name.startswith("proj.")}
    pruned = prune(linear, keep, sparse, own)
    Actions(engine).rebuild(1, rest | {f"proj.weight/{name}": t for name, t in pruned.items()})
    state = WholeModel(engine).state_dict()
    assert same(state, whole | {key: whole[key] * keep.view(8, 8)})
    ones = {name: torch.ones_like(value) for name, value in state.items()}
    WholeModel(engine).load_state_dict(ones)
    kept = keep.view(8, 8).float()
    assert same(WholeModel(engine).state_dict(), ones | {key: kept})
    assert torch.equal(unpacked(linear, "weight", linear.weight).float(), kept)
    run_step(engine, 1, *tokens(1), lr=0.1)


def test_cached_outputs_of_frozen_layers_are_dropped() -> None:
    engine = gpt(**SMALL)
    cases = Cases([make(Freezing(cache_bytes=1 << 20), RunFacts(layers=6))], engine)
    cases.take_over(engine)
    Actions(engine).freeze([0, 1])
    cases.take_samples(range(MICROBATCHES), MICROBATCHES)
    before = [engine.evaluate(StepBatch(*tokens(0)), MICROBATCHES) for _ in range(2)]
    state = {name: 2 * value for name, value in WholeModel(engine).state_dict().items()}
    WholeModel(engine).load_state_dict(state)
    after = engine.evaluate(StepBatch(*tokens(0)), MICROBATCHES)
    cases.take_samples(None, MICROBATCHES)
    assert cases.skipped == 2 * MICROBATCHES
    assert before[0] == before[1] != after == engine.evaluate(StepBatch(*tokens(0)), MICROBATCHES)


def test_state_of_a_module_is_loaded_without_a_copy_of_its_memory(world: Meeting) -> None:
    """The user's modules and tied memory see the new values, and the given state stays as it is."""
    modules = layers()
    pipeline = trained(world, modules, 1)
    with pytest.raises(CheckpointError, match=r"'0\.weight' of the state has no values"):
        pipeline.load_state_dict(nn.Sequential(*layers()).to("meta").state_dict())
    parameter, state = modules[0].get_parameter("weight"), nn.Sequential(*layers(3)).state_dict()
    pipeline.load_state_dict(state)
    assert modules[0].get_parameter("weight") is parameter
    assert torch.equal(parameter, state["0.weight"])
    pipeline.step(torch.ones(8, 4), torch.ones(8, 3))
    assert same(state, nn.Sequential(*layers(3)).state_dict())


@pytest.mark.parametrize(
    ("ranks", "options", "last"),
    [(1, {}, [0]), (2, {}, [1]), (2, {"schedule": "zb-v"}, [0]), (4, {"replicas": 2}, [2, 3])],
)
def test_outputs_of_an_evaluation_are_those_of_the_modules(
    pool: Pool, ranks: int, options: dict[str, Any], last: list[int]
) -> None:
    rows = pool.run(JOBS + "outputs", ranks, **options)
    assert [rank for rank, seen in enumerate(rows) if seen.pop("last")] == last
    for seen in rows:
        assert all(seen.values()), seen


def test_outputs_may_be_tuples_and_must_have_a_first_dimension(pool: Pool) -> None:
    first, second = pool.run(JOBS + "odd_outputs", 2)
    assert (first[0], second[0]) == (None, [True, [8, 3]])
    assert first[1] == second[1]
    assert first[1].startswith("the last layer's outputs of a batch cannot be concatenated (")


def test_middle_rank_passes_nothing(pool: Pool) -> None:
    rows = pool.run(JOBS + "without_batch", 3)
    assert rows == [rows[0]] * 3
