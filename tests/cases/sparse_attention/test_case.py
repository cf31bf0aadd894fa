"""Kinds and steps of sparse attention. Any placement gives the same bits."""

from __future__ import annotations

import json
import tomllib
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dynmo.cases.sparse_attention.case import SparseAttentionCase, expected_ratio
from dynmo.cases.sparse_attention.dropped import Dropped
from dynmo.cases.sparse_attention.hashed import Hashed
from dynmo.cases.sparse_attention.layers import SharedAttentionHalf
from dynmo.change_events import ChangeEvent
from dynmo.config import parse
from dynmo.cost.layer_cost import Forecast
from dynmo.errors import ConfigError
from dynmo.event_log import read
from dynmo.events import StepResult
from dynmo.models.options import ModelOptions
from dynmo.pipeline.case import Change
from dynmo.train.setup import model_of
from tests.cases.kept import Kept, cases_of
from tests.combinations import mostly_matrix
from tests.equality import RANDOM_MOVES, resumed, run, same
from tests.equality import config as small_run
from tests.pool import Pool

HALF = ModelOptions(hidden=16, heads=2, sequence=8)


def layers(blocks: int = 3) -> Kept:
    """An embedding with an attribute `sparse` of its own, blocks of two halves, and a head."""
    halves = [m for _ in range(blocks) for m in (SharedAttentionHalf(HALF), nn.Linear(16, 16))]
    return Kept(modules=[nn.Embedding(4, 16), *halves, nn.Linear(16, 4)])


def seeds(model: Kept) -> list[int | None]:
    halves = [module for module in model.modules if isinstance(module, SharedAttentionHalf)]
    return [x.seed if isinstance(x := each.sparse_attention, Hashed) else None for each in halves]


def hashed(seed: int) -> Hashed:
    return Hashed(4, 8, seed)


def test_attention_becomes_sparse_by_schedule() -> None:
    model = layers()
    case = SparseAttentionCase([(1, (0, 2)), (3, (1, 2)), (4, None)], hashed, seed=7)
    done = [case.act(step, model) for step in range(6)]
    assert [d and d.layers for d in done] == [None, (1, 5), None, (1, 3), (1,), None]
    assert done[4] == Change((1,), "3 of 3 attention halves are sparse (schedule, step 4)")
    assert case.state() == {"sparse": [1, 3, 5]}


def test_directions_follow_from_seed_step_and_layer() -> None:
    drawn: list[list[int | None]] = []
    for seed, steps in ((7, [0, 1, 2]), (7, [2]), (8, [2])):
        model, case = layers(), SparseAttentionCase([(0, None)], hashed, seed)
        for step in steps:
            case.act(step, model)
            drawn.append(seeds(model))
    assert len({x for row in drawn[:3] for x in row}) == 9
    assert drawn[3] == drawn[2], "a run that starts at step 2 draws what one does that came there"
    assert not set(drawn[4]) & set(drawn[2])


def test_resumed_run_reports_no_second_change() -> None:
    model, case = layers(), SparseAttentionCase([(0, None)], hashed, 0)
    case.load(json.loads(json.dumps({"sparse": [1, 3, 5]})))
    assert case.act(4, model) is None
    assert None not in seeds(model)


def test_forecast_has_the_expected_time_ratio() -> None:
    f, b = expected_ratio(hidden=16, sequence=48, share=0.25)
    assert f == (6 * 16**2 + 0.25 * 2 * 48 * 16) / (6 * 16**2 + 2 * 48 * 16)
    assert b == pytest.approx(0.4643, abs=1e-4)
    model, case = layers(), SparseAttentionCase([(2, (0,)), (5, (1, 2))], hashed, 0, ratio=(f, b))
    case.act(0, model)
    later = Forecast(5, (3, 5), f, b, 1.0)
    again = Forecast(5, (1,), 1.0, 1.0, 1.0)  # of what a layer takes now: dense is as now
    assert list(case.forecast(0)) == [Forecast(2, (1,), f, b, 1.0), later, again]
    case.act(2, model)
    assert list(case.forecast(2)) == [later, Forecast(5, (1,), 1 / f, 1 / b, 1.0)]


