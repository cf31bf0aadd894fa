"""Named sums over the outputs of an evaluation."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor

from dynmo.errors import RunError
from dynmo.runtime.comm.agreement import share_texts
from dynmo.runtime.comm.world import World

Metrics: TypeAlias = Callable[[Any, Any], Mapping[str, Tensor | float]]


class MetricSums:
    """Adds up what a function returns for each microbatch."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics, self._values = metrics, dict[str, list[Tensor]]()

    def __call__(self, output: Any, targets: Any) -> None:
        with torch.no_grad():
            found = cast(object, self._metrics(output, targets))
            if not isinstance(found, Mapping):
                raise RunError(
                    f"metrics returned a {type(found).__name__}; it must return sums by name, "
                    'such as {"correct": 17}'
                )
            for name, value in cast(Mapping[str, Tensor | float], found).items():
                number = torch.as_tensor(value, dtype=torch.float64)
                self._values.setdefault(name, []).append(number)

    def over(self, world: World, *, shares: bool) -> dict[str, float]:
        """Returns the sums over all replicas, or of the first one unless `shares`."""
        own = {name: [value.item() for value in each] for name, each in self._values.items()}
        texts = share_texts(world, json.dumps(own), "the metrics")
        found = [cast("dict[str, list[float]]", json.loads(text)) for text in texts]
        first = [each for rank, each in enumerate(found) if not rank % world.replicas]
        counted = found if shares else first
        names = dict.fromkeys(name for each in counted for name in each)
        # Exact, so that any number of replicas has the same sum.
        return {
            name: math.fsum(value for each in counted for value in each.get(name, ()))
            for name in names
        }
