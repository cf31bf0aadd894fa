"""Changes the ranks of a running pipeline: some leave, or new ones join.

The numbers stay the same.

    shrink   4 ranks: layers go to those that stay -> the leaving ranks go -> 2 ranks meet anew
    grow     2 ranks and 2 newcomers meet anew -> layers go where they now belong

Layers travel as in a reshape, with weights, gradients, optimizer state and flags. A shrink moves
them in the old generation of process groups, a growth in the new one. Until the layers have
arrived everywhere, every rank still holds what it held.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NoReturn

from torch import Tensor

from dynmo.balance.expert_placement import ExpertPlacement
from dynmo.balance.layout import Layout, Layouts
from dynmo.balance.partition import Move, Partition
from dynmo.errors import ConfigError, RankDied, RunError, WaitTimeout
from dynmo.pipeline.actions import EngineParts
from dynmo.runtime.comm.agreement import agree
from dynmo.runtime.engine.profiler import measure_links
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
        microbatches: Number of microbatches of all replicas, if the batch is cut otherwise from
            now on. The numbers then change. None means as many as before.
    """

    pipeline: int
    data: int
    partition: Partition
    microbatches: int | None = None

    def layout(self, layouts: Layouts, before: Layout) -> Layout:
        """Returns the layout of this mesh.

        Args:
            layouts: Makes the possible layouts.
            before: The layout until now.

        Raises:
            InputError: The sizes do not fit the model, the batch or the schedule.
        """
        return layouts.resized(before, self.pipeline, self.data, self.partition, self.microbatches)


