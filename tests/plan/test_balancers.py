"""Balancers by name: placements, limits, links, and errors of your own."""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynmo.cost.costs_file import Profile
from dynmo.cost.layer_cost import LayerCost, LinkCost
from dynmo.errors import ConfigError, NoRoomError, PartitionError
from dynmo.options import find_own
from dynmo.plan.balancers import balancer, diffuse, find_rule, is_forced, merge
from dynmo.plan.best import plan_on
from dynmo.plan.bisection import exact
from dynmo.plan.evaluate import Plan, evaluate
from dynmo.plan.options import BALANCERS, Elastic
from dynmo.plan.partition import Move, Partition, moves_between_ranks, stage_loads, uniform
from dynmo.plan.placement import place
from dynmo.plan.problem import Allowed, Choice, Mesh, Problem
from dynmo.schedule.memory import Limit
from tests.plan.asked import ask

Now = tuple[Problem, Plan]

# The first three layers are frozen: forward only, but as many parameters as the others.
FROZEN = tuple(LayerCost(1.0, 0.0, 0.0, parameters=10) for _ in range(3)) + tuple(
    LayerCost(1.0, 1.0, 1.0, parameters=10) for _ in range(3)
)
ONE = LayerCost(1.0, 1.0, 1.0, parameters=10)


def now(
    layers: Sequence[LayerCost],
    counts: tuple[int, ...],
    schedule: str = "zb-h1",
    microbatches: int = 4,
    ranks: int | None = None,
    links: Sequence[LinkCost] = (),
    names: tuple[str, ...] | None = None,
    **known: Any,
) -> Now:
    """A problem, and the plan of its layers where they are now."""
    profile = Profile(
        tuple(layers),
        names or tuple(map(str, range(len(layers)))),
        links=tuple(((i, i + 1), link) for i, link in enumerate(links)),
        microbatch=1,
    )
    problem, mesh, _ = ask(profile, ranks or len(counts), microbatches, schedule, **known)
    return problem, evaluate(problem, Choice(mesh, Partition(counts)))


def limited(sizes: Sequence[int], counts: tuple[int, ...], limit: Limit, **known: Any) -> Now:
    layers = [LayerCost(1.0, 1.0, 1.0, weight_bytes=size) for size in sizes]
    return now(layers, counts, memory_limit=limit, **known)


def counts_of(name: str, asked: Now) -> tuple[int, ...]:
    return balancer(name)(*asked).counts


def test_each_balancer() -> None:
    # By time 1 1 1 3 3 3: three and one layer of 3 against two of 3. The current placement is one
    # of the best already.
    asked = now(FROZEN, (4, 2))
    by_time = dict.fromkeys(("exact", "diffusion"), (4, 2))
    assert {name: counts_of(name, asked) for name in BALANCERS} == {
        "none": (4, 2),
        "uniform": (3, 3),
        **by_time,
    }


def test_balancing_by_parameters_ignores_freezing() -> None:
    asked = now(FROZEN, (4, 2), cost="parameters")
    assert counts_of("exact", asked) == counts_of("diffusion", asked) == (3, 3)


def test_exact_moves_boundaries_as_little_as_it_can() -> None:
    # Layer 0 decides alone. (1, 3, 1) moves layer 1. The smoother (1, 2, 2) moves layer 3 too.
    layers = [LayerCost(1.0, 0.0, 0.0, parameters=weight) for weight in (6, 1, 1, 1, 1)]
    assert counts_of("exact", now(layers, (2, 2, 1), cost="parameters")) == (1, 3, 1)


