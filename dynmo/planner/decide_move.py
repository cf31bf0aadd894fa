"""Decides where the layers live, and in which order the ops run, on the present mesh."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from dynmo.balance.balancers import BalanceRequest, balancer
from dynmo.balance.layout import moves_between_ranks
from dynmo.balance.partition import Partition
from dynmo.balance.stage_costs import pipeline_costs
from dynmo.balance.trigger import FORCED, Decision, Outlook, confirmed, worth_moving_through
from dynmo.cost.layer_cost import LayerCost
from dynmo.planner.situation import Layers, Situation
from dynmo.planner.stage_plan import schedule_for_balancers
from dynmo.schedule.automatic.make import full_schedule
from dynmo.schedule.catalogue import entry
from dynmo.schedule.simulator import resident, simulate


@dataclass(frozen=True)
class MoveChoice:
    """A possible move of layers.

    Attributes:
        target: The placement after the move.
        on_the_way: Seconds that the layers take over the links.
        decision: Whether they move.
    """

    target: Partition
    on_the_way: float
    decision: Decision


def decide_move(now: Situation) -> MoveChoice | None:
    """Decides whether layers move, and where to.

    Returns:
        The decision. None if the balancer leaves the layers where they are.

    Raises:
        PartitionError: The balancer has no placement.
    """
    return None if now.balance.balancer == "none" else weigh_move(now, propose(now))


def propose(now: Situation) -> Partition:
    """Returns the balancer's placement."""
    return balancer(now.balance.balancer)(balance_request(now, now.layers))


def weigh_move(now: Situation, target: Partition) -> MoveChoice | None:
    """Decides whether a move to `target` repays itself. None if it is the present placement."""
    balance = now.balance
    if target == now.partition:
        return None
    on_the_way = _on_the_way(now, target)

    def decide(layers: Layers) -> Decision:
        return worth_moving_through(
            _outlook(now, layers, target),
            on_the_way + now.fixed_seconds,
            balance.margin,
            balance.hysteresis * now.doubt,
        )

    decision = decide(now.layers)
    if balance.balancer in FORCED:
        decision = Decision(True, decision.predicted_gain, f"{balance.balancer}: forced")
    elif decision.move:
        decision = confirmed(decision, list(map(decide, now.halves)), now.preempted)
    return MoveChoice(target, on_the_way, decision)


def balance_request(now: Situation, layers: tuple[LayerCost, ...]) -> BalanceRequest:
    """Returns the request to a balancer for a placement of these layers."""
    stages, limit = now.stages, now.memory_limit
    # Each stage is given its rank's whole limit. A balancer that knows the placement adds up the
    # bytes of a rank's stages. Memory is that of all stages training, whatever is frozen.
    limits = None if limit is None else (limit,) * len(stages.stage_ranks)
    full = full_schedule(stages.schedule, stages.ranks, stages.microbatches, stages.chunks)
    return BalanceRequest(
        layers,
        now.partition,
        now.balance.cost,
        resident(full),
        limits,
        now.seed,
        now.step,
        now.names,
        schedule_for_balancers(stages, layers),
        now.boundary_links,
        now.objective,
        now.first_trainable,
        stage_ranks=stages.stage_ranks,
    )


def _outlook(now: Situation, layers: Layers, target: Partition) -> list[Outlook]:
    """Returns the seconds of a step on both placements, from the next step to the run's end.

    The cases' actions before the next step itself are still to come, and were not measured.
    """
    make = schedule_for_balancers(now.stages, layers)

    def seconds(costs: Layers, partition: Partition) -> float:
        if costs == layers:
            return now.seconds_of(costs, partition)
        stages = pipeline_costs(costs, partition, links=now.boundary_links)
        return simulate(make(stages), stages).length(now.objective)

    return [
        Outlook(x.start, x.stop, *(seconds(x.layers, each) for each in (now.partition, target)))
        for x in now.intervals(layers)
    ]


def _on_the_way(now: Situation, target: Partition) -> float:
    """Returns the seconds of a move's layers, in sequence, over the slowest link."""
    moves = moves_between_ranks(now.partition, target, now.stages.stage_ranks)
    sizes = [now.layers[move.layer].moved_bytes for move in moves]
    if now.seconds_per_byte is not None:
        return now.seconds_per_byte * sum(sizes)
    links = [link for _, link in now.links]
    return math.fsum(max((link.seconds(x) for link in links), default=0.0) for x in sizes)


def decide_schedule(now: Situation, partition: Partition) -> float | None:
    """Decides whether the schedule is made anew from the present costs.

    One reading alone proves nothing. It must save a quarter of `balance.hysteresis`.

    Args:
        now: What is known.
        partition: The placement that it is for.

    Returns:
        The predicted share of a step that is saved. None if the schedule stays. Schedules that are
        not made from costs always stay.
    """
    if not now.halves:
        return None
    gain = schedule_gain(now, partition)
    if gain is None or (now.is_measured and gain <= now.balance.hysteresis / 4):
        return None
    return max(0.0, gain)


def schedule_gain(now: Situation, partition: Partition) -> float | None:
    """Returns the share of a step that a schedule of the present costs saves."""
    if not entry(now.mesh.schedule).from_costs:
        return None
    costs = pipeline_costs(now.layers, partition, links=now.boundary_links)
    before, after = (
        simulate(now.schedule_on(partition, layers), costs).length(now.objective)
        for layers in (now.scheduled, now.layers)
    )
    return 1 - after / before if before else 0.0


# -- answers as JSON -------------------------------------------------------------------------------


def move_answer(choice: MoveChoice | None) -> dict[str, Any]:
    if choice is None:
        return {"move": False}
    decision = choice.decision
    return {
        "move": decision.move,
        "to": list(choice.target.counts),
        "uncertain": decision.uncertain,
    }


def schedule_answer(partition: Partition, gain: float | None) -> dict[str, Any]:
    return {"partition": list(partition.counts), "change": gain is not None}
