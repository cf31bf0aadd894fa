"""A move of layers that travels while the next step runs (`balance.move_ahead`)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from dynmo.plan.partition import Layout, Move
from dynmo.runtime.engine.engine import Engine
from dynmo.runtime.state.migration import Migration, NotMoved
from dynmo.runtime.state.move_ahead import MoveAhead


def can_move_ahead(engine: Engine, layout: Layout) -> bool:
    """Returns whether a step can end on another placement than it began on."""
    store, before = engine.store, engine.store.layout
    return (
        store.world.device.type == "cpu"
        and not engine.pending.validates
        and not engine.model.tied
        and not store.spreads_groups
        and not before.sliced
        and layout.schedule == before.schedule
        and layout.stage_ranks == before.stage_ranks
        and layout.recomputed == before.recomputed
    )


class Ahead:
    """A move that ends with the next step. Every rank makes it and calls every method alike.

    Attributes:
        is_over: Whether the step has ended it.
        migration: What has moved. `seconds` are those that the rank waited. None: nothing.
        refusal: Why nothing has moved.
    """

    def __init__(self, engine: Engine, layout: Layout, moves: Sequence[Move]) -> None:
        self._engine, self._before = engine, engine.store.layout
        self._layout, self._moves = layout, moves
        self._seconds = 0.0
        self.is_over = False
        self.migration: Migration | None = None
        self.refusal = ""

    def begin(self) -> None:
        """Begins just before a step trains, unless the layers have moved otherwise since."""
        start, engine, store = time.perf_counter(), self._engine, self._engine.store
        if self.is_over or store.layout is not self._before:
            return
        store.check_names({move.layer for move in self._moves})
        ahead = MoveAhead(
            store.world,
            self._moves,
            lambda move: store.packed(move.layer, store.state(move.layer)),
        )
        engine.after_agreement = partial(self._finish, ahead)
        self._seconds = time.perf_counter() - start

    def _finish(self, ahead: MoveAhead) -> None:
        start, engine, store = time.perf_counter(), self._engine, self._engine.store
        engine.drop_after_agreement()
        try:
            migration = ahead.finish(
                store.check_arrival, partial(store.moved, self._layout, self._moves)
            )
        except NotMoved as error:
            self.refusal = str(error)
        else:
            store.frozen.share(store.world, store.layers)
            engine.profiler.forget(move.layer for move in self._moves)
            engine.programs.relower()
            seconds = self._seconds + time.perf_counter() - start
            self.migration = replace(migration, seconds=seconds)
        self.is_over = True
