"""Questions that a run could ask, from a few facts."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, TypeVar

from dynmo.cost.costs_file import Profile
from dynmo.cost.layer_cost import LayerCost, LinkCost
from dynmo.plan.decide import DecisionRecord
from dynmo.plan.partition import Partition
from dynmo.plan.problem import Choice, Mesh, Problem, Readings, Rules, Work
from dynmo.schedule.bounds import Objective

T = TypeVar("T")


def question(layers: tuple[LayerCost, ...], mesh: Mesh, partition: Partition, **known: Any):
    """Returns what a run with these layers asks, fifty steps before the end.

    `known` are fields of any of the records.
    """
    taken = set[str]()

    def record(kind: type[T], **more: Any) -> T:
        own = {field.name: known[field.name] for field in fields(kind) if field.name in known}  # pyright: ignore[reportArgumentType]
        taken.update(own)
        return kind(**more | own)

    names = tuple(map(str, range(len(layers))))
    link = (((0, 1), LinkCost(1e-4, 1e9)),)
    size = {"microbatch": mesh.micro_batch, "ranks": mesh.pipeline, "partition": partition.counts}
    profile = record(Profile, layers=layers, names=names, links=link, **size)
    work = record(Work, objective=Objective.MAKESPAN, accumulation_groups=1, step=50, end=100)
    problem = record(Problem, profile=profile, work=work, bandwidth=1e9)
    rules = record(Rules, available_ranks=mesh.gpus, most_ranks=mesh.gpus)
    readings = record(Readings, halves=(layers, layers), scheduled=layers)
    assert taken == known.keys()
    return DecisionRecord(problem, Choice(mesh, partition), rules, readings, {})
