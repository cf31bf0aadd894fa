"""A plan, or, where nothing fits the memory, which change to the job would: words for an error that says what to do."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from dynmo.errors import InputError, PartitionError, ScheduleError
from dynmo.planner.evaluate import Job, Plan
from dynmo.planner.microbatches import resize
from dynmo.planner.stage_plan import LARGE, attempt


def plan(job: Job) -> Plan:
    """Raises InputError: what is wrong with the job, or, where it does not fit the memory, which rank needs how much and what would fit."""
    try:
        return attempt(job)
    except (PartitionError, ScheduleError):
        if job.memory_limit is None:
            raise
    free = attempt(replace(job, memory_limit=None))  # what is wrong apart from memory is told as it is
    over = max(range(job.ranks), key=lambda rank: free.memory[rank])
    if free.memory[over] > job.memory_limit:
        where = f"rank {over} (layers {_layers_of(free, over)}) needs {free.memory[over]} bytes under {job.schedule}"
        where += f" with the placement {'+'.join(map(str, free.partition.counts))}, over the limit of {job.memory_limit}"
    else:
        where = f"no placement by {job.balancer!r} was found that keeps every rank under {job.memory_limit} bytes with {job.schedule}"
    raise PartitionError(f"{where}; {_nearest(job, free)}")


def _layers_of(plan: Plan, rank: int) -> str:
    ranges = [plan.partition.range_of(stage) for stage, holder in enumerate(plan.job.placement) if holder == rank]
    return " and ".join(f"{own.start} to {own.stop - 1}" if len(own) > 1 else f"{own.start}" for own in ranges)


# Where memory is short, those that need the least change first, then those that keep less.
_BY_MEMORY = ("zb-h1", "zb-auto", "zb-v", "1f1b", "v-half", "v-min")


def _nearest(job: Job, free: Plan) -> str:
    """In words, the first plan that fits: another placement, schedule, size of microbatches, number of ranks."""
    for what, other in _nearer(job):
        try:
            found = attempt(other)
        except InputError:
            continue
        return f"{what} would fit: {max(found.memory)} bytes at most, a step of {found.step:.4g} s instead of {free.step:.4g} s"
    largest = max(range(len(job.layers)), key=lambda i: job.layers[i].static_bytes + job.layers[i].activation_bytes)
    held = job.layers[largest].static_bytes + job.layers[largest].activation_bytes
    return f"nothing that was tried fits (other placements, schedules, microbatches, more ranks); layer {largest} alone needs {held} bytes"


def _nearer(job: Job) -> Iterator[tuple[str, Job]]:
    base = replace(job, balancer="exact", any_links=True, quick=True)
    if job.balancer not in ("exact", "schedule-aware"):
        yield "the balancer 'exact'", base
    schedules = [replace(base, schedule=name, chunks=None) for name in _BY_MEMORY if name != job.schedule]
    for other in schedules:
        yield f"the schedule {other.schedule}", other
    smaller = [replace(base, profile=profile, microbatches=m) for m, profile in resize(base.profile, base.microbatches, (2, 4, 8, 16))]
    for other in smaller if job.ranks * job.microbatches <= LARGE else smaller[:1]:
        yield f"{other.microbatches} microbatches for the same global batch", other
    steps = (*range(1, 5), *(math.ceil(job.ranks * share) for share in (0.25, 0.5, 1, 2, 3)))
    for ranks in sorted({job.ranks + by for by in steps if job.ranks + by <= len(job.layers)}):
        for other in (base, *schedules[-1:]):
            yield f"{ranks} ranks with {other.schedule}", replace(other, ranks=ranks)
