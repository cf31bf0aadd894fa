"""Jobs of the ranks of this folder's tests. Each returns JSON."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import dynmo
from dynmo.errors import DynmoError
from dynmo.huggingface import from_pretrained, generate, save_pretrained
from dynmo.pipeline.options import grouped
from dynmo.runtime.comm.meeting import Meeting
from tests.full_disk import full_at
from tests.models.huggingface.small import make_batch
from tests.models.huggingface.tiny import model_of

MICROBATCHES = 4


def trained(world: Meeting, kind: str, **options: Any) -> dynmo.Pipeline:
    """A pipeline after a step, in which each replica has its rows of the batch."""
    replicas = options.get("replicas", 1)
    options |= {"microbatches": MICROBATCHES // replicas, "optimizer": dynmo.AdamW(lr=0.01)}
    pipeline = dynmo.Pipeline(model_of(kind), world, **grouped(options))
    batch = make_batch(0, padded=False)
    rows = {name: each.chunk(replicas)[world.rank % replicas] for name, each in batch.items()}
    pipeline.step(rows)
    return pipeline


def plain_of(folder: str, told: dict[str, Any] | None = None) -> Any:
    """What transformers loads from a folder. `told` gets the keys that do not fit."""
    loaded: Any = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    plain, info = loaded
    if told is not None:
        told["keys"] = sorted({*info["missing_keys"], *info["unexpected_keys"]})
    return plain.eval()


def equal(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def exported(world: Meeting, kind: str, folder: str, **options: Any) -> dict[str, Any]:
    pipeline = trained(world, kind, **options)
    save_pretrained(pipeline, folder)
    seen = dict[str, Any]()
    plain = plain_of(folder, seen)
    state, loaded = pipeline.state_dict(everywhere=True), plain.state_dict()
    seen["state"] = equal(loaded, state)
    ids = make_batch(2, padded=False)["input_ids"]
    out = pipeline.evaluate({"input_ids": ids}, outputs=True, shared=True).outputs
    if options.get("precision", "float32") == "float32" and isinstance(out, Tensor):
        parts = ids.chunk(pipeline.mesh.microbatches)
        with torch.no_grad():
            seen["logits"] = torch.equal(out, torch.cat([plain(part).logits for part in parts]))
    model = from_pretrained(folder)
    again = dynmo.Pipeline(model, world, microbatches=MICROBATCHES, schedule="1f1b")
    seen["again"] = equal(again.state_dict(everywhere=True), state)
    seen["goes on"] = pipeline.step(make_batch(1, padded=False)).loss > 0
    return seen


def save_on_a_full_disk(world: Meeting, folder: str, files: list[tuple[int, int]]) -> list[str]:
    """The error for each number of a file that one rank cannot sync, and each such rank."""
    pipeline, said = trained(world, "llama"), list[str]()
    for at, (number, full) in enumerate(files):
        with pytest.raises(DynmoError) as caught, full_at(number if world.rank == full else -1):
            save_pretrained(pipeline, f"{folder}{at}")
        said.append(str(caught.value))
    return said


def continued(
    world: Meeting, folder: str, ids: list[list[int]], new: int, **options: Any
) -> list[list[int]]:
    pipeline = dynmo.Pipeline(from_pretrained(folder), world, microbatches=2, **grouped(options))
    longer = generate(pipeline, torch.tensor(ids), max_new_tokens=new)
    assert longer.dtype == torch.int64
    return longer.tolist()


def text_continued(world: Meeting, folder: str, text: str) -> str:
    pipeline = dynmo.Pipeline(from_pretrained(Path(folder)), world, microbatches=2)
    return generate(pipeline, text, max_new_tokens=4)
