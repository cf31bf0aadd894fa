"""Fewer ranks by a rule that merges by memory, DynMo's or the user's own."""

from __future__ import annotations

from typing import Any

import pytest

from dynmo.cost.layer_cost import LayerCost
from dynmo.cost.profile_file import Profile
from dynmo.errors import ConfigError, NoRoomError
from dynmo.plan.evaluate import Plan, evaluate
from dynmo.plan.merging import find_rule, merge
from dynmo.plan.options import Elastic
from dynmo.plan.partition import Partition
from dynmo.plan.problem import Choice, Mesh, Problem

MERGING = "python:benchmarks.baselines.merging:"
OTHERS = (MERGING + name for name in ("best_fit", "round_robin", "halving"))
RULES = ("first-fit", *OTHERS)


def now(limit: int, layer: LayerCost | None = None, replicas: int = 1) -> Plan:
    """Eight equal layers on four ranks."""
    layers = (layer or LayerCost(1.0, 1.0, 1.0, weight_bytes=100),) * 8
    problem = Problem(Profile(layers, tuple("abcdefgh"), microbatch=1), memory_limit=limit)
    mesh = Mesh(4, replicas, 8 // replicas, 1, "zb-h1")
    return evaluate(problem, Choice(mesh, Partition((2, 2, 2, 2))))


def rule(algorithm: str, **known: Any) -> Elastic:
    return Elastic(repack=True, algorithm=algorithm, **known)


@pytest.mark.parametrize("algorithm", RULES)
def test_baselines_merge_ranks_within_memory(algorithm: str):
    plan, verdict = merge(now(500), rule(algorithm))
    assert plan.partition == Partition((4, 4))
    assert plan.mesh.gpus == 2
    assert verdict.pays
    assert verdict.gain < 0, "they do not look at time"
    assert algorithm in verdict.reason

    plan, verdict = merge(now(300), rule(algorithm))
    assert not verdict.pays, "no merge fits"
    assert verdict.reason == f"stay: {algorithm} merges nothing"
    assert plan.partition == Partition((2, 2, 2, 2))


def test_baselines_stop_at_the_minimum_of_ranks():
    assert merge(now(10_000), rule("first-fit", min_ranks=3))[0].partition.stages == 3
    assert merge(now(10_000, replicas=2), rule("first-fit", min_ranks=3))[0].mesh.gpus == 4


def test_merge_over_the_activation_memory_is_refused():
    """Several microbatches are in flight on a rank, which the algorithms ignore."""
    heavy = LayerCost(1.0, 1.0, 1.0, weight_bytes=10, activation_bytes=100)
    with pytest.raises(NoRoomError, match="first-fit merges to 2 ranks"):
        merge(now(500, heavy), rule("first-fit"))


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
