"""A grant: the message of rank 0 by which a newcomer becomes a rank."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from dynmo.cost.layer_cost import LayerCost
from dynmo.errors import RunError


class Grant(BaseModel):
    """The newcomer's place, and the part of the run's state that no layer has.

    Attributes:
        rank: The newcomer's number.
        size: The number of ranks from now on.
        generation: The new generation.
        step: The next step.
        shape: Ranks of a pipeline, and number of replicas, from now on.
        layers: Layers on each stage from now on.
        shape_before: The mesh of the present ranks.
        layers_before: Layers on each of its stages.
        state: State of the run as a checkpoint has it.
        costs: Costs of the layers, for schedules that are made from costs.
        reference: Seconds that a step took at first. `elastic.repack` compares with it.
        microbatches: Microbatches of a step from now on, over all replicas.
        groups: Layers whose weights are spread over replicas: (layer, holders of each group).
    """

    model_config = ConfigDict(extra="forbid")
    rank: int
    size: int
    generation: int
    step: int
    shape: tuple[int, int]
    layers: tuple[int, ...]
    shape_before: tuple[int, int]
    layers_before: tuple[int, ...]
    state: dict[str, Any]
    costs: tuple[dict[str, Any], ...] | None
    reference: float | None
    microbatches: int
    groups: tuple[tuple[int, tuple[tuple[int, ...], ...]], ...] = ()

    def to_text(self) -> str:
        """Returns the grant as JSON. Floats read back exactly, NaN included."""
        return json.dumps(self.model_dump())

    @property
    def known_costs(self) -> tuple[LayerCost, ...] | None:
        return None if self.costs is None else tuple(LayerCost(**cost) for cost in self.costs)


def grant_from(text: str) -> Grant:
    """Reads the text of a grant. Raises RunError if it is none."""
    try:
        return Grant.model_validate(json.loads(text))
    except (json.JSONDecodeError, ValidationError) as error:
        first = str(error).splitlines()[0]
        raise RunError(
            f"rank 0 sent a grant that cannot be read ({first}); do all ranks run the same dynmo?"
        ) from None


def cost_records(costs: tuple[LayerCost, ...] | None) -> tuple[dict[str, Any], ...] | None:
    return None if costs is None else tuple(dataclasses.asdict(cost) for cost in costs)
