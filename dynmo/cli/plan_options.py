"""The options of `dynmo plan`, and the checks that need nothing but them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from dynmo.errors import InputError
from dynmo.plan.options import BALANCERS, OWN_BALANCER
from dynmo.schedule.bounds import Objective
from dynmo.schedule.catalogue import SCHEDULES

if TYPE_CHECKING:
    from dynmo.cost.costs_file import Profile
    from dynmo.schedule.memory import Limit


@dataclass(frozen=True)
class PlanOptions:
    """The options of `dynmo plan`. None means that an option is not given."""

    costs: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Costs of the layers (dynmo profile writes them), or a run's folder. Needed.",
        ),
    ] = None
    ranks: Annotated[
        int | None, typer.Option(min=1, metavar="P", help="Pipeline ranks (default: FILE's).")
    ] = None
    microbatches: Annotated[
        int | None,
        typer.Option(min=1, metavar="M", help="Microbatches of a step (default: FILE's)."),
    ] = None
    gpus: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Instead: search pipeline x replicas on N GPUs (with --global-batch).",
        ),
    ] = None
    global_batch: Annotated[
        int | None, typer.Option(min=1, metavar="B", help="Sequences of a step, over all replicas.")
    ] = None
    micro_batch: Annotated[
        str | None,
        typer.Option(
            metavar="B1,B2", help="Sizes of microbatches to search (default: near FILE's)."
        ),
    ] = None
    zero: Annotated[
        int | None,
        typer.Option(
            min=0, max=1, metavar="0|1", help="1: optimizer state divided over the replicas."
        ),
    ] = None
    bandwidth: Annotated[
        str | None,
        typer.Option(
            metavar="BYTES_PER_S", help="Between replicas (default: the slowest link in FILE)."
        ),
    ] = None
    balancer: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help=f"One of {', '.join(BALANCERS)}, or your own: {OWN_BALANCER} (default: exact).",
        ),
    ] = None
    schedule: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help=f"One of {', '.join(SCHEDULES)}, or auto (default: FILE's, or zb-auto).",
        ),
    ] = None
    chunks: Annotated[
        int | None, typer.Option(metavar="V", help="Stages per rank (default: the schedule's own).")
    ] = None
    memory_limit: Annotated[
        str | None,
        typer.Option(
            metavar="BYTES",
            help='Most memory of a rank: bytes, or "40GiB". One for all, or "24GiB,16GiB".',
        ),
    ] = None
    speeds: Annotated[
        str | None,
        typer.Option(metavar="S1,S2", help="Speed of each rank (default: all are 1)."),
    ] = None
    recompute: Annotated[
        Literal["none", "auto", "all"],
        typer.Option(
            metavar="WHICH",
            help="Layers that run F again in B to save memory: none, auto (as few as must) or all.",
        ),
    ] = "none"
    objective: Annotated[
        Objective,
        typer.Option(help="Time to keep short: span, or makespan if the optimizer is a barrier."),
    ] = Objective.SPAN
    cost: Annotated[
        Literal["time", "parameters"],
        typer.Option(metavar="COST", help="Cost that the balancer evens out: time or parameters."),
    ] = "time"
    fewest_ranks: Annotated[
        float | None,
        typer.Option(
            metavar="SHARE",
            min=0.0,
            help="Instead: compare 1 to P (or N) ranks, and find the fewest on which a step "
            "takes at most this share longer than on all.",
        ),
    ] = None
    alternatives: Annotated[
        bool,
        typer.Option(
            "--alternatives/--no-alternatives", help="Show what other choices would give."
        ),
    ] = True
    megatron: Annotated[
        bool, typer.Option("--megatron", help="Show the placement as Megatron's layout.")
    ] = False
    torchtitan: Annotated[
        bool, typer.Option("--torchtitan", help="Show it as torchtitan's module lists.")
    ] = False
    deepspeed: Annotated[
        bool, typer.Option("--deepspeed", help="Show it as DeepSpeed's parts.")
    ] = False
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False

    def costs_path(self) -> Path:
        """Returns the file or folder of the costs. Raises InputError if it is missing."""
        if self.costs is None:
            raise InputError(
                "--costs is missing: a file of costs (dynmo profile writes one), or a run's folder"
            )
        return self.costs

    def check_combination(self) -> None:
        """Raises InputError if an option lacks another one that it needs, or excludes it."""
        for problem in self._problems():
            raise InputError(problem)

    def _problems(self) -> Iterator[str]:
        is_mesh, is_fewest = self.gpus is not None, self.fewest_ranks is not None
        of_pipelines, of_meshes = (
            [f"--{x.replace('_', '-')}" for x in names if getattr(self, x) is not None]
            for names in (
                ("ranks", "microbatches"),
                ("global_batch", "micro_batch", "zero", "bandwidth"),
            )
        )
        if of_meshes and not is_mesh:
            yield f"{of_meshes[0]} goes with --gpus, which searches the mesh; add --gpus N"
        if is_mesh and self.global_batch is None:
            yield "--gpus needs --global-batch: how many sequences a step takes, over all replicas"
        leave_out = "leave one of the two out"
        if is_mesh and of_pipelines:
            yield f"{of_pipelines[0]} is what --gpus searches for; {leave_out}"
        search = "--gpus" if is_mesh else "--fewest-ranks"
        each = ["--speeds"] if self.speeds is not None else []
        each += ["--memory-limit"] if "," in (self.memory_limit or "") else []
        if each and (is_mesh or is_fewest):
            yield f"{each[0]} names single ranks, but {search} searches their number; {leave_out}"
        if self.cost != "time" and (is_mesh or is_fewest):
            wrong = f"--cost {self.cost} does not go with {search}, which compares seconds"
            yield f"{wrong}; {leave_out}"
        if is_fewest and self.exports():
            yield (
                f"--{self.exports()[0]} does not go with --fewest-ranks, which makes many plans; "
                f"{leave_out}"
            )

    def exports(self) -> list[str]:
        """Returns the names of the trainers in whose form the plan is wanted."""
        return [name for name in ("megatron", "torchtitan", "deepspeed") if getattr(self, name)]

    def pipeline(self, profile: Profile) -> tuple[int, int]:
        """Returns the number of ranks and of microbatches.

        Both are the profile's, unless they are given.
        """
        found = {x: getattr(self, x) or getattr(profile, x) for x in ("ranks", "microbatches")}
        for option, value in found.items():
            if value is None:
                raise InputError(
                    f"--{option} is missing, and the costs file does not say it either"
                )
        return found["ranks"], found["microbatches"]

    def schedule_of(self, profile: Profile) -> str:
        """Returns the name of the schedule. It is the profile's, unless it is given."""
        return self.schedule or profile.schedule or "zb-auto"

    def memory_limits(self, ranks: int | None = None) -> Limit:
        """Returns the memory limit of a rank, or of each, in bytes. None means unlimited."""
        if self.memory_limit is None or ranks is None or "," not in self.memory_limit:
            return None if self.memory_limit is None else _size(self.memory_limit)
        return tuple(map(_size, _words("--memory-limit", self.memory_limit, ranks)))

    def rank_speeds(self, ranks: int) -> tuple[float, ...] | None:
        """Returns the speed of each rank. None if all are 1."""
        if self.speeds is None:
            return None
        return tuple(map(_speed, _words("--speeds", self.speeds, ranks)))


def _words(option: str, text: str, ranks: int) -> list[str]:
    words = text.split(",")
    if len(words) != ranks:
        count = f"{len(words)} numbers for {ranks} ranks"
        raise InputError(f"{option} {text}: {count}; give one per rank")
    return words


def _speed(word: str) -> float:
    with suppress(ValueError):
        speed = float(word)
        if 0 < speed < math.inf:
            return speed
    raise InputError(f"--speeds: {word!r} is no speed; give a number over 0 for each rank")


def _size(text: str) -> int:
    from dynmo.options import parse_bytes

    try:
        size = parse_bytes(text)
    except ValueError as error:
        raise InputError(f"--memory-limit {text}: {error}") from None
    if not size:
        raise InputError(
            "--memory-limit 0: a rank needs some memory; leave the option out for no limit"
        )
    return size
