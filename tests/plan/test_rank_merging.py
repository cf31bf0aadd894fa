"""Fewer ranks by a rule that merges by memory, DynMo's or the user's own."""

from dataclasses import replace

import pytest

from dynmo.cost.layer_cost import LayerCost
from dynmo.cost.profile_file import Profile
from dynmo.errors import ConfigError, NoRoomError
from dynmo.plan.mesh_plan import Mesh
from dynmo.plan.mesh_search import MeshRequest
from dynmo.plan.partition import Partition
from dynmo.plan.rank_choice import RankQuestion
from dynmo.plan.rank_merging import find_rule, merge_ranks

MERGING = "python:benchmarks.baselines.merging:"
OTHERS = (MERGING + name for name in ("best_fit", "round_robin", "halving"))
RULES = ("first-fit", *OTHERS)


def ask(limit: int, layer: LayerCost | None = None, replicas: int = 1) -> RankQuestion:
    """Eight equal layers on four ranks."""
    layers = (layer or LayerCost(1.0, 1.0, 1.0, weight_bytes=100),) * 8
    profile = Profile(layers, tuple("abcdefgh"), microbatch=1)
    request = MeshRequest(profile, gpus=4 * replicas, global_batch=8, memory_limit=limit)
    mesh = Mesh(4, replicas, 8 // replicas, 1, "zb-h1")
    return RankQuestion(request, mesh, Partition((2, 2, 2, 2)), 1, 4 * replicas, 1.0, 10)


@pytest.mark.parametrize("algorithm", RULES)
def test_baselines_merge_ranks_within_memory(algorithm):
    choice = merge_ranks(ask(500), algorithm)
    assert choice.partition == Partition((4, 4))
    assert choice.mesh.gpus == 2
    assert choice.decision.move
    assert choice.decision.predicted_gain < 0, "they do not look at time"
    assert algorithm in choice.decision.reason

    none = merge_ranks(ask(300), algorithm)
    assert not none.decision.move, "no merge fits"
    assert none.partition == Partition((2, 2, 2, 2))


def test_baselines_stop_at_the_minimum_of_ranks():
    assert merge_ranks(replace(ask(10_000), least=3), RULES[0]).partition.stages == 3
    assert merge_ranks(replace(ask(10_000, replicas=2), least=3), RULES[0]).mesh.gpus == 4


def test_merge_over_the_activation_memory_is_refused():
    """Several microbatches are in flight on a rank, which the algorithms ignore."""
    heavy = LayerCost(1.0, 1.0, 1.0, weight_bytes=10, activation_bytes=100)
    with pytest.raises(NoRoomError, match="first-fit merges to 2 ranks"):
        merge_ranks(ask(500, heavy), RULES[0])


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("python:benchmarks.baselines.merging:none", ".* has no function none"),
        ("python:no.such:merge", "cannot import no.such"),
        ("python:dynmo.plan.partition:uniform", "raised TypeError"),
        ("python:builtins:print", "returned None; return a Partition of all 4 layers"),
    ],
)
def test_wrong_rule_is_refused_at_once(name, says):
    with pytest.raises(ConfigError, match=f"elastic.algorithm '{name}': {says}"):
        find_rule(name)
