"""Jobs of ranks that read text for a model of transformers. Each returns JSON."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from dynmo import Pipeline
from dynmo.config import parse
from dynmo.runtime.comm.world import World
from dynmo.train.loader import DataLoader
from dynmo.train.setup import model_of


def batches(world: World, config: dict[str, Any]) -> list[Any]:
    """Inputs and targets of the first step and of an evaluation. None where there are none."""
    loaded = parse(config)
    model = model_of(loaded)
    pipeline = Pipeline(model, world, **loaded.pipeline_options())
    loader = DataLoader(loaded, world, pipeline, model)
    read = [*loader.train(0)[:2], *loader.held_out(1)[:2]]
    pipeline.close()
    return [each.tolist() if isinstance(each, Tensor) else None for each in read]
