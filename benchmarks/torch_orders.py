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
    """Returns the order in which one of torch's schedules runs its ops."""
    stages = [
        mock.create_autospec(PipelineStage, instance=True) for _ in range(kind.stages_per_rank)
    ]
    for stage in stages:
        stage.group_rank = 0
        stage.group_size = ranks
        stage.num_stages = ranks * kind.stages_per_rank
        stage.submod = None
    order = kind.build(stages, microbatches).pipeline_order
    rows = [
        ",".join("" if action is None else str(action) for action in order[rank])
        for rank in range(ranks)
    ]
    return from_torch_csv("\n".join(rows), name=name)
