"""Calls the dynamic cases, in the order in which they act."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager

from dynmo.cost.layer_cost import Forecast
from dynmo.pipeline.case import Change, Dynamism, Signals, TokenShares, checked, named
from dynmo.pipeline.case_context import CaseContext
from dynmo.runtime.engine.engine import Engine


class Cases:
    def __init__(self, cases: Sequence[Dynamism], engine: Engine) -> None:
        self.all, self._model = cases, engine.model
        # Layers that may take another time for each batch.
        self._varies = any(getattr(x, "varying_time", False) for x in engine.store.modules)
        self._context = CaseContext(engine)
        for case in cases:
            case.check(engine.store.modules)

    @property
    def keep_kinds(self) -> bool:
        """True if layers of one kind and size take equally long until a change is announced."""
        return not self._varies and all(case.announces for case in self.all)

    def collect(self, step: int) -> Iterator[tuple[Dynamism, TokenShares]]:
        """Collects what layers have counted in the step before. For use before layers move."""
        for case in self.all:
            with named(case, "collect", step):
                shares = case.collect(step, self._context)
            if shares is not None:
                yield case, shares

    def act(self, step: int) -> Iterator[tuple[Dynamism, Change]]:
        for case in self.all:
            with named(case, "act", step):
                change = checked(case, case.act(step, self._context), self._model.layers)
            if change is not None:
                self._context.on_workload_change(change.layers)
                yield case, change

    def observe(self, signals: Signals) -> None:
        for case in self.all:
            with named(case, "observe", signals.step):
                case.observe(signals)

    def dense(self) -> Iterator[AbstractContextManager[None]]:
        """Yields a context for each case that can be switched off for an evaluation."""
        for case in self.all:
            dense = case.dense(self._context)
            if dense is not None:
                yield dense

    def forecasts(self, step: int) -> list[Sequence[Forecast]]:
        return [case.forecast(step) for case in self.all]
