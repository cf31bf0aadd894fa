"""Changes what the ranks hold or run, between steps.

Such changes are freezing, moves, other meshes and other schedules.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from dynmo.balance.expert_placement import ExpertPlacement
from dynmo.balance.layout import Layouts, moves_between_ranks
from dynmo.balance.partition import Partition
from dynmo.cost.layer_cost import LayerCost
from dynmo.errors import ConfigError, PartitionError
from dynmo.pipeline.schedule_keeper import ScheduleKeeper
from dynmo.pipeline.step_inputs import check_partition
from dynmo.runtime.comm.agreement import agree
from dynmo.runtime.engine.post_validation import PostValidation
from dynmo.runtime.engine.profiler import Profiler, measure_links
from dynmo.runtime.engine.programs import Programs
from dynmo.runtime.state.layer_store import LayerStore
from dynmo.runtime.state.migration import Arrival, Migration, exchange
from dynmo.runtime.state.reshape import holders, transfers


@dataclass(frozen=True)
class EngineParts:
    """The parts of an engine that a change between steps acts on.

    Attributes:
        layouts: Makes the possible layouts.
        layer_store: Holds this rank's layers, and knows where all others are.
        schedule_keeper: Knows the schedule and the costs.
        programs: Run the schedule. They are lowered again after a change.
        profiler: Drops its measurements of layers that change.
        pending: Knows the step that is not final yet, with post-validation.
    """

    layouts: Layouts
    layer_store: LayerStore
    schedule_keeper: ScheduleKeeper
    programs: Programs
    profiler: Profiler
    pending: PostValidation


class Actions:
    """Carries out decisions.

    All ranks call every method but `rebuild` together, with equal arguments. Each method first
    waits until the last step is final.
    """

    def __init__(self, parts: EngineParts) -> None:
        self._layouts, self._layer_store = parts.layouts, parts.layer_store
        self._schedule_keeper, self._programs = parts.schedule_keeper, parts.programs
        self._profiler, self._pending = parts.profiler, parts.pending

    def freeze(self, layers: Collection[int]) -> None:
        """Stops training these layers. Their optimizer state stays.

        A frozen prefix of the model runs no backward.

        Args:
            layers: Indices in the model.

        Raises:
            PartitionError: There is no such layer, or none would train.
        """
        frozen = self._pending.final.frozen
        self._check_layers(layers)
        before, after = frozen.first_trainable, frozen.first_trainable_after(layers)
        if after is None:
            raise PartitionError(f"freezing layers {sorted(layers)} would leave nothing to train")
        new = set(layers) - frozen.layers
        frozen.freeze(layers)
        # The layers between the old and the new end of the frozen prefix cease to run B.
        self.on_workload_change({*new, *range(before, after + 1)})

    def unfreeze(self, layers: Collection[int]) -> None:
        """Trains frozen layers again, from the optimizer state that they had.

        Args:
            layers: Indices in the model.

        Raises:
            PartitionError: There is no such layer.
        """
        frozen = self._pending.final.frozen
        self._check_layers(layers)
        before = frozen.first_trainable
        self._schedule_keeper.forget()  # costs of layers that train again are not measured yet
        frozen.thaw(layers)
        self.on_workload_change({*layers, *range(frozen.first_trainable, before + 1)})

    def _check_layers(self, layers: Collection[int]) -> None:
        count = self._layer_store.model.layers
        outside = next((index for index in layers if not 0 <= index < count), None)
        if outside is not None:
            raise PartitionError(
                f"there is no layer {outside}; the model has {count}, from 0 to {count - 1}"
            )

    def on_workload_change(self, layers: Iterable[int]) -> None:
        """Drops the measurements of layers whose work changes.

        Their costs change from the next step on.

        Args:
            layers: Indices in the model.
        """
        layer_store, layers = self._pending.final, list(layers)
        self._profiler.forget(layers)
        layer_store.outputs.forget(layers)
        self._schedule_keeper.elide()
        for index in layers:
            if index in layer_store.layers:
                layer_store.layers[index].forget_sizes()
        self._programs.relower()

    def move(self, partition: Partition, is_agreed: bool = False) -> Migration:
        """Moves layers with weights, gradients, optimizer state and flags. All or nothing.

        Args:
            partition: Number of layers on each stage, first stage first.
            is_agreed: Whether the ranks have compared `partition` already.

        Returns:
            The bytes that have moved, and the seconds that it took.

        Raises:
            PartitionError: It has another number of layers or stages.
            NoRoomError: The layers do not fit the memory there. Nothing has moved.
        """
        check_partition(partition)
        layer_store = self._pending.final
        world, before = layer_store.world, layer_store.layout
        layout = self._layouts.moved(before, partition)
        plan = moves_between_ranks(before.partition, partition, before.processes)
        if not is_agreed:
            agree(
                world,
                hashlib.sha256(repr((before.partition.counts, partition.counts)).encode()).digest(),
                "the new placement",
            )

        migration = exchange(
            world,
            plan,
            lambda i: (layer_store.modules[i], layer_store.state(i)),
            partial(layer_store.moved, layout, plan),
        )
        layer_store.tied.join()
        self._profiler.forget(move.layer for move in plan)
        self._programs.relower()
        self.on_recompute_change(before.recomputed ^ layout.recomputed)
        return migration

    def reshape(self, *, pipeline: int, data: int, partition: Partition | None = None) -> Migration:
        """Makes the same ranks another mesh. All or nothing.

        The batch stays the same, so each replica has other microbatches from the next step on.

        Args:
            pipeline: Number of ranks of a pipeline.
            data: Number of replicas.
            partition: Layers on each new stage. The default is as even as possible.

        Returns:
            The bytes that have moved, and the seconds that it took.

        Raises:
            InputError: The ranks, the microbatches, the accumulation groups or the schedule do not
                fit. All ranks raise it.
            ConfigError: The pipeline's ranks are slices of one GPU.
        """
        layer_store = self._pending.final
        everyone, before = layer_store.world.everyone, layer_store.layout
        if before.sliced:
            raise ConfigError("a pipeline of slices cannot be reshaped; make another")
        if layer_store.experts is not None:
            raise ConfigError(
                "replicas that share experts (parallel.expert) cannot be reshaped; make another "
                "pipeline"
            )
        layout = self._layouts.reshaped(before, pipeline, data, partition)
        agree(
            everyone,
            hashlib.sha256(repr((pipeline, data, layout.partition.counts)).encode()).digest(),
            "the new mesh",
        )
        after = holders(layout.partition, layout.placement, data)
        plan = transfers(holders(before.partition, before.placement, before.replicas), after)
        whole = {i: layer_store.state(i, whole=True) for i in sorted(layer_store.layers)}

        def adopt(arrivals: list[Arrival]) -> None:
            self._programs.relower()
            layer_store.reshaped(
                layout,
                [i for i in layer_store.layers if everyone.rank not in after[i]],
                whole,
                arrivals,
            )
            self._pending.reshaped()

        migration = exchange(everyone, plan, lambda i: (layer_store.modules[i], whole[i]), adopt)
        self._profiler.forget(move.layer for move in plan)
        self._schedule_keeper.reshaped(measure_links(layer_store.world, layout.pairs))
        self.on_recompute_change(before.recomputed ^ layout.recomputed)
        return migration

    def on_recompute_change(self, layers: frozenset[int]) -> None:
        """Takes note of layers that begin or cease to be recomputed.

        Their new costs are not measured yet.

        Args:
            layers: Indices in the model.
        """
        if layers:
            self._schedule_keeper.forget()
            self.on_workload_change(layers)

    def replan(self, layers: tuple[LayerCost, ...], least: float = 0.0) -> float | None:
        """Makes the schedule anew from these costs, if that is predicted to save enough.

        Args:
            layers: Cost of each layer, the same on every rank.
            least: Share of a step that must be saved.

        Returns:
            The predicted share of a step that is saved. None if the schedule stays. Schedules that
            are not made from costs always stay.
        """
        self._pending.settle()
        gain = self._schedule_keeper.replan(layers, least)
        if gain is not None:
            self._programs.relower()
        return gain

    def rebuild(self, layer: int, moments: Mapping[str, Tensor]) -> None:
        """Trains the new parameters of one of this rank's layers. Only its rank calls it.

        Args:
            layer: A layer whose module has other parameters than before.
            moments: Their optimizer state, `parameter/moment` -> tensor.

        Raises:
            RunError: The last step may still be taken back.
        """
        self._pending.assert_final()
        self._layer_store.rebuild(layer, moments)
        self._programs.relower()

    def place_experts(self, placements: Mapping[int, ExpertPlacement]) -> int:
        """Moves experts between the replicas that share them, with their optimizer state.

        Args:
            placements: The new placements, by layer.

        Returns:
            Bytes that all ranks received.

        Raises:
            ConfigError: Every replica holds every expert.
        """
        layer_store = self._pending.final
        if layer_store.experts is None:
            raise ConfigError(
                "experts cannot be placed where every replica holds all of them; set "
                "parallel.expert"
            )
        holders = {index: placement.holders for index, placement in sorted(placements.items())}
        everyone = layer_store.world.everyone
        agree(
            everyone, hashlib.sha256(repr(holders).encode()).digest(), "the new places of experts"
        )
        moved = torch.tensor([layer_store.place_experts(placements)])
        self._programs.relower()
        return int(everyone.sum(moved, "all experts to arrive"))
