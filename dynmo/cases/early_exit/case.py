"""Early exit: from a step on, tokens leave the model at exit heads.

Sources: DynMo 2.2 and F.6. The layers do the work (`layers.py`). The case decides from which step
on tokens leave, and records how many do.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, final

from torch import nn

from dynmo import Change, Layers
from dynmo.cases.early_exit.options import EarlyExit
from dynmo.extend import CountingCase, RunFacts, layers_that


@final
class EarlyExitCase(CountingCase):
    """Lets tokens exit."""

    name = "early_exit"

    def __init__(self, start: int, record_every: int) -> None:
        super().__init__(2, record_every)
        self._start, self._on = start, False

    def counting(self, modules: Sequence[nn.Module]) -> list[int]:
        return layers_that(
            lambda module: hasattr(module, "exits") and hasattr(module, "seen"),
            modules,
            "early_exit, but no layer of the model lets tokens exit; give load_model or "
            "from_pretrained the cases, too, or a layer of your own the attributes `exits` and "
            "`seen`, as dynmo.cases.early_exit.layers.ExitHead has",
        )

    def counted(self, module: Any) -> tuple[int, int]:
        seen, module.seen = module.seen, (0, 0)
        return seen

    def shares(self, rows: list[list[float]]) -> dict[str, list[float]]:
        return {"exited": [gone / tokens if tokens else 0.0 for tokens, gone in rows]}

    def act(self, step: int, layers: Layers) -> Change | None:
        super().act(step, layers)
        before, self._on = self._on, step >= self._start
        exits = self.counting(layers.modules)
        behind = range(exits[0], layers.count)
        _set_all(layers, behind, "varying_shapes", self._on)
        _set_all(layers, exits, "exits", self._on)
        if before == self._on:
            return None
        return Change(tuple(behind), f"tokens may leave at {len(exits)} exits (step {step})")

    def acts(self, step: int) -> bool:
        return (step >= self._start) != self._on or self.records(step)

    def records(self, step: int) -> bool:
        return step > self._start and super().records(step)

    @contextmanager
    def _without_exits(self, layers: Layers) -> Generator[None]:
        exits = self.counting(layers.modules)
        try:
            _set_all(layers, exits, "exits", False)
            yield
        finally:
            _set_all(layers, exits, "exits", self._on)

    def dense(self, layers: Layers) -> AbstractContextManager[None] | None:
        return self._without_exits(layers) if self._on else None

    def state(self) -> dict[str, Any]:
        return {"on": self._on, **super().state()}

    def load(self, state: dict[str, Any]) -> None:
        self._on = bool(state["on"])
        super().load(state)


def _set_all(layers: Layers, indices: Iterable[int], name: str, value: bool) -> None:
    for index in indices:
        setattr(layers.modules[index], name, value)


def make(options: EarlyExit, run: RunFacts) -> EarlyExitCase:
    return EarlyExitCase(options.start_of(run.steps), options.record_every)
