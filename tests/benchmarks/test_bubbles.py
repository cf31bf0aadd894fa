"""Equation 1, the bubble of equal stages, and the preset of the paper's setting."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import paper_model
from benchmarks.bubbles import SIDES, equation_1, inherent, row
from dynmo.config import load
from dynmo.plan.workload import read

ROOT = Path(__file__).parents[2]


def test_equation_1_at_four_workers() -> None:
    """P^2 / 2 - P is 4: T_C counts 12 + 24 - 2 - 8, over 48 - 8, 32 - 8 and 16."""
    assert equation_1(4, 1, 2, 0) == pytest.approx(16 / (48 + 16))
    assert equation_1(4, 1, 2, 0.5) == pytest.approx((13 + 16) / (20 + 48 + 16))


def test_inherent_bubble_of_zb_h1() -> None:
    assert inherent("zb-h1", 4, 16, 0.0) == pytest.approx(3 / (16 * 3 + 3))


def test_bubbles_add_up_to_the_idle_share() -> None:
    result = row("freezing", 2048, 24, 4, None, stride=12)
    for side in SIDES:
        assert result["inherent"] + result["imbalance"][side] == pytest.approx(result["idle"][side])
    assert result["imbalance"]["known at once"] <= result["imbalance"]["even"]


def test_presets_have_the_papers_setting() -> None:
    config = load(ROOT / "examples" / "dynmo_paper.toml")
    model, train = config.model, config.train
    assert (model.hidden, model.heads) == (paper_model.HIDDEN, paper_model.HEADS)
    assert model.sequence == paper_model.SEQUENCE
    assert train.micro_batch == paper_model.MICROBATCH
    assert train.global_batch == paper_model.MICROBATCH * paper_model.PER_RANK * config.ranks
    workload = read(ROOT / "benchmarks" / "data" / "dynmo_paper.toml")
    assert workload.microbatches == paper_model.PER_RANK * workload.ranks
