"""The request of `dynmo schedule`: a schedule's name and shape, and the costs to replay it at.

The costs are equal for all stages, or come from a file. The schedule itself is made in
`dynmo.schedule`, or read from torch's CSV.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from dynmo.cli.schedule_options import ScheduleOptions
from dynmo.cost.layer_cost import Costs, split_costs, uniform_costs
from dynmo.errors import InputError, ScheduleError
from dynmo.files import read_text
from dynmo.schedule.bounds import Objective
from dynmo.schedule.catalogue import check_microbatches, entry, make, stage_ranks_of
from dynmo.schedule.op import Schedule


@dataclass(frozen=True)
class ScheduleRequest:
    """A schedule, the costs of its stages, and the limits of its ranks.

    Attributes:
        stage_ranks: The rank that holds each stage.
        chunks: Stages per rank. None means the schedule's own number.
        caps: Most memory of each rank, in the costs' unit.
        first_trainable: The first stage that is not frozen.
        objective: The time that the schedule keeps short.
        read: The schedule, if it was read from a file.
    """

    name: str
    microbatches: int
    stage_ranks: tuple[int, ...]
    costs: Costs
    chunks: int | None
    caps: tuple[float, ...]
    first_trainable: int
    objective: Objective
    read: Schedule | None

    @property
    def ranks(self) -> int:
        return len(self.caps)

    @property
    def is_optimized(self) -> bool:
        """Whether the schedule is made from the costs, with compiled loops."""
        return self.read is None and entry(self.name).from_costs

    def schedule(self) -> Schedule:
        return self.make(self.name) if self.read is None else self.read

    def make(self, name: str) -> Schedule:
        return make(
            name,
            self.ranks,
            self.microbatches,
            costs=self.costs,
            chunks=self.chunks,
            caps=self.caps,
            first_trainable=self.first_trainable,
            objective=self.objective,
        )


def request_of(options: ScheduleOptions) -> ScheduleRequest:
    """Returns the request of a command line."""
    if options.from_torch_csv is None:
        read = None
        name, microbatches, stage_ranks = _shape(options)
    else:
        read = _read(options.from_torch_csv, options)
        name, microbatches, stage_ranks = read.name, read.microbatches, read.stage_ranks
    first_trainable, caps = 0, (math.inf,) * (max(stage_ranks) + 1)
    if options.costs is None:
        costs = _uniform(stage_ranks, options)
    else:
        costs, first_trainable, caps = _from_file(options.costs, stage_ranks, options)
    limit = options.memory_limit
    if limit is not None:
        if not limit >= 0:
            raise InputError(f"--memory-limit {limit}: a limit is a number of at least 0")
        caps = tuple(min(cap, limit) for cap in caps)
    if read is not None and first_trainable:
        raise InputError(
            f"costs file {options.costs}: a frozen prefix, but torch's CSV has a backward of every "
            "stage; give costs without one"
        )
    return ScheduleRequest(
        name,
        microbatches,
        stage_ranks,
        costs,
        options.chunks,
        caps,
        first_trainable,
        options.objective,
        read,
    )


# -- name and shape --------------------------------------------------------------------------------


def _shape(options: ScheduleOptions) -> tuple[str, int, tuple[int, ...]]:
    """Returns name, microbatches and rank of each stage of a schedule that is to be made."""
    name, ranks, microbatches = options.name, options.ranks, options.microbatches
    if name is None or ranks is None or microbatches is None:
        needed = {"--schedule": name, "--ranks": ranks, "--microbatches": microbatches}
        missing = next(option for option, value in needed.items() if value is None)
        raise InputError(
            f"Missing option '{missing}'; give --schedule, --ranks and --microbatches, or "
            "--from-torch-csv FILE"
        )
    if ranks < 1 or microbatches < 1:
        raise ScheduleError(
            f"--ranks {ranks} --microbatches {microbatches}: at least 1 of each is needed"
        )
    check_microbatches(name, ranks, microbatches)
    return name, microbatches, stage_ranks_of(name, ranks, options.chunks)


def _read(path: Path, options: ScheduleOptions) -> Schedule:
    from dynmo.schedule.torch_csv import from_torch_csv

    excluded = {
        "--schedule": options.name,
        "--ranks": options.ranks,
        "--microbatches": options.microbatches,
        "--chunks": options.chunks,
    }
    given = next((option for option, value in excluded.items() if value is not None), None)
    if given is not None:
        raise InputError(
            f"{given} and --from-torch-csv both say what the schedule is; use one of them"
        )
    try:
        return from_torch_csv(read_text(path), name="torch")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text in UTF-8"
        raise InputError(f"torch CSV {path}: cannot be read: {reason}") from None
    except ScheduleError as error:
        raise ScheduleError(f"torch CSV {path}: {error}") from None


# -- costs -----------------------------------------------------------------------------------------


def _uniform(stage_ranks: tuple[int, ...], options: ScheduleOptions) -> Costs:
    """Returns equal costs for all stages.

    The times are those of a rank. The stages of a rank share them, and its memory, equally.
    """
    times = {"--tf": options.tf, "--tb": options.tb, "--tw": options.tw}
    unset = [option for option, time in times.items() if time is None]
    if 0 < len(unset) < len(times):
        raise InputError(
            f"{unset[0]} is missing: give --tf, --tb and --tw, or none of them for equal costs"
        )
    tf, tb, tw = (1.0 if time is None else time for time in times.values())
    tcomm = 0.0 if options.tcomm is None else options.tcomm
    for option, value in {"--tf": tf, "--tb": tb, "--tw": tw, "--tcomm": tcomm}.items():
        if not math.isfinite(value) or value < 0:
            raise InputError(f"{option} {value}: a time is a number of at least 0")
    w_memory = _w_memory(options)
    return split_costs(
        uniform_costs(max(stage_ranks) + 1, tf, tb, tw, tcomm, w_memory), stage_ranks
    )


def _from_file(
    path: Path, stage_ranks: tuple[int, ...], options: ScheduleOptions
) -> tuple[Costs, int, tuple[float, ...]]:
    """Returns the costs of a file, the first trainable stage, and the limit of each rank.

    The file has the costs of each stage, or of each rank. The stages of a rank then share its costs
    equally. The layers of a costs file are stages, or its placement says which are.
    """
    from dynmo.cost.costs_file import read

    _check_alone(options)
    w_memory = _w_memory(options)
    file, ranks, stages = read(path, of_stages=True), max(stage_ranks) + 1, len(stage_ranks)
    placed = (file.partition, (1,) * len(file.layers))
    counts = next((x for x in placed if x and len(x) in (stages, ranks)), None)
    if counts is None:
        raise InputError(
            f"costs file {path}: f has {len(file.layers)} entries, {stages} expected, one per "
            "stage; dynmo plan --costs places layers"
        )
    if file.has_memory and options.w_memory is not None:
        raise InputError(
            f"--w-memory, but costs file {path} has memory, which says it; use one of them"
        )
    try:
        if len(counts) == stages:
            costs = file.stages(counts, stage_ranks, w_memory)
        else:
            costs = file.stages(counts, range(ranks), w_memory)
    except InputError as error:
        raise InputError(f"costs file {path}: {error}") from None
    first = next(i for i, stage in enumerate(costs.stages) if stage.b or stage.w)
    caps = file.cap or (math.inf,) * len(counts)
    if len(counts) == stages:
        held = ([c for c, x in zip(caps, stage_ranks, strict=True) if x == r] for r in range(ranks))
        return costs, first, tuple(map(sum, held))
    if first:
        raise InputError(
            f"costs file {path}: a frozen prefix and several stages a rank; give one number per "
            f"stage ({stages})"
        )
    return split_costs(costs, stage_ranks), 0, caps


def _check_alone(options: ScheduleOptions) -> None:
    times = {"--tf": options.tf, "--tb": options.tb, "--tw": options.tw, "--tcomm": options.tcomm}
    given = [option for option, value in times.items() if value is not None]
    if given:
        raise InputError(f"{given[0]} and --costs both give times; use one of them")


def _w_memory(options: ScheduleOptions) -> float:
    share = 0.5 if options.w_memory is None else options.w_memory
    if not 0 <= share <= 1:
        raise InputError(f"--w-memory {share}: it is a share between 0 and 1")
    return share