def test_balancers_and_memory_limits() -> None:
    """The plan of a balancer that does not search may be refused."""
    asked = limited([4, 4, 1, 1], (1, 3), (5, 99))
    assert counts_of("exact", asked) == counts_of("diffusion", asked) == (1, 3)
    assert counts_of("none", limited([4, 4, 1, 1], (3, 1), (5, 99))) == (3, 1)
    for name in ("uniform", "none"):
        problem, current = limited([4, 4, 1, 1], (2, 2), (5, 99))
        allowed = Allowed(2, 4, balancer=name)
        plan = plan_on(problem, current.mesh, allowed, current.partition)
        assert (plan.partition.counts, plan.beyond) == ((2, 2), 3)
        with pytest.raises(NoRoomError, match=r"rank 0 needs 8 bytes .* the limit of 5; use more"):
            plan.check_room()
    with pytest.raises(NoRoomError, match="rank 0 needs 9 bytes"):
        balancer("exact")(*limited([9, 9], (1, 1), (1, 9)))
    assert counts_of("uniform", limited([4, 4, 1, 1], (1, 3), None)) == (2, 2)


@pytest.mark.parametrize("balance", ["exact", "diffusion"])
@pytest.mark.parametrize("limit", range(5, 13))
def test_no_rank_gets_fuller_than_its_limit(balance: str, limit: int) -> None:
    """The present placement fits, so one that fits is there."""
    asked = limited([1, 1, 1, 5, 1, 1, 4], (3, 1, 3), (limit, 5, max(limit, 6)), microbatches=6)
    problem, current = asked
    assert not current.beyond
    partition = balancer(balance)(*asked)
    assert not evaluate(problem, replace(current.choice, partition=partition)).beyond


def test_faster_rank_gets_more_layers() -> None:
    for schedule in ("zb-h1", "1f1b"):
        asked = now([ONE] * 6, (3, 3), schedule, 8, speeds=(1.0, 2.0))
        assert counts_of("exact", asked) == (2, 4)
    assert counts_of("exact", now([ONE] * 6, (3, 3), speeds=(1.0, 2.0), cost="parameters")) == (
        2,
        4,
    )


def test_exact_balances_several_stages_per_rank() -> None:
    """The stages of both ranks, 0 1 1 0, have work of 7 and 6."""
    layers = [LayerCost(f, f, f, parameters=f) for f in (5, *[1] * 8)]
    for cost in ("time", "parameters"):
        asked = now(layers, (3, 2, 2, 2), "zb-v", 8, ranks=2, cost=cost)
        first, second, third, last = counts_of("exact", asked)
        assert max(first + 4 + last, second + third) == 7
    assert counts_of("uniform", asked) == (3, 2, 2, 2)


def behind_slow_link(seconds: float, counts: tuple[int, ...] = (6,) * 4, **known: Any) -> Now:
    """24 equal layers on 4 ranks, and a link in the middle."""
    links = [LinkCost(x, math.inf) for x in (0.0, seconds, 0.0)]
    return now([ONE] * 24, counts, "zb-h1", 8, links=links, **known)


def test_balancers_know_slow_links() -> None:
    problem, current = behind_slow_link(8.0)

    def step(partition: Partition) -> float:
        return evaluate(problem, replace(current.choice, partition=partition)).step

    quick = place(problem, current.mesh, current.partition, quick=True)
    spans = {name: step(balancer(name)(problem, current)) for name in BALANCERS}
    assert spans == {"none": 214.0, "uniform": 214.0, "exact": 205.0, "diffusion": 205.0}
    assert 205.0 <= quick.step <= 214.0
    # By parameters nothing is simulated.
    blind = behind_slow_link(8.0, cost="parameters")
    assert counts_of("diffusion", blind) == counts_of("exact", blind) == (6,) * 4


@pytest.mark.parametrize("seconds", [0.0, 1.0, 1.8])
def test_fast_links_change_no_placement(seconds: float) -> None:
    uneven, without = (behind_slow_link(x, (9, 3, 3, 9)) for x in (seconds, 0.0))
    assert counts_of("diffusion", uneven) == counts_of("diffusion", without)
    assert counts_of("exact", uneven) == counts_of("exact", without)


def test_equal_questions_have_equal_answers() -> None:
    for name in BALANCERS:
        asked, again = (behind_slow_link(3.0, (9, 3, 3, 9)) for _ in range(2))
        assert balancer(name)(*asked) == balancer(name)(*again)


# -- your own --------------------------------------------------------------------------------------


