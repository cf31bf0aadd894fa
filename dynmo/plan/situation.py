"""What is known before a step. Every decision is a pure function of it.

    measured costs, links, limits --> Situation --> decide_move       where the layers live
                                                --> decide_schedule   the order of the ops
                                                --> decide_mesh       pipeline x replicas
                                                --> decide_ranks      how many ranks

A run gathers a `Situation`, the same on every rank, and writes it with the answer to
`decisions.jsonl`. `dynmo simulate` asks the same functions again, without ranks.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter

from dynmo.cost.input_file import read_text
from dynmo.cost.layer_cost import Forecast, LayerCost, LinkCost
from dynmo.cost.profile_file import Pair, Profile
from dynmo.errors import InputError
from dynmo.files import parse_json
from dynmo.plan.mesh_plan import Mesh
from dynmo.plan.options import Balance, Elastic
from dynmo.plan.partition import Partition, uniform
from dynmo.plan.speeds import Speeds
from dynmo.plan.stage_plan import StageRequest, schedule_on
from dynmo.plan.trigger import ForecastInterval, forecast_intervals
from dynmo.schedule.bounds import Objective
from dynmo.schedule.memory import Limit
from dynmo.schedule.op import Schedule
from dynmo.schedule.simulator import simulate

Layers = tuple[LayerCost, ...]
Kind = Literal["move", "schedule", "mesh", "ranks"]


@dataclass(frozen=True)
class Situation:
    """What is known before a step, the same on every rank.

    Attributes:
        end: The step after the last.
        layers: Cost of each layer from all readings: seconds per microbatch, and bytes.
        halves: The costs from the earlier and from the later readings alone. Empty if some time has
            one reading only.
        links: Link of each pair of neighbouring ranks of a pipeline, the lower rank first.
        scheduled: Costs that the present schedule was made from. None if it knows no costs.
        is_measured: Whether `scheduled` was measured.
        forecasts: What each dynamic case expects.
        memory_limit: Bytes of a rank, or of each. None means unlimited.
        speeds: Speed of each rank of a pipeline. None: all are 1. `layers` are costs at speed 1.
        scheduled_speeds: Speeds that the present schedule was made from.
        zero: 1 if ZeRO divides the optimizer state over the replicas, else 0.
        expert: Number of replicas that share experts.
        accumulation_groups: Number of accumulation groups of the whole mesh.
        moments: Optimizer moments of a parameter.
        masters: Whether parameters have a float32 master.
        shapes: The meshes that the present ranks can form.
        mesh_links: `links`. If there are none, the link of some other pair of ranks.
        fixed_seconds: Seconds of a move beyond its layers' way over the links.
        seconds_per_byte: Seconds of a move per byte, instead of those of the links.
        schedules: Schedules that may take the present one's place. Empty: it stays.
        doubt: Factor of the usual gain that a move must promise.
        preempted: Share of the ops' time that other processes take.
        pause: Seconds that a change of ranks takes beyond its bytes.
        nodes: Name of the machine of each rank.
        there: Number of ranks, newcomers included.
        most: The largest number of ranks that the run has had.
        reference: Seconds that a step took at first. None means the best predicted seconds now.
    """

    step: int
    end: int
    layers: Layers
    halves: tuple[Layers, ...]
    names: tuple[str, ...]
    first_trainable: int
    links: tuple[tuple[Pair, LinkCost], ...]
    mesh: Mesh
    partition: Partition
    scheduled: Layers | None = None
    is_measured: bool = False
    forecasts: tuple[tuple[Forecast, ...], ...] = ()
    chunks: int | None = None
    objective: Objective = Objective.SPAN
    post_validation: bool = False
    memory_limit: Limit = None
    speeds: Speeds | None = None
    scheduled_speeds: Speeds | None = None
    zero: int = 0
    expert: int = 1
    accumulation_groups: int = 1
    moments: int = 2
    masters: bool = False
    shapes: tuple[tuple[int, int], ...] = ()
    mesh_links: tuple[tuple[Pair, LinkCost], ...] = ()
    fixed_seconds: float = 0.0
    seconds_per_byte: float | None = None
    doubt: float = 1.0
    preempted: float = 0.0
    pause: float = 0.0
    nodes: tuple[str, ...] = ()
    there: int = 1
    most: int = 1
    reference: float | None = None
    balance: Balance = field(default_factory=Balance)
    elastic: Elastic = field(default_factory=Elastic)
    seed: int = 0
    schedules: tuple[str, ...] = ()

    def under(self, schedule: str) -> Situation:
        """Returns the same situation with another schedule, and as many layers on each stage."""
        if schedule == self.mesh.schedule:
            return self
        there = replace(self, mesh=replace(self.mesh, schedule=schedule))
        stage_ranks, links = there.stages.stage_ranks, dict(self.links)
        # Ranks that have not exchanged messages yet are as far apart as any others.
        slowest = LinkCost(
            max((link.latency for link in links.values()), default=0.0),
            min((link.bytes_per_second for link in links.values()), default=math.inf),
        )
        for first, second in pairwise(stage_ranks):
            if first != second:
                links.setdefault((min(first, second), max(first, second)), slowest)
        placed = uniform(len(self.layers), len(stage_ranks))
        return replace(there, links=tuple(links.items()), partition=placed)

    @cached_property
    def stages(self) -> StageRequest:
        return StageRequest(
            self.mesh.schedule,
            self.mesh.pipeline,
            self.mesh.microbatches,
            self.chunks,
            self.memory_limit,
            self.objective,
            self.post_validation,
            self.mesh.replicas,
            self.accumulation_groups // self.mesh.replicas,
            self.speeds,
        )

    @cached_property
    def boundary_links(self) -> tuple[LinkCost, ...]:
        """The link behind each stage but the last."""
        return links_behind(self.stages.stage_ranks, dict(self.links))

    def schedule_on(self, partition: Partition, layers: Layers | None) -> Schedule:
        links, first = self.boundary_links, self.first_trainable
        return schedule_on(self.stages, layers, partition, links, first)

    def seconds_of(self, layers: Layers, partition: Partition) -> float:
        """Predicts the seconds of a step on a placement, with the schedule of these costs."""
        return _seconds(self.stages, layers, partition, self.boundary_links, self.first_trainable)

    def intervals(self, layers: Layers) -> tuple[ForecastInterval, ...]:
        """Returns the costs from the next step on, cut where they are expected to change."""
        return forecast_intervals(layers, self.forecasts, self.step, self.end)

    def profile(self, layers: Layers) -> Profile:
        """Returns these costs as a costs file has them, without ZeRO's division."""
        return Profile(
            layers=tuple(map(self._whole, layers)) if self.zero else layers,
            names=self.names,
            first_trainable=self.first_trainable,
            links=self.mesh_links or self.links,
            microbatch=self.mesh.micro_batch,
            microbatches=self.mesh.microbatches,
            ranks=self.mesh.pipeline,
            partition=self.partition.counts,
            schedule=self.mesh.schedule,
        )

    def _whole(self, cost: LayerCost) -> LayerCost:
        return with_all_shares(cost, self.mesh.replicas, self.moments, self.masters)


