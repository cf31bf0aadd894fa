"""The drawn cases are valid, and every two choices meet in them."""

from __future__ import annotations

import pytest

from dynmo.config import parse
from tests.drawn import CASES, CHOICES, TRAININGS, draw, possible, todays_seed, valid_pairs


@pytest.mark.parametrize("seed", [0, "today"])
def test_every_valid_pair_occurs_in_the_drawn_cases(seed: int | str) -> None:
    cases = draw(todays_seed() if seed == "today" else int(seed))
    assert len(cases) == CASES
    assert set().union(*(case.pairs for case in cases)) == valid_pairs()
    for case in cases:
        assert all(possible(case.chosen, name) for name in CHOICES)
        assert parse(case.config).ranks == case.ranks <= 4


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


def test_a_seed_determines_the_cases() -> None:
    assert draw(0) == draw(0) != draw(4)


def test_too_few_cases_are_refused() -> None:
    with pytest.raises(ValueError, match="5 cases do not have all pairs"):
        draw(1, 5)
