"""The balancers by name."""

from collections import Counter
from dataclasses import replace

import pytest

from dynmo.balance.balancers import BALANCERS, BalanceRequest, balancer
from dynmo.balance.partition import Partition
from dynmo.costs import LayerCost
from dynmo.errors import PartitionError

# The first three layers are frozen: forward only, but as many parameters as the others.
FROZEN = tuple(LayerCost(1.0, 0.0, 0.0, parameters=10) for _ in range(3)) + tuple(LayerCost(1.0, 1.0, 1.0, parameters=10) for _ in range(3))
REQUEST = BalanceRequest(FROZEN, Partition((4, 2)))


def limited(sizes: list[int], current: tuple[int, ...], limit: tuple[int, ...]) -> BalanceRequest:
    layers = tuple(LayerCost(1.0, 1.0, 1.0, weight_bytes=size) for size in sizes)
    return BalanceRequest(layers, Partition(current), resident=((),) * len(limit), memory_limit=limit)


def test_what_each_returns():
    found = {name: balance(REQUEST).counts for name, balance in BALANCERS.items() if name != "random"}
    # By time 1 1 1 3 3 3: three and one layer of 3 against two of 3. The current placement is one of the best already.
    assert found == {"none": (4, 2), "uniform": (3, 3), "exact": (4, 2), "diffusion": (4, 2)}


def test_parameters_do_not_see_freezing():
    blind = replace(REQUEST, cost="parameters")
    assert balancer("exact")(blind).counts == balancer("diffusion")(blind).counts == (3, 3)


def test_exact_moves_as_few_bytes_as_it_can():
    # Layer 0 decides alone; (1, 3, 1) moves layer 1, and (1, 2, 2), which is smoother, layer 3 too.
    layers = tuple(LayerCost(f, 0.0, 0.0, optimizer_bytes=size) for f, size in ((6, 1), (1, 5), (1, 1), (1, 1), (1, 1)))
    request = BalanceRequest(layers, Partition((2, 2, 1)))
    assert balancer("exact")(request).counts == (1, 3, 1)
    free = tuple(replace(layer, optimizer_bytes=size) for layer, size in zip(layers, (1, 5, 0, 0, 0), strict=True))
    assert balancer("exact")(replace(request, layers=free)).counts == (1, 2, 2)
    # Where no bytes are given, layers are counted.
    unknown = tuple(replace(layer, optimizer_bytes=0) for layer in layers)
    assert balancer("exact")(replace(request, layers=unknown)).counts == (1, 3, 1)


@pytest.mark.parametrize("name", BALANCERS)
def test_every_balancer_is_pure_and_keeps_the_number_of_ranks(name: str):
    for step in range(5):
        request = replace(REQUEST, step=step)
        found = balancer(name)(request)
        assert found == balancer(name)(replace(REQUEST, step=step))
        assert (found.layers, found.ranks) == (6, 2)


def test_random_draws_every_other_placement():
    layers = tuple(LayerCost(1.0, 1.0, 1.0) for _ in range(5))
    current = Partition((2, 1, 2))
    drawn = Counter(balancer("random")(BalanceRequest(layers, current, seed=3, step=step)).counts for step in range(500))
    assert set(drawn) == {(1, 1, 3), (1, 2, 2), (1, 3, 1), (2, 2, 1), (3, 1, 1)}
    assert min(drawn.values()) > 60  # 100 each on average
    steps = range(20)
    a, b = ([balancer("random")(BalanceRequest(layers, current, seed=seed, step=step)) for step in steps] for seed in (0, 1))
    assert a != b


def test_random_is_the_same_on_every_machine():
    layers = tuple(LayerCost(1.0, 1.0, 1.0) for _ in range(50))
    assert balancer("random")(BalanceRequest(layers, Partition((10,) * 5), seed=1, step=2)).counts == (14, 3, 5, 10, 18)


def test_random_without_another_placement():
    layers = tuple(LayerCost(1.0, 1.0, 1.0) for _ in range(3))
    for counts in ((3,), (1, 1, 1)):
        assert balancer("random")(BalanceRequest(layers, Partition(counts))).counts == counts


def test_random_draws_only_what_fits():
    request = limited([1, 1, 5, 1, 1], (1, 1, 3), (10, 2, 10))
    drawn = {balancer("random")(replace(request, step=step)).counts for step in range(100)}
    # Stage 1 cannot hold layer 2; (1, 1, 3) is the current one.
    assert drawn == {(3, 1, 1)}
    unfit = replace(request, current=Partition((2, 1, 2)))
    assert {balancer("random")(replace(unfit, step=step)).counts for step in range(100)} == {(3, 1, 1), (1, 1, 3)}


def test_memory_limits():
    request = limited([4, 4, 1, 1], (1, 3), (5, 99))
    assert balancer("exact")(request).counts == (1, 3)
    assert balancer("diffusion")(request).counts == (1, 3)
    assert balancer("none")(replace(request, current=Partition((3, 1)))).counts == (3, 1)
    with pytest.raises(PartitionError, match=r"stage 0 of the placement \(2, 2\) needs 8 bytes, its limit is 5"):
        balancer("uniform")(request)
    with pytest.raises(PartitionError, match="stage 0"):
        balancer("exact")(limited([9, 9], (1, 1), (1, 9)))
    assert balancer("uniform")(replace(request, resident=None, memory_limit=None)).counts == (2, 2)


def test_requests_that_do_not_hold_together():
    with pytest.raises(PartitionError, match="5 layers for 6 layer costs"):
        BalanceRequest(FROZEN, Partition((4, 1)))
    with pytest.raises(PartitionError, match="resident"):
        BalanceRequest(FROZEN, Partition((4, 2)), memory_limit=(1, 1))
    with pytest.raises(PartitionError, match="3 memory limits for 2 ranks"):
        BalanceRequest(FROZEN, Partition((4, 2)), resident=((), ()), memory_limit=(1, 1, 1))
    with pytest.raises(PartitionError, match="1 resident stages for 2 ranks"):
        BalanceRequest(FROZEN, Partition((4, 2)), resident=((),), memory_limit=(1, 1))


def test_names():
    with pytest.raises(PartitionError, match="'schedule-aware' is not served by this version; choose one of none, uniform, exact"):
        balancer("schedule-aware")
    with pytest.raises(PartitionError, match="unknown balancer 'exat'; choose one of none, uniform, exact, diffusion, random"):
        balancer("exat")
