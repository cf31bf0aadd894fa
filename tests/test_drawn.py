"""The drawn cases are valid, and every two choices meet in them."""

from __future__ import annotations

import pytest

from dynmo.config import parse
from tests.drawn import CASES, CHOICES, TRAININGS, draw, possible, todays_seed, valid_pairs


def test_every_valid_pair_occurs_in_todays_cases() -> None:
    cases = draw(todays_seed())
    assert len(cases) == CASES
    assert set().union(*(case.pairs for case in cases)) == valid_pairs()
    for case in cases:
        assert all(possible(case.chosen, name) for name in CHOICES)
        assert parse(case.config).ranks == case.ranks <= 4
    assert draw(todays_seed()) == cases, "a seed determines the cases"


def test_valid_pairs_are_those_that_no_rule_forbids() -> None:
    """Every choice has pairs, and some pairs that rules forbid are missing."""
    met = {choice for pair in valid_pairs() for choice in pair}
    assert met >= {(name, x) for name in CHOICES if name != "training" for x in CHOICES[name]}
    assert met >= {item for training in TRAININGS.values() for item in training.features.items()}
    assert (("pipeline", 3), ("replicas", 1)) in valid_pairs()
    for forbidden in (
        (("replicas", 1), ("zero", 1)),
        (("expert", 2), ("model", "gpt")),
        (("messages", "slices"), ("validation", "after")),
        (("messages", "slices"), ("schedule", "auto")),
        (("precision", "float16"), ("validation", "in-place")),
    ):
        assert tuple(sorted(forbidden)) not in valid_pairs()


def test_too_few_cases_are_refused() -> None:
    with pytest.raises(ValueError, match="1 cases do not have all pairs"):
        draw(1, 1)
