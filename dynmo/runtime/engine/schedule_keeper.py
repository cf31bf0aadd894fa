"""Makes a pipeline's schedule, and the requests to balancers. Nothing moves here.

layers' measured costs, links, layout --> stages' costs --> schedule --simulator--> seconds of a
step
                                                        --> request of a balancer
"""

from __future__ import annotations

import hashlib
import math
from itertools import pairwise
from typing import TYPE_CHECKING

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
from dynmo.runtime.engine.options import StepOptions
from dynmo.runtime.state.layer_store import LayerStore
from dynmo.schedule.automatic.make import full_schedule
from dynmo.schedule.bounds import Objective
from dynmo.schedule.catalogue import entry
from dynmo.schedule.op import Schedule
from dynmo.schedule.simulator import Timeline, resident, simulate

if TYPE_CHECKING:
    from dynmo.balance.balancers import BalanceRequest

Links = dict[tuple[int, int], LinkCost]
"""Link of each pair of ranks that hold neighbouring stages. The lower rank comes first."""


class ScheduleKeeper:
    """Knows the schedule of a pipeline, and the costs that it is made from.

    Args:
        layer_store: Knows the layers and where they are.
        steps: Name of the schedule, and the limits that it is made within.
        links: Measured links between the ranks.
        post_validation: Whether steps may have no barrier at their end.
    """

    def __init__(
        self,
        layer_store: LayerStore,
        steps: StepOptions,
        links: Links,
        *,
        post_validation: bool,
    ) -> None:
        self._layer_store, self._steps = layer_store, steps
        self.links, self._post_validation = links, post_validation
        # Costs that the next schedule is made from. None until something is measured.
        self.known: tuple[LayerCost, ...] | None = None

    @property
    def objective(self) -> Objective:
        """The time that this pipeline's schedule keeps short."""
        return (
            Objective.MAKESPAN
            if not self._post_validation or self._layer_store.tied.apart
            else Objective.SPAN
        )

    # -- the schedule ------------------------------------------------------------------------------

    def agreed(self) -> Schedule:
        """Returns the schedule of the next steps, after all ranks have compared it."""
        schedule = self.on(self._layer_store.layout.partition)
        if entry(self._steps.schedule).from_costs:
            agree(
                self._layer_store.world,
                hashlib.sha256(str(schedule).encode()).digest(),
                "the schedule",
            )
        return schedule

    def on(self, partition: Partition, layers: tuple[LayerCost, ...] | None = None) -> Schedule:
        """Returns the schedule of a placement, with the layers that are frozen now.

        Args:
            partition: Number of layers on each stage.
            layers: Costs to make it for. The default is the known costs.
        """
        from_costs = entry(self._steps.schedule).from_costs
        layers = (layers or self.known or self._guess()) if from_costs else None
        if layers is None:
            # All stages count as equal, with activations of 1. The cap is twice that of 1F1B.
            placement = self._layer_store.layout.placement
            caps = (2.0 * len(placement),) * self._layer_store.layout.ranks
            return self._request.make(
                None, caps, partition.owner(self._layer_store.frozen.first_trainable)
            )
        return self.stage_plan(partition, layers).schedule

    def stage_plan(self, partition: Partition, layers: tuple[LayerCost, ...]) -> StagePlan:
        """Returns the schedule of a placement at these costs, with its caps and memory.

        Args:
            partition: Number of layers on each stage.
            layers: Cost of each layer.
        """
        return plan_stages(
            self._request,
            layers,
            partition,
            self._boundary_links(),
            self._layer_store.frozen.first_trainable,
        )

    @property
    def _request(self) -> StageRequest:
        layout, steps = self._layer_store.layout, self._steps
        return StageRequest(
            steps.schedule,
            layout.ranks,
            layout.microbatches,
            steps.chunks,
            steps.memory_limit,
            self.objective,
            self._post_validation,
            layout.replicas,
            self._layer_store.accumulation_groups // layout.replicas,
        )

    def _guess(self) -> tuple[LayerCost, ...] | None:
        """Returns costs before any are measured: bytes by shape, and equal times."""
        layout, frozen = self._layer_store.layout, self._layer_store.frozen
        shapes = None if self._steps.shapes is None else self._steps.shapes(layout.replicas)
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
        """Returns the schedule with every stage training.

        Its memory is an upper bound for any frozen prefix.
        """
        return full_schedule(
            self._steps.schedule,
            self._layer_store.layout.ranks,
            self._layer_store.layout.microbatches,
            self._steps.chunks,
        )

    def predict(self, layers: tuple[LayerCost, ...], partition: Partition) -> Timeline:
        """Simulates one step with the schedule made for these costs and this placement.

        Args:
            layers: Cost of each layer.
            partition: Number of layers on each stage.

        Returns:
            The simulated timeline.
        """
        return simulate(self.on(partition, layers), self.stage_costs(layers, partition))

    def replan(self, layers: tuple[LayerCost, ...], least: float) -> float | None:
        """Takes these costs for the next schedule, if that saves enough.

        Args:
            layers: Cost of each layer.
            least: Share of a step that the new schedule must save more than.

        Returns:
            The predicted share of a step that is saved. None if the schedule stays. Schedules that
            are not made from costs always stay.
        """
        if not entry(self._steps.schedule).from_costs:
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
        """Takes note of another mesh.

        Its ranks hold other bytes than the measured ones, such as shares of the optimizer state.

        Args:
            links: Links between the ranks of the new mesh.
        """
        self.links = links
        if self._steps.memory_limit is not None:
            self.forget()

    def forget(self) -> None:
        """Drops the known costs, because the work of some layer is not measured yet."""
        self.known = None

    def elide(self) -> None:
        """Updates the known costs for the frozen layers. This needs no measurement."""
        if self.known is not None:
            self.known = elide(
                self.known,
                self._layer_store.frozen.first_trainable,
                self._layer_store.frozen.layers,
            )

    @property
    def message_timeout(self) -> float:
        """Seconds within which a message arrives that was sent in time.

        They are twice the latency of the slowest link.
        """
        return 2 * max((link.latency for link in self.links.values()), default=0.0)

    # -- requests to a balancer --------------------------------------------------------------------

    def request(
        self, layers: tuple[LayerCost, ...], cost: Cost, seed: int, step: int
    ) -> BalanceRequest:
        """Returns the request to a balancer for a placement of these layers.

        It has this pipeline's schedule, links and memory limit.

        Args:
            layers: Cost of each layer.
            cost: Figure of a layer that the balancer goes by.
            seed: Seed of balancers that draw.
            step: The next step.
        """
        limit, layout = self._steps.memory_limit, self._layer_store.layout
        # Each stage is given its rank's whole limit. A balancer that knows the placement adds up
        # the bytes of a rank's stages.
        limits = None if limit is None else (limit,) * len(layout.placement)
        from dynmo.balance.balancers import BalanceRequest

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
        """Returns the stages' costs, with the link seconds of the messages between them.

        Args:
            layers: Cost of each layer.
            partition: Number of layers on each stage.
        """
        return pipeline_costs(layers, partition, links=self._boundary_links())

    def _boundary_links(self) -> tuple[LinkCost, ...]:
        """Returns the link behind each stage but the last.

        A link between two stages of one rank costs nothing.
        """
        here = LinkCost(0.0, math.inf)
        return tuple(
            self.links.get((min(pair), max(pair)), here)
            for pair in pairwise(self._layer_store.layout.placement)
        )
