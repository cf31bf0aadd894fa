"""Changes what the ranks hold or run, between steps.

    freeze, unfreeze, place_groups     other work
    move, replan                       the same mesh: layers move, another order or schedule
    reshape                            the same ranks, another mesh

Layers travel with weights, gradients, optimizer state and flags, so the numbers stay the same.
Until the layers have arrived everywhere, every rank still holds what it held.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from functools import partial

import torch
from torch import Tensor

from dynmo.cost.layer_cost import LayerCost
from dynmo.errors import PartitionError
from dynmo.models.group_placement import GroupPlacement
from dynmo.pipeline.ahead import Ahead, can_move_ahead
from dynmo.plan.partition import Layout, Move, Partition, moves_between_ranks
from dynmo.runtime.comm.agreement import agree
from dynmo.runtime.engine.engine import Engine
from dynmo.runtime.engine.profiler import measure_links
from dynmo.runtime.state.frozen_weights import Frozen
from dynmo.runtime.state.migration import Arrival, Migration, exchange, holders, transfers


class Actions:
    """Carries out decisions on an engine.

    All ranks call every method but `rebuild` together, with equal arguments. Each method first
    waits until the last step is final.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._store, self._pending = engine.store, engine.pending
        self._programs, self._profiler = engine.programs, engine.profiler
        self._schedule_maker = engine.schedule_maker

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
        self._schedule_maker.forget()  # costs of layers that train again are not measured yet
        frozen.thaw(layers)
        self.on_workload_change({*layers, *range(frozen.first_trainable, before + 1)})

    def _shared_flags(self) -> Frozen:
        store = self._pending.final
        if store.layers:  # a newcomer is still alone
            store.frozen.share(store.world, store.layers)
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
        self._schedule_maker.elide()
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
        layout, plan = self._planned(partition, schedule)
        places = [(each.schedule, each.partition.counts) for each in (before, layout)]
        agree(world, places, "the new placement")
        store.check_names({move.layer for move in plan})
        migration = exchange(
            world,
            plan,
            lambda move: store.packed(move.layer, store.state(move.layer)),
            store.check_arrival,
            partial(store.moved, layout, plan),
        )
        store.tied.join()
        store.frozen.share(store.world, store.layers)
        self._profiler.forget(move.layer for move in plan)
        self._programs.relower()
        if layout.stage_ranks != before.stage_ranks:
            # The steps now begin and end on other ranks.
            self._pending.reshaped()
        if layout.pairs != before.pairs:
            self._schedule_maker.links = measure_links(world, layout.pairs)
        self._on_recompute_change(before.recomputed ^ layout.recomputed)
        return migration

    def _planned(
        self, partition: Partition, schedule: str | None
    ) -> tuple[Layout, tuple[Move, ...]]:
        before = self._store.layout
        layout = self.engine.layouts.make(
            *before.shape, before.microbatches, partition, schedule or before.schedule
        )
        return layout, moves_between_ranks(
            before.partition, partition, before.processes, layout.processes
        )

    def ahead(self, partition: Partition, schedule: str | None = None) -> Ahead | None:
        """Returns a move that travels while the next step runs. None if that cannot be.

        Raises:
            NoRoomError: The layers do not fit the memory there.
        """
        layout, plan = self._planned(partition, schedule)
        return Ahead(self.engine, layout, plan) if can_move_ahead(self.engine, layout) else None

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
        assert not before.sliced, "slices cannot be reshaped"
        assert not store.spreads_groups, "replicas that share experts cannot be reshaped"
        assert pipeline * data == everyone.size, "the mesh has all ranks"
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
            everyone,
            plan,
            lambda move: store.packed(move.layer, whole[move.layer]),
            store.check_arrival,
            adopt,
        )
        store.frozen.share(store.world, store.layers)
        self._profiler.forget(move.layer for move in plan)
        self._schedule_maker.reshaped(measure_links(store.world, layout.pairs))
        self._on_recompute_change(before.recomputed ^ layout.recomputed)
        return migration

    def _on_recompute_change(self, layers: frozenset[int]) -> None:
        """Forgets the costs of layers that begin or cease to be recomputed."""
        if layers:
            self._schedule_maker.forget()
            self.on_workload_change(layers)

    def replan(self, layers: tuple[LayerCost, ...]) -> None:
        """Makes the schedule of the next steps from these costs, the same on every rank."""
        if self._schedule_maker.from_costs:
            self._pending.settle()
            self._schedule_maker.learn(layers)
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
        assert store.spreads_groups, "replicas share groups"
        store.spread.check(placements)
        holders = {index: placement.holders for index, placement in sorted(placements.items())}
        everyone = store.world.everyone
        agree(everyone, holders, "the new places of groups")
        moved = torch.tensor([store.place_groups(placements)])
        self._programs.relower()
        return int(everyone.sum(moved, "all groups to arrive"))
