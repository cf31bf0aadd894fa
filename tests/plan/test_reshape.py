from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynmo.cost.layer_cost import LayerCost
from dynmo.cost.profile_file import Profile
from dynmo.errors import PartitionError
from dynmo.plan.mesh_plan import Mesh, add_reductions, mesh_profile
from dynmo.plan.mesh_search import MeshRequest
from dynmo.plan.partition import Partition, uniform
from dynmo.plan.plan_request import PlanRequest, evaluate_partition
from dynmo.plan.reshape import largest_arrival, reshape


def profile(weights: list[float]) -> Profile:
    layers = tuple(LayerCost(x, x, x, 1, 10, 10, 20) for x in weights)
    return Profile(layers, tuple(map(str, range(len(weights)))), microbatch=1)


@settings(max_examples=10)
@given(
    st.integers(0, 10**6),
    st.sampled_from((1, 2, 4)),
    st.integers(0, 50),
    st.sampled_from((0.0, 0.01, 1.0)),
    st.sampled_from((None, 200, 400)),
)
def test_reshape_is_never_predicted_to_be_slower(
    seed: int, replicas: int, horizon: int, price: float, limit: int | None
):
    rng = random.Random(seed)
    given = profile([rng.uniform(0.2, 2.0) for _ in range(8)])
    current = Mesh(4 // replicas, replicas, 8 // replicas, 1, "zb-h1")
    partition = uniform(8, 4 // replicas)
    request = MeshRequest(given, 4, 8, (1,), ("zb-h1",), memory_limit=limit, bandwidth=100.0)
    result = reshape(
        request, current, partition, horizon_steps=horizon, seconds_per_byte=price, margin=1.0
    )
    known = mesh_profile(given, current, 0)
    stays = PlanRequest(known, current.pipeline, current.microbatches)
    now = add_reductions(current, evaluate_partition(stays, partition), 100.0).seconds
    assert result.plan.seconds <= now
    if result.decision.move:
        assert (now - result.plan.seconds) * horizon > result.moved_bytes * price
        assert limit is None or max(result.plan.memory) <= limit
        arrived = largest_arrival(
            given.layers, current, partition, result.plan.mesh, result.plan.plan.partition
        )
        assert result.moved_bytes == arrived
    else:
        assert (result.plan.mesh, result.plan.plan.partition) == (current, partition)
        assert result.moved_bytes == 0


def test_reshape_to_fewer_stages_needs_enough_memory():
    """Heavy and light layers alternate, so two stages are better balanced than four."""
    given = profile([3.0, 1.0, 1.0, 1.0, 3.0, 1.0, 1.0, 1.0])
    current, partition = Mesh(4, 1, 16, 1, "zb-h1"), Partition((2, 2, 2, 2))
    request = MeshRequest(given, 4, 16, (1,), ("zb-h1",))
    # Four layers of 40 bytes, and 30 to sum the gradients of one over two replicas.
    short, roomy, tight = (
        reshape(replace(request, memory_limit=limit), current, partition, horizon_steps=100)
        for limit in (189, 190, 120)
    )
    assert short.plan.mesh.pipeline == 4
    assert (roomy.plan.mesh.pipeline, roomy.plan.mesh.replicas) == (2, 2)
    assert roomy.moved_bytes == 60, "two layers of 30 bytes: the copies of a stage are neighbours"
    assert tight.plan.mesh.pipeline == 4
    assert tight.plan.seconds > roomy.plan.seconds
    dear = reshape(request, current, partition, horizon_steps=2, seconds_per_byte=10.0)
    assert not dear.decision.move
    with pytest.raises(PartitionError, match="reshaping changes neither"):
        reshape(MeshRequest(given, 8, 16), current, partition, horizon_steps=1)