def test_a_model_without_attention_halves_is_refused() -> None:
    with pytest.raises(ConfigError, match="names block 3"):
        SparseAttentionCase([(0, (1,)), (9, (3,))], hashed, 0).check(layers().modules)


def test_missing_cuda_kernel_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    with pytest.raises(ConfigError, match='kind = "drop" has no CUDA kernel'):
        cases_of(config(kind="drop"), 18)
    monkeypatch.setattr("dynmo.cases.sparse_attention.case.find_spec", lambda _: None)
    with pytest.raises(ConfigError, match='kind = "hash" needs triton on CUDA'):
        cases_of(config(), 18)
    on_cpu = {"parallel": {"device": "cpu"}, "dynamism": {"cases": ["sparse_attention"]}}
    assert cases_of(parse(on_cpu), 18)


def config(**options: Any) -> Any:
    return parse({"dynamism": {"cases": ["sparse_attention"], "sparse_attention": options}})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"buckets": 15}, "buckets = 15: must be a multiple of 2"),
        ({"buckets": 0}, "buckets = 0"),
        ({"buckets": 258}, "258 is more than model.sequence = 256 tokens; use 256 or fewer"),
        ({"drop": 1.0}, "drop = 1.0"),
        ({"drop": -0.1}, "drop = -0.1"),
        ({"kind": "hashes"}, "'hash' or 'drop'"),
        ({"tile": 0}, "tile = 0"),
        ({"blocks": [8]}, "blocks names block 8, but the model has 8, from 0 to 7"),
        ({"schedule": [[0, [9]]]}, "schedule names block 9"),
        ({"schedule": [[3, [0]], [3, [1]]]}, "steps must ascend"),
        ({"schedule": [[3, []]]}, "names no block"),
        ({"blocks": []}, "names no block"),
        ({"schedule": [[3, [0]]], "start": 2}, "leave them out"),
        ({"start": 100}, "starts at step 100, but the run has 100 steps"),
        ({"schedule": [[100, [0]]]}, "starts at step 100, but the run has 100 steps"),
        ({"bucket": 4}, "did you mean dynamism.sparse_attention.buckets?"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config(**options)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"kind": "python:a:b", "sequence": 32}, "buckets = 64"),
        ({"kind": "emulated"}, '"emulated" has no attention'),
    ],
)
def test_a_model_that_does_not_fit_is_refused(model: dict[str, Any], message: str) -> None:
    dynamism = {"cases": ["sparse_attention"], "sparse_attention": {"buckets": 64}}
    with pytest.raises(ConfigError, match=message):
        parse({"model": model, "dynamism": dynamism})


def test_sparse_attention_case_follows_the_config() -> None:
    given = config(schedule=[[2, [0, 3]], [4, [1]]], buckets=8)
    assert parse(tomllib.loads(given.to_toml())) == given
    (case,) = cases_of(given, 18)
    model, what = layers(8), "2 of 8 attention halves are sparse (schedule, step 2)"
    assert case.act(2, model) == Change((1, 7), what)
    first = model.modules[1]
    assert isinstance(first, SharedAttentionHalf)
    assert isinstance(first.sparse_attention, Hashed)
    assert (first.sparse_attention.buckets, first.sparse_attention.tile) == (8, 32)
    (case,) = cases_of(config(kind="drop", drop=0.25), 18)
    case.act(0, model)
    assert isinstance(first.sparse_attention, Dropped)


