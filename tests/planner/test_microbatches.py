"""Costs of the same layers with another microbatch size."""

from __future__ import annotations

from dynmo.planner.alternatives import other_microbatches
from dynmo.planner.evaluate import PlanRequest
from tests.planner.test_make_plan import profile


def test_smaller_microbatches_scale_time_and_activations() -> None:
    plan = {x.choice: x.plan for x in other_microbatches(PlanRequest(profile(12), 3, 6))}[12]
    assert plan is not None
    for small, whole in zip(plan.request.layers, profile(12).layers, strict=True):
        assert (small.f, small.static_bytes) == (whole.f / 2, whole.static_bytes)
        assert small.activation_bytes == -(-whole.activation_bytes // 2)
