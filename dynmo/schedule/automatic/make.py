"""Makes any schedule by its name.

It is made by hand if the catalogue can, else by a search for the costs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from dynmo.cost.layer_cost import Costs, uniform_costs
from dynmo.errors import ScheduleError
from dynmo.schedule.automatic.vshape import v_shape
from dynmo.schedule.automatic.zero_bubble import automatic
from dynmo.schedule.bounds import Objective
from dynmo.schedule.catalogue import check_microbatches, entry, make_by_hand, stage_ranks_of
from dynmo.schedule.op import Schedule

_MAKERS: dict[str, Callable[..., Schedule]] = {
    "zb-auto": automatic,
    **{name: partial(v_shape, name) for name in ("zb-v", "v-auto", "v-half", "v-min")},
}


def make(
    name: str,
    ranks: int,
    microbatches: int,
    *,
    costs: Costs | None = None,
    chunks: int | None = None,
    caps: Sequence[float] | None = None,
    first_trainable: int = 0,
    objective: Objective = Objective.SPAN,
) -> Schedule:
    """Make the schedule called `name`, one of `catalogue.SCHEDULES`.

    Args:
        name: Name of the schedule.
        ranks: Number of pipeline ranks.
        microbatches: Microbatches of a step.
        costs: Costs of every stage. None means that all are alike: F = B = W, and no links.
        chunks: Stages per rank. None means the schedule's own number.
        caps: The most live memory of each rank, in the costs' unit. Only schedules that are made
            from costs keep to it. The caller checks the others.
        first_trainable: The stages before this one run F only.
        objective: The time that a schedule made from costs keeps short.

    Raises:
        ScheduleError: The schedule cannot be made so. The message says which values would do.
    """
    stage_ranks = stage_ranks_of(name, ranks, chunks)
    if not entry(name).from_costs:
        return make_by_hand(name, ranks, microbatches, first_trainable, chunks)
    check_microbatches(name, ranks, microbatches)
    if costs is None:
        costs = uniform_costs(len(stage_ranks), 1.0, 1.0, 1.0)
    if len(costs.stages) != len(stage_ranks):
        raise ScheduleError(
            f"{name} on {ranks} ranks has {len(stage_ranks)} stages, but costs are given for "
            f"{len(costs.stages)}"
        )
    return _MAKERS[name](
        costs, microbatches, caps=caps, first_trainable=first_trainable, objective=objective
    )


def full_schedule(name: str, ranks: int, microbatches: int, chunks: int | None = None) -> Schedule:
    """Make a schedule of equal stages that all train."""
    # A schedule that is made within any limit must at least find the memory of 1F1B.
    caps = (float(ranks),) * ranks if name == "zb-auto" else None
    return make(name, ranks, microbatches, chunks=chunks, caps=caps)
