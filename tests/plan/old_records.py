"""Turns decisions that an earlier version wrote into questions of this one."""

from __future__ import annotations

from typing import Any

from pydantic import TypeAdapter

from dynmo.cost.costs_file import Pair, Profile
from dynmo.cost.layer_cost import Forecast, LayerCost, LinkCost
from dynmo.pipeline.gathering import UNKNOWN_LINK, with_all_shares
from dynmo.plan.decide import Decision, DecisionRecord
from dynmo.plan.options import Balance, Elastic
from dynmo.plan.partition import Partition
from dynmo.plan.problem import Choice, Kind, Layers, Mesh, Problem, Readings, Rules, Work
from dynmo.schedule.bounds import Objective

_LAYERS = TypeAdapter(tuple[LayerCost, ...])
_LINKS = TypeAdapter(tuple[tuple[Pair, LinkCost], ...])
_FORECASTS = TypeAdapter(tuple[tuple[Forecast, ...], ...])
_KINDS: dict[str, Kind] = {
    "move": "placement",
    "schedule": "placement",
    "mesh": "mesh",
    "ranks": "ranks",
}


def question(record: dict[str, Any]) -> DecisionRecord:
    """Returns an old record's question as one of this version, without its answer."""
    kind, old = record["kind"], record["situation"]
    mesh = Mesh(**old["mesh"])
    counts = record["answer"]["partition"] if kind == "schedule" else old["partition"]["counts"]
    partition, groups = Partition(tuple(counts)), old.get("accumulation_groups", 1)

    def layers(found: Any) -> Layers:
        costs = _LAYERS.validate_python(found)
        if not old.get("zero"):
            return costs
        known = mesh.replicas, old.get("moments", 2), old.get("masters", False)
        return tuple(with_all_shares(cost, *known) for cost in costs)

    balance = Balance(**old.get("balance", {}))
    elastic = Elastic(**old.get("elastic", {}))
    links = _LINKS.validate_python(old.get("mesh_links") or old["links"])
    problem = Problem(
        Profile(
            layers(old["layers"]),
            tuple(old["names"]),
            old["first_trainable"],
            links,
            microbatch=mesh.micro_batch,
            microbatches=mesh.microbatches,
            ranks=mesh.pipeline,
            partition=partition.counts,
            schedule=mesh.schedule,
        ),
        Work(
            Objective(old.get("objective", Objective.SPAN)),
            old.get("post_validation", False),
            old.get("chunks"),
            groups,
            old.get("zero", 0),
            balance.cost,
            old.get("seed", 0),
            old["step"],
            old["end"],
        ),
        _ranks_own(old.get("memory_limit")),
        _ranks_own(old.get("speeds")),
        min((x.bytes_per_second for _, x in links), default=UNKNOWN_LINK),
        tuple(old.get("nodes", ())),
        _FORECASTS.validate_python(old.get("forecasts", ())),
    )
    replicas = tuple(count for _, count in old.get("shapes", ()))
    sizes: tuple[int, ...] = ()
    if kind == "ranks":
        replicas = mesh.fewer_replicas(groups) if old.get("expert", 1) == 1 else (mesh.replicas,)
        sizes = mesh.near_sizes(groups, replicas) if elastic.retune else ()
    rules = Rules(
        _KINDS[kind],
        Balance(**old.get("balance", {}) | {"balancer": "none"}) if kind == "schedule" else balance,
        elastic,
        tuple(old.get("schedules", ())) if kind == "move" else (),
        replicas,
        sizes,
        old.get("there", 1),
        old.get("most", 1),
    )
    readings = Readings(
        tuple(layers(half) for half in old["halves"]),
        old.get("doubt", 1.0),
        old.get("preempted", 0.0),
        old.get("fixed_seconds", 0.0),
        old.get("seconds_per_byte"),
        old.get("pause", 0.0),
        None if old.get("scheduled") is None else layers(old["scheduled"]),
        _ranks_own(old.get("scheduled_speeds")),
        old.get("is_measured", False),
        old.get("reference"),
    )
    return DecisionRecord(problem, Choice(mesh, partition), rules, readings, {})


def _ranks_own(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def answer(kind: str, decision: Decision) -> dict[str, Any]:
    """Returns a decision as the old record has it."""
    plan, verdict = decision.plan, decision.verdict
    mesh, counts = plan.mesh, list(plan.partition.counts)
    if kind == "schedule":
        return {"partition": counts, "change": decision.remade is not None}
    certain = {"move": verdict.pays, "uncertain": verdict.uncertain}
    if kind == "move":
        if decision.refusal or "nothing else is better" in verdict.reason:
            return {"move": False}
        return certain | {"to": counts}
    if kind == "mesh":
        if not verdict.pays:
            return certain
        return {"move": True, "to": [mesh.pipeline, mesh.replicas], "partition": counts}
    if decision.refusal:
        return {"move": False}
    changed = {"to": [mesh.pipeline, mesh.replicas, mesh.microbatches], "partition": counts}
    return certain | {"ranks": decision.ranks} | (changed if verdict.pays else {})