class Membership:
    """Changes the set of ranks of the pipeline.

    All ranks call every method together, with equal arguments.

    Args:
        parts: The parts of the engine that it changes.
        on_recompute_change: Takes note of layers that begin or cease to be recomputed.
    """

    def __init__(
        self, parts: EngineParts, on_recompute_change: Callable[[frozenset[int]], None]
    ) -> None:
        self._layouts, self._layer_store = parts.layouts, parts.layer_store
        self._schedule_keeper, self._programs = parts.schedule_keeper, parts.programs
        self._profiler, self._pending = parts.profiler, parts.pending
        self._on_recompute_change = on_recompute_change

    def shrink(
        self,
        kept: Sequence[int],
        mesh: NextMesh,
    ) -> Migration:
        """Goes on with some of the ranks.

        The others hold nothing afterwards, and are alone.

        Args:
            kept: Global ranks that stay, ascending. They become ranks 0, 1, ...
            mesh: The mesh of these ranks.

        Returns:
            The bytes that have moved, and the seconds during which the ranks stood still.

        Raises:
            InputError: The sizes do not fit the model, the batch or the schedule.
            NoRoomError: The layers do not fit the memory there. Nothing has moved.
            ResizeFailed: A rank could not give or take a layer. Nothing has moved.
        """
        start, layer_store = time.perf_counter(), self._pending.final
        everyone, before = layer_store.world.everyone, layer_store.layout
        self._check(len(kept), mesh)
        layout = mesh.layout(self._layouts, before)
        self._agree(tuple(kept), mesh)
        after = tuple(tuple(kept[rank] for rank in ranks) for ranks in _holders(layout))
        plan, whole = transfers(_holders(before), after, layer_store.shares_experts), self._states()
        arrivals: list[Arrival] = []
        try:
            migration = exchange(
                everyone, plan, lambda i: (layer_store.modules[i], whole[i]), arrivals.extend
            )
        except (WaitTimeout, RankDied):
            raise
        except RunError as error:
            raise ResizeFailed(f"{error}; the run goes on with {everyone.size} ranks") from error
        rank = everyone.rank
        gone = [i for i in layer_store.layers if rank not in after[i]]
        self._part()
        if rank not in kept:
            layer_store.empty()
            everyone.park()
            return migration
        everyone.renew(kept.index(rank), len(kept), everyone.generation + 1, everyone.timeout)
        self._take_up(layout, gone, whole, arrivals)
        self._pending.reshaped()
        self._finish(before, layout, plan)
        return replace(migration, seconds=time.perf_counter() - start)

    def grow(
        self,
        newcomers: int,
        mesh: NextMesh,
        join_timeout: float,
    ) -> Migration:
        """Goes on with more ranks. The newcomers call `arrive` meanwhile.

        Args:
            newcomers: Number of ranks that join. They get the numbers after those of the present
                ranks.
            mesh: The mesh of all these ranks.
            join_timeout: Seconds to wait for them.

        Returns:
            The bytes that have moved, and the seconds during which the ranks stood still.

        Raises:
            InputError: The sizes do not fit the model, the batch or the schedule.
            ResizeFailed: The newcomers did not come or could not take their layers. The ranks go on
                as before, and nothing is lost.
        """
        start, layer_store = time.perf_counter(), self._pending.final
        everyone, before = layer_store.world.everyone, layer_store.layout
        rank, size = everyone.rank, everyone.size
        self._check(size + newcomers, mesh)
        layout = mesh.layout(self._layouts, before)
        self._agree(newcomers, mesh)
        whole = self._states()
        self._part()
        plan = transfers(_holders(before), _holders(layout), layer_store.shares_experts)
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
        experts: Mapping[int, ExpertPlacement] | None = None,
    ) -> Migration:
        """Joins a run, as a newcomer whose layer store is bare. The others call `grow`.

        Args:
            rank: This process's number from now on.
            size: Number of ranks from now on.
            generation: Number of the meeting.
            mesh: The mesh from now on.
            join_timeout: Seconds to wait for the others.
            experts: Replicas that hold each expert, by layer.

        Returns:
            The bytes that have moved.

        Raises:
            RunError: The ranks did not meet, or a rank could not give or take a layer.
        """
        layer_store, before = self._layer_store, self._layer_store.layout
        layout = mesh.layout(self._layouts, before)
        layer_store.world.everyone.renew(rank, size, generation, join_timeout)
        plan = transfers(_holders(before), _holders(layout), layer_store.shares_experts)
        migration = self._exchange(layout, plan, {}, experts)
        self._finish(before, layout, plan)
        return migration

    def _exchange(
        self,
        layout: Layout,
        plan: Sequence[Move],
        whole: Mapping[int, dict[str, Tensor]],
        experts: Mapping[int, ExpertPlacement] | None = None,
    ) -> Migration:
        """Moves layers among the ranks of the new generation, and goes on there."""
        layer_store = self._layer_store
        everyone, after = layer_store.world.everyone, _holders(layout)

        def take_up(arrivals: list[Arrival]) -> None:
            gone = [i for i in layer_store.layers if everyone.rank not in after[i]]
            self._take_up(layout, gone, whole, arrivals, experts)
            self._pending.renewed()

        return exchange(everyone, plan, lambda i: (layer_store.modules[i], whole[i]), take_up)

    def _go_back(
        self,
        rank: int,
        size: int,
        before: Layout,
        whole: Mapping[int, dict[str, Tensor]],
        error: RunError,
    ) -> NoReturn:
        """Goes on with the ranks that were here before newcomers failed to join."""
        everyone = self._layer_store.world.everyone
        if self._layer_store.layout is not before:
            # A rank was lost after the exchange, so layers are elsewhere already.
            raise error
        everyone.renew(rank, size, everyone.generation + 1, everyone.timeout)
        self._take_up(before, (), whole, ())
        self._pending.reshaped()
        self._finish(before, before, ())
        raise ResizeFailed(f"{error}; the run goes on with {size} ranks") from error

    def _check(self, size: int, mesh: NextMesh) -> None:
        layer_store, pipeline, data = self._layer_store, mesh.pipeline, mesh.data
        if layer_store.layout.sliced:
            raise ConfigError("a pipeline of slices cannot get other ranks; make another")
        if layer_store.shares_experts and data != layer_store.layout.replicas:
            raise ConfigError(
                "replicas that share experts (parallel.expert) stay as many; change the ranks of "
                "a pipeline only"
            )
        if layer_store.world.everyone.home is None:
            raise ConfigError("ranks within a program's own process groups cannot become others")
        if pipeline * data != size:
            raise ConfigError(
                f"{size} ranks cannot be {data} replicas of {pipeline} ranks; their product must "
                "be the number of ranks"
            )

    def _agree(self, ranks: tuple[int, ...] | int, mesh: NextMesh) -> None:
        """Compares the ranks that stay, or the number of newcomers, and their mesh."""
        decision = (ranks, mesh.pipeline, mesh.data, mesh.partition.counts, mesh.microbatches)
        agree(
            self._layer_store.world,
            hashlib.sha256(repr(decision).encode()).digest(),
            "which ranks go on",
        )

    def _states(self) -> dict[int, dict[str, Tensor]]:
        """Returns the states of this rank's layers, before ranks leave.

        With ZeRO-1 they have the shares of all replicas, which must still be here. Replicas that
        share experts keep their own part each.
        """
        layer_store = self._layer_store
        return {
            i: layer_store.state(i, whole=not layer_store.shares_experts)
            for i in sorted(layer_store.layers)
        }

    def _part(self) -> None:
        """Ends all use of the process groups on this rank."""
        self._programs.relower()
        self._layer_store.replicas.close()
        self._pending.part()

    def _take_up(
        self,
        layout: Layout,
        gone: Collection[int],
        whole: Mapping[int, dict[str, Tensor]],
        arrivals: Sequence[Arrival],
        experts: Mapping[int, ExpertPlacement] | None = None,
    ) -> None:
        self._programs.relower()
        self._layer_store.reshaped(layout, gone, whole, arrivals, experts)

    def _finish(self, before: Layout, layout: Layout, plan: Sequence[Move]) -> None:
        self._profiler.forget(move.layer for move in plan)
        self._schedule_keeper.reshaped(measure_links(self._layer_store.world, layout.pairs))
        if layout.microbatches * layout.replicas != before.microbatches * before.replicas:
            self._schedule_keeper.forget()
            # The costs of all layers change.
            self._on_recompute_change(frozenset(range(layout.partition.layers)))
        else:
            self._on_recompute_change(before.recomputed ^ layout.recomputed)


def _holders(layout: Layout) -> Holders:
    """Returns the global ranks that hold each layer."""
    return holders(layout.partition, layout.placement, layout.replicas)
