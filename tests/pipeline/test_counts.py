"""Counts of layers are exact and are added up on their own rank."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dynmo
from dynmo.cases.experts import Experts
from dynmo.cases.experts.case import ExpertsCase
from dynmo.cases.experts.layers import ExpertsHalf
from dynmo.change_events import TokensEvent
from dynmo.config import parse
from dynmo.events import Event
from dynmo.models.options import ModelOptions
from dynmo.pipeline.case import Change, Layers
from dynmo.pipeline.counts import CountingCase, Counts
from dynmo.pipeline.options import grouped
from dynmo.train.setup import model_of
from tests.cases.kept import Kept, cases_of, short_run
from tests.pool import Pool

CASES: dict[str, dict[str, Any]] = {
    "experts": {"model": {"kind": "moe", "blocks": 2, "hidden": 16, "heads": 2, "sequence": 8}},
    "early_exit": {"policy": "adp-c", "exits": [0, 1], "start": 0},
    "mixture_of_depths": {"capacity": 0.25},
}


def test_counts_add_numbers_and_tensors() -> None:
    counts, layers = Counts(2), Kept(2)
    for step in range(3):
        counts.add({0: (2, torch.tensor(step)), 1: torch.tensor([1, 2**24])})
    assert counts.total(layers, [0, 1], "counts") == [[6, 3], [3, 3 * 2**24]]
    assert counts.total(layers, [0, 1], "counts") == [[0, 0], [0, 0]], "they begin anew"


def test_layer_without_tokens_adds_no_count() -> None:
    """Such a count might be on another device than the counts of other layers."""
    half = ExpertsHalf(ModelOptions(kind="moe", hidden=8, experts=3, top_k=1, router_loss=0.0))
    layers, case = Kept(1, modules=[half]), ExpertsCase(Experts(record_every=2), 3, 0.0)
    assert case.collect(0, layers) is None
    half(torch.randn(1, 7, 8))
    assert case.collect(1, layers) is None
    half(torch.randn(1, 5, 8))
    expected = case._recorded._sums[0]
    assert isinstance(expected, torch.Tensor)
    assert (expected.dtype, int(expected.sum())) == (torch.int64, 7)
    shares = case.collect(2, layers)
    assert shares is not None
    assert 1.0 <= shares.shares["hottest expert"][0] <= 3.0


class Passed(CountingCase):
    """Counts the calls of a layer."""

    name = "passed"

    def __init__(self) -> None:
        super().__init__(1, record_every=5)

    def counting(self, modules: Sequence[nn.Module]) -> list[int]:
        return list(range(len(modules)))

    def counted(self, module: Any) -> tuple[int]:
        return (1,)

    def shares(self, rows: list[list[float]]) -> dict[str, list[float]]:
        return {}

    def act(self, step: int, layers: Layers) -> Change | None:
        return super().act(step, layers)


def test_newcomer_sums_with_the_others_for_a_save() -> None:
    """It collects nothing before its first step."""
    for joined in (False, True):
        layers, case = Kept(modules=[nn.Identity()]), Passed()
        assert case.state() == {"counts": []}, "nothing to sum before the first step"
        case.load({"counts": [[7.0]]})
        if not joined:
            case.collect(0, layers)
        case.act(0, layers)
        assert case.state() == {"counts": [[8.0 if joined else 9.0]]}


def resumed(world: dynmo.World, case: str, folder: str) -> list[Any]:
    """What is told of steps 3 and 4, after steps alone, a resume, and a load."""
    options = {"record_every": 4, **CASES[case]}
    sections = {"model": options.pop("model")} if "model" in options else {}
    config = parse(short_run(case, options, world.size, blocks=3) | sections)
    events = list[Event]()

    def make(**given: Any) -> dynmo.Pipeline:
        model = model_of(config)
        cases = cases_of(config, model.layers)
        return dynmo.Pipeline(
            model, world, microbatches=2, cases=cases, **grouped({"listen": events.append, **given})
        )

    def train(pipeline: dynmo.Pipeline, steps: range) -> list[Any]:
        events.clear()
        for step in steps:
            random = torch.Generator().manual_seed(step)
            ids = torch.randint(config.model.vocab, (4, 8), generator=random)
            pipeline.step(ids, ids)
        return [[e.step, e.shares] for e in events if isinstance(e, TokensEvent)]

    pipeline = make()
    train(pipeline, range(3))
    pipeline.save(folder)
    told = [train(pipeline, range(3, 5)), train(make(resume=folder), range(3, 5))]
    train(pipeline, range(5, 6))
    pipeline.load(folder)
    return [*told, train(pipeline, range(3, 5))]


@pytest.mark.parametrize("case", CASES)
def test_counts_are_the_same_after_a_resume(pool: Pool, tmp_path: Path, case: str) -> None:
    job = "tests.pipeline.test_counts:resumed"
    for told in pool.run(job, 2, case=case, folder=str(tmp_path)):
        assert len(told[0]) == 1
        assert told == [told[0]] * 3