def own(text: str, folder: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> str:
    """Writes a module and returns the way to its `place`."""
    (folder / f"{name}.py").write_text(f"from dynmo.plan.partition import Partition\n{text}")
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, name, raising=False)
    find_own.cache_clear()
    return f"python:{name}:place"


def test_own_balancer_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "def place(problem, now):\n    return Partition((2, len(now.layers) - 2))"
    way = own(text, tmp_path, monkeypatch, "own_ok")
    problem, current = limited([4, 4, 1, 1], (1, 3), (8, 99))
    assert balancer(way)(problem, current).counts == (2, 2)
    assert not is_forced(way)
    plan = plan_on(
        replace(problem, memory_limit=(5, 99)), current.mesh, Allowed(2, 4, balancer=way)
    )
    with pytest.raises(NoRoomError, match=r"rank 0 needs 8 bytes .* the limit of 5"):
        plan.check_room()
    with pytest.raises(ConfigError, match="return a Partition of all 6 layers on 3 stages"):
        balancer(way)(*now(FROZEN, (2, 2, 2)))
    assert is_forced("python:benchmarks.baselines.placements:random")
    assert is_forced("uniform")
    assert not is_forced("exact")


@pytest.mark.parametrize(
    "text",
    [
        "def place(*known):\n    return known[1].partition",
        "def place(problem, now, more=1):\n    return now.partition",
        "place = lambda problem, now: now.partition",
        "class Place:\n    def __call__(self, problem, now):\n        return now.partition\n"
        "place = Place()",
        "def place(problem, now):\n    return now.partition\nplace.forced = True",
    ],
)
def test_own_balancer_may_have_any_form(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    way = own(text, tmp_path, monkeypatch, "form")
    assert counts_of(way, now(FROZEN, (4, 2))) == (4, 2)
    assert is_forced(way) is ("forced" in text)


def test_own_balancer_may_have_no_placement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (
        "from dynmo.errors import PartitionError\n"
        "def place(problem, now):\n    raise PartitionError('not these layers')"
    )
    way = own(text, tmp_path, monkeypatch, "none_of_these")
    with pytest.raises(PartitionError, match="not these layers"):
        balancer(way)(*now(FROZEN, (4, 2)))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("place = 3", "wrong has no function place"),
        ("raise OSError('gone')", "importing wrong raised OSError: gone"),
        (
            "def place(problem, now):\n    return [2, 2]",
            r"returned \[2, 2\]; return a Partition of all 4 layers on 2 stages",
        ),
        (
            "def place(problem, now):\n    return Partition((2, 3))",
            r"returned Partition\(counts=\(2, 3\)\); return a Partition of all 4 layers",
        ),
        ("def place(problem, now):\n    return 1 / 0", r"raised ZeroDivisionError.*wrong.py:3\)"),
        ("def place():\n    return 1", "raised TypeError"),
        (
            "def place(request):\n    return request.current",
            r"takes one argument, as in earlier versions; write \(problem, now\) -> Partition",
        ),
        (
            "def place(problem, now):\n    return now.current",
            "raised AttributeError: 'Plan' object has no attribute 'current'",
        ),
    ],
)
def test_wrong_balancer_of_your_own_is_refused_at_once(
    text: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    way = own(text, tmp_path, monkeypatch, "wrong")
    with pytest.raises(ConfigError, match=f"^balancer '{way}'.* ?{says}") as error:
        balancer(way)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "error", "says"),
    [
        ("exat", PartitionError, "'exat'; choose one of .*exact"),
        ("python:a.b", PartitionError, "write python:package.module:NAME for your own"),
        ("python:no.such:place", ConfigError, "cannot import no.such"),
    ],
)
def test_unknown_balancer_is_refused(name: str, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        balancer(name)
    problem, current = now(FROZEN, (4, 2))
    with pytest.raises(error, match=says):
        plan_on(problem, current.mesh, Allowed(2, 4, balancer=name))


def test_plan_of_a_balancer_is_its_placement() -> None:
    problem, current = now(FROZEN, (4, 2))
    for name, counts in (("uniform", (3, 3)), ("none", (1, 5)), ("diffusion", (4, 2))):
        plan = plan_on(problem, current.mesh, Allowed(2, 4, balancer=name), Partition((1, 5)))
        assert plan.partition.counts == counts
        assert plan.mesh == Mesh(2, 1, 4, 1, "zb-h1")


# -- diffusion descends and keeps the order --------------------------------------------------------

many = settings(derandomize=True)


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[float], Partition]:
    # Multiples of 1/8, so that loads are exact floats and may be compared.
    weights = [x / 8 for x in draw(st.lists(st.integers(0, 40), min_size=1, max_size=14))]
    cuts = draw(st.sets(st.integers(1, len(weights) - 1))) if len(weights) > 1 else set[int]()
    return weights, Partition.from_bounds([0, *sorted(cuts), len(weights)])


