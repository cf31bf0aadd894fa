"""The orders of torch.distributed.pipelining, as schedules that dynmo runs.

torch's own class makes the order, from stages that are stand-ins. `dynmo.schedule.torch_csv` reads
it as it reads torch's CSV. So two orders can be compared on one executor. torch's runtime has no
part in it.
"""

from __future__ import annotations

from unittest import mock

from torch.distributed.pipelining import PipelineStage

from benchmarks.torch_peer import PeerSchedule
from dynmo.schedule.op import Schedule
from dynmo.schedule.torch_csv import from_torch_csv


def torch_order(kind: PeerSchedule, ranks: int, microbatches: int, name: str) -> Schedule:
    """Returns the order in which one of torch's schedules runs its ops.

    Args:
        kind: The schedule's class, and how many stages a rank has.
        ranks: Number of pipeline ranks.
        microbatches: Microbatches of a step.
        name: The name of the result.

    Returns:
        The schedule on the ranks and stages that torch gives it.

    Raises:
        ScheduleError: The order is not one that dynmo can run.
    """
    stages = [
        mock.create_autospec(PipelineStage, instance=True) for _ in range(kind.stages_per_rank)
    ]
    for stage in stages:
        stage.group_rank, stage.group_size, stage.num_stages, stage.submod = (
            0,
            ranks,
            ranks * kind.stages_per_rank,
            None,
        )
    order = kind.build(stages, microbatches).pipeline_order
    rows = [
        ",".join("" if action is None else str(action) for action in order[rank])
        for rank in range(ranks)
    ]
    return from_torch_csv("\n".join(rows), name=name)
