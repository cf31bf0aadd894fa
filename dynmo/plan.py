"""What a config would run, from shapes alone: placement, schedule, and memory of each rank. Nothing is computed or allocated."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Any

import torch
from rich.table import Table
from torch._subclasses.fake_tensor import FakeTensorMode

from dynmo.config import Config
from dynmo.costs import Costs, LayerCost, stage_costs
from dynmo.data.corpus import check_vocab, open_corpus
from dynmo.dynamism import make_cases
from dynmo.errors import ConfigError, PartitionError, place
from dynmo.memory import live_limits, rank_memory
from dynmo.models.emulated import EmulatedLayer
from dynmo.models.model import Model, load_model
from dynmo.runtime.clock import HostClock
from dynmo.runtime.profiler import weight_bytes
from dynmo.runtime.split_backward import Layer, Tensors
from dynmo.schedule.catalogue import make, placement_of
from dynmo.trainer import first_partition, memory_limit, optimizer_settings


@dataclass(frozen=True)
class Plan:
    """Per stage: layers, the rank that holds it, parameters; per rank: bytes at the schedule's peak."""

    names: tuple[str, ...]
    partition: tuple[int, ...]
    placement: tuple[int, ...]
    parameters: tuple[int, ...]
    memory: tuple[int, ...]
    limit: int | None
    schedule: str
    microbatches: int

    def to_json(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if key != "names"}

    def table(self) -> Table:
        limit = "" if self.limit is None else f", limit {self.limit / 2**20:,.1f} MiB"
        table = Table(title=f"{self.schedule}, {len(self.memory)} ranks, {self.microbatches} microbatches{limit}", title_justify="left")
        for heading in ("rank", "layers", "first", "last", "parameters", "memory at peak"):
            table.add_column(heading, justify="left" if heading in ("first", "last") else "right")
        start = 0
        for stage, (count, rank) in enumerate(zip(self.partition, self.placement, strict=True)):
            first, last = self.names[start], self.names[start + count - 1]
            start += count
            # A rank's memory stands at the first of its stages.
            memory = f"{self.memory[rank] / 2**20:,.1f} MiB" if self.placement.index(rank) == stage else ""
            table.add_row(str(rank), str(count), first, last, f"{self.parameters[stage]:,}", memory)
        return table


def dry_run(config: Config) -> Plan:
    """Raises PartitionError if a rank's memory at the schedule's peak is over the limit, ConfigError as a run would."""
    model = load_model(config)
    if config.model.kind != "emulated":
        check_vocab(config.model.vocab)
    open_corpus(config.data.source)
    make_cases(config, model.layers)
    partition = first_partition(config, model.layers)
    try:
        costs = shape_costs(config, model)
    except Exception as error:
        if not config.model.kind.startswith("python:"):
            raise
        what = f"{type(error).__name__}: {error}{place(error)}"
        raise ConfigError(f"model.kind = '{config.model.kind}': on shapes alone, its layers raised {what}") from error
    limit = memory_limit(config, torch.device("cpu"))
    placement = placement_of(config.pipeline.schedule, config.parallel.pipeline, config.chunks)
    # Shapes alone tell no times: every layer counts the same.
    stages = Costs(stage_costs([replace(c, f=1.0, b=1.0, w=1.0) for c in costs], partition.counts), (0.0,) * (len(placement) - 1))
    caps = live_limits(costs, partition.counts, placement, limit)
    schedule = make(config.pipeline.schedule, config.parallel.pipeline, config.microbatches, costs=stages, chunks=config.chunks, caps=caps)
    memory = rank_memory(costs, partition.counts, schedule)
    for rank, need in enumerate(memory):
        if limit is not None and need > limit:
            raise PartitionError(
                f"rank {rank} needs {need} bytes at the peak of {schedule.name}, over pipeline.memory_limit = {limit}; "
                "use more ranks, smaller microbatches, or a schedule that keeps fewer in flight"
            )
    parameters = tuple(sum(costs[i].parameters for i in partition.range_of(stage)) for stage in range(partition.ranks))
    return Plan(model.names, partition.counts, placement, parameters, memory, limit, schedule.name, config.microbatches)


def shape_costs(config: Config, model: Model) -> tuple[LayerCost, ...]:
    """Bytes of every layer, by running one microbatch on fake tensors: shapes without memory. Seconds are 0.

    Not on the meta device: there, attention would run (and save) the plain product of all positions with all, which no real device does.
    """
    # What a layer raises is told in one line; torch would print a traceback first.
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)
    with FakeTensorMode():
        return _shape_costs(config, model)


def _shape_costs(config: Config, model: Model) -> tuple[LayerCost, ...]:
    shape = (config.train.micro_batch, config.model.sequence)
    tensors: Tensors = (torch.zeros(shape, dtype=torch.int64),)
    targets = torch.zeros(shape, dtype=torch.int64)
    layers: list[Layer] = []
    for index, module in enumerate(model.build(range(model.layers))):
        if isinstance(module, EmulatedLayer):
            module.f = module.b = module.w = 0.0
        layers.append(Layer(index, module, HostClock(), config.seed))
        last = index == model.layers - 1
        finish = (lambda out: model.loss(out, targets)) if last else None
        tensors = layers[-1].forward(0, tensors, 0, graph=True, need_input=index > 0, finish=finish)
    gradients: Tensors = (torch.ones(()),)
    for layer in reversed(layers):
        gradients = layer.backward_input(0, gradients, deferred=True)
    out: list[LayerCost] = []
    # Of the optimizer, per trained weight: its moments, and what must be kept to take a step back.
    moments = optimizer_settings(config.train).moments
    optimizer = moments + (1 + moments) * (config.pipeline.post_validation and config.pipeline.rollback == "exact")
    for layer in layers:
        parameters = list(layer.module.parameters())
        weights = weight_bytes(layer.module)
        trained = sum(p.nbytes for p in parameters if p.requires_grad)
        count = sum(p.numel() for p in parameters)
        # ZeRO-1: a replica keeps its share of the optimizer's state.
        state = optimizer * trained // (config.parallel.data if config.parallel.zero else 1)
        sizes = (count, weights, trained, state, layer.activation_bytes, layer.stash_bytes, layer.output_bytes)
        out.append(LayerCost(0, 0, 0, *sizes))
    return tuple(out)
