"""Trainings with adapters for the pool of ranks."""

from __future__ import annotations

import functools
from typing import Any

import torch
from peft import LoraConfig

import dynmo
from dynmo.huggingface import save_pretrained
from dynmo.models.huggingface.model import HuggingFaceModel, from_pretrained
from dynmo.pipeline.options import grouped
from dynmo.runtime.comm.meeting import Meeting
from tests.models.huggingface.small import make_batch, steps_of
from tests.models.huggingface.tiny import config

STEPS = 4
UPPER = {"target_modules": ["q_proj", "v_proj", "down_proj"], "layers_to_transform": [1, 2]}


def lora(**options: Any) -> LoraConfig:
    return LoraConfig(r=4, lora_alpha=8, **{**UPPER, **options})


def adamw(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0, foreach=False)


@functools.cache
def model_of(folder: str | None = None, dropout: float = 0.0, **options: Any) -> HuggingFaceModel:
    source = config("llama") if folder is None else folder
    return from_pretrained(source, lora=lora(lora_dropout=dropout), **options)


def pipeline_of(model: HuggingFaceModel, world: Meeting, **options: Any) -> dynmo.Pipeline:
    options |= {"optimizer": adamw, "max_grad_norm": 1e9}
    return dynmo.Pipeline(model, world, microbatches=4, **grouped(options))


def train(
    world: Meeting,
    model: dict[str, Any] | None = None,
    move: tuple[int, ...] | None = None,
    **options: Any,
) -> dict[str, Any]:
    pipeline = pipeline_of(model_of(**(model or {})), world, **options)
    return steps_of(pipeline, STEPS, False, move)


def export(
    world: Meeting,
    base: str,
    folder: str,
    meshes: list[list[int]] | None = None,
    checkpoints: str | None = None,
    resume: str | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Trains and saves adapters while ranks change. Ranks that have left return nothing."""
    options |= {"elastic": dynmo.Elastic(reshape_at=meshes or ()), "resume": resume}
    pipeline = pipeline_of(model_of(base, saves_base=False), world, steps=STEPS, **options)
    while pipeline.steps < STEPS:
        pipeline.adapt()
        if pipeline.left and not pipeline.join():
            return {}
        pipeline.step(make_batch(pipeline.steps, padded=False))
        if pipeline.steps == 2 and checkpoints is not None:
            pipeline.save(checkpoints)
    save_pretrained(pipeline, folder)
    told = {"weights": pipeline.digest(), "size": world.size}
    pipeline.close()
    return told
