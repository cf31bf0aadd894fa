"""Mixture of depths: selection by the predictor, records and refused models."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from dynmo.cases.mixture_of_depths.case import MixtureOfDepthsCase
from dynmo.cases.mixture_of_depths.layers import RoutedAttentionHalf, Router
from dynmo.config import parse
from dynmo.pipeline.case import Change, TokenShares
from dynmo.train.setup import model_of
from tests.cases.kept import Kept, short_run
from tests.combinations import mostly_matrix
from tests.equality import fields_of, run
from tests.pool import Pool

ROUTED = [3, 7]  # attention halves of the blocks 1 and 3


def config(ranks: int = 1, **options: Any) -> dict[str, Any]:
    wanted = {"capacity": 0.25, "record_every": 2} | options
    return short_run("mixture_of_depths", wanted, ranks, blocks=4)


def layers() -> Kept:
    model = model_of(parse(config()))
    return Kept(modules=model.build(range(model.layers)))


def routers(model: Kept) -> list[Router]:
    return [module.router for module in model.modules if isinstance(module, RoutedAttentionHalf)]


def test_predictor_selects_from_the_configured_step() -> None:
    model, case = layers(), MixtureOfDepthsCase(threshold_from=2, record_every=10)
    assert [case.acts(step) for step in (0, 1, 2)] == [False, False, True]
    assert [case.act(step, model) for step in (0, 1)] == [None, None]
    assert not any(router.by_threshold for router in routers(model))
    what = "2 blocks select tokens by their predictors (step 2)"
    assert case.act(2, model) == Change((3, 4, 7, 8), what)
    assert all(router.by_threshold for router in routers(model))
    assert case.act(3, model) is None
    assert not case.acts(3)
    model, case = layers(), MixtureOfDepthsCase(threshold_from=None, record_every=10)
    assert [case.act(step, model) for step in (0, 5, 1000)] == [None] * 3
    assert not any(router.by_threshold for router in routers(model))
    assert case.dense(model) is None


def test_record_covers_the_steps_since_the_last_record() -> None:
    model, case = layers(), MixtureOfDepthsCase(None, record_every=3)
    assert [case.acts(step) for step in (0, 1, 2, 3, 4)] == [False, False, False, True, False]
    first, second = routers(model)

    def shares(selected: list[float], right: list[float]) -> TokenShares:
        return TokenShares((3, 7), {"selected": selected, "predicted_right": right})

    first.seen, second.seen = (32, 8, torch.tensor(24)), (32, 4, 32)
    assert case.collect(2, model) is None
    assert case.collect(3, model) == shares([0.25, 0.125], [0.75, 1.0])
    assert case.collect(6, model) == shares([0.0, 0.0], [0.0, 0.0]), "the counts start anew"
    first.seen = second.seen = (32, 8, 16)
    model.own = range(5, 10)
    assert case.collect(9, model) == shares([0.0, 0.25], [0.0, 0.5]), "own layers"


def test_resumed_run_reports_no_second_change() -> None:
    before, case = MixtureOfDepthsCase(2, 10), MixtureOfDepthsCase(2, 10)
    before.act(3, layers())
    case.load(json.loads(json.dumps(before.state())))
    model = layers()
    assert case.act(4, model) is None
    assert all(router.by_threshold for router in routers(model)), "the modules are new"


@pytest.mark.parametrize(
    ("every", "expected"), [(1, (0, 1, 2, 3, 4)), (2, (1, 3)), (3, (2,)), (5, (4,))]
)
def test_routed_blocks_follow_the_interval(every: int, expected: tuple[int, ...]) -> None:
    wanted = parse(short_run("mixture_of_depths", {"every": every}, 1, blocks=5))
    assert wanted.dynamism.mixture_of_depths.routed_blocks(5) == expected


@pytest.mark.parametrize("predictor", mostly_matrix(["mlp", "bce"], everyday=["mlp"]))
def test_log_has_the_selected_shares(pool: Pool, predictor: str) -> None:
    events = run(pool, config(2, predictor=predictor, threshold_from=6), "events")[0]
    told = fields_of(events, "tokens", "step", "case", "layers", "shares")
    rows = [(step, "mixture_of_depths", ROUTED) for step in (2, 4, 6, 8)]
    assert [row[:3] for row in told] == rows
    assert [row[3]["selected"] for row in told[:3]] == [[0.25, 0.25]] * 3, "2 of 8 tokens"
    assert all(0 <= share <= 1 for row in told for shares in row[3].values() for share in shares)
    assert fields_of(events, "change", "step", "case") == [(6, "mixture_of_depths")]
    first = run(pool, config(predictor=predictor))[0]["digest"]  # which selects other tokens
    assert fields_of(events, "end", "weights_digest") != [(first,)]
