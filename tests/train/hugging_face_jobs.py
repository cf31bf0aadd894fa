"""Jobs of ranks that read text for a model of transformers. Each returns JSON."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from torch import Tensor

from dynmo import Pipeline
from dynmo.config import parse
from dynmo.runtime.comm.meeting import Meeting
from dynmo.train.data import TextLoader
from dynmo.train.setup import model_of
from tests.pool import Pool


@cache
def prepare(pool: Pool) -> None:
    """All ranks import transformers at once. None waits for the import of another one later."""
    pool.run("tests.train.hugging_face_jobs:import_transformers", 4, timeout=300)


def run(pool: Pool, config: dict[str, Any], folder: Path, **options: Any) -> Any:
    """Trains in a folder. Returns what rank 0 knows."""
    folder.mkdir(exist_ok=True)
    ranks = parse(config).ranks
    return pool.run("train_in", ranks, config=config, folder=str(folder), **options)[0]


def import_transformers(world: Meeting) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    del world, AutoModelForCausalLM, AutoTokenizer


def batches(world: Meeting, config: dict[str, Any]) -> list[Any]:
    """Inputs and targets of the first step and of an evaluation. None where there are none."""
    loaded = parse(config)
    model = model_of(loaded)
    pipeline = Pipeline(model, world, **loaded.pipeline_arguments())
    loader = TextLoader(loaded, pipeline, model)
    read = [*loader.train(0)[:2], *loader.evaluation(1)[:2]]
    pipeline.close()
    return [each.tolist() if isinstance(each, Tensor) else None for each in read]
