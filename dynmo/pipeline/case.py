"""The protocol of a dynamic case: it changes the model's work while it trains.

    before a run       check(modules)       refuses a model that lacks what the case needs
    before each step   act(step, layers)    changes layers, and says which
    after each step    observe(signals)     takes loss, gradient norms and learning rate
    before a move      collect(step, layers)  takes what layers have counted, for the log
    evaluations        dense(layers)        switches the case off, to compare
    at any time        forecast(step)       says what it expects to change
    frozen layers      frozen_prefix(layers)  runs F of the first layers, or skips it
    checkpoints        state(), load()      what every rank knows

Every rank holds the same cases and calls them with the same measurements. So all ranks reach the
same decision. A case knows no ranks: it works on the layers of its rank (`layers.own`). If every
rank must know one number per layer, the case asks for a sum (`layers.collective`). Tensors in
`layers.kept(i)` move and are saved with layer i. dynmo does not know which case runs. It sees the
resulting costs only.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Generator, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias, cast

from torch import Tensor, nn

from dynmo.cost.layer_cost import Forecast
from dynmo.errors import ConfigError, RunError
from dynmo.models.group_placement import GroupPlacement
from dynmo.runtime.layer.stage import FrozenPrefix


@dataclass(frozen=True)
class Signals:
    """The measurements that every rank knows after a step.

    A step that was skipped because it was not finite has none. After an overflow under a dynamic
    loss scale all norms are 0.

    Attributes:
        step: Number of the step.
        loss: Mean loss of the step.
        squared_norms: Squared norm of each layer's gradients before clipping, in the model's order.
        rate: Learning rate of the step.
    """

    step: int
    loss: float
    squared_norms: tuple[float, ...]
    rate: float = 0.0


class Collective(Protocol):
    """The requests of a case to the other ranks.

    Every rank must ask the same, in the same order.
    """

    def sum(self, tensor: Tensor, what: str) -> Tensor:
        """Adds a tensor up over the ranks, in place.

        The result must not depend on the placement. So the tensor has integers, or floats that are
        0 on all ranks but one.
        """
        ...

    def sum_all(self, tensor: Tensor, what: str) -> Tensor:
        """Adds a tensor up over the ranks of all replicas, in place.

        `sum` counts the first replica alone. Give integers, so that the sum is the same for any
        number of replicas.
        """
        ...


class Spread(Protocol):
    """The groups of grouped linears that replicas share."""

    @property
    def place(self) -> int:
        """This rank's place among the replicas that share groups."""
        ...

    @property
    def placements(self) -> Mapping[int, GroupPlacement]:
        """The groups that each of these replicas holds, by layer."""
        ...

    def move(self, placements: Mapping[int, GroupPlacement]) -> int:
        """Moves groups between replicas, with their optimizer state. All ranks call it alike.

        Args:
            placements: New ones, by layer.

        Returns:
            Bytes that all ranks received.
        """
        ...


class Layers(Protocol):
    """The model as a case sees it, and the changes that a case may make.

    All ranks call `freeze` and `unfreeze` alike. Changes take effect before the next step. The
    object is the same at every call, so a case may keep it.
    """

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
        """All layers. Those of other ranks are on the meta device: shapes without memory."""
        ...

    @property
    def own(self) -> Sequence[int]:
        """Indices of this rank's layers, ascending. A move changes them."""
        ...

    @property
    def collective(self) -> Collective: ...

    def kept(self, layer: int) -> dict[str, Tensor]:
        """Returns the CPU tensors that move and are saved with one of this rank's layers.

        The case fills the dictionary.
        """
        ...

    def moments(self, layer: int) -> dict[str, Tensor]:
        """The optimizer state of one of this rank's layers, `parameter/moment` -> tensor."""
        ...

    def rebuild(self, layer: int, moments: Mapping[str, Tensor]) -> None:
        """Trains the new modules or parameters of one of this rank's layers.

        Args:
            layer: Index of the layer. If its parameters have other names than before, every rank
                must rename them, on the meta device too.
            moments: Their optimizer state, `parameter/moment` -> tensor.
        """
        ...

    @property
    def spread(self) -> Spread | None:
        """The groups of weights that replicas share (`parallel.expert`). None: they share none."""
        ...


@dataclass(frozen=True)
class Change:
    """The changes that a case made before a step.

    Attributes:
        layers: Indices of the layers whose cost or output has changed.
        what: A line for the log.
        options: Keys of `[dynamism.NAME]` that the case has measured. The run's saved config has
            them, so that a run from it need not measure. A case of the user's own has no section.

    Example:
        >>> Change((0, 1), "froze the first block").layers
        (0, 1)
    """

    layers: tuple[int, ...]
    what: str
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True)
class TokenShares:
    """Shares of the tokens that some layers compute or let go, by what is counted."""

    layers: tuple[int, ...]
    shares: Mapping[str, list[float]]


RunFrozen: TypeAlias = Callable[[FrozenPrefix, Hashable | None], tuple[Tensor, ...]]


