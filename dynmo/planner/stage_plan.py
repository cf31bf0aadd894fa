"""A whole plan from measured costs, without running anything: where the layers live, in which order the ranks work, what it takes.

costs of layers -> balancer -> placement -> costs of stages -> schedule -> simulator -> step time, idleness, memory
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product

from dynmo.balance.balancers import BalanceRequest, balancer
from dynmo.balance.partition import Partition, exact
from dynmo.balance.stage_costs import Make, pipeline_costs
from dynmo.cost.layer_cost import Costs, uniform_costs
from dynmo.errors import InputError, PartitionError, ScheduleError
from dynmo.planner.evaluate import Job, Plan, TooFullError, judge, made_for, make_for, needs_of, with_memory
from dynmo.planner.recompute import choose, memory, whole_memory
from dynmo.schedule.catalogue import check_microbatches, entry, make
from dynmo.schedule.memory import MemoryLimits, Pairs, stage_memory
from dynmo.schedule.op import Schedule
from dynmo.schedule.simulator import resident

LARGE = 6000  # ops of a kind: a simulation takes a tenth of a second


def attempt(job: Job) -> Plan:
    """The plan for just this job. Raises PartitionError or ScheduleError where it cannot be made or does not fit the memory."""
    if job.recompute == "all":
        return _attempt(replace(job, recompute="none", recomputed=frozenset(range(len(job.kept)))))
    if job.recompute == "auto" and job.memory_limit is not None:
        return _recomputing(replace(job, recompute="none"), job.memory_limit)
    return _attempt(job)


def _recomputing(job: Job, limit: int) -> Plan:
    """The best of: fitting without recomputing; and the placement that would be best with enough memory, made to fit by recomputing. Other
    costs want another placement, and that may want other layers to be recomputed: a few rounds of both."""
    found: list[Plan] = []
    failed = _into(found, lambda: _attempt(job))
    free = _attempt(replace(job, memory_limit=None))  # what is wrong apart from memory is told as it is
    if found and found[0].step <= free.step:
        return found[0]
    for _ in range(3):
        try:
            chosen = _chosen(job, free, limit)
        except PartitionError:
            # This placement does not fit in any way. From one that does with all recomputed, what is not needed is given back.
            every = replace(job, recomputed=frozenset(range(len(job.kept))))
            problem = _into(found, lambda every=every: _attempt(every))
            if problem is not None:
                failed = failed or problem
                break
            free = found[-1]
            continue
        again, partition = replace(job, recomputed=chosen), free.partition
        _into(found, lambda again=again, partition=partition: judge(again, partition))
        _into(found, lambda again=again: _attempt(again))
        nearer = _attempt(replace(again, memory_limit=None))
        if nearer.partition == free.partition:
            break
        free = nearer
    if not found:
        every = replace(job, recomputed=frozenset(range(len(job.kept))))
        _into(found, lambda: _attempt(every))
    if not found:
        assert failed is not None
        raise failed
    return min(found, key=lambda plan: plan.step)


def _chosen(job: Job, free: Plan, limit: int) -> frozenset[int]:
    """The layers to recompute for this placement and schedule. What waits, and ops need beside, comes on top of what `choose` knows of."""
    counts, limits = free.partition.counts, [limit] * job.ranks
    chosen = choose(job.kept, counts, free.schedule, limits, job.replicas)
    for _ in range(_ROUNDS):
        needs, known = (account(job.kept, chosen, counts, free.schedule, job.replicas) for account in (whole_memory, memory))
        if max(needs) <= limit:
            break
        each = zip(limits, needs, known, strict=True)
        limits = [min(own - max(0, need - limit), limit - (need - told)) for own, need, told in each]
        chosen = choose(job.kept, counts, free.schedule, limits, job.replicas)
    return chosen


def _into(found: list[Plan], make: Callable[[], Plan]) -> InputError | None:
    try:
        found.append(make())
    except (PartitionError, ScheduleError) as error:
        return error
    return None


def _limits(job: Job) -> tuple[int | None, ...]:
    """What balancers are told at first. They do not know what comes for a moment only, so there is a second try with that set aside."""
    if job.memory_limit is None or not job.reserve:
        return (job.memory_limit,)
    return (job.memory_limit, max(0, job.memory_limit - job.reserve))


def _attempt(job: Job) -> Plan:
    check_microbatches(job.schedule, job.ranks, job.microbatches)
    best: Plan | None = None
    failed: InputError | None = None
    for pairs, limit in product(_residents(job), _limits(job)):
        try:
            found = _placed(job, pairs, limit)
        except (PartitionError, ScheduleError) as error:
            failed = failed or error
            continue
        if best is None or found.step < best.step:
            best = found
        if job.schedule != "zb-auto":
            break
    if best is None and job.memory_limit is not None:
        best = _repaired(job, failed.partition if isinstance(failed, TooFullError) else None)
    if best is None:
        assert failed is not None
        raise failed
    return best


_ROUNDS = 4  # of asking a balancer anew


def _placed(job: Job, pairs: tuple[Pairs, ...] | None, limit: int | None) -> Plan:
    """By the balancer, and judged. Balancers do not know of messages that wait: where a rank is too full, they are told of less room there,
    and asked again."""
    told = None if limit is None else (limit,) * len(job.placement)
    request = BalanceRequest(
        job.layers,
        job.current,
        job.cost,
        resident=pairs,
        seed=job.seed,
        step=job.step,
        names=job.profile.names,
        make=None if job.quick and job.balancer == "exact" else _maker(job),
        links=job.links,
        objective=job.objective,
        first_trainable_layer=job.profile.first_trainable,
        placement=job.placement,
    )
    failed: InputError | None = None
    for _ in range(_ROUNDS if job.balancer in _CHOOSING else 1):
        try:
            return judge(job, balancer(job.balancer)(replace(request, memory_limit=told)))
        except (PartitionError, ScheduleError) as error:
            failed = failed or error
            if told is None or pairs is None or not isinstance(error, TooFullError):
                break
            told = _less(job, pairs, told, error)
    assert failed is not None
    raise failed


def _less(job: Job, pairs: tuple[Pairs, ...], told: tuple[int, ...], refused: TooFullError) -> tuple[int, ...]:
    """Per stage, the limit to tell a balancer that was told this much and filled some rank beyond the memory."""
    limit, needs = job.memory_limit, refused.needs
    assert limit is not None
    known = [max((layer.workspace_bytes for layer in job.layers), default=0)] * job.ranks
    for need, rank in zip(stage_memory(job.layers, refused.partition.counts, pairs), job.placement, strict=True):
        known[rank] += need
    return tuple(
        max(0, min(own - max(0, needs[rank] - limit), limit - max(0, needs[rank] - known[rank])))
        for own, rank in zip(told, job.placement, strict=True)
    )


def _residents(job: Job) -> Iterator[tuple[Pairs, ...] | None]:
    """What the schedule keeps alive, as the balancer is told: a schedule that is made within limits may keep little or much."""
    if job.memory_limit is None:
        yield None
        return
    stages = len(job.placement)
    costs = uniform_costs(stages, 1.0, 1.0, 1.0)
    # One activation of a stage is 1 here: 1F1B's memory, and in any case that of one microbatch.
    caps = (float(max(job.ranks, stages // job.ranks)),) * job.ranks
    yield resident(make(job.schedule, job.ranks, job.microbatches, costs=costs, chunks=job.chunks, caps=caps))
    if job.schedule == "zb-auto" and job.ranks > 1:
        yield (((1, 0), (0, 1)),) * stages
    elif not entry(job.schedule).from_costs and job.profile.first_trainable:
        # With a frozen prefix the others may keep less. How many stages it fills, only the placement says.
        for frozen in range(1, stages):
            yield resident(make(job.schedule, job.ranks, job.microbatches, chunks=job.chunks, first_trainable=frozen))


_TRIES, _QUICK_TRIES = 600_000, 60_000  # ops of the plans that are looked at
_CHOOSING = ("exact", "schedule-aware")


def _repaired(job: Job, refused: Partition | None) -> Plan | None:
    """What a rank needs is less than its stages' peaks and the largest workspace together, so the balancers may refuse what fits: from the
    placement that was `refused` as it was judged, and that without a limit, one boundary at a time, as long as the fullest rank gets
    emptier. For balancers that choose; a baseline's placement is what it is."""
    limit = job.memory_limit
    assert limit is not None
    if job.balancer not in _CHOOSING or not _may_fit(job, limit):
        return None
    free = replace(job, memory_limit=None, quick=True)
    starts = [] if refused is None else [refused]
    if not job.quick:
        try:
            starts += [_attempt(free).partition, job.current]
        except InputError:
            return None

    def fullest(counts: tuple[int, ...]) -> int:
        partition = Partition(counts)
        costs = with_memory(pipeline_costs(job.layers, partition, links=job.links))
        if job.schedule == "zb-auto":  # within whatever there is: with one microbatch at a time at the least
            return max(needs_of(job, partition, make_for(job, costs, tuple(stage.held for stage in costs.stages))))
        return max(needs_of(job, partition, made_for(free, partition, costs)[2]))

    tries = min(300, (_QUICK_TRIES if job.quick else _TRIES) // (3 * len(job.placement) * job.microbatches))
    for start in starts:
        counts, most = start.counts, fullest(start.counts)
        while most > limit and tries > 0:
            others = {other: fullest(other) for other in _neighbours(counts)}
            tries -= len(others)
            nearer = min(others, key=lambda other: others[other], default=counts)
            if others.get(nearer, most) >= most:
                break
            counts, most = nearer, others[nearer]
        if most <= limit:
            try:
                return judge(job, Partition(counts))
            except (PartitionError, ScheduleError):
                continue
    return None


def _may_fit(job: Job, limit: int) -> bool:
    """No where it is certain that no placement fits. Only of one stage a rank, without a frozen prefix, are a stage's peaks known before
    there is a placement."""
    if len(job.placement) > job.ranks or job.profile.first_trainable or entry(job.schedule).from_costs:
        return True
    known = resident(make(job.schedule, job.ranks, job.microbatches))
    try:
        exact([layer.seconds for layer in job.layers], job.ranks, memory=MemoryLimits(job.layers, known, (limit,) * job.ranks))
    except PartitionError:
        return False
    return True


def _neighbours(counts: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    for boundary in range(len(counts) - 1):
        for by in (-1, 1):
            if counts[boundary] + by > 0 and counts[boundary + 1] - by > 0:
                yield (*counts[:boundary], counts[boundary] + by, counts[boundary + 1] - by, *counts[boundary + 2 :])


def _maker(job: Job) -> Make:
    """The schedule that would run at some stages' costs. What a rank holds anyway is taken as everyone's mean: only the plan that is
    chosen is made within its ranks' true limits."""
    held = sum(layer.static_bytes for layer in job.layers) / job.ranks

    def scheduled(costs: Costs) -> Schedule:
        costs, kept = with_memory(costs), [0.0] * job.ranks
        for stage, rank in zip(costs.stages, job.placement, strict=True):
            kept[rank] += stage.held
        if job.memory_limit is None:
            caps = (2.0 * job.ranks * max(kept),) * job.ranks
        else:
            caps = tuple(max(own, job.memory_limit - job.reserve - held) for own in kept)
        return make_for(job, costs, caps)

    return scheduled
