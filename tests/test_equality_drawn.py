"""Same numbers in drawn places: one digest for each training, whatever the place.

The seed is the date, or `DYNMO_SEED`. A failure says how to repeat its case alone.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from typing import Any

import pytest

from dynmo.schedule.catalogue import AUTO
from tests.combinations import mostly_matrix
from tests.drawn import CASES, TRAININGS, Drawn, draw, reference, todays_seed
from tests.equality import fields_of
from tests.fuzz.outcome import Observed, difference
from tests.pool import JobFailed, Pool

JOB = 10
"""Most cases of a job."""
EVERYDAY = range(CASES // 2)

Results = list[dict[str, Any]]


@pytest.fixture(scope="module")
def references(pool: Pool) -> dict[str, dict[str, Any]]:
    """The result of each training on one rank."""
    configs = [reference(training) for training in TRAININGS]
    (told,) = pool.run("tests.drawn:train_each", 1, configs=configs, staged=[False] * len(configs))
    return dict(zip(TRAININGS, told, strict=True))


@pytest.fixture(scope="module")
def run(pool: Pool, request: pytest.FixtureRequest) -> Callable[[int], tuple[Drawn, Results]]:
    """Gives a case and the result of each rank, by the case's number.

    The cases that pytest has selected run several in a job.
    """
    cases = draw(todays_seed())
    names = {item.name for item in request.session.items}
    selected = [n for n in range(CASES) if any(name.endswith(f"[case-{n}]") for name in names)]
    selected.sort(key=lambda n: cases[n].ranks)
    jobs: list[list[int]] = []
    for _, group in groupby(selected, key=lambda n: cases[n].ranks):
        same = list(group)
        jobs += [same[at : at + JOB] for at in range(0, len(same), JOB)]
    found: dict[int, Results] = {}

    def run_job(numbers: list[int]) -> None:
        drawn = [cases[number] for number in numbers]
        told = pool.run(
            "tests.drawn:train_each",
            drawn[0].ranks,
            timeout=30.0 * len(drawn),
            configs=[case.config for case in drawn],
            staged=[case.chosen["messages"] == "staged" for case in drawn],
        )
        found.update(zip(numbers, map(list, zip(*told, strict=True)), strict=True))

    def of(number: int) -> tuple[Drawn, Results]:
        job = next(job for job in jobs if number in job)
        try:
            if number not in found:
                run_job(job)
        except JobFailed:  # some case of the job is wrong, so each runs by itself
            jobs.remove(job)
            jobs.extend([each] for each in job)
            try:
                run_job([number])
            except JobFailed as error:
                pytest.fail(f"{repeat(number, cases[number])}\n{error}")
        return cases[number], found[number]

    return of


def repeat(number: int, case: Drawn) -> str:
    test = f"test_a_drawn_place_leaves_the_numbers[case-{number}]"
    suite = "" if number in EVERYDAY else "-m matrix "
    command = f"pytest {suite}'tests/test_equality_drawn.py::{test}'"
    return f"DYNMO_SEED={todays_seed()} {command}    # {case.chosen}"


@pytest.mark.parametrize(
    "number", mostly_matrix(range(CASES), EVERYDAY), ids=[f"case-{n}" for n in range(CASES)]
)
def test_a_drawn_place_leaves_the_numbers(
    run: Callable[[int], tuple[Drawn, Results]],
    references: dict[str, dict[str, Any]],
    number: int,
) -> None:
    case, results = run(number)
    ours, expected = Observed(), Observed()
    ours.read(results[0]["events"])
    expected.read(references[case.training]["events"])
    assert difference(ours, expected) is None, repeat(number, case)
    for key in ("weights_digest", "buffers_digest"):
        told = {result[key] for result in results}
        assert told == {references[case.training][key]}, repeat(number, case)
    placements = [tuple(x) for (x,) in fields_of(results[0]["events"], "step", "layers")]
    stages = case.chosen["pipeline"] > 1 and case.chosen["schedule"] != AUTO
    if case.chosen["balancer"] == "random" and stages:
        assert len(set(placements)) > 1, f"no layer moved: {repeat(number, case)}"
    reshaped = bool(fields_of(results[0]["events"], "reshape", "step"))
    assert reshaped == case.chosen["reshape"], repeat(number, case)


@pytest.mark.parametrize("training", TRAININGS)
def test_every_feature_of_a_training_acts(
    references: dict[str, dict[str, Any]], training: str
) -> None:
    events = references[training]["events"]
    features = TRAININGS[training].features
    changes = {case for (case,) in fields_of(events, "change", "case")}
    for case in ("freezing", "pruning", "sparse_attention"):
        assert (case in changes) == features[case], case
    shares = [
        share
        for (told,) in fields_of(events, "tokens", "shares")
        for some in told.values()
        for share in some
    ]
    if features["early_exit"] or features["mixture_of_depths"]:
        assert any(0.05 < share < 0.95 for share in shares), shares
    norms = [norm for (norm,) in fields_of(events, "step", "gradient_norm")]
    if features["clip"] == "global":
        assert any(norm > 0.5 for norm in norms)


def test_trainings_differ(references: dict[str, dict[str, Any]]) -> None:
    assert len({told["weights_digest"] for told in references.values()}) == len(TRAININGS)
