"""Trainings from folders for the pool of ranks."""

from __future__ import annotations

import dynmo
from dynmo.huggingface import from_pretrained, save_pretrained
from dynmo.runtime.comm.meeting import Meeting
from tests.models.huggingface.small import make_batch


def export(world: Meeting, folder: str, out: str) -> None:
    pipeline = dynmo.Pipeline(from_pretrained(folder), world, microbatches=4)
    pipeline.step(make_batch(0, padded=False))
    save_pretrained(pipeline, out)
