"""The placement with the least simulated time that fits the memory.

Many placements share the least bottleneck, and they do not take the same time. A heavy stage far
upstream fills the pipeline more slowly than one near its end. A slightly larger bottleneck may be
worth a shorter way. The search therefore starts from several placements of the least bottleneck. It
moves one layer at a time along the path between two stages while the simulated time falls:

    4 3 | 2 2 | 1 1 2      from stage 0 to stage 2:      4 | 3 2 | 2 1 1 2

A move is judged by a compiled replay of one schedule (`_replay_kernels`), and the bytes that it
keeps. `evaluate` judges the result, with the schedule that is made for it. Its true bytes correct
those of the next round. Nothing depends on the clock or on chance: equal inputs give equal
placements, on every rank.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from dynmo.errors import NoRoomError
from dynmo.plan.evaluate import Plan, Replica, evaluate
from dynmo.plan.local_search import LocalSearch
from dynmo.plan.partition import Partition, enough
from dynmo.plan.problem import Choice, Mesh, Problem, RecomputeMode
from dynmo.plan.recompute import choose_recomputed

_ROUNDS = 3  # placements that are made to fit by recomputing, one after another
_NEAR = 4  # placements that nearly fit whose layers are tried with recomputing


def place(
    problem: Problem,
    mesh: Mesh,
    current: Partition | None = None,
    recompute: RecomputeMode = "none",
    quick: bool = False,
) -> Plan:
    """Looks for the placement with the least span or makespan under its own schedule.

    The result is never worse in the simulator than the placement of the least bottleneck, nor than
    `current` if that has as many stages and fits. Of placements of equal time, the one that moves
    the fewest bytes is returned. If none fits the memory, it is the one that comes closest.

    Args:
        quick: Look at the least bottleneck only, as long as it fits. Steps then come out some
            percent longer.

    Raises:
        PartitionError: There are fewer layers than stages.
        ScheduleError: There is no such schedule.
    """
    replica = Replica(problem, mesh)
    enough(len(replica.layers), len(replica.stage_ranks))
    every = frozenset(range(len(replica.layers)))

    def search(recomputed: frozenset[int] = frozenset(), limited: bool = True) -> Plan:
        own = problem if limited else replace(problem, memory_limit=None)
        return LocalSearch(Replica(own, mesh), current, recomputed).run(quick)

    if recompute == "all":
        return search(every)
    fitting = LocalSearch(replica, current, frozenset())
    plan = fitting.run(quick)
    if recompute == "none" or replica.limits is None:
        return plan
    # One candidate fits without recomputing. The other one is the placement that would be best with
    # enough memory, made to fit by recomputing. Recomputing changes the costs. They want another
    # placement, which may want other layers to be recomputed.
    plans, free = [plan], search(limited=False)
    if not plan.beyond and plan.step <= free.step:
        return plan
    # Faster placements that nearly fit may need few recomputed layers.
    near = [x for x in fitting.judged.values() if x and x.beyond and x.step < plan.step]
    near.sort(key=lambda x: x.beyond)
    plans += [recomputing(replica, x) for x in near[:_NEAR]]
    for _ in range(_ROUNDS):
        plans.append(recomputing(replica, free))
        if plans[-1].beyond:
            # This placement does not fit in any way. A placement that fits with all layers
            # recomputed then gives back the layers that need not be.
            plans.append(search(every))
            free = plans[-1]
            if free.beyond:
                break
            continue
        recomputed = plans[-1].recomputed
        plans.append(search(recomputed))
        nearer = search(recomputed, limited=False)
        if nearer.partition == free.partition:
            break
        free = nearer
    return min(plans, key=lambda plan: plan.rank)


def recomputing(replica: Replica, free: Plan) -> Plan:
    """Returns a plan with the same placement whose layers recompute as far as the memory wants.

    Not even all layers may be enough.
    """
    assert replica.limits is not None
    partition, schedule, plans = free.partition, free.schedule, list[Plan]()
    every = frozenset(range(len(replica.layers)))
    # With all layers recomputed, the schedule that is made for the memory keeps less than the free
    # one. It may then give layers back.
    for _ in range(2):
        account = partial(replica.memory, partition=partition, schedule=schedule)
        try:
            chosen = choose_recomputed(replica.layers, partition, schedule, account, replica.limits)
        except NoRoomError:
            chosen = every
        plans.append(evaluate(replica.problem, Choice(replica.mesh, partition, chosen)))
        if chosen != every or plans[-1].schedule.ops == schedule.ops:
            break
        schedule = plans[-1].schedule
    if all(plan.beyond for plan in plans):  # the schedule of the chosen layers keeps more
        plans.append(evaluate(replica.problem, Choice(replica.mesh, partition, every)))
    return min(plans, key=lambda plan: plan.rank)
