"""Early exit: from a step on, tokens leave the model at exit heads.

Sources: DynMo 2.2 and F.6. The layers do the work (`dynmo.models.early_exit`). The case decides
from which step on tokens leave, and records how many do.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, final

from torch import nn

from dynmo.cases.early_exit import EarlyExit
from dynmo.pipeline.case import Change, Dynamism, Layers, TokenShares, layers_that
from dynmo.pipeline.case_options import RunFacts
from dynmo.pipeline.counts import Counts, counts_of


@final
class EarlyExitCase(Dynamism):
    """Lets tokens exit."""

    name = "early_exit"

    def __init__(self, start: int, record_every: int) -> None:
        self._start, self._every = start, record_every
        self._on, self._counts = False, Counts(2)
        self._layers: Layers | None = None

    def check(self, modules: Sequence[nn.Module]) -> None:
        exits_of(modules)

    def act(self, step: int, layers: Layers) -> Change | None:
        self._layers = layers
        before, self._on = self._on, step >= self._start
        exits = exits_of(layers.modules)
        behind = range(exits[0], layers.count)
        _set_all(layers, behind, "varying_shapes", self._on)
        _set_all(layers, exits, "exits", self._on)
        if before == self._on:
            return None
        return Change(tuple(behind), f"tokens may leave at {len(exits)} exits (step {step})")

    def acts(self, step: int) -> bool:
        return (step >= self._start) != self._on or self._records(step)

    def _records(self, step: int) -> bool:
        return step > self._start and step % self._every == 0

    def collect(self, step: int, layers: Layers) -> TokenShares | None:
        self._layers = layers
        exits = self._take(layers)
        if not self._records(step):
            return None
        rows = self._counts.total(layers, exits, "the tokens of every exit")
        shares = [gone / tokens if tokens else 0.0 for tokens, gone in rows]
        return TokenShares(tuple(exits), {"exited": shares})

    def dense(self, layers: Layers) -> AbstractContextManager[None] | None:
        return self._without_exits(layers) if self._on else None

    @contextmanager
    def _without_exits(self, layers: Layers) -> Generator[None]:
        exits = exits_of(layers.modules)
        try:
            _set_all(layers, exits, "exits", False)
            yield
        finally:
            _set_all(layers, exits, "exits", self._on)

    def _take(self, layers: Layers) -> list[int]:
        """Asks the layers for their counts."""
        exits = exits_of(layers.modules)
        self._counts.add(counts_of(layers, exits, _counted))
        return exits

    def state(self) -> dict[str, Any]:
        counts = self._counts.save(self._layers, self._take, all_replicas=False)
        return {"on": self._on, "counts": counts}

    def load(self, state: dict[str, Any]) -> None:
        self._on = bool(state["on"])
        if self._layers is not None:
            self._take(self._layers)
        self._counts.load(state.get("counts", []))


def _counted(module: Any) -> tuple[int, int]:
    seen, module.seen = module.seen, (0, 0)
    return seen


def _set_all(layers: Layers, indices: Iterable[int], name: str, value: bool) -> None:
    for index in indices:
        setattr(layers.modules[index], name, value)


def exits_of(modules: Sequence[nn.Module]) -> list[int]:
    """Returns the layers with the attributes `exits` and `seen`."""
    return layers_that(
        lambda module: hasattr(module, "exits") and hasattr(module, "seen"),
        modules,
        "early_exit, but no layer of the model lets tokens exit; give one of your own the "
        "attributes `exits` and `seen`, as dynmo.cases.early_exit.layers.ExitHead has",
    )


def make(options: EarlyExit, run: RunFacts) -> Dynamism:
    return EarlyExitCase(options.start_of(run.steps), options.record_every)
