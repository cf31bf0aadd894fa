"""Cases compose: all at once, in a fixed order, under moves."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from dynmo.config import parse
from dynmo.errors import ConfigError
from dynmo.train.setup import model_of
from tests.cases.freezing.test_egeria import LONG, OPTIONS
from tests.cases.kept import cases_of
from tests.combinations import mostly_matrix
from tests.equality import RANDOM_MOVES, run, same
from tests.equality import config as small_run
from tests.pool import Pool

OWN = "python:tests.cases.own_case:LayerDrop"
CASES = [OWN, "freezing", "pruning", "sparse_attention"]


def config(ranks: int, schedule: str, cases: list[str]) -> dict[str, Any]:
    base = small_run(ranks, schedule, {"balancer": RANDOM_MOVES, "every": 2}, False, True)
    base["model"] |= {"sequence": 32}
    base["train"] |= LONG | {"steps": 20}
    base["dynamism"] = {
        "cases": cases,
        "pruning": {"dense_below": 0.3, "start": 2, "end": 14, "every": 3},
        "sparse_attention": {"buckets": 4, "start": 3},
        "freezing": OPTIONS,
    }
    return base


def test_case_order_does_not_depend_on_the_config() -> None:
    configs = [parse(config(1, "zb-h1", cases)) for cases in (CASES, CASES[::-1])]
    order, other = ([case.name for case in cases_of(each, 6)] for each in configs)
    assert order == other
    # What freezes sees what the others changed. One's own comes last.
    assert order[-2:] == ["freezing", "layer_drop"]


RUNS = [(3, "zb-h2"), (2, "zb-v")]


@pytest.mark.parametrize(("ranks", "schedule"), mostly_matrix(RUNS, RUNS[:1]))
def test_all_cases_together_have_the_same_digest(pool: Pool, ranks: int, schedule: str) -> None:
    expected = run(pool, config(1, "1f1b", CASES))[0]
    assert max(expected["frozen"]) > expected["frozen"][-1] == 0, "nothing froze, or nothing thawed"
    results = run(pool, config(ranks, schedule, CASES))
    same(results, expected)
    assert results[0]["frozen"] == expected["frozen"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("early_exit", r"early_exit.*`exits` and `seen`"),
        ("mixture_of_depths", r"mixture_of_depths.*`router`"),
        ("sparse_attention", "`sparse_attention`"),
    ],
)
def test_a_model_without_the_modules_of_a_case_is_refused(name: str, message: str) -> None:
    given = parse({"dynamism": {"cases": [name]}})
    model, (case,) = model_of(given), cases_of(given, 18)
    case.check(model.build(()))
    for modules in ([], [nn.Embedding(4, 4), nn.Linear(4, 4)]):
        with pytest.raises(ConfigError, match=message) as caught:
            case.check(modules)
        assert "\n" not in str(caught.value)
