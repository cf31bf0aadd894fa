"""Plans the run of a config from shapes alone.

A plan has the placement, the schedule and the memory of each rank. Nothing is computed or
allocated.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from rich.table import Table

from dynmo.config import Config, mesh_shapes
from dynmo.cost.layer_cost import LayerCost
from dynmo.cost.profile_file import Profile
from dynmo.data.corpus import check_vocab, open_corpus
from dynmo.dynamism import make_cases
from dynmo.errors import NoRoomError
from dynmo.models.model import Model
from dynmo.models.registry import load_model
from dynmo.planner.mesh_search import MeshRequest, NoMeshFitsError, search
from dynmo.planner.recompute import recompute_as_workspace
from dynmo.planner.stage_schedule import plan_stages
from dynmo.schedule.automatic.make import full_schedule
from dynmo.schedule.bounds import Objective
from dynmo.train.setup import check_meshes, first_partition, memory_limit
from dynmo.train.shape_costs import known_costs, meta_layers, recompute_for, stage_request


@dataclass(frozen=True)
class RunPlan:
    """The plan of a run.

    Attributes:
        names: Name of each layer.
        partition: Number of layers on each stage.
        placement: The rank that holds each stage.
        parameters: Number of parameters of each stage.
        memory: Bytes of each rank at the schedule's peak.
        limit: Bytes that a rank may use. None means unlimited.
        schedule: Name of the schedule.
        microbatches: Number of microbatches of a step.
        precision: The precision that the model computes in.
        recompute: The layers that recompute.
        activations_unknown: Why the layers' activations are unknown. `memory` is then without them.
    """

    names: tuple[str, ...]
    partition: tuple[int, ...]
    placement: tuple[int, ...]
    parameters: tuple[int, ...]
    memory: tuple[int, ...]
    limit: int | None
    schedule: str
    microbatches: int
    precision: str = "float32"
    recompute: tuple[int, ...] = ()
    activations_unknown: str | None = None

    def check_memory(self) -> None:
        """Raises NoRoomError if a rank needs more than the limit. The message names the rank."""
        for rank, need in enumerate(self.memory):
            if self.limit is None or need <= self.limit:
                continue
            if self.activations_unknown is not None:
                raise NoRoomError(
                    f"rank {rank} needs {need} bytes for parameters, gradients and optimizer "
                    f"state alone, over pipeline.memory_limit = {self.limit}; use more ranks, "
                    "parallel.zero = 1 with replicas, or a higher limit"
                )
            raise NoRoomError(
                f"rank {rank} needs {need} bytes at the peak of {self.schedule}, over "
                f"pipeline.memory_limit = {self.limit}; use more ranks, smaller microbatches, "
                "train.recompute = 'auto', or a schedule that keeps fewer in flight"
            )

    def to_json(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if key != "names"}

    def table(self) -> Table:
        recompute = (
            f", {len(self.recompute)} of {len(self.names)} layers recomputed in B"
            if self.recompute
            else ""
        )
        limit = "" if self.limit is None else f", limit {self.limit / 2**20:,.1f} MiB"
        known = "" if self.activations_unknown is None else "; parameters only, activations unknown"
        table = Table(
            title=f"{self.schedule}, {len(self.memory)} ranks, {self.microbatches} "
            f"microbatches, {self.precision}{recompute}{limit}{known}",
            title_justify="left",
        )
        for heading in (
            "rank",
            "layers",
            "first",
            "last",
            "parameters",
            "memory at peak" if not known else "memory without activations",
        ):
            table.add_column(heading, justify="left" if heading in ("first", "last") else "right")
        start = 0
        for stage, (count, rank) in enumerate(zip(self.partition, self.placement, strict=True)):
            first, last = self.names[start], self.names[start + count - 1]
            start += count
            # The row of a rank's first stage shows the rank's memory.
            memory = (
                f"{self.memory[rank] / 2**20:,.1f} MiB"
                if self.placement.index(rank) == stage
                else ""
            )
            table.add_row(str(rank), str(count), first, last, f"{self.parameters[stage]:,}", memory)
        return table


def dry_run(config: Config) -> RunPlan:
    """Plans the run of a config without running it.

    Raises:
        NoRoomError: A rank's memory at the schedule's peak is over the limit.
        ConfigError: The config is wrong. A run would raise the same error.
    """
    model = load_model(config)
    if config.model.kind != "emulated":
        check_vocab(config.model.vocab)
    open_corpus(config.data.source)
    cases = make_cases(config, model.layers)
    modules = meta_layers(model) if cases else []
    for case in cases:
        case.check(modules)
    first_partition(config, model.layers)
    check_meshes(config, model.layers)
    costs, unknown = known_costs(config, model)
    check_later_ranks(config, model, costs, torch.device("cpu"))
    return first_plan(config, model, costs, torch.device("cpu"), unknown)


def check_later_ranks(
    config: Config, model: Model, costs: tuple[LayerCost, ...], device: torch.device
) -> None:
    """Checks that the model fits the later numbers of ranks that the config names.

    Args:
        config: Config of the run.
        model: Model of the run.
        costs: Cost of each layer from shapes.
        device: Device of the ranks.

    Raises:
        NoRoomError: No placement on so many ranks fits the memory limit. Nothing has moved.
    """
    limit, elastic = memory_limit(config, device), config.elastic
    if limit is None or config.train.recompute != "none":
        return
    wanted = {
        pipeline * data: f"elastic.reshape_at: [{step}, {pipeline}, {data}]"
        for step, pipeline, data in elastic.reshape_at
    }
    if elastic.target_ranks is not None:
        wanted[elastic.target_ranks] = f"elastic.target_ranks = {elastic.target_ranks}"
    # Any times will do, because only the memory counts.
    layers = tuple(replace(cost, f=1.0, b=1.0, w=1.0) for cost in costs)
    for ranks, key in wanted.items():
        request = MeshRequest(
            Profile(
                layers, model.names, model=config.model.kind, microbatch=config.train.micro_batch
            ),
            gpus=ranks,
            global_batch=config.train.global_batch,
            micro_batches=(config.train.micro_batch,),
            schedules=(config.pipeline.schedule,),
            chunks=config.pipeline.chunks,
            memory_limit=limit,
            zero=config.parallel.zero,
            replicas=tuple(data for _, data in mesh_shapes(config, ranks)),
            accumulation_groups=config.accumulation_groups,
        )
        try:
            search(request, quick=True)
        except NoMeshFitsError as error:
            raise NoRoomError(
                f"{key} cannot hold the model: {error.shortage}; use more ranks, or a higher "
                "memory limit"
            ) from None


def first_plan(
    config: Config,
    model: Model,
    costs: tuple[LayerCost, ...],
    device: torch.device,
    activations_unknown: str | None = None,
) -> RunPlan:
    """Plans the run from the first step on.

    Args:
        config: Config of the run.
        model: Model of the run.
        costs: Cost of each layer from shapes.
        device: Device of the ranks.
        activations_unknown: Why `costs` are without activations. None means that they have them.

    Raises:
        NoRoomError: A rank's memory is over the limit.
    """
    partition, replicas = first_partition(config, model.layers), config.parallel.data
    name, ranks = config.pipeline.schedule, config.parallel.pipeline
    full = full_schedule(name, ranks, config.microbatches, config.chunks)
    recompute = recompute_for(config, model, device)
    recomputed = frozenset(
        recompute(partition, full, replicas) if callable(recompute) else recompute
    )
    costs = recompute_as_workspace(costs, recomputed)
    limit = memory_limit(config, device)
    request = stage_request(config, replicas, limit)
    holder = [request.placement[partition.owner(layer)] for layer in range(model.layers)]
    if any(holder[owner] != holder[user] for (owner, _), (user, _) in model.tied):
        # A weight that is tied over two ranks keeps the barrier at the end of a step.
        request = replace(request, objective=Objective.MAKESPAN)
    stage_plan = plan_stages(request, costs, partition, None, 0)
    plan = RunPlan(
        names=model.names,
        partition=partition.counts,
        placement=stage_plan.request.placement,
        parameters=tuple(
            sum(costs[layer].parameters for layer in partition.range_of(stage))
            for stage in range(partition.ranks)
        ),
        memory=stage_plan.memory,
        limit=limit,
        schedule=stage_plan.schedule.name,
        microbatches=config.microbatches,
        precision=config.train.precision,
        recompute=tuple(sorted(recomputed)),
        activations_unknown=activations_unknown,
    )
    plan.check_memory()
    return plan
