"""Early exit: first step, records and refused models."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import pytest

from dynmo.cases.early_exit.case import EarlyExitCase
from dynmo.cases.early_exit.layers import ExitHead
from dynmo.config import parse
from dynmo.pipeline.case import Change, TokenShares
from dynmo.train.setup import model_of
from tests.cases.kept import Kept, cases_of, short_run
from tests.equality import fields_of, run
from tests.pool import Pool

EXITS = [3, 6]  # layers: embedding, two halves a block, and an exit behind the blocks 0 and 1


def config(ranks: int = 1, **options: Any) -> dict[str, Any]:
    wanted = {"policy": "adp-c", "exits": [0, 1], "start": 2, "record_every": 2} | options
    return short_run("early_exit", wanted, ranks, blocks=3)


def layers() -> Kept:
    model = model_of(parse(config()))
    return Kept(modules=model.build(range(model.layers)))


def switches(model: Kept, name: str) -> list[int]:
    return [index for index, module in enumerate(model.modules) if getattr(module, name, False)]


def test_exits_switch_on_at_the_start_step() -> None:
    model, case = layers(), EarlyExitCase(start=2, record_every=10)
    assert [case.acts(step) for step in (0, 1, 2)] == [False, False, True]
    assert [case.act(step, model) for step in (0, 1)] == [None, None]
    assert switches(model, "exits") == switches(model, "varying_shapes") == []
    assert case.dense(model) is None
    assert case.act(2, model) == Change(tuple(range(3, 10)), "tokens may leave at 2 exits (step 2)")
    assert switches(model, "exits") == EXITS
    assert switches(model, "varying_shapes") == list(range(3, 10)), "from the first exit on"
    assert case.dense(model) is not None
    assert case.act(3, model) is None
    assert not case.acts(3)


def test_record_covers_the_steps_since_the_last_record() -> None:
    model, case = layers(), EarlyExitCase(start=2, record_every=3)
    assert case.collect(0, model) is None
    case.act(2, model)
    assert [case.acts(step) for step in (3, 4, 5, 6)] == [True, False, False, True]
    first, second = (m for m in model.modules if isinstance(m, ExitHead))
    first.seen, second.seen = (32, 8), (32, 16)
    assert case.collect(4, model) is None
    assert case.collect(6, model) == TokenShares((3, 6), {"exited": [0.25, 0.5]})
    assert case.collect(9, model) == TokenShares((3, 6), {"exited": [0.0, 0.0]}), "counts anew"
    first.seen = second.seen = (32, 8)
    model.own = range(5)
    assert case.collect(12, model) == TokenShares((3, 6), {"exited": [0.25, 0.0]}), "own layers"


def test_dense_switches_exits_off_temporarily() -> None:
    model, case = layers(), EarlyExitCase(start=0, record_every=1)
    case.act(0, model)
    for fails in (False, True):
        dense = case.dense(model)
        assert dense is not None
        with suppress(KeyError), dense:
            assert switches(model, "exits") == []
            if fails:
                raise KeyError
        assert switches(model, "exits") == EXITS


def test_resumed_run_reports_no_second_change() -> None:
    before, case = EarlyExitCase(start=2, record_every=10), EarlyExitCase(start=2, record_every=10)
    before.act(3, layers())
    case.load(json.loads(json.dumps(before.state())))
    model = layers()
    assert case.act(4, model) is None
    assert switches(model, "exits") == EXITS, "the modules are new"


def test_default_start_is_a_share_of_the_steps() -> None:
    (case,) = cases_of(parse(config(start=None)), 10)
    assert [case.acts(step) for step in (1, 2)] == [False, True], "30 % of 9 steps"


def options(blocks: int = 8, **given: Any) -> Any:
    wanted = {"cases": ["early_exit"], "early_exit": given}
    return parse({"model": {"blocks": blocks}, "dynamism": wanted}).dynamism.early_exit


def test_default_threshold_depends_on_the_policy() -> None:
    assert options().threshold_of_policy == 0.9
    assert options(policy="adp-c").threshold_of_policy == 0.998
    assert options(threshold=0.0).threshold_of_policy == 0.0


@pytest.mark.parametrize(
    ("blocks", "expected"),
    [(2, (0,)), (3, (0, 1)), (4, (1, 2)), (6, (1, 3)), (8, (2, 5)), (24, (7, 15))],
)
def test_default_exits_are_at_one_and_two_thirds(blocks: int, expected: tuple[int, ...]) -> None:
    assert options(blocks).exits_of(blocks) == expected


@pytest.mark.parametrize(("threshold", "expected"), [(0.0, [1.0, 0.0]), (1.0, [0.0, 0.0])])
def test_log_has_the_exit_shares(pool: Pool, threshold: float, expected: list[float]) -> None:
    """Exits that no token takes change no bits."""
    wanted = config(2, threshold=threshold)
    wanted["train"]["eval_every"] = 2
    events = run(pool, wanted, "events")[0]
    assert fields_of(events, "tokens", "step", "case", "layers", "shares") == [
        (step, "early_exit", EXITS, {"exited": expected}) for step in (4, 6, 8)
    ]
    assert fields_of(events, "change", "step", "case") == [(2, "early_exit")]
    never = run(pool, config(start=8, threshold=1.0))[0]["digest"]
    assert (fields_of(events, "end", "weights_digest") == [(never,)]) == (threshold == 1.0)
    evaluations = fields_of(events, "eval", "step", "loss", "dense_loss")
    assert all((dense is not None) == (step > 2) for step, _, dense in evaluations)
    if threshold == 0.0:
        assert all(loss != dense for _, loss, dense in evaluations)


def test_switch_also_applies_to_meta_modules() -> None:
    """Every rank must know which messages vary, also for layers of other ranks."""
    kept = Kept(modules=model_of(parse(config())).build(()))
    assert all(p.is_meta for module in kept.modules for p in module.parameters())
    EarlyExitCase(start=0, record_every=1).act(0, kept)
    assert switches(kept, "exits") == EXITS
