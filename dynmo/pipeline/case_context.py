"""The view that a dynamic case has of the model (`dynmo.dynamism.Layers`)."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from torch import Tensor, nn

from dynmo.balance.expert_placement import ExpertPlacement
from dynmo.dynamism.case import Dynamism
from dynmo.errors import ConfigError
from dynmo.models.model import defined_in
from dynmo.models.source_code import code_of
from dynmo.pipeline.actions import Actions
from dynmo.runtime.comm.agreement import first_difference
from dynmo.runtime.comm.error_text import ranks_text
from dynmo.runtime.comm.process_mesh import FirstReplica
from dynmo.runtime.comm.world import World
from dynmo.runtime.engine.engine import Engine


def agree_on_cases(world: World, cases: Sequence[Dynamism]) -> None:
    """Raises ConfigError on every rank if the ranks have other cases, or other code of a case."""
    names = [(case.name, type(case).__qualname__) for case in cases]
    parts = [*map(repr, names), *map(repr, code_of(defined_in(cases)).items())]
    difference = first_difference(world, parts, "the cases of all ranks to be compared")
    if difference is None:
        return
    index, others = difference
    mine = f" (on rank {world.everyone.rank}: {parts[index]})" if index < len(parts) else ""
    raise ConfigError(
        f"the dynamic cases are not the same on rank 0 and {ranks_text(others)}{mine}; start all "
        "ranks with the same cases from the same code"
    )


class CaseContext:
    """The model as a dynamic case sees it.

    A decision of the case is carried out by `Actions`.
    """

    def __init__(self, engine: Engine) -> None:
        self._store, self._pending = engine.store, engine.pending
        self._actions = Actions(engine)

    @property
    def count(self) -> int:
        """Number of layers of the model."""
        return self._store.model.layers

    @property
    def names(self) -> tuple[str, ...]:
        """Name of each layer."""
        return self._store.model.names

    @property
    def frozen(self) -> frozenset[int]:
        """Layers that do not train."""
        return self._store.frozen.layers

    @property
    def modules(self) -> Sequence[nn.Module]:
        """All layers. Those of other ranks are on the meta device."""
        return self._store.modules

    @property
    def own(self) -> list[int]:
        """The layers of this rank, ascending. A move changes them."""
        return sorted(self._store.layers)

    @property
    def collective(self) -> FirstReplica:
        """Sums over the ranks."""
        return FirstReplica(self._store.world)

    def freeze(self, layers: Collection[int]) -> None:
        """Stops training these layers. See `Actions.freeze`."""
        self._actions.freeze(layers)

    def unfreeze(self, layers: Collection[int]) -> None:
        """Trains these layers again. See `Actions.unfreeze`."""
        self._actions.unfreeze(layers)

    def kept(self, layer: int) -> dict[str, Tensor]:
        """Returns the tensors that a case keeps with one of this rank's layers.

        They move and are saved with the layer.
        """
        return self._store.kept[layer]

    def moments(self, layer: int) -> dict[str, Tensor]:
        """The optimizer state of one of this rank's layers, `parameter/moment` -> tensor.

        Raises:
            RunError: The last step may still be taken back. See `Dynamism.acts`.
        """
        self._pending.assert_final()
        return self._store.moments(layer)

    def rebuild(self, layer: int, moments: Mapping[str, Tensor]) -> None:
        """Trains the new parameters of one of this rank's layers. See `Actions.rebuild`.

        Args:
            layer: Index of one of this rank's layers.
            moments: Optimizer state of the new parameters, `parameter/moment` -> tensor.
        """
        self._actions.rebuild(layer, moments)

    @property
    def expert_place(self) -> int:
        """This rank's place among the replicas that share experts."""
        experts = self._store.experts
        return 0 if experts is None else experts.group.place

    @property
    def expert_placements(self) -> Mapping[int, ExpertPlacement]:
        """The replicas that hold each expert, by layer."""
        experts = self._store.experts
        return {} if experts is None else experts.placements

    def place_experts(self, placements: Mapping[int, ExpertPlacement]) -> int:
        """Moves experts between replicas. See `Actions.place_experts`."""
        return self._actions.place_experts(placements)
