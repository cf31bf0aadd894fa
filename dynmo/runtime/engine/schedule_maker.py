"""Makes the schedules of a pipeline from its layout and the costs that are known."""

from __future__ import annotations

from contextlib import suppress

from dynmo.cost.costs_file import Profile
from dynmo.cost.layer_cost import LayerCost, LinkCost, elide
from dynmo.errors import InputError
from dynmo.plan.costs import even_costs, one_microbatch, roomy_caps
from dynmo.plan.evaluate import Plan, Replica, evaluate
from dynmo.plan.partition import Partition
from dynmo.plan.problem import Choice, Problem, Speeds, Work
from dynmo.plan.recompute import recompute_as_workspace
from dynmo.runtime.comm.agreement import agree
from dynmo.runtime.engine.rank_speeds import RankSpeeds
from dynmo.runtime.options import EngineOptions
from dynmo.runtime.state.layer_store import LayerStore
from dynmo.schedule.bounds import Objective
from dynmo.schedule.catalogue import entry
from dynmo.schedule.memory import reduction_bytes
from dynmo.schedule.op import Schedule
from dynmo.schedule.simulator import simulate

# A step's shares of F, B and W that differ by more ask for a new schedule. Noise does not.
_DRIFT = 0.05

Links = dict[tuple[int, int], LinkCost]
"""Link of each pair of ranks that hold neighbouring stages. The lower rank comes first."""


class ScheduleMaker:
    def __init__(
        self,
        store: LayerStore,
        options: EngineOptions,
        links: Links,
        speeds: RankSpeeds,
    ) -> None:
        self._store, self._options, self._speeds = store, options, speeds
        self.links = links
        # Costs that the next schedule is made from. None until something is measured.
        self.known: tuple[LayerCost, ...] | None = None
        # Speeds of the ranks that it is made from. None: all are 1.
        self.known_speeds: Speeds | None = None
        # What `inherent_idle` was last computed for, and the result. It costs a schedule.
        self._inherent: tuple[Replica, tuple[float, ...], float | None] | None = None

    @property
    def objective(self) -> Objective:
        has_barrier = not self._options.post_validation or self._store.tied.spans_ranks
        return Objective.MAKESPAN if has_barrier else Objective.SPAN

    # -- the schedule ------------------------------------------------------------------------------

    def agreed(self) -> Schedule:
        """Returns the schedule of the next steps, after all ranks have compared it."""
        schedule = self.on(self._store.layout.partition)
        if self.from_costs:
            agree(self._store.world, str(schedule), "the schedule")
        return schedule

    def on(self, partition: Partition) -> Schedule:
        """Returns the schedule of a placement, with the layers that are frozen now."""
        return self.replica(self.scheduled, self.known_speeds).schedule_on(partition)

    @property
    def scheduled(self) -> tuple[LayerCost, ...] | None:
        """Costs that the present schedule is made from: known ones, or of shapes."""
        return (self.known or self._guess()) if self.from_costs else None

    @property
    def from_costs(self) -> bool:
        return entry(self._store.layout.schedule).from_costs

    def plan(self, partition: Partition, layers: tuple[LayerCost, ...]) -> Plan:
        """Returns the plan of a placement at these costs."""
        replica = self.replica(layers, self._speeds.current)
        return evaluate(replica.problem, Choice(replica.mesh, partition))

    def replica(self, layers: tuple[LayerCost, ...] | None, speeds: Speeds | None) -> Replica:
        layout, options = self._store.layout, self._options
        first, links = self._store.frozen.first_trainable, tuple(self.links.items())
        profile = Profile(layers or (), (), first, links, microbatch=1)
        groups = self._store.accumulation_groups
        work = Work(self.objective, options.post_validation, options.chunks, groups)
        problem = Problem(profile, work, options.memory_limit, speeds)
        microbatches, replicas = layout.microbatches, layout.replicas
        return Replica(problem, problem.mesh(layout.ranks, microbatches, layout.schedule, replicas))

    def _guess(self) -> tuple[LayerCost, ...] | None:
        """Returns costs before any are measured: bytes by shape, and equal times."""
        layout, frozen = self._store.layout, self._store.frozen
        shapes = None if self._options.shapes is None else self._options.shapes(layout.replicas)
        if shapes is None:
            return None
        costs = recompute_as_workspace(shapes, layout.recomputed)
        return elide(costs, frozen.first_trainable, frozen.layers)

    def inherent_idle(self, kinds: tuple[float, float, float]) -> float | None:
        """Returns the idle ratio if these seconds of F, B and W were even over the stages.

        None if nothing was measured, or if there is no such schedule.
        """
        whole = sum(kinds)
        if not whole:
            return None
        shares = tuple(seconds / whole for seconds in kinds)
        about = self.replica(self.scheduled, None)
        if (
            self._inherent is None
            or self._inherent[0] != about
            or max(abs(x - y) for x, y in zip(shares, self._inherent[1], strict=True)) > _DRIFT
        ):
            idle = None
            with suppress(InputError):  # say, equal stages do not fit the memory limit
                idle = inherent_idle(about, *shares)
            self._inherent = about, shares, idle
        return self._inherent[2]

    def reshaped(self, links: Links) -> None:
        """Takes note of another mesh, whose ranks hold other bytes than the measured ones."""
        self.links, self.known_speeds = links, None
        self._speeds.reset()
        if self._options.memory_limit is not None:
            self.forget()

    def learn(self, layers: tuple[LayerCost, ...]) -> None:
        """Takes the costs, and the present speeds, that the next schedule is made from."""
        self.known, self.known_speeds = layers, self._speeds.current

    def forget(self) -> None:
        """Drops the known costs, because the work of some layer is not measured yet."""
        self.known = None

    def elide(self) -> None:
        """Updates the known costs for the frozen layers. This needs no measurement."""
        frozen = self._store.frozen
        if self.known is not None:
            self.known = elide(self.known, frozen.first_trainable, frozen.layers)


def inherent_idle(replica: Replica, f: float, b: float, w: float) -> float:
    """Returns the idle ratio of a schedule whose stages all have the same F, B and W.

    The layers tell what a schedule within a memory limit keeps alive. Every rank is assumed to hold
    the mean of the static memory.
    """
    layers, ranks, stage_ranks = replica.layers, replica.mesh.pipeline, replica.stage_ranks
    costs = even_costs(layers, len(stage_ranks), f, b, w)
    caps = roomy_caps(costs, stage_ranks)
    if layers and replica.limits is not None:
        aside = sum(x.static_bytes for x in layers) // ranks
        aside += max(x.workspace_bytes for x in layers)
        aside += reduction_bytes(layers) if replica.mesh.replicas > 1 else 0
        least = one_microbatch(costs, stage_ranks)
        caps = tuple(max(a, b - aside) for a, b in zip(least, replica.limits, strict=True))
    return simulate(replica.make(costs, caps, 0), costs).idle_ratio
