"""The ranks of a schedule in one process.

One row gives all ranks' ops in the order of the clock.

    0 | F0 F1 BW0 BW1              0 | 0F0 0F1 1F0 1B0 0BW0 1F1 1B1 0BW1 1W0 1W1
    1 | F0 B0 F1 B1 W0 W1

The engine that runs the row hands each op to its rank's own queue (stream). The op waits there for
its inputs. The ranks' own orders are kept, and no op is handed over after one that waits for it.
"""

from __future__ import annotations

from dataclasses import replace

from dynmo.cost.layer_cost import uniform_costs
from dynmo.schedule.lowering import fuse
from dynmo.schedule.op import Schedule
from dynmo.schedule.simulator import simulate


def fold(schedule: Schedule) -> Schedule:
    """Put the same ops on one rank that holds all stages.

    B and W are fused, and a frozen prefix is held back, as on several ranks.
    """
    fused = fuse(schedule)
    # F = B = W: the order decides how early an op is queued, not which ops it waits for.
    timeline = simulate(fused, uniform_costs(fused.stages, 1.0, 1.0, 1.0))
    row = tuple(
        span.op
        for _, _, span in sorted(
            (span.start, rank, span) for rank, spans in enumerate(timeline.ranks) for span in spans
        )
    )
    credits = fused.ranks if fused.credits is None else fused.credits
    return replace(fused, stage_ranks=(0,) * fused.stages, ops=(row,), credits=credits)
