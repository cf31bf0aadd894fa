from __future__ import annotations

from dynmo.cost.layer_cost import Costs, LayerCost, LinkCost, StageCost, stage_costs, uniform_costs


def test_uniform_costs() -> None:
    costs = uniform_costs(3, 1, 2, 3, comm=0.5, w_memory=0.25)
    assert costs == Costs((StageCost(1, 2, 3, 1.0, -0.75, -0.25),) * 3, (0.5, 0.5))
    assert costs.stages[0].seconds == 6
    assert uniform_costs(1, 1, 2, 3, comm=0.5).links == ()


def test_layers_are_summed_into_stages() -> None:
    layers = [
        LayerCost(1, 2, 3, activation_bytes=100, stash_bytes=40),
        LayerCost(10, 20, 30, activation_bytes=1000, stash_bytes=0),
        LayerCost(0.5, 0, 0),
    ]
    assert stage_costs(layers, (2, 1)) == (
        StageCost(11, 22, 33, 1100, -1060, -40),
        StageCost(0.5, 0, 0, 0, 0, 0),
    )
    assert stage_costs(layers, (1, 2))[1] == StageCost(10.5, 20, 30, 1000, -1000, 0)
    assert all(
        stage.mem_f + stage.mem_b + stage.mem_w == 0 for stage in stage_costs(layers, (2, 1))
    )


def test_layer_cost_adds_up_seconds_and_bytes() -> None:
    layer = LayerCost(1, 2, 3, 0, 10, 20, 30, activation_bytes=5, rollback_bytes=40)
    assert layer.seconds == 6
    assert layer.static_bytes == 100
    assert layer.with_accumulation(1).pending_gradient_bytes == 0
    several = layer.with_accumulation(4)
    assert (several.pending_gradient_bytes, several.static_bytes) == (40, 140)
    share = layer.shared(4)
    assert (share.weight_bytes, share.optimizer_bytes, share.rollback_bytes) == (10, 8, 10)
    assert layer.moved_bytes == 40, "weights and the optimizer's state"


def test_link_time_is_linear_in_bytes() -> None:
    link = LinkCost(latency=0.5, bytes_per_second=100)
    assert link.seconds(0) == 0.5
    assert link.seconds(50) == 1.0
