"""Goes on with fewer or more ranks between steps.

    shrink   4 ranks: layers go to those that stay -> the leaving ranks go -> 2 ranks meet anew
    grow     2 ranks and 2 newcomers meet anew -> layers go where they now belong

A shrink moves layers in the old generation of process groups, a growth in the new one.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NoReturn

from torch import Tensor

from dynmo.errors import ConfigError, RankDied, RunError, WaitTimeout
from dynmo.models.group_placement import GroupPlacement
from dynmo.pipeline.actions import Actions
from dynmo.plan.partition import Layout, Layouts, Move, Partition
from dynmo.runtime.comm.agreement import agree
from dynmo.runtime.comm.meeting import meeting_of
from dynmo.runtime.engine.profiler import measure_links
from dynmo.runtime.state.migration import (
    Arrival,
    Holders,
    Migration,
    exchange,
    holders,
    transfers,
)


class ResizeFailed(RunError):
    """Newcomers did not come, or a rank could not give or take a layer.

    The run goes on as it was.
    """


@dataclass(frozen=True)
class NextMesh:
    """The mesh in which the run goes on, and why.

    Attributes:
        pipeline: Number of ranks of a pipeline.
        replicas: Number of pipelines.
        partition: Layers on each new stage.
        microbatches: Number of microbatches of all replicas. The numbers change if the batch is cut
            otherwise from now on.
        gain: Predicted share of a step that the mesh saves, negative for a slowdown.
    """

    pipeline: int
    replicas: int
    partition: Partition
    microbatches: int
    reason: str = ""
    gain: float | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return self.pipeline, self.replicas

    @property
    def ranks(self) -> int:
        return self.pipeline * self.replicas

    def layout(self, layouts: Layouts, before: Layout) -> Layout:
        return layouts.resized(
            before, self.pipeline, self.replicas, self.partition, self.microbatches
        )


class Resizing(Actions):
    """Changes the ranks of an engine. All ranks call each method together, with equal arguments."""

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
                lambda move: store.packed(move.layer, whole[move.layer]),
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

    def take_up(
        self, arrivals: Sequence[Arrival], groups: Mapping[int, GroupPlacement] | None
    ) -> None:
        """Begins with the layers of an engine whose layer store is bare, on all ranks."""
        layout = self._store.layout
        self._take_up(layout, (), {}, arrivals, groups)
        self._pending.renewed()
        self._finish(layout, layout, ())

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
            everyone,
            plan,
            lambda move: store.packed(move.layer, whole[move.layer]),
            store.check_arrival,
            take_up,
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
        store = self._store
        assert not store.layout.sliced, "slices cannot get other ranks"
        assert not store.spreads_groups or mesh.replicas == store.layout.replicas, (
            "experts stay shared"
        )
        assert mesh.ranks == size, "the mesh has all ranks"
        if meeting_of(store.world).home is None:
            raise ConfigError("ranks within a program's own process groups cannot become others")

    def _agree_on_ranks(self, ranks: tuple[int, ...] | int, mesh: NextMesh) -> None:
        decision = (ranks, mesh.pipeline, mesh.replicas, mesh.partition.counts, mesh.microbatches)
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
        self._schedule_maker.reshaped(measure_links(self._store.world, layout.pairs))
        if layout.microbatches * layout.replicas != before.microbatches * before.replicas:
            self._schedule_maker.forget()
            # The costs of all layers change.
            self._on_recompute_change(frozenset(range(layout.partition.layers)))
        else:
            self._on_recompute_change(before.recomputed ^ layout.recomputed)


def _holders(layout: Layout) -> Holders:
    return holders(layout.partition, layout.stage_ranks, layout.replicas)
