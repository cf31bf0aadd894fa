"""The view that a dynamic case has of the model (`dynmo.Layers`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from dynmo.errors import ConfigError
from dynmo.models.group_placement import GroupPlacement
from dynmo.models.identity import code_of
from dynmo.models.model import defined_in
from dynmo.pipeline.actions import Actions
from dynmo.pipeline.case import Dynamism
from dynmo.runtime.comm.agreement import first_difference
from dynmo.runtime.comm.process_mesh import FirstReplica
from dynmo.runtime.comm.waits import ranks_text
from dynmo.runtime.comm.world import World
from dynmo.runtime.state.spread_groups import SpreadGroups


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


class CaseContext(Actions):
    """The model as a dynamic case sees it, and the actions that it may ask for."""

    @property
    def count(self) -> int:
        return self._store.model.layers

    @property
    def names(self) -> tuple[str, ...]:
        return self._store.model.names

    @property
    def frozen(self) -> frozenset[int]:
        return self._store.frozen.layers

    @property
    def modules(self) -> Sequence[nn.Module]:
        return self._store.modules

    @property
    def own(self) -> list[int]:
        return sorted(self._store.layers)

    @property
    def collective(self) -> FirstReplica:
        return FirstReplica(self._store.world)

    def kept(self, layer: int) -> dict[str, Tensor]:
        return self._store.kept[layer]

    def moments(self, layer: int) -> dict[str, Tensor]:
        self._pending.assert_final()
        return self._store.moments(layer)

    @property
    def spread(self) -> SpreadView | None:
        return None if self._store.spread is None else SpreadView(self, self._store.spread)


class SpreadView:
    """The groups of weights that replicas share, as a case sees them (`Layers.spread`)."""

    def __init__(self, actions: Actions, groups: SpreadGroups) -> None:
        self._actions, self.placements = actions, groups.placements
        self.place = groups.sharers.place

    def move(self, placements: Mapping[int, GroupPlacement]) -> int:
        return self._actions.place_groups(placements)
