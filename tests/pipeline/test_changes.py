"""Changes between two steps, with stand-ins for what decides."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import MagicMock

import pytest
import torch

from dynmo.pipeline import elasticity
from dynmo.pipeline.changes import Changes
from dynmo.pipeline.elasticity import Elasticity
from dynmo.pipeline.options import PipelineOptions
from dynmo.pipeline.rebalance import Rebalancer
from dynmo.plan.decide import Rules
from dynmo.plan.options import Balance, Elastic

OPTIONS = PipelineOptions(microbatches=4)


def test_layers_are_placed_once_before_a_step_whose_case_fails() -> None:
    cases, rebalancer = MagicMock(all=()), MagicMock()
    cases.collect.return_value = ()
    cases.act.side_effect = [ValueError("the user's own"), (), ()]
    rebalancer.is_due.return_value = False
    engine = SimpleNamespace(attempt=nullcontext)
    changes = Changes(OPTIONS, cast(Any, engine), cases, rebalancer, MagicMock(), dict, 0.0)
    with pytest.raises(ValueError, match="own"):
        changes.make(3)
    changes.make(3)
    assert (changes.made, rebalancer.is_due.call_count) == (3, 1)
    changes.make(4)
    assert rebalancer.is_due.call_count == 2


def test_planner_is_told_of_the_ranks_that_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 4 ranks the run has 2, and a third waits."""
    everyone = MagicMock(size=2)
    everyone.sum.return_value = torch.tensor([1, 4, 0])
    engine = SimpleNamespace(store=SimpleNamespace(world=SimpleNamespace(everyone=everyone)))
    rebalancer = MagicMock(measured=True)
    rules = Rules("ranks", Balance(), Elastic())
    monkeypatch.setattr(elasticity, "rules_of", lambda *_: rules)
    monkeypatch.setattr(Elasticity, "_places", lambda _: [])
    options = OPTIONS.model_copy(update={"pipeline": 4})
    monkeypatch.setattr(Elasticity, "_open_entrance", lambda *_: None)
    own = Elasticity(options, cast(Any, engine), rebalancer, MagicMock())
    rebalancer.decide.return_value.refusal = "no"
    assert own._ask_planner(5) is None
    given = rebalancer.decide.call_args.args[1]
    assert (given.available_ranks, given.most_ranks) == (3, 4)


def test_newcomer_may_take_the_place_of_a_slow_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    everyone = MagicMock(size=3, rank=0)
    everyone.sum.side_effect = lambda table, _: table
    engine = SimpleNamespace(store=SimpleNamespace(world=SimpleNamespace(everyone=everyone)))
    monkeypatch.setattr(Elasticity, "_open_entrance", lambda *_: None)
    options = OPTIONS.model_copy(update={"pipeline": 4, "elastic": Elastic(repack=True)})
    own = Elasticity(options, cast(Any, engine), MagicMock(), MagicMock())
    assert not own._is_welcome(1)
    own._given_up = 1
    assert own._is_welcome(1)
    assert own._known_to_first() == (0, 3, False), "the run asks for no rank in its place"


def test_gain_of_a_change_of_ranks_is_measured_if_one_was_predicted() -> None:
    for predicted, measures in ((0.5, True), (None, False)):
        rebalancer = Rebalancer(OPTIONS, MagicMock(), MagicMock(), None)
        for step in range(3):
            rebalancer.observe(step, 2.0, (1.0,))
        assert rebalancer.on_resize(3, predicted) == (1, None)
        for step in range(3, 6):
            rebalancer.observe(step, 1.0, (1.0,))
        result = rebalancer.close_measurement(6)
        assert (result is not None) is measures
        assert result is None or (result.id, result.measured_gain) == (1, 0.5)


def test_samples_count_as_one_while_their_number_is_unknown() -> None:
    assert (OPTIONS.samples, OPTIONS.global_batch) == (1, 4)
