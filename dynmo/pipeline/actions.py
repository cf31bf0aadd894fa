"""Changes what the ranks hold or run, and which ranks there are, between steps.

    freeze, unfreeze, place_groups     other work
    move, replan                       the same mesh: layers move, another order or schedule
    reshape                            the same ranks, another mesh
    shrink, grow, arrive               other ranks

    shrink   4 ranks: layers go to those that stay -> the leaving ranks go -> 2 ranks meet anew
    grow     2 ranks and 2 newcomers meet anew -> layers go where they now belong

Layers travel with weights, gradients, optimizer state and flags, so the numbers stay the same. A
shrink moves them in the old generation of process groups, a growth in the new one. Until the layers
have arrived everywhere, every rank still holds what it held.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NoReturn

import torch
from torch import Tensor

from dynmo.cost.layer_cost import LayerCost
from dynmo.errors import ConfigError, PartitionError, RankDied, RunError, WaitTimeout
from dynmo.models.group_placement import GroupPlacement
from dynmo.plan.partition import Layout, Layouts, Move, Partition, moves_between_ranks
from dynmo.runtime.comm.agreement import agree
from dynmo.runtime.comm.meeting import meeting_of
from dynmo.runtime.engine.engine import Engine
from dynmo.runtime.engine.profiler import measure_links
from dynmo.runtime.state.frozen_weights import Frozen
from dynmo.runtime.state.migration import Arrival, Migration, exchange
from dynmo.runtime.state.reshape import Holders, holders, transfers


class ResizeFailed(RunError):
    """Newcomers did not come, or a rank could not give or take a layer.

    The run goes on as it was.
    """


@dataclass(frozen=True)
class NextMesh:
    """The mesh in which the run goes on.

    Attributes:
        pipeline: Number of ranks of a pipeline.
        data: Number of replicas.
        partition: Layers on each new stage.
        microbatches: Number of microbatches of all replicas. The numbers change if the batch is cut
            otherwise from now on.
    """

    pipeline: int
    data: int
    partition: Partition
    microbatches: int

    def layout(self, layouts: Layouts, before: Layout) -> Layout:
        return layouts.resized(before, self.pipeline, self.data, self.partition, self.microbatches)


class Actions:
    """Carries out decisions on an engine.

    All ranks call every method but `rebuild` together, with equal arguments. Each method first
    waits until the last step is final.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._store, self._pending = engine.store, engine.pending
        self._programs, self._profiler = engine.programs, engine.profiler
        self._schedule_keeper = engine.schedule_keeper

    def freeze(self, layers: Collection[int]) -> None:
        """Stops training these layers. Their optimizer state stays.

        A frozen prefix of the model runs no backward.

        Raises:
            PartitionError: There is no such layer, or none would train.
        """
        frozen = self._shared_flags()
        self._check_layers(layers)
        before, after = frozen.first_trainable, frozen.first_trainable_after(layers)
        if after is None:
            raise PartitionError(f"freezing layers {sorted(layers)} would leave nothing to train")
        new = set(layers) - frozen.layers
        frozen.freeze(layers)
        # The layers between the old and the new end of the frozen prefix cease to run B.
        self.on_workload_change({*new, *range(before, after + 1)})

    def unfreeze(self, layers: Collection[int]) -> None:
        """Trains frozen layers again, from the optimizer state that they had."""
        frozen = self._shared_flags()
        self._check_layers(layers)
        before = frozen.first_trainable
        self._schedule_keeper.forget()  # costs of layers that train again are not measured yet
        frozen.thaw(layers)
        self.on_workload_change({*layers, *range(frozen.first_trainable, before + 1)})

    def _shared_flags(self) -> Frozen:
        store = self._pending.final
        if store.layers:  # a newcomer is still alone
            store.share_flags()
        return store.frozen

    def _check_layers(self, layers: Collection[int]) -> None:
        count = self._store.model.layers
        outside = next((index for index in layers if not 0 <= index < count), None)
        if outside is not None:
            raise PartitionError(
                f"there is no layer {outside}; the model has {count}, from 0 to {count - 1}"
            )

    def on_workload_change(self, layers: Iterable[int]) -> None:
        """Drops the measurements of layers whose work changes from the next step on."""
        store, layers = self._pending.final, list(layers)
        self._profiler.forget(layers)
        self.engine.speeds.on_workload_change(layers)
        store.on_change(layers)
        store.rebuilt.difference_update(layers)
        self._schedule_keeper.elide()
        for index in layers:
            if index in store.layers:
                store.layers[index].forget_sizes()
        self._programs.relower()

    def move(self, partition: Partition, schedule: str | None = None) -> Migration:
        """Moves layers with weights, gradients, optimizer state and flags. All or nothing.

        Args:
            partition: Number of layers on each stage.
            schedule: Another schedule, whose stages `partition` has.

        Raises:
            ConfigError: The schedule cannot be changed.
            PartitionError: `partition` has another number of layers or stages.
            NoRoomError: The layers do not fit the memory there. Nothing has moved.
        """
        store = self._pending.final
        world, before = store.world, store.layout
        layout = self.engine.layouts.make(
            *before.shape, before.microbatches, partition, schedule or before.schedule
        )
        plan = moves_between_ranks(before.partition, partition, before.processes, layout.processes)
        places = [(each.schedule, each.partition.counts) for each in (before, layout)]
        agree(world, places, "the new placement")
        store.check_names({move.layer for move in plan})
        migration = exchange(
            world,
            plan,
            lambda i: (store.modules[i], store.state(i)),
            store.check_arrival,
            partial(store.moved, layout, plan),
        )
        store.tied.join()
        store.share_flags()
        self._profiler.forget(move.layer for move in plan)
        self._programs.relower()
        if layout.stage_ranks != before.stage_ranks:
            # The steps now begin and end on other ranks.
            self._pending.reshaped()
        if layout.pairs != before.pairs:
            self._schedule_keeper.links = measure_links(world, layout.pairs)
        self._on_recompute_change(before.recomputed ^ layout.recomputed)
        return migration

    def reshape(self, *, pipeline: int, data: int, partition: Partition | None = None) -> Migration:
        """Makes the same ranks another mesh. All or nothing.

        The batch stays the same, so each replica has other microbatches from the next step on.

        Args:
            pipeline: Number of ranks of a pipeline.
            data: Number of replicas.
            partition: Layers on each new stage. The default is as even as possible.

        Raises:
            InputError: The sizes do not fit the model, the batch or the schedule.
        """
        store = self._pending.final
        everyone, before = store.world.everyone, store.layout
        if before.sliced:
            raise ConfigError("a pipeline of slices cannot be reshaped; make another")
        if store.spread is not None:
            raise ConfigError(
                "replicas that share experts (parallel.expert) cannot be reshaped; make another "
                "pipeline"
            )
        if pipeline * data != everyone.size:
            raise ConfigError(
                f"{everyone.size} ranks cannot be {data} replicas of {pipeline} ranks; pipeline x "
                "replicas must be all ranks"
            )
        layout = self.engine.layouts.resized(before, pipeline, data, partition)
        agree(everyone, (pipeline, data, layout.partition.counts), "the new mesh")
        after = holders(layout.partition, layout.stage_ranks, data)
        plan = transfers(holders(before.partition, before.stage_ranks, before.replicas), after)
        store.check_names({move.layer for move in plan})
        whole = {i: store.state(i, whole=True) for i in sorted(store.layers)}

        def adopt(arrivals: list[Arrival]) -> None:
            self._programs.relower()
            store.reshaped(
                layout, [i for i in store.layers if everyone.rank not in after[i]], whole, arrivals
            )
            self._pending.reshaped()

        migration = exchange(
            everyone, plan, lambda i: (store.modules[i], whole[i]), store.check_arrival, adopt
        )
        store.share_flags()
        self._profiler.forget(move.layer for move in plan)
        self._schedule_keeper.reshaped(measure_links(store.world, layout.pairs))
        self._on_recompute_change(before.recomputed ^ layout.recomputed)
        return migration

    def _on_recompute_change(self, layers: frozenset[int]) -> None:
        """Forgets the costs of layers that begin or cease to be recomputed."""
        if layers:
            self._schedule_keeper.forget()
            self.on_workload_change(layers)

    def replan(self, layers: tuple[LayerCost, ...]) -> None:
        """Makes the schedule of the next steps from these costs, the same on every rank."""
        if self._schedule_keeper.from_costs:
            self._pending.settle()
            self._schedule_keeper.learn(layers)
            self._programs.relower()

    def rebuild(self, layer: int, moments: Mapping[str, Tensor]) -> None:
        """Trains the new parameters of one of this rank's layers. Only its rank calls it.

        Args:
            layer: A layer whose module has other parameters than before.
            moments: Their optimizer state, `parameter/moment` -> tensor.
        """
        self._pending.assert_final()
        self._store.rebuild(layer, moments)
        self._programs.relower()

    def place_groups(self, placements: Mapping[int, GroupPlacement]) -> int:
        """Moves groups of weights between the replicas that share them, with optimizer state.

        Returns:
            Bytes that all ranks received.

        Raises:
            ConfigError: The replicas cannot hold the groups in this way.
        """
        store = self._pending.final
        if store.spread is None:
            raise ConfigError(
                "experts cannot be placed where every replica holds all of them; set "
                "parallel.expert"
            )
        store.spread.check(placements)
        holders = {index: placement.holders for index, placement in sorted(placements.items())}
        everyone = store.world.everyone
        agree(everyone, holders, "the new places of groups")
        moved = torch.tensor([store.place_groups(placements)])
        self._programs.relower()
        return int(everyone.sum(moved, "all groups to arrive"))

    # -- other ranks -------------------------------------------------------------------------------

    def shrink(self, kept: Sequence[int], mesh: NextMesh) -> Migration:
        """Goes on with some of the ranks. The others hold nothing afterwards, and are alone.

        Args:
            kept: Global ranks that stay, ascending. They become ranks 0, 1, ...
            mesh: The mesh of these ranks.

        Raises:
            NoRoomError: The layers do not fit the memory there. Nothing has moved.
            ResizeFailed: A rank could not give or take a layer. Nothing has moved.
        """
        start, store = time.perf_counter(), self._pending.final
        everyone, before = meeting_of(store.world), store.layout
        self._check_size(len(kept), mesh)
        layout = mesh.layout(self.engine.layouts, before)
        self._agree_on_ranks(tuple(kept), mesh)
        after = tuple(tuple(kept[rank] for rank in ranks) for ranks in _holders(layout))
        plan, whole = transfers(_holders(before), after, store.spreads_groups), self._states()
        arrivals: list[Arrival] = []
        try:
            migration = exchange(
                everyone,
                plan,
                lambda i: (store.modules[i], whole[i]),
                store.check_arrival,
                arrivals.extend,
            )
        except (WaitTimeout, RankDied):
            raise
        except RunError as error:
            raise ResizeFailed(f"{error}; the run goes on with {everyone.size} ranks") from error
        rank = everyone.rank
        gone = [i for i in store.layers if rank not in after[i]]
        self._part()
        if rank not in kept:
            store.empty()
            everyone.leave()
            return migration
        everyone.renew(kept.index(rank), len(kept), everyone.generation + 1, everyone.timeout)
        self._take_up(layout, gone, whole, arrivals)
        self._pending.reshaped()
        self._finish(before, layout, plan)
        return replace(migration, seconds=time.perf_counter() - start)

    def grow(self, newcomers: int, mesh: NextMesh, join_timeout: float) -> Migration:
        """Goes on with more ranks. The newcomers call `arrive` meanwhile.

        Args:
            newcomers: Number of ranks that join, behind the present ranks.
            mesh: The mesh of all these ranks.
            join_timeout: Seconds to wait for them.

        Raises:
            ResizeFailed: The newcomers did not come or could not take their layers. The ranks go on
                as before, and nothing is lost.
        """
        start, store = time.perf_counter(), self._pending.final
        everyone, before = meeting_of(store.world), store.layout
        rank, size = everyone.rank, everyone.size
        self._check_size(size + newcomers, mesh)
        layout = mesh.layout(self.engine.layouts, before)
        self._agree_on_ranks(newcomers, mesh)
        whole = self._states()
        self._part()
        plan = transfers(_holders(before), _holders(layout), store.spreads_groups)
        try:
            everyone.renew(rank, size + newcomers, everyone.generation + 1, join_timeout)
            migration = self._exchange(layout, plan, whole)
        except RunError as error:
            self._go_back(rank, size, before, whole, error)
        self._finish(before, layout, plan)
        return replace(migration, seconds=time.perf_counter() - start)

    def arrive(
        self,
        rank: int,
        size: int,
        generation: int,
        mesh: NextMesh,
        *,
        join_timeout: float,
        groups: Mapping[int, GroupPlacement] | None = None,
    ) -> Migration:
        """Joins a run, as a newcomer whose layer store is bare. The others call `grow`."""
        store, before = self._store, self._store.layout
        layout = mesh.layout(self.engine.layouts, before)
        meeting_of(store.world).renew(rank, size, generation, join_timeout)
        plan = transfers(_holders(before), _holders(layout), store.spreads_groups)
        migration = self._exchange(layout, plan, {}, groups)
        self._finish(before, layout, plan)
        return migration

    def _exchange(
        self,
        layout: Layout,
        plan: Sequence[Move],
        whole: Mapping[int, dict[str, Tensor]],
        groups: Mapping[int, GroupPlacement] | None = None,
    ) -> Migration:
        store = self._store
        everyone, after = meeting_of(store.world), _holders(layout)

        def take_up(arrivals: list[Arrival]) -> None:
            gone = [i for i in store.layers if everyone.rank not in after[i]]
            self._take_up(layout, gone, whole, arrivals, groups)
            self._pending.renewed()

        return exchange(
            everyone, plan, lambda i: (store.modules[i], whole[i]), store.check_arrival, take_up
        )

    def _go_back(
        self,
        rank: int,
        size: int,
        before: Layout,
        whole: Mapping[int, dict[str, Tensor]],
        error: RunError,
    ) -> NoReturn:
        everyone = meeting_of(self._store.world)
        if self._store.layout is not before:
            # A rank was lost after the exchange, so layers are elsewhere already.
            raise error
        everyone.renew(rank, size, everyone.generation + 1, everyone.timeout)
        self._take_up(before, (), whole, ())
        self._pending.reshaped()
        self._finish(before, before, ())
        raise ResizeFailed(f"{error}; the run goes on with {size} ranks") from error

    def _check_size(self, size: int, mesh: NextMesh) -> None:
        store, pipeline, data = self._store, mesh.pipeline, mesh.data
        if store.layout.sliced:
            raise ConfigError("a pipeline of slices cannot get other ranks; make another")
        if store.spreads_groups and data != store.layout.replicas:
            raise ConfigError(
                "replicas that share experts (parallel.expert) stay as many; change the ranks of "
                "a pipeline only"
            )
        if meeting_of(store.world).home is None:
            raise ConfigError("ranks within a program's own process groups cannot become others")
        if pipeline * data != size:
            raise ConfigError(
                f"{size} ranks cannot be {data} replicas of {pipeline} ranks; their product must "
                "be the number of ranks"
            )

    def _agree_on_ranks(self, ranks: tuple[int, ...] | int, mesh: NextMesh) -> None:
        decision = (ranks, mesh.pipeline, mesh.data, mesh.partition.counts, mesh.microbatches)
        agree(self._store.world, decision, "which ranks go on")
        self._store.check_names(range(self._store.model.layers))

    def _states(self) -> dict[int, dict[str, Tensor]]:
        store = self._store
        # With ZeRO-1 they have the shares of all replicas, which must still be here. Replicas that
        # share experts keep their own part each.
        return {i: store.state(i, whole=not store.spreads_groups) for i in sorted(store.layers)}

    def _part(self) -> None:
        """Ends all use of the process groups on this rank."""
        self._programs.relower()
        self._store.replicas.close()
        self._pending.ring.close()

    def _take_up(
        self,
        layout: Layout,
        gone: Collection[int],
        whole: Mapping[int, dict[str, Tensor]],
        arrivals: Sequence[Arrival],
        groups: Mapping[int, GroupPlacement] | None = None,
    ) -> None:
        self._programs.relower()
        self._store.reshaped(layout, gone, whole, arrivals, groups)

    def _finish(self, before: Layout, layout: Layout, plan: Sequence[Move]) -> None:
        self._profiler.forget(move.layer for move in plan)
        self._schedule_keeper.reshaped(measure_links(self._store.world, layout.pairs))
        if layout.microbatches * layout.replicas != before.microbatches * before.replicas:
            self._schedule_keeper.forget()
            # The costs of all layers change.
            self._on_recompute_change(frozenset(range(layout.partition.layers)))
        else:
            self._on_recompute_change(before.recomputed ^ layout.recomputed)


def _holders(layout: Layout) -> Holders:
    return holders(layout.partition, layout.stage_ranks, layout.replicas)