@lru_cache(maxsize=256)
def _seconds(
    stages: StageRequest,
    layers: Layers,
    partition: Partition,
    links: tuple[LinkCost, ...],
    first_trainable: int,
) -> float:
    schedule = schedule_on(stages, layers, partition, links, first_trainable)
    costs = stages.costs(layers, partition, links)
    return simulate(schedule, costs).length(stages.objective)


def links_behind(stage_ranks: tuple[int, ...], links: dict[Pair, LinkCost]) -> tuple[LinkCost, ...]:
    """Returns the link behind each stage but the last.

    A link between two stages of one rank costs nothing. `links` have the lower rank first.
    """
    here = LinkCost(0.0, math.inf)
    return tuple(links.get((min(pair), max(pair)), here) for pair in pairwise(stage_ranks))


def with_all_shares(cost: LayerCost, replicas: int, moments: int, masters: bool) -> LayerCost:
    """Returns a layer's cost with all replicas' shares of its optimizer state.

    No share is larger than this one, which bounds them. Not every parameter may have a master. For
    a frozen layer nothing else is known.
    """
    most = replicas * cost.optimizer_bytes
    if not cost.gradient_bytes:
        return replace(cost, optimizer_bytes=most)
    copies = (1 + moments) * cost.gradient_bytes if cost.rollback_bytes else 0
    state = min(most, (moments + masters) * cost.gradient_bytes)
    return replace(cost, optimizer_bytes=state, rollback_bytes=copies)


# -- records of decisions --------------------------------------------------------------------------

IN_RUN = "decisions.jsonl"  # name of the records' file in a run's folder


@dataclass(frozen=True)
class DecisionRecord:
    """One decision: what was asked, what was known, and the answer as JSON."""

    kind: Kind
    situation: Situation
    answer: dict[str, Any]

    @property
    def stays(self) -> bool:
        """Whether nothing changes."""
        return not (self.answer.get("move") or self.answer.get("change"))

    def to_text(self) -> str:
        """Returns the record as one line of JSON without defaults. Floats read back exactly."""
        data = _RECORD.dump_python(self, mode="json", exclude_defaults=True)
        return json.dumps(data, separators=(",", ":"))

    @classmethod
    def from_text(cls, text: str) -> DecisionRecord:
        return _RECORD.validate_python(parse_json(text))


_RECORD = TypeAdapter(DecisionRecord)


def read_records(path: Path) -> Iterator[DecisionRecord]:
    """Reads the decisions that a run wrote. A torn last line (the run was cut off) is left out."""
    lines = read_text(path, str(path)).split("\n")
    for number, line in enumerate(lines, start=1):
        try:
            if line:
                yield DecisionRecord.from_text(line)
        except ValueError as error:
            if number == len(lines):
                return
            first = str(error).splitlines()[0]
            raise InputError(f"{path}, line {number} is no decision of a run: {first}") from None
