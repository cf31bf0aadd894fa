"""Which schedule a pipeline runs, what it would run on another placement, and what a balancer is
asked; nothing moves here.

layers' measured costs, links, layout --> stages' costs --> schedule --simulator--> seconds of a
step
                                                        --> request of a balancer
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from itertools import pairwise

from dynmo.balance.balancers import BalanceRequest
from dynmo.balance.partition import Cost, Partition
from dynmo.balance.stage_costs import pipeline_costs
from dynmo.cost.layer_cost import Costs, LayerCost, LinkCost, elide
from dynmo.planner.recompute import recompute_as_workspace
from dynmo.planner.stage_schedule import (
    StagePlan,
    StageRequest,
    plan_stages,
    schedule_for_balancers,
)
from dynmo.runtime.comm.agreement import agree
from dynmo.runtime.state.layer_store import LayerStore
from dynmo.schedule.automatic.make import full_schedule
from dynmo.schedule.bounds import Objective
from dynmo.schedule.catalogue import entry
from dynmo.schedule.op import Schedule
from dynmo.schedule.simulator import Timeline, resident, simulate

Links = dict[tuple[int, int], LinkCost]
"""Between the ranks of a pair, the lower first, that hold neighbouring stages."""

Shapes = Callable[[int], tuple[LayerCost, ...] | None]
"""What the layers hold, from shapes alone, on one of so many replicas; None where shapes do not
tell."""


class ScheduleKeeper:
    """Of the layers that `holding` knows, under the schedule of this name. memory_limit: bytes per
    rank, for schedules that are made within one. post_validation: steps may have no barrier at
    their end. accumulation_groups: of the whole mesh. shapes: what schedules are made from while
    nothing is measured."""

    def __init__(
        self,
        layer_store: LayerStore,
        name: str,
        chunks: int | None,
        memory_limit: int | None,
        links: Links,
        *,
        post_validation: bool,
        accumulation_groups: int,
        shapes: Shapes | None = None,
    ) -> None:
        self._layer_store, self._name, self._chunks, self._memory_limit = (
            layer_store,
            name,
            chunks,
            memory_limit,
        )
        self.links, self._post_validation, self._accumulation_groups, self._shapes = (
            links,
            post_validation,
            accumulation_groups,
            shapes,
        )
        # What the next schedule is made from; None until something is measured.
        self.known: tuple[LayerCost, ...] | None = None

    @property
    def objective(self) -> Objective:
        """What makes a step of this pipeline short."""
        return (
            Objective.MAKESPAN
            if not self._post_validation or self._layer_store.tied.apart
            else Objective.SPAN
        )

    # -- the schedule ------------------------------------------------------------------------------

    def agreed(self) -> Schedule:
        """The schedule of the next steps, which all ranks have compared."""
        schedule = self.on(self._layer_store.layout.partition)
        if entry(self._name).from_costs:
            agree(
                self._layer_store.world,
                hashlib.sha256(str(schedule).encode()).digest(),
                "the schedule",
            )
        return schedule

    def on(self, partition: Partition, layers: tuple[LayerCost, ...] | None = None) -> Schedule:
        """The schedule that would run on this placement, with what is frozen now.

        Args:
            partition: Number of layers on each stage.
            layers: Costs to make it for. The default is what is known of them.
        """
        layers = (layers or self.known or self._guess()) if entry(self._name).from_costs else None
        if (
            layers is None
        ):  # all stages count as alike, their activations 1: at most twice as many as 1F1B keeps
            placement = self._layer_store.layout.placement
            caps = (2.0 * len(placement),) * self._layer_store.layout.ranks
            return self._request.make(
                None, caps, partition.owner(self._layer_store.frozen.first_trainable)
            )
        return self.stage_plan(partition, layers).schedule

    def stage_plan(self, partition: Partition, layers: tuple[LayerCost, ...]) -> StagePlan:
        """The schedule of a placement at these costs, with its caps and memory."""
        return plan_stages(
            self._request,
            layers,
            partition,
            self._boundary_links(),
            self._layer_store.frozen.first_trainable,
        )

    @property
    def _request(self) -> StageRequest:
        layout = self._layer_store.layout
        return StageRequest(
            self._name,
            layout.ranks,
            layout.microbatches,
            self._chunks,
            self._memory_limit,
            self.objective,
            self._post_validation,
            layout.replicas,
            self._accumulation_groups // layout.replicas,
        )

    def _guess(self) -> tuple[LayerCost, ...] | None:
        """Costs before any are measured: bytes by shape, and every layer's times alike."""
        layout, frozen = self._layer_store.layout, self._layer_store.frozen
        shapes = None if self._shapes is None else self._shapes(layout.replicas)
        return (
            None
            if shapes is None
            else elide(
                recompute_as_workspace(shapes, layout.recomputed),
                frozen.first_trainable,
                frozen.layers,
            )
        )

    def full(self) -> Schedule:
        """The schedule with every stage training: an upper bound of what any frozen prefix keeps in
        memory."""
        return full_schedule(
            self._name,
            self._layer_store.layout.ranks,
            self._layer_store.layout.microbatches,
            self._chunks,
        )

    def predict(self, layers: tuple[LayerCost, ...], partition: Partition) -> Timeline:
        """What the simulator says of one step under these costs and this placement, with the
        schedule made for them."""
        return simulate(self.on(partition, layers), self.stage_costs(layers, partition))

    def replan(self, layers: tuple[LayerCost, ...], least: float) -> float | None:
        """Takes these costs for the next schedule, where that saves more than the share `least` of
        a step.

        Returns the share that the simulator says it saves; None where the schedule stays, as those
        do that are not made from costs.
        """
        if not entry(self._name).from_costs:
            return None
        partition = self._layer_store.layout.partition
        costs = self.stage_costs(layers, partition)
        before = simulate(self.on(partition), costs).length(self.objective)
        after = simulate(self.on(partition, layers), costs).length(self.objective)
        gain = 1 - after / before if before else 0.0
        if self.known is not None and gain <= least:
            return None
        self.known = layers
        return max(0.0, gain)

    def reshaped(self, links: Links) -> None:
        """Takes note of another mesh. A rank of it holds other bytes than were measured, such as
        shares of the optimizer state.

        Args:
            links: Between the ranks of the new mesh.
        """
        self.links = links
        if self._memory_limit is not None:
            self.forget()

    def forget(self) -> None:
        """Some layer does what nobody has measured."""
        self.known = None

    def elide(self) -> None:
        """What layers cost that are frozen by now is known without measuring."""
        if self.known is not None:
            self.known = elide(
                self.known,
                self._layer_store.frozen.first_trainable,
                self._layer_store.frozen.layers,
            )

    @property
    def message_timeout(self) -> float:
        """Seconds within which a message that was sent in time is there: twice what the slowest
        link takes for the smallest."""
        return 2 * max((link.latency for link in self.links.values()), default=0.0)

    # -- what a balancer is asked ------------------------------------------------------------------

    def request(
        self, layers: tuple[LayerCost, ...], cost: Cost, seed: int, step: int
    ) -> BalanceRequest:
        """What a balancer is asked: where these layers should live, under this pipeline's schedule,
        links and memory limit."""
        limit, layout = self._memory_limit, self._layer_store.layout
        # Each stage is given its rank's whole limit: a balancer that knows of the placement adds up
        # what a rank's stages hold.
        limits = None if limit is None else (limit,) * len(layout.placement)
        return BalanceRequest(
            layers,
            layout.partition,
            cost,
            resident(self.full()),
            limits,
            seed,
            step,
            self._layer_store.model.names,
            schedule_for_balancers(self._request, layers),
            self._boundary_links(),
            self.objective,
            self._layer_store.frozen.first_trainable,
            placement=layout.placement,
        )

    def stage_costs(self, layers: tuple[LayerCost, ...], partition: Partition) -> Costs:
        """The stages' costs, and the links' times for the messages that cross there."""
        return pipeline_costs(layers, partition, links=self._boundary_links())

    def _boundary_links(self) -> tuple[LinkCost, ...]:
        """The link behind each stage but the last; between two stages of one rank it costs
        nothing."""
        here = LinkCost(0.0, math.inf)
        return tuple(
            self.links.get((min(pair), max(pair)), here)
            for pair in pairwise(self._layer_store.layout.placement)
        )
