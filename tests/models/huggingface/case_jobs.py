"""Trainings of tiny models of transformers with dynamic cases, for the pool of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

import dynmo
from dynmo.huggingface import from_pretrained, save_pretrained
from dynmo.pipeline.options import grouped
from dynmo.runtime.comm.meeting import Meeting
from tests.models.huggingface.small import make_batch
from tests.models.huggingface.tiny import config as tiny
from tests.pool import Pool

SHAPES = ("llama", "qwen3", "mixtral")
STEPS = 6
TRAIN = "tests.models.huggingface.case_jobs:train"


def train(  # noqa: PLR0913
    world: Meeting,
    case: str = "",
    options: dict[str, Any] | None = None,
    shape: str = "llama",
    config: dict[str, Any] | None = None,
    padded: bool = True,
    save: str = "",
    load: str = "",
    pipeline: dict[str, Any] | None = None,
    export: str = "",
) -> dict[str, Any]:
    """Trains with a case. Layers move after two steps and after four.

    Args:
        case: Name of its options in `dynmo`. Empty: there is none.
        options: Its options.
        shape: Type of the model, or its folder.
        config: What differs in the config of the model.
        save: Folder that gets a checkpoint after three steps.
        load: Folder of a checkpoint to go on from.
        pipeline: Options of the pipeline.
        export: Folder that gets the model at the end.
    """
    cases = [getattr(dynmo, case)(**(options or {}))] if case else []
    source = shape if "/" in shape else tiny(shape, **(config or {}))
    model = from_pretrained(source, cases=cases)
    given: dict[str, Any] = {"microbatches": 4, "cases": cases, "steps": STEPS, **(pipeline or {})}
    trained = dynmo.Pipeline(model, world, **grouped(given))
    losses, first = list[float](), trained.load(load) if load else 0
    ranks, layers = trained.mesh.shape[0], trained.mesh.model.layers
    for step in range(first, STEPS):
        if step in (2, 4) and ranks > 1:
            own = step // 2
            trained.move([own] * (ranks - 1) + [layers - own * (ranks - 1)])
        batch, (_, replicas) = make_batch(step, padded), trained.mesh.shape
        own = {name: x.chunk(replicas)[trained.mesh.replica] for name, x in batch.items()}
        losses.append(trained.step(own).loss)
        if save and step == 2:
            trained.save(save)
    if export:
        save_pretrained(trained, export)
    return {"losses": losses, "weights": trained.digest()}


def equal_on_ranks(
    pool: Pool, folder: object, ranks: tuple[int, ...] = (1, 2), **given: Any
) -> dict[str, Any]:
    """Trains on several numbers of ranks, and goes on from a checkpoint on the last of them.

    All must end alike. Returns losses and digest.
    """
    place = str(folder)
    first, *others = (pool.run(TRAIN, count, save=place, **given)[0] for count in ranks)
    assert all(each == first for each in others)
    resumed = pool.run(TRAIN, ranks[-1], load=place, **given)[0]
    assert resumed == {"losses": first["losses"][3:], "weights": first["weights"]}
    return first


def save_shape(shape: str, folder: Path, **config: Any) -> str:
    """Saves a model of transformers, and returns the folder."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(tiny(shape, **config)).save_pretrained(folder)
    return str(folder)
