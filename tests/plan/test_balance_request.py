"""Tests of the balancers in the registry: placements, limits, purity and errors."""

import math
from dataclasses import replace

import pytest

from dynmo.cost.layer_cost import LayerCost, LinkCost
from dynmo.errors import ConfigError, PartitionError
from dynmo.plan.balance_request import BalanceRequest, balancer
from dynmo.plan.options import BALANCERS
from dynmo.plan.partition import Partition
from dynmo.plan.stage_costs import by_name, pipeline_costs
from dynmo.schedule.simulator import simulate

# The first three layers are frozen: forward only, but as many parameters as the others.
FROZEN = tuple(LayerCost(1.0, 0.0, 0.0, parameters=10) for _ in range(3)) + tuple(
    LayerCost(1.0, 1.0, 1.0, parameters=10) for _ in range(3)
)
REQUEST = BalanceRequest(FROZEN, Partition((4, 2)), make=by_name("zb-h1", 4))


def limited(sizes: list[int], current: tuple[int, ...], limit: tuple[int, ...]) -> BalanceRequest:
    layers = tuple(LayerCost(1.0, 1.0, 1.0, weight_bytes=size) for size in sizes)
    return BalanceRequest(
        layers, Partition(current), resident=((),) * len(limit), memory_limit=limit
    )


def test_each_balancer():
    # By time 1 1 1 3 3 3: three and one layer of 3 against two of 3. The current placement is one
    # of the best already.
    assert {name: balancer(name)(REQUEST).counts for name in BALANCERS} == {
        "none": (4, 2),
        "uniform": (3, 3),
        "exact": (4, 2),
        "diffusion": (4, 2),
    }


def test_balancing_by_parameters_ignores_freezing():
    blind = replace(REQUEST, cost="parameters")
    assert balancer("exact")(blind).counts == balancer("diffusion")(blind).counts == (3, 3)


def test_exact_moves_boundaries_as_little_as_it_can():
    # Layer 0 decides alone. (1, 3, 1) moves layer 1. The smoother (1, 2, 2) moves layer 3 too.
    layers = tuple(LayerCost(f, 0.0, 0.0) for f in (6, 1, 1, 1, 1))
    assert balancer("exact")(BalanceRequest(layers, Partition((2, 2, 1)))).counts == (1, 3, 1)


def test_balancers_keep_memory_limits():
    request = limited([4, 4, 1, 1], (1, 3), (5, 99))
    assert balancer("exact")(request).counts == (1, 3)
    assert balancer("diffusion")(request).counts == (1, 3)
    assert balancer("none")(replace(request, current=Partition((3, 1)))).counts == (3, 1)
    with pytest.raises(PartitionError, match=r"stage 0 .* needs 8 bytes, its limit is 5"):
        balancer("uniform")(request)
    with pytest.raises(PartitionError, match="stage 0"):
        balancer("exact")(limited([9, 9], (1, 1), (1, 9)))
    assert balancer("uniform")(replace(request, resident=None, memory_limit=None)).counts == (2, 2)


@pytest.mark.parametrize(
    ("known", "message"),
    [
        ({"current": Partition((4, 1))}, "5 layers for 6 layer costs"),
        ({"memory_limit": (1, 1)}, "resident"),
        ({"resident": ((), ()), "memory_limit": (1, 1, 1)}, "3 memory limits for 2 ranks"),
        ({"resident": ((),), "memory_limit": (1, 1)}, "1 resident stages for 2 ranks"),
    ],
)
def test_inconsistent_requests_are_refused(known, message):
    with pytest.raises(PartitionError, match=message):
        replace(REQUEST, **known)


def test_faster_rank_gets_more_layers():
    layers = (LayerCost(1.0, 1.0, 1.0),) * 6
    even = BalanceRequest(layers, Partition((3, 3)), speeds=(1.0, 2.0))
    assert balancer("exact")(even).counts == (2, 4)
    assert balancer("exact")(replace(even, make=by_name("1f1b", 8))).counts == (2, 4)


def test_exact_balances_several_stages_per_rank():
    layers = tuple(LayerCost(f, 0.0, 0.0) for f in (5, *[1] * 8))
    heavy = BalanceRequest(layers, Partition((3, 2, 2, 2)), stage_ranks=(0, 1, 1, 0))
    first, second, third, last = balancer("exact")(heavy).counts
    assert max(first + 4 + last, second + third) == 7
    with pytest.raises(PartitionError, match="placement of 2 stages on ranks for 4 stages"):
        replace(heavy, stage_ranks=(0, 1))


def behind_slow_link(middle: float) -> BalanceRequest:
    """24 equal layers on 4 ranks, and a link in the middle."""
    links = tuple(LinkCost(seconds, math.inf) for seconds in (0.0, middle, 0.0))
    layers, current = (LayerCost(1.0, 1.0, 1.0),) * 24, Partition((6, 6, 6, 6))
    return BalanceRequest(layers, current, make=by_name("zb-h1", 8), links=links)


def test_balancers_know_slow_links():
    request = behind_slow_link(8.0)
    quick = replace(request, quick=True)
    found = {
        "none": balancer("none")(request),
        "exact": balancer("exact")(request),
        "quick": balancer("exact")(quick),
        "diffusion": balancer("diffusion")(request),
    }
    spans = {
        name: simulate(by_name("zb-h1", 8)(costs), costs).span
        for name, x in found.items()
        for costs in [pipeline_costs(request.layers, x, links=request.links)]
    }
    assert spans == {"none": 214.0, "exact": 205.0, "quick": 207.0, "diffusion": 205.0}
    # By parameters nothing is simulated.
    parameters = tuple(replace(layer, parameters=1) for layer in request.layers)
    blind = replace(request, layers=parameters, cost="parameters")
    assert balancer("diffusion")(blind).counts == (6,) * 4


@pytest.mark.parametrize("seconds", [0.0, 1.0, 1.8])
def test_fast_links_change_no_placement(seconds: float):
    request = behind_slow_link(seconds)
    uneven = replace(request, current=Partition((9, 3, 3, 9)))
    without = replace(uneven, links=None)
    for name in ("exact", "diffusion"):
        quick, blind = replace(uneven, quick=True), replace(without, quick=True)
        assert balancer(name)(quick) == balancer(name)(blind)


@pytest.mark.parametrize(
    ("name", "error", "says"),
    [
        ("exat", PartitionError, "'exat'; choose one of .*exact"),
        ("python:a.b", PartitionError, "write python:package.module:NAME for your own"),
        ("python:no.such:place", ConfigError, "cannot import no.such"),
    ],
)
def test_unknown_balancer_is_refused(name, error, says):
    with pytest.raises(error, match=says):
        balancer(name)