def crossed(placements: list[Partition]) -> tuple[Move, ...]:
    """The layers' crossings of a boundary, in the order made."""
    return tuple(move for pair in pairwise(placements) for move in moves_between_ranks(*pair))


def descending(weights: list[float], partition: Partition) -> list[float]:
    return sorted(stage_loads(weights, partition), reverse=True)


@many
@given(cases())
def test_diffusion_descends_until_no_path_helps(case: tuple[list[float], Partition]):
    weights, current = case
    result = diffuse(weights, current)
    assert result == diffuse(weights, current)
    if len(result) > 1:
        assert descending(weights, result[-1]) < descending(weights, current)
    assert result[0] == current
    assert diffuse(weights, result[-1]) == [result[-1]]


@many
@given(cases())
def test_only_boundary_layers_cross_to_a_neighbour(case: tuple[list[float], Partition]):
    weights, current = case
    result = diffuse(weights, current)
    owners = [current.owner(layer) for layer in range(current.layers)]
    crossings = crossed(result)
    for layer, source, target in crossings:
        assert owners[layer] == source
        assert abs(source - target) == 1
        owners[layer] = target
    assert owners == [result[-1].owner(layer) for layer in range(current.layers)]
    assert len(crossings) <= (len(result) - 1) * (current.stages - 1)


@many
@given(cases(), st.integers(1, 5))
def test_no_stage_exceeds_its_memory_limit(case: tuple[list[float], Partition], limit: int):
    weights, current = case
    result = diffuse(weights, current, fits=lambda stage, start, stop: stop - start <= limit)
    for old, new in zip(current.counts, result[-1].counts, strict=True):
        assert new <= max(limit, old)


def test_path_to_a_distant_stage_evens_a_slope():
    # 4 3 2 layers: one layer to the next stage only exchanges the two loads; the path to the last
    # stage evens all three.
    assert diffuse([1.0] * 9, Partition((4, 3, 2)))[-1].counts == (3, 3, 3)
    slope = diffuse([1.0] * 55, Partition((10, 9, 8, 7, 6, 5, 4, 3, 2, 1)))[-1]
    assert sorted(slope.counts) == [5] * 5 + [6] * 5


def test_moves_match_a_hand_computed_example():
    # The loads are 9 3 3. Both flows run downstream, and a layer over each boundary lessens them.
    # The loads become 7 4 4. Then no path lowers the largest.
    result = diffuse([4.0, 3.0, 2.0, 2.0, 1.0, 1.0, 2.0], Partition((3, 2, 2)))
    assert crossed(result)[:2] == ((2, 0, 1), (4, 1, 2))
    assert max(stage_loads([4.0, 3.0, 2.0, 2.0, 1.0, 1.0, 2.0], result[-1])) <= 7.0


def test_one_round_moves_a_layer_over_every_uneven_boundary():
    result = diffuse([1.0] * 10, Partition((4, 1, 1, 4)))
    assert [x.counts for x in result] == [(4, 1, 1, 4), (3, 2, 2, 3)]
    assert crossed(result) == ((3, 0, 1), (6, 3, 2))


