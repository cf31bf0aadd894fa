"""dynmo's schedules in torch's pipeline runtime, and torch's schedules in dynmo."""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    ScheduleDualPipeV,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
    _Action,
    _add_reduce_grad,
    _add_send_recv,
    _add_unshard_reshard,
    _PipelineScheduleRuntime,
)
from torch.nn import functional

from dynmo.cost.layer_cost import Costs, StageCost
from dynmo.runtime.comm.meeting import Meeting
from dynmo.schedule.automatic.zero_bubble import automatic
from dynmo.schedule.catalogue import make
from dynmo.schedule.torch_csv import from_torch_csv, to_torch_csv
from tests.combinations import mostly_matrix
from tests.pool import Pool
from tests.schedule.samples import from_text

# Two schedules with two chunks a rank. One places them around and around. The other places them
# down and up again, where rank 1 hands from stage 1 to stage 2 in memory.
LOOPED = """
# looped  ranks=2 microbatches=4 placement=0,1,0,1
0 | 0F0 0F1 2F0 2F1 0F2 2B0 0F3 2W0 2B1 2W1 0B0 0W0 2F2 0B1 2F3 0W1 2B2 2W2 2BW3 0BW2 0B3 0W3
1 | 1F0 1F1 3F0 3B0 3F1 3B1 1F2 3W0 1B0 3W1 1W0 1F3 1B1 1W1 3F2 3BW2 3F3 3BW3 1B2 1W2 1BW3
"""
V_SHAPED = """
# v-shaped  ranks=2 microbatches=4 placement=0,1,1,0
0 | 0F0 0F1 0F2 3F0 3B0 0F3 3F1 3B1 3W0 3W1 0B0 3F2 3B2 0W0 0B1 0W1 3W2 3F3 3BW3 0BW2 0B3 0W3
1 | 1F0 2F0 1F1 2F1 1F2 2B0 1B0 2W0 2F2 1W0 2B1 1B1 1F3 2F3 2W1 1W1 2BW2 1BW2 2B3 1B3 2W3 1W3
"""


def test_csv_written_by_torch_reads_back() -> None:
    """torch pads its rows and uses other line ends.

    torch may also add ops for messages and for FSDP.
    """
    schedule = from_text(LOOPED)
    rows = to_torch_csv(schedule).splitlines()
    padded = ",,".join(["", *rows[0].split(","), ""]) + "\r\n" + rows[1] + ",,\r\n"
    assert from_torch_csv(padded, name="looped") == schedule
    actions = {
        rank: [_Action.from_str(cell) for cell in row.split(",")] for rank, row in enumerate(rows)
    }
    around: dict[int, Any] = {
        rank: _add_reduce_grad([*_add_unshard_reshard(row)], 4) for rank, row in actions.items()
    }
    full = _add_send_recv(around, lambda stage: stage % 2, 4)
    text = "\n".join(",".join(map(str, full[rank])) for rank in range(2))
    assert all(word in text for word in ("SEND_F", "RECV_B", "UNSHARD", "RESHARD", "REDUCE_GRAD"))
    assert from_torch_csv(text, name="looped") == schedule


def test_schedules_of_torch_are_read() -> None:
    # Only the rows are wanted, so these stand for schedules without a process group and stages.
    twos = ("pp_group_size", "n_local_stages", "number_of_rounds", "microbatches_per_round")
    fours = ("_num_stages", "num_stages", "_n_microbatches")
    settings = SimpleNamespace(**dict.fromkeys(twos, 2), **dict.fromkeys(fours, 4))
    looped, down_and_up = (0, 1, 0, 1), (0, 1, 1, 0)
    for kind, placement in (
        (ScheduleInterleavedZeroBubble, looped),
        (ScheduleZBVZeroBubble, down_and_up),
        (ScheduleDualPipeV, down_and_up),
    ):
        make = partial(kind._calculate_single_rank_operations, cast(Any, settings))
        rows = [["" if cell is None else str(cell) for cell in make(rank)] for rank in range(2)]
        read = from_torch_csv("\n".join(map(",".join, rows)))
        assert (read.ranks, read.microbatches, read.stage_ranks) == (2, 4, placement)


def _stage(index: int) -> nn.Module:
    torch.manual_seed(index)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6)).double()


def run_in_torch(world: Meeting, text: str, stages: int, microbatches: int) -> dict[str, Any]:
    """Runs two steps of torch's runtime with the schedule on each rank.

    Gradients and loss are held against one process with all stages.
    """
    torch.manual_seed(99)
    inputs = torch.randn(2 * microbatches, 6).double()
    targets = torch.randn(2 * microbatches, 6).double()
    whole = nn.Sequential(*map(_stage, range(stages)))
    expected = functional.mse_loss(whole(inputs), targets)
    expected.backward()

    cells = text.splitlines()[world.rank].split(",")
    own = sorted({int(cell.split("F")[0]) for cell in cells if "F" in cell})
    held = {index: _stage(index) for index in own}
    built = [
        PipelineStage(module, index, stages, torch.device("cpu")) for index, module in held.items()
    ]
    runtime = _PipelineScheduleRuntime(built, microbatches, loss_fn=functional.mse_loss)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "schedule.csv"
        file.write_text(text)
        runtime._load_csv(str(file))
    losses: list[torch.Tensor] = []
    for _ in range(2):
        for module in held.values():
            module.zero_grad()
        losses = []
        runtime.step(
            *[inputs] if 0 in own else [],
            target=targets if stages - 1 in own else None,
            losses=losses,
        )
        for index, module in held.items():
            for ours, theirs in zip(module.parameters(), whole[index].parameters(), strict=True):
                assert ours.grad is not None
                torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-6, atol=1e-12)
    if stages - 1 in own:
        torch.testing.assert_close(torch.stack(losses).mean(), expected, rtol=1e-6, atol=0)
    return {"stages": own, "ran": [str(action) for action in runtime.pipeline_order[world.rank]]}


SCHEDULES = {
    "1f1b": lambda: make("1f1b", 2, 4),
    "zb-h1": lambda: make("zb-h1", 2, 4),
    "zb-h2": lambda: make("zb-h2", 4, 8),
    "zb-auto": lambda: automatic(
        Costs((StageCost(2, 3, 1), StageCost(4, 1, 2)), (0.5,)), 4, caps=[3, 2]
    ),
    "looped": lambda: from_text(LOOPED),
    "v-shaped": lambda: from_text(V_SHAPED),
}


@pytest.mark.parametrize("name", mostly_matrix(SCHEDULES, everyday=["looped", "v-shaped"]))
def test_torch_runs_our_schedules_with_equal_gradients(pool: Pool, name: str) -> None:
    schedule = SCHEDULES[name]()
    text, ranks = to_torch_csv(schedule), schedule.ranks
    given = {"text": text, "stages": schedule.stages, "microbatches": schedule.microbatches}
    results = pool.run("tests.test_torch_pipelining:run_in_torch", ranks, **given)
    stages = [tuple(result["stages"]) for result in results]
    assert stages == [schedule.stages_of(rank) for rank in range(ranks)]
    assert [",".join(result["ran"]) for result in results] == text.splitlines()
