"""dynmo: pipeline-parallel training of language models whose work changes while they train.

    import dynmo

    with dynmo.init() as world:
        model = dynmo.Sequential([embedding, *blocks, head], loss=loss)
        pipeline = dynmo.Pipeline(model, world, schedule="zb-auto", microbatches=8)
        for inputs, targets in loader:
            result = pipeline.step(inputs, targets)

The names below are the public ones. Each is loaded when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dynmo.balance.partition import Partition as Partition
    from dynmo.config import Balance as Balance
    from dynmo.cost.layer_cost import LayerCost as LayerCost
    from dynmo.dynamism import Change as Change
    from dynmo.dynamism import Dynamism as Dynamism
    from dynmo.dynamism import Forecast as Forecast
    from dynmo.dynamism import Layers as Layers
    from dynmo.dynamism import Signals as Signals
    from dynmo.errors import DynmoError as DynmoError
    from dynmo.models.model import next_token_loss as next_token_loss
    from dynmo.models.sequential import Sequential as Sequential
    from dynmo.pipeline.optimizers import SGD as SGD
    from dynmo.pipeline.optimizers import AdamW as AdamW
    from dynmo.pipeline.pipeline import Pipeline as Pipeline
    from dynmo.pipeline.start import init as init
    from dynmo.runtime.comm.world import World as World
    from dynmo.runtime.engine.step_reduction import StepResult as StepResult

__version__: str

_HOMES = {
    "AdamW": "dynmo.pipeline.optimizers",
    "Balance": "dynmo.config",
    "Change": "dynmo.dynamism",
    "Dynamism": "dynmo.dynamism",
    "DynmoError": "dynmo.errors",
    "Forecast": "dynmo.dynamism",
    "LayerCost": "dynmo.cost.layer_cost",
    "Layers": "dynmo.dynamism",
    "Partition": "dynmo.balance.partition",
    "Pipeline": "dynmo.pipeline.pipeline",
    "SGD": "dynmo.pipeline.optimizers",
    "Sequential": "dynmo.models.sequential",
    "Signals": "dynmo.dynamism",
    "StepResult": "dynmo.runtime.engine.step_reduction",
    "World": "dynmo.runtime.comm.world",
    "init": "dynmo.pipeline.start",
    "next_token_loss": "dynmo.models.model",
}

__all__ = [
    "SGD",
    "AdamW",
    "Balance",
    "Change",
    "Dynamism",
    "DynmoError",
    "Forecast",
    "LayerCost",
    "Layers",
    "Partition",
    "Pipeline",
    "Sequential",
    "Signals",
    "StepResult",
    "World",
    "__version__",
    "init",
    "next_token_loss",
]


def __getattr__(name: str) -> Any:
    """Loads a public name when it is first used (PEP 562)."""
    if name == "__version__":
        from importlib.metadata import version

        value: Any = version("dynmo")
    elif name in _HOMES:
        value = getattr(importlib.import_module(_HOMES[name]), name)
    else:
        raise AttributeError(
            f"module 'dynmo' has no attribute {name!r}; its public names are {', '.join(__all__)}"
        )
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
