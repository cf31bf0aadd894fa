"""Schedules in the CSV form of torch.distributed.pipelining.

torch reads and writes the form with `_load_csv` and `_dump_csv`. This is torch's form without
messages ("compute_only"). Each rank is a row, and each op is a cell: stage, kind, microbatch.
dynmo's B is called I there, and an ordinary backward is called B:

    0F0,0F1,0I0,0W0,0I1,0W1        F forward, I input gradient, W weight gradient
    1F0,1B0,1F1,1B1                B both at once (dynmo's BW)

torch pads its rows with empty cells for steps in which a rank idles. They do not affect the order
and are dropped.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator

from dynmo.errors import ScheduleError
from dynmo.schedule.op import Kind, Op, Schedule, validate

_TO_TORCH = {Kind.F: "F", Kind.B: "I", Kind.W: "W", Kind.BW: "B"}
_FROM_TORCH = {word: kind for kind, word in _TO_TORCH.items()}

_ACTION = re.compile(r"(\d+)([FIWB])(\d+)")
# Messages and FSDP's actions around the ops: each runtime adds its own.
_AROUND = re.compile(r"\d+((SEND|RECV)_[FB]\d+|UNSHARD|RESHARD|REDUCE_GRAD)")
# Two ops that torch may run as one. Without a function for that it runs them one after the other,
# as dynmo does.
_OVERLAP = re.compile(r"\((.*)\)OVERLAP_F_B")


def to_torch_csv(schedule: Schedule) -> str:
    """Write the schedule for `_PipelineScheduleRuntime._load_csv`, one line per rank."""
    if schedule.first_trainable:
        raise ScheduleError(
            f"{schedule.name}: stages below {schedule.first_trainable} are frozen and have no "
            "backward, which torch wants of every stage; "
            "write a schedule with first trainable stage 0"
        )
    return "".join(
        ",".join(f"{op.stage}{_TO_TORCH[op.kind]}{op.microbatch}" for op in row) + "\n"
        for row in schedule.ops
    )


def from_torch_csv(text: str, name: str = "torch") -> Schedule:
    """Read torch's CSV, with or without messages, and check it as `validate` does.

    Args:
        text: Content of the file.
        name: Name of the schedule. The file does not have it.

    Raises:
        ScheduleError: The one-line message names row and cell, both from 0 as torch counts.
    """
    rows: list[tuple[Op, ...]] = []
    holds: dict[int, int] = {}
    lines = text.strip("\r\n").splitlines()
    for rank, cells in enumerate(csv.reader(lines)):
        row: list[Op] = []
        for index, cell in enumerate(cells):
            where = f"row {rank}, cell {index} of torch's CSV"
            for op in _ops(cell.strip(), where):
                if (expected := holds.setdefault(op.stage, rank)) != rank:
                    raise ScheduleError(
                        f"{where}: {cell.strip()} is on rank {rank}, but stage {op.stage} belongs "
                        f"to rank {expected}"
                    )
                row.append(op)
        if not row:
            raise ScheduleError(
                f"row {rank} of torch's CSV has no ops; every rank needs at least one stage"
            )
        rows.append(tuple(row))
    if not rows:
        raise ScheduleError("torch's CSV is empty; it has one row per rank, such as 0F0,0I0,0W0")
    stages = max(holds) + 1
    for stage in range(stages):
        if stage not in holds:
            raise ScheduleError(f"torch's CSV has no op of stage {stage} of {stages}")
    microbatches = 1 + max(op.microbatch for row in rows for op in row)
    schedule = Schedule(
        name, microbatches, tuple(holds[stage] for stage in range(stages)), tuple(rows)
    )
    validate(schedule)
    return schedule


def _ops(cell: str, where: str) -> Iterator[Op]:
    overlap = _OVERLAP.fullmatch(cell)
    for part in overlap[1].split(";") if overlap else [cell]:
        action = _ACTION.fullmatch(part.strip())
        if action is not None:
            yield Op(_FROM_TORCH[action[2]], int(action[1]), int(action[3]))
        elif overlap or (cell and not _AROUND.fullmatch(cell)):
            raise ScheduleError(
                f"{where}: {cell!r} is not an action such as 0F0, 0I0, 0W0 or 0B0 (stage, kind, "
                "microbatch)"
            )