def test_attention_half_switches_between_dense_and_sparse() -> None:
    """Weights and shapes do not change. One bucket is dense attention."""
    torch.manual_seed(0)
    module, x = SharedAttentionHalf(HALF), torch.randn(2, 8, 16)
    dense = module(x)
    module.sparse_attention = Dropped(0.0, 4, 0)
    torch.testing.assert_close(module(x), dense)
    module.sparse_attention = Hashed(4, 4, 0)
    sparse = module(x)
    assert sparse.shape == dense.shape
    assert not torch.equal(sparse, dense)
    assert torch.equal(sparse[:, 0], x[:, 0]), "the first position has nothing to attend to"
    later = x.clone()
    later[:, 5:] += 1
    assert torch.equal(module(later)[:, :5], sparse[:, :5]), "no position sees a later one"


def test_only_a_model_with_the_case_shares_queries_and_keys() -> None:
    plain, shared = (model_of(c).build(range(18)) for c in (parse({}), config()))
    assert [p.shape for p in plain[1].parameters()][1] == (768, 256)
    assert [p.shape for p in shared[1].parameters()][1] == (512, 256)
    assert [type(a) for a in plain[::2]] == [type(b) for b in shared[::2]]


# -- the same bits ---------------------------------------------------------------------------------

OPTIONS: dict[str, dict[str, Any]] = {
    "hash": {"schedule": [[2, [1]], [4, [0, 2]]], "buckets": 4, "tile": 4},
    "drop": {"kind": "drop", "start": 1, "tile": 4},
}


def wanted(ranks: int, kind: str, schedule: str, balancer: str = RANDOM_MOVES) -> dict[str, Any]:
    base = small_run(ranks, schedule, {"balancer": balancer, "every": 1}, False, clipping=True)
    base["model"] |= {"blocks": 3, "sequence": 24}
    base["dynamism"] = {
        "cases": ["sparse_attention", "freezing"],
        "freezing": {"schedule": [[5, 2]]},
        "sparse_attention": OPTIONS[kind],
    }
    return base


@cache
def reference(pool: Pool, kind: str) -> dict[str, Any]:
    return run(pool, wanted(1, kind, "1f1b", "none"))[0]


@pytest.mark.parametrize(
    ("ranks", "schedule", "kind"),
    mostly_matrix(
        product((2, 3), ["gpipe", "1f1b", "zb-h1", "zb-h2", "zb-auto", "zb-v"], OPTIONS),
        everyday=[(3, "1f1b", "drop")],
    ),
)
def test_digest_is_equal_on_any_ranks(pool: Pool, ranks: int, schedule: str, kind: str) -> None:
    same(run(pool, wanted(ranks, kind, schedule)), reference(pool, kind), moving=True)


def test_sparse_attention_changes_the_numbers(pool: Pool) -> None:
    dense = wanted(1, "hash", "1f1b", "none")
    dense["dynamism"]["sparse_attention"] = {"start": 6}
    losses = [run(pool, dense)[0]["losses"]]
    losses += [reference(pool, kind)["losses"] for kind in OPTIONS]
    assert losses[0][:2] == losses[1][:2], "dense until step 2"
    assert losses[0][0] == losses[2][0], "dense until step 1"
    assert len({tuple(x[3:]) for x in losses}) == 3


@pytest.mark.matrix
@pytest.mark.parametrize("kind", OPTIONS)
def test_resumed_run_has_the_same_numbers(pool: Pool, tmp_path: Path, kind: str) -> None:
    """The run stops after step 3 on three ranks and resumes on two."""
    parts = wanted(3, kind, "zb-h1"), wanted(2, kind, "1f1b")
    ended = resumed(pool, tmp_path, *parts, stop_after=2)[0]
    assert ended["weights_digest"] == reference(pool, kind)["digest"]
    events = list(read(tmp_path / "events.jsonl"))
    losses = {e.step: e.loss for e in events if isinstance(e, StepResult)}
    assert losses == dict(enumerate(reference(pool, kind)["losses"]))
    told = [e.step for e in events if isinstance(e, ChangeEvent) and e.case == "sparse_attention"]
    assert told == {"hash": [2, 4], "drop": [1]}[kind], "each change is told once"
