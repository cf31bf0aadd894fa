"""A whole plan from measured costs, without running anything.

A plan says where the layers live, in which order the ranks work, and what that takes:

    costs of layers -> balancer -> placement -> costs of stages -> schedule -> simulator
        -> step time, idleness, memory
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product

from dynmo.cost.layer_cost import uniform_costs
from dynmo.errors import InputError, PartitionError, ScheduleError
from dynmo.plan.balance_request import BalanceRequest, balancer
from dynmo.plan.bisection import exact
from dynmo.plan.partition import Partition
from dynmo.plan.plan_request import (
    Plan,
    PlanRequest,
    TooFullError,
    evaluate_partition,
    memory_needs,
)
from dynmo.plan.recompute import choose_recomputed
from dynmo.plan.stage_costs import frozen_stages
from dynmo.plan.stage_plan import (
    one_microbatch,
    plan_stages,
    schedule_for_balancers,
    with_unit_memory,
)
from dynmo.schedule.catalogue import check_microbatches, entry, make
from dynmo.schedule.memory import MemoryLimits, Pairs, stage_memory
from dynmo.schedule.simulator import resident

LARGE = 6000  # ops of a kind: a simulation takes a tenth of a second


def make_plan(request: PlanRequest) -> Plan:
    """The plan for exactly this request.

    Raises:
        PartitionError: There is no placement, or it does not fit the memory.
        ScheduleError: The schedule cannot be made.
    """
    if request.recompute == "all":
        every = frozenset(range(len(request.kept)))
        return _attempt(replace(request, recompute="none", recomputed=every))
    if request.recompute == "auto" and request.memory_limit is not None:
        return _recomputing(replace(request, recompute="none"))
    return _attempt(request)


def _recomputing(request: PlanRequest) -> Plan:
    """The best plan with recomputation.

    One candidate fits without recomputing. The other one is the placement that would be best with
    enough memory, made to fit by recomputing. Recomputing changes the costs. They want another
    placement, which may want other layers to be recomputed. A few rounds of both are tried.
    """
    plans: list[Plan] = []

    def failed(make: Callable[..., Plan], *arguments: object) -> InputError | None:
        try:
            plans.append(make(*arguments))
        except (PartitionError, ScheduleError) as error:
            return error
        return None

    problem = failed(_attempt, request)
    # Errors that have nothing to do with memory are raised as they are.
    free = _attempt(replace(request, memory_limit=None))
    if plans and plans[0].step <= free.step:
        return plans[0]
    every = replace(request, recomputed=frozenset(range(len(request.kept))))
    for _ in range(3):
        try:
            changed = replace(request, recomputed=_chosen(request, free))
        except PartitionError:
            # This placement does not fit in any way. A placement that fits with all layers
            # recomputed then gives back the layers that need not be.
            if failed(_attempt, every):
                break
            free = plans[-1]
            continue
        failed(evaluate_partition, changed, free.partition)
        failed(_attempt, changed)
        nearer = _attempt(replace(changed, memory_limit=None))
        if nearer.partition == free.partition:
            break
        free = nearer
    if not plans:
        failed(_attempt, every)
    if not plans:
        assert problem is not None
        raise problem
    return min(plans, key=lambda plan: plan.step)


def _chosen(request: PlanRequest, free: Plan) -> frozenset[int]:
    """The layers to recompute for this placement and schedule.

    `choose_recomputed` does not know of messages that wait and of ops' workspaces. They come on
    top.
    """
    assert request.limits is not None
    return choose_recomputed(
        request.kept,
        free.partition,
        free.schedule,
        lambda layers: request.stages.memory(layers, free.partition.counts, free.schedule),
        request.limits,
    )


def _limits(request: PlanRequest) -> tuple[tuple[int, ...] | None, ...]:
    """The ranks' limits that balancers are told, one try after the other.

    Balancers do not know the bytes that come for a moment only. A second try sets these aside.
    """
    limits = request.limits
    if limits is None or not request.reserve:
        return (limits,)
    return (limits, tuple(max(0, limit - request.reserve) for limit in limits))


def _attempt(request: PlanRequest) -> Plan:
    check_microbatches(request.schedule, request.ranks, request.microbatches)
    best: Plan | None = None
    failed: InputError | None = None
    for pairs, limits in product(_residents(request), _limits(request)):
        try:
            plan = _placed(request, pairs, limits)
        except (PartitionError, ScheduleError) as error:
            failed = failed or error
            continue
        if best is None or plan.step < best.step:
            best = plan
        if request.schedule != "zb-auto":
            break
    if best is None and request.memory_limit is not None:
        best = _repaired(request, failed.partition if isinstance(failed, TooFullError) else None)
    if best is None:
        assert failed is not None
        raise failed
    return best


_ROUNDS = 4  # the most times that a balancer is asked


def _placed(
    request: PlanRequest, pairs: tuple[Pairs, ...] | None, limits: tuple[int, ...] | None
) -> Plan:
    """Places by the balancer, and evaluates the placement.

    Balancers do not know of messages that wait. If a rank is too full, they are told of less room
    there, and asked again.
    """
    told = None if limits is None else tuple(limits[rank] for rank in request.stage_ranks)
    balance_request = BalanceRequest(
        request.layers,
        request.current,
        request.cost,
        resident=pairs,
        seed=request.seed,
        step=request.step,
        names=request.profile.names,
        make=schedule_for_balancers(request.stages, request.layers),
        quick=request.quick,
        links=request.links,
        objective=request.objective,
        first_trainable_layer=request.profile.first_trainable,
        speeds=request.speeds,
        stage_ranks=request.stage_ranks,
    )
    failed: InputError | None = None
    for _ in range(_ROUNDS if request.balancer == "exact" else 1):
        try:
            return evaluate_partition(
                request, balancer(request.balancer)(replace(balance_request, memory_limit=told))
            )
        except (PartitionError, ScheduleError) as error:
            failed = failed or error
            if told is None or pairs is None or not isinstance(error, TooFullError):
                break
            told = _less(request, pairs, told, error)
    assert failed is not None
    raise failed


def _less(
    request: PlanRequest, pairs: tuple[Pairs, ...], told: tuple[int, ...], refused: TooFullError
) -> tuple[int, ...]:
    """Lowers the limits for a balancer that filled some rank beyond the memory.

    `told` are the limits of the stages that it was told before. Returns one limit per stage.
    """
    limits, needs = request.limits, refused.needs
    assert limits is not None
    known = [max((layer.workspace_bytes for layer in request.layers), default=0)] * request.ranks
    for need, rank in zip(
        stage_memory(request.layers, refused.partition.counts, pairs),
        request.stage_ranks,
        strict=True,
    ):
        known[rank] += need
    return tuple(
        max(
            0,
            min(
                own - max(0, needs[rank] - limits[rank]),
                limits[rank] - max(0, needs[rank] - known[rank]),
            ),
        )
        for own, rank in zip(told, request.stage_ranks, strict=True)
    )


def _residents(request: PlanRequest) -> Iterator[tuple[Pairs, ...] | None]:
    """The microbatches that the schedule keeps alive, as the balancer is told.

    A schedule that is made within limits may keep little or much.
    """
    if request.memory_limit is None:
        yield None
        return
    stages = len(request.stage_ranks)
    costs = uniform_costs(stages, 1.0, 1.0, 1.0)
    # One activation of a stage is 1 here. The caps are 1F1B's memory, and at least that of one
    # microbatch.
    caps = (float(max(request.ranks, stages // request.ranks)),) * request.ranks
    yield resident(
        make(
            request.schedule,
            request.ranks,
            request.microbatches,
            costs=costs,
            chunks=request.chunks,
            caps=caps,
        )
    )
    if request.schedule == "zb-auto" and request.ranks > 1:
        yield (((1, 0), (0, 1)),) * stages
    elif not entry(request.schedule).from_costs and request.profile.first_trainable:
        # With a frozen prefix the other stages may keep less. Only the placement says how many
        # stages the prefix fills.
        for frozen in range(1, stages):
            yield resident(
                make(
                    request.schedule,
                    request.ranks,
                    request.microbatches,
                    chunks=request.chunks,
                    first_trainable=frozen,
                )
            )


_TRIES, _QUICK_TRIES = 600_000, 60_000  # the most ops of the plans that are tried


def _repaired(request: PlanRequest, refused: Partition | None) -> Plan | None:
    """A plan that fits, found by moving one boundary at a time.

    A rank needs less than its stages' peaks and the largest workspace together. The balancers may
    therefore refuse a placement that fits. The search starts from the placement that was `refused`
    after its evaluation, and from the one without a limit. It goes on while the fullest rank gets
    emptier. It is for "exact". Another balancer's placement stays as it is.
    """
    limits = request.limits
    assert limits is not None
    if request.balancer != "exact" or not _may_fit(request, limits):
        return None
    free = replace(request, memory_limit=None, quick=True)
    starts = [] if refused is None else [refused]
    if not request.quick:
        try:
            starts += [_attempt(free).partition, request.current]
        except InputError:
            return None
    ops = 3 * len(request.stage_ranks) * request.microbatches
    tries = min(300, (_QUICK_TRIES if request.quick else _TRIES) // ops)
    for start in starts:
        counts, used = _emptied(free, start.counts, limits, tries)
        tries -= used
        if counts is not None:
            try:
                return evaluate_partition(request, Partition(counts))
            except (PartitionError, ScheduleError):
                continue
    return None


def _emptied(
    free: PlanRequest, counts: tuple[int, ...], limits: tuple[int, ...], tries: int
) -> tuple[tuple[int, ...] | None, int]:
    """Moves one boundary at a time while the fullest rank gets emptier.

    Returns the first placement whose fullest rank fits the limit, or None, and how many placements
    were tried besides the first. `free` is the request without a memory limit.
    """
    most, used = _most_beyond(free, counts, limits), 0
    while most > 0 and used < tries:
        others = {other: _most_beyond(free, other, limits) for other in _neighbours(counts)}
        used += len(others)
        nearer = min(others, key=lambda other: others[other], default=counts)
        if others.get(nearer, most) >= most:
            break
        counts, most = nearer, others[nearer]
    return (counts if most <= 0 else None), used


def _most_beyond(free: PlanRequest, counts: tuple[int, ...], limits: tuple[int, ...]) -> int:
    """The most bytes that a rank needs beyond its limit."""
    return max(a - b for a, b in zip(_rank_needs(free, counts), limits, strict=True))


def _rank_needs(free: PlanRequest, counts: tuple[int, ...]) -> tuple[int, ...]:
    """Bytes of each rank. A zb-auto schedule keeps one microbatch alive at a time."""
    partition = Partition(counts)
    if free.schedule == "zb-auto":
        # The planner lowers its caps as far as this if the memory is short.
        costs = with_unit_memory(free.stages.costs(free.layers, partition, free.links))
        caps = one_microbatch(costs, free.stage_ranks)
        schedule = free.stages.make(costs, caps, frozen_stages(costs))
        return memory_needs(free, partition, schedule)
    first_trainable = free.profile.first_trainable
    return plan_stages(free.stages, free.layers, partition, free.links, first_trainable).memory


def _may_fit(request: PlanRequest, limits: tuple[int, ...]) -> bool:
    """False if it is certain that no placement fits.

    A stage's peaks are known before there is a placement only with one stage per rank and without a
    frozen prefix.
    """
    if (
        len(request.stage_ranks) > request.ranks
        or request.profile.first_trainable
        or entry(request.schedule).from_costs
    ):
        return True
    known = resident(make(request.schedule, request.ranks, request.microbatches))
    try:
        exact(
            [layer.seconds for layer in request.layers],
            request.ranks,
            memory=MemoryLimits(request.layers, known, limits),
        )
    except PartitionError:
        return False
    return True


def _neighbours(counts: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    for boundary in range(len(counts) - 1):
        for by in (-1, 1):
            if counts[boundary] + by > 0 and counts[boundary + 1] - by > 0:
                yield (
                    *counts[:boundary],
                    counts[boundary] + by,
                    counts[boundary + 1] - by,
                    *counts[boundary + 2 :],
                )