class Dynamism(Protocol):
    """One dynamic case. Inherit from it and write `act`.

    The other methods have defaults.

    Attributes:
        name: Names the case in messages and checkpoints.
        announces: Whether each change of a layer's time follows from a `Change`. If not, the data
            may change it, too.
        divides_parameters: Whether parts of a parameter leave. The optimizer must then update each
            element by itself.
        wants_samples: Whether `frozen_prefix` needs the samples of each microbatch.

    Example:
        >>> class FreezeEmbedding(Dynamism):
        ...     name = "freeze_embedding"
        ...     def act(self, step, layers):
        ...         if step == 100:
        ...             layers.freeze([0])
        ...             return Change((0,), "the embedding is frozen")
        >>> FreezeEmbedding().acts(5)
        True
    """

    name: str
    announces: bool = False
    divides_parameters: bool = False
    wants_samples: bool = False

    @abstractmethod
    def act(self, step: int, layers: Layers) -> Change | None:
        """Changes the model before a step.

        Args:
            step: Number of the next step.
            layers: The model.

        Returns:
            The changes. None if nothing has changed.
        """
        ...

    def check(self, modules: Sequence[nn.Module]) -> None:
        """Refuses a model that lacks what the case needs.

        Called before a run, and in a dry run.

        Args:
            modules: All layers as they were built. They may be on the meta device.

        Raises:
            ConfigError: The model lacks something. The message says what.
        """
        return

    def acts(self, step: int) -> bool:
        """Says whether `act` may do something before a step.

        Post-validation asks. False lets the step begin before the previous step is final. `act` is
        called all the same. It must not read weights, moments or the last signals then.

        Args:
            step: Number of the next step.
        """
        return True

    def observe(self, signals: Signals) -> None:
        """Takes the measurements of a step."""
        return

    def forecast(self, step: int) -> Sequence[Forecast]:
        """Returns what the case expects to do after a step, soonest first.

        It is empty if the case cannot know.
        """
        return ()

    def attach(self, layers: Layers) -> None:
        """Takes note of the model, before a first copy of the ranks' layers and after a fault.

        Called with `elastic.recover` alone, for cases whose `state` or `observe` need the model.
        It must not ask other ranks for anything.
        """

    def collect(self, step: int, layers: Layers) -> TokenShares | None:
        """Collects what layers have counted in the step before.

        Called before layers move, on all ranks.

        Args:
            step: Number of the next step. If the case asks other ranks for anything, `acts` must be
                true of it.
            layers: The model.

        Returns:
            The shares of tokens for the log. None if there is nothing to tell.
        """
        return None

    def dense(self, layers: Layers) -> AbstractContextManager[None] | None:
        """Switches the case off within a context, to compare an evaluation.

        Args:
            layers: The model.

        Returns:
            The context. None if there is nothing to compare.
        """
        return None

    def frozen_prefix(self, layers: Sequence[int]) -> RunFrozen | None:
        """Returns who runs F of the frozen leading layers. None: dynmo does.

        Called after a change of the layers that a rank holds or trains, before the next step. Every
        rank must return a function, or none.

        Args:
            layers: Indices of the frozen leading layers on this rank, ascending.

        Returns:
            A function that takes a `FrozenPrefix` and its samples, and returns the outputs of its
            last layer. The samples are what the loop gave for the microbatch: `step(samples=...)`.
            None says that it does not come again. If several cases return a function, that of the
            first one counts.
        """
        return None

    def changed(self, layers: Collection[int]) -> None:
        """Takes note that layers have another output now, for another reason than training.

        A case, a load or a mode has changed them. All ranks call it.
        """
        return

    def state(self) -> dict[str, Any]:
        """Returns the case's own state for checkpoints.

        It is plain JSON, the same on every rank. All ranks call it together.
        """
        return {}

    def load(self, state: dict[str, Any]) -> None:
        """Takes back what `state` returned."""
        return


@contextmanager
def named(case: Dynamism, what: str, step: int | None = None) -> Generator[None]:
    """Adds the case's name to exceptions that are raised within the context."""
    try:
        yield
    except Exception as error:
        at = "" if step is None else f" at step {step}"
        error.add_note(f"in {what} of case {case.name!r}{at}")
        raise


def layers_that(
    serve: Callable[[nn.Module], bool], modules: Sequence[nn.Module], problem: str
) -> list[int]:
    indices = [index for index, module in enumerate(modules) if serve(module)]
    if not indices:
        raise ConfigError(f"dynamism.cases: {problem}")
    return indices


def checked(case: Dynamism, change: object, layers: int) -> Change | None:
    """Returns what `act` returned, or raises RunError if it may not return that."""
    if change is None:
        return None
    if not isinstance(change, Change):
        what = f"case {case.name!r}: act returned a {type(change).__name__}"
        raise RunError(f"{what}; return dynmo.Change(layers, text), or None where nothing changed")
    outside = [index for index in change.layers if not 0 <= index < layers]
    if outside:
        raise RunError(
            f"case {case.name!r}: act changed layer {outside[0]}, but the model has {layers}, "
            f"from 0 to {layers - 1}"
        )
    return change


def checked_outputs(case: Dynamism, outputs: object) -> tuple[Tensor, ...]:
    """Returns the outputs of a frozen prefix, or raises RunError if they are none."""
    given = cast(tuple[object, ...], outputs) if isinstance(outputs, tuple) else ()
    tensors = tuple(each for each in given if isinstance(each, Tensor))
    if not given or len(tensors) < len(given):
        what = type(outputs).__name__
        raise RunError(
            f"case {case.name!r}: the function of frozen_prefix returned a {what}; return the "
            "outputs of the last layer, a tuple of tensors"
        )
    return tensors
