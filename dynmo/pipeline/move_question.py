"""Asks the configured balancer for a running engine: would another placement repay its move?

The mesh stays the same. Nothing moves here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import cast

from dynmo.balance.balancers import BalanceRequest, balancer
from dynmo.balance.layout import moves_between_ranks
from dynmo.balance.partition import Cost, Partition
from dynmo.balance.trigger import (
    FORCED,
    Decision,
    Expected,
    Outlook,
    confirmed,
    forecast_intervals,
    worth_moving_through,
)
from dynmo.cost.layer_cost import LayerCost
from dynmo.pipeline.options import PipelineOptions
from dynmo.runtime.engine.engine import Engine
from dynmo.schedule.simulator import simulate

Forecasts = Callable[[int], Sequence[Sequence[Expected]]]
"""Returns the actions that each dynamic case expects after a step, the same on every rank."""


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


@dataclass(frozen=True)
class MoveSituation:
    """The measurements and limits that the decision rests on. They are the same on every rank.

    Attributes:
        options: Options of the pipeline.
        engine: Holds the layers.
        step: The next step.
        costs: Cost of each layer from all readings.
        halves: Costs from the earlier and from the later readings alone. Both must support a move.
        forecasts: Returns the actions that each dynamic case expects after a step.
        fixed: Seconds of a move beyond its layers' way over the links.
        doubt: Factor of the usual gain that a move must promise.
        preempted: Share of the ops' time that other processes take.
    """

    options: PipelineOptions
    engine: Engine
    step: int
    costs: tuple[LayerCost, ...]
    halves: tuple[tuple[LayerCost, ...], ...]
    forecasts: Forecasts
    fixed: float
    doubt: float
    preempted: float


def ask_move(situation: MoveSituation) -> MoveChoice | None:
    """Decides whether layers move, and where to. Every rank computes the same.

    Returns:
        The decision, or None if the balancer leaves the layers where they are.

    Raises:
        PartitionError: The balancer has no placement.
    """
    balance, engine, costs = situation.options.balance, situation.engine, situation.costs
    request = engine.schedule_keeper.request(
        costs, cast(Cost, balance.cost), situation.options.seed, situation.step
    )
    target = balancer(balance.balancer)(request)
    if target == engine.store.layout.partition:
        return None
    on_the_way = _on_the_way(engine, costs, target)

    def decide(layers: tuple[LayerCost, ...]) -> Decision:
        outlook = _outlook(situation, replace(request, layers=layers), target)
        return worth_moving_through(
            outlook,
            on_the_way + situation.fixed,
            balance.margin,
            balance.hysteresis * situation.doubt,
        )

    decision = decide(costs)
    if balance.balancer in FORCED:
        decision = Decision(True, decision.predicted_gain, f"{balance.balancer}: forced")
    elif decision.move:
        decision = confirmed(decision, list(map(decide, situation.halves)), situation.preempted)
    return MoveChoice(target, on_the_way, decision)


def _outlook(situation: MoveSituation, request: BalanceRequest, target: Partition) -> list[Outlook]:
    """Returns the seconds of a step on both placements, from the next step to the run's end.

    The placements are the present one and `target`.

    The cases' actions before the next step itself are still to come, and were not measured.
    """
    engine, costs, step = situation.engine, request.layers, situation.step

    def seconds(layers: tuple[LayerCost, ...], partition: Partition) -> float:
        if layers == costs or request.make is None:
            return engine.schedule_keeper.predict(layers, partition).length(
                engine.schedule_keeper.objective
            )
        stages = engine.schedule_keeper.stage_costs(layers, partition)
        return simulate(request.make(stages), stages).length(engine.schedule_keeper.objective)

    ahead = forecast_intervals(costs, situation.forecasts(step - 1), step, situation.options.end)
    both = (engine.store.layout.partition, target)
    return [
        Outlook(x.start, x.stop, *(seconds(x.layers, placement) for placement in both))
        for x in ahead
    ]


def _on_the_way(engine: Engine, costs: tuple[LayerCost, ...], target: Partition) -> float:
    """Returns the seconds of a move's layers, in sequence, over the slowest link."""
    sizes = [
        costs[move.layer].moved_bytes
        for move in moves_between_ranks(
            engine.store.layout.partition, target, engine.store.layout.placement
        )
    ]
    return sum(
        max(
            (link.seconds(size) for link in engine.schedule_keeper.links.values()),
            default=0.0,
        )
        for size in sizes
    )
