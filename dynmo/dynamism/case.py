"""The protocol of a dynamic case: something that changes the model's work while it trains.

    before a run         check(modules)           refuses a model that lacks what the case needs
    before each step     act(step, layers)        changes layers, says which; acts(step) tells beforehand whether it may
    after each step      observe(signals)         loss, gradient norms, learning rate
    at any time          forecast(step)           what it expects to change, for a balancer that acts only where it pays
    checkpoints          state() / load(state)    what every rank knows;  layers.kept(i): tensors that move and are saved with layer i

Every rank holds the same cases and calls them with the same measurements, so all reach the same decision. A case never knows ranks: it
works on the layers that are here (`layers.own`), and where one number per layer must be known everywhere, it asks for a sum
(`layers.collective`). dynmo never knows which case runs: it sees the costs that result.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor, nn

from dynmo.errors import RunError


@dataclass(frozen=True)
class Signals:
    """What every rank knows after a step: the loss, squared gradient norms before clipping, one per layer in global order, and the
    learning rate of the step."""

    step: int
    loss: float
    squared_norms: tuple[float, ...]
    rate: float = 0.0


class Collective(Protocol):
    """What a case may ask of the other ranks. Every rank must ask the same, in the same order."""

    def sum(self, tensor: Tensor, what: str) -> Tensor:
        """The sum over the ranks, in place. For equal bits on any placement: integers, or floats of which each has one rank alone
        that does not give 0. what: what is waited for, should a rank not come."""
        ...


class Layers(Protocol):
    """The model as a case sees it, and what it may do: `freeze` and `unfreeze` are called alike on every rank. What is done takes effect
    before the next step. It is the same object at every call, so a case may hold on to it."""

    @property
    def count(self) -> int: ...
    @property
    def frozen(self) -> frozenset[int]: ...
    def freeze(self, layers: Collection[int]) -> None: ...
    def unfreeze(self, layers: Collection[int]) -> None: ...

    @property
    def names(self) -> Sequence[str]: ...
    @property
    def modules(self) -> Sequence[nn.Module]:
        """All layers; those that are elsewhere are on the meta device: shapes without memory."""
        ...

    @property
    def own(self) -> Sequence[int]:
        """The layers that are here, ascending. After a move they are others."""
        ...

    @property
    def collective(self) -> Collective: ...

    def kept(self, layer: int) -> dict[str, Tensor]:
        """Of a layer that is here: tensors on the CPU that move and are saved with it. The case fills it; names are its own."""
        ...

    def moments(self, layer: int) -> dict[str, Tensor]:
        """Of a layer that is here: its optimizer's state, `parameter/moment` -> tensor."""
        ...

    def rebuild(self, layer: int, moments: Mapping[str, Tensor]) -> None:
        """After a layer that is here got other modules or parameters: trains these, from that optimizer state. A module that has other
        names of parameters than before must get them on every rank, on the meta device too."""
        ...


@dataclass(frozen=True)
class Change:
    """What a case did: the global indices of the layers whose cost is no longer what was measured, or whose output is another now, and a
    line for the log. options: those of `[dynamism.NAME]` that the case has measured by itself; the run's own config will say them, so
    that a run from it need not. (Of one's own case there is no such section.)"""

    layers: tuple[int, ...]
    what: str
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True)
class Forecast:
    """From `step` on, these layers are expected to take `f`, `b`, `w` times what they take now (when the forecast is made). Of one case, a
    later forecast for a layer replaces an earlier one."""

    step: int
    layers: tuple[int, ...]
    f: float = 1.0
    b: float = 1.0
    w: float = 1.0


class Dynamism(Protocol):
    """One case. Inherit from it and write `act`; the rest has defaults, for a case that needs no more."""

    name: str

    @abstractmethod
    def act(self, step: int, layers: Layers) -> Change | None:
        """Before `step`."""
        ...

    def check(self, modules: Sequence[nn.Module]) -> None:
        """Before a run, and in a dry run: raises ConfigError where the model lacks what the case needs. modules: all layers as they were
        built; they may be on the meta device."""
        return

    def acts(self, step: int) -> bool:
        """Whether `act` may do something before `step`, or `observe` did not only take its signals after the step before it. Asked with
        post-validation, where a step usually begins before the one before it is final, and `observe` is told of that one late: False lets
        it. `act` is called all the same, and must not look at weights, moments or the last signals then."""
        return True

    def observe(self, signals: Signals) -> None:
        """After a step."""
        return

    def forecast(self, step: int) -> Sequence[Forecast]:
        """What it expects to do after `step`, soonest first. Empty where it cannot know: a hint, never a promise."""
        return ()

    def state(self) -> dict[str, Any]:
        """Plain JSON, the same on every rank, for checkpoints."""
        return {}

    def load(self, state: dict[str, Any]) -> None:
        return


@contextmanager
def named(case: Dynamism, what: str, step: int) -> Generator[None]:
    """What the case raises within is told with its name."""
    try:
        yield
    except Exception as error:
        error.add_note(f"in {what} of case {case.name!r} at step {step}")
        raise


def checked(case: Dynamism, change: object, layers: int) -> Change | None:
    """What `act` returned. Raises RunError where that is none of what it may return."""
    if change is None:
        return None
    if not isinstance(change, Change):
        what = f"case {case.name!r}: act returned a {type(change).__name__}"
        raise RunError(f"{what}; return dynmo.dynamism.Change(layers, text), or None where nothing changed")
    outside = [index for index in change.layers if not 0 <= index < layers]
    if outside:
        raise RunError(f"case {case.name!r}: act changed layer {outside[0]}, but the model has {layers}, from 0 to {layers - 1}")
    return change