def test_result_is_within_one_layer_of_the_optimum():
    draw = random.Random(7)
    near, total = 0, 100
    for _ in range(total):
        layers = draw.randint(2, 40)
        ranks = draw.randint(1, min(layers, 12))
        kind = [lambda: draw.lognormvariate(0, 1), draw.random]
        weights = [draw.choice(kind)() for _ in range(layers)]
        cuts = sorted(draw.sample(range(1, layers), ranks - 1))
        given = Partition.from_bounds([0, *cuts, layers])
        current = draw.choice([uniform(layers, ranks), given])
        largest = max(stage_loads(weights, diffuse(weights, current)[-1]))
        near += largest <= max(stage_loads(weights, exact(weights, ranks))) + max(weights)
    assert near >= 0.99 * total


@many
@given(cases(), st.data())
def test_sending_counts_as_load(case: tuple[list[float], Partition], data: st.DataObject):
    weights, current = case
    eighths = st.integers(0, 80).map(lambda x: x / 8)
    seconds = [data.draw(eighths) for _ in range(current.stages - 1)]
    links, sizes = [LinkCost(x, math.inf) for x in seconds], [1] * current.layers

    def times(partition: Partition) -> list[float]:
        loads = stage_loads(weights, partition)
        return sorted(map(sum, zip(loads, [*seconds, 0.0], strict=True)), reverse=True)

    result = diffuse(weights, current, links=links, output_bytes=sizes)
    descent = list(map(times, result))
    if any(weights):
        assert descent == sorted(descent, reverse=True)
        assert len(set(map(tuple, descent))) == len(descent)
    assert len(diffuse(weights, result[-1], links=links, output_bytes=sizes)) == 1


# -- rules that merge ranks by memory --------------------------------------------------------------

MERGING = "python:benchmarks.baselines.merging:"
OTHERS = (MERGING + name for name in ("best_fit", "round_robin", "halving"))
RULES = ("first-fit", *OTHERS)


def on_four(limit: int, layer: LayerCost | None = None, replicas: int = 1) -> Plan:
    """Eight equal layers on four ranks."""
    layers = (layer or LayerCost(1.0, 1.0, 1.0, weight_bytes=100),) * 8
    problem = Problem(Profile(layers, tuple("abcdefgh"), microbatch=1), memory_limit=limit)
    mesh = Mesh(4, replicas, 8 // replicas, 1, "zb-h1")
    return evaluate(problem, Choice(mesh, Partition((2, 2, 2, 2))))


def rule(algorithm: str, **known: Any) -> Elastic:
    return Elastic(repack=True, algorithm=algorithm, **known)


@pytest.mark.parametrize("algorithm", RULES)
def test_baselines_merge_ranks_within_memory(algorithm: str):
    plan, verdict = merge(on_four(500), rule(algorithm))
    assert plan.partition == Partition((4, 4))
    assert plan.mesh.gpus == 2
    assert verdict.pays
    assert verdict.gain < 0, "they do not look at time"
    assert algorithm in verdict.reason

    plan, verdict = merge(on_four(300), rule(algorithm))
    assert not verdict.pays, "no merge fits"
    assert verdict.reason == f"stay: {algorithm} merges nothing"
    assert plan.partition == Partition((2, 2, 2, 2))


def test_baselines_stop_at_the_minimum_of_ranks():
    assert merge(on_four(10_000), rule("first-fit", min_ranks=3))[0].partition.stages == 3
    assert merge(on_four(10_000, replicas=2), rule("first-fit", min_ranks=3))[0].mesh.gpus == 4


def test_merge_over_the_activation_memory_is_refused():
    """Several microbatches are in flight on a rank, which the algorithms ignore."""
    heavy = LayerCost(1.0, 1.0, 1.0, weight_bytes=10, activation_bytes=100)
    with pytest.raises(NoRoomError, match="first-fit merges to 2 ranks"):
        merge(on_four(500, heavy), rule("first-fit"))


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("python:benchmarks.baselines.merging:none", ".* has no function none"),
        ("python:no.such:merge", "cannot import no.such"),
        ("python:dynmo.plan.partition:uniform", "raised TypeError"),
        ("python:builtins:print", "returned None; return a Partition of all 4 layers"),
    ],
)
def test_wrong_rule_is_refused_at_once(name: str, says: str):
    with pytest.raises(ConfigError, match=f"elastic.algorithm '{name}': {says}"):
        find_rule(name)
