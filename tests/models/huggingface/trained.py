"""Trains families on ranks of the pool, and in a plain loop of torch."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModelForCausalLM, PreTrainedConfig

import dynmo
from dynmo.models.huggingface.model import from_pretrained
from dynmo.models.loss import joined
from dynmo.pipeline.options import grouped
from tests.models.huggingface.tiny import VOCABULARY, config

ROWS, TOKENS, MICROBATCHES, STEPS = 12, 7, 4, 3
SCHEDULES = ("zb-h1", "zb-v")

Trained = tuple[list[float], dict[str, Tensor]]
"""The loss of each step, and the weights after the last one."""

_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
_ROPE = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, **_LLAMA3}
_KINDS = (
    "llama cohere deepseek_v3 gemma gemma2 gemma3_text glm4 gpt2 gpt_neox gpt_oss granite mistral "
    "mixtral olmo2 opt phi phi3 qwen2 qwen3 qwen3_moe smollm3 stablelm starcoder2"
)
# Model type, and values of its config.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    **{kind: (kind, {}) for kind in _KINDS.split()},
    "llama-tied": ("llama", {"tie_word_embeddings": True, "rope_parameters": _ROPE}),
}


def config_of(family: str) -> PreTrainedConfig:
    kind, values = FAMILIES[family]
    made = config(kind)
    for name, value in values.items():
        setattr(made, name, value)
    return made


def make_batch(step: int) -> dict[str, Tensor]:
    """Makes rows [12, 7] with padding. Microbatches count 15, 18, 14 and 12 labels."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(3, VOCABULARY, (ROWS, TOKENS), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    mask[7, 3:] = 0
    labels = ids.masked_fill(mask == 0, -100)
    labels[9:, 5:] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def train(world: dynmo.World, family: str, folder: str) -> list[list[float]]:
    """Trains with each schedule. Rank 0 writes the weights to files. Returns the losses."""
    model, losses = from_pretrained(config_of(family)), list[list[float]]()
    for schedule in SCHEDULES:
        given: Any = {"schedule": schedule, "microbatches": MICROBATCHES, "max_grad_norm": 0}
        adamw = dynmo.AdamW(lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
        pipeline = dynmo.Pipeline(model, world, optimizer=adamw, **grouped(given))
        losses.append([pipeline.step(make_batch(step)).loss for step in range(STEPS)])
        state = pipeline.state_dict()
        if world.rank == 0:
            torch.save(state, f"{folder}/{schedule}")
    return losses


@functools.cache
def plain(family: str, *, apart: bool) -> Trained:
    """Trains the model of transformers in one process.

    `apart`: each use of a tied weight sums its gradients over the microbatches, as in a pipeline.
    """
    made = config_of(family)
    model = from_pretrained(made)
    layers = reversed(model.build(range(model.layers)))
    state = {name: tensor for layer in layers for name, tensor in layer.state_dict().items()}
    whole = AutoModelForCausalLM.from_config(made).train()
    names = [(owner, user) for (_, owner), (_, user) in model.tied]
    whole.load_state_dict(state | {user: state[owner] for owner, user in names})
    uses = [_untied(whole, owner, user) for owner, user in names] if apart else []
    users = {id(user) for _, user in uses}
    decays = [p for p in whole.parameters() if p.dim() > 1 and id(p) not in users]
    others = [p for p in whole.parameters() if p.dim() < 2]
    decay: Any = {"params": decays, "weight_decay": 0.1}
    groups = [decay, {"params": others, "weight_decay": 0.0}]
    # Fused, as dynmo's.
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), fused=True)
    losses = list[float]()
    for step in range(STEPS):
        optimizer.zero_grad()
        losses.append(_forward_backward(whole, make_batch(step)))
        for owner, user in uses:
            found = [each.grad for each in (user, owner) if each.grad is not None]
            owner.grad, user.grad = found[0] + found[1] if found[1:] else found[0], None
        optimizer.step()
    return losses, whole.state_dict()


def _untied(whole: nn.Module, owner: str, user: str) -> tuple[nn.Parameter, nn.Parameter]:
    """Gives the second use of a weight a parameter of its own over the same memory."""
    path, _, key = user.rpartition(".")
    owned = whole.get_parameter(owner)
    used = nn.Parameter(owned.data)
    setattr(whole.get_submodule(path), key, used)
    return owned, used


def _forward_backward(whole: nn.Module, batch: dict[str, Tensor]) -> float:
    """Returns the mean loss of all labels that count. Each gradient is a sum over microbatches."""
    rows = ROWS // MICROBATCHES
    labels = functional.pad(batch.pop("labels"), (0, 1), value=-100)[:, 1:]
    counts, losses = [float((part != -100).sum()) for part in labels.split(rows)], list[Tensor]()
    for index, count in enumerate(counts):
        cut = {name: each.split(rows)[index] for name, each in batch.items()}
        logits = whole(**cut, use_cache=False).logits
        targets = labels.split(rows)[index].reshape(-1)
        loss = functional.cross_entropy(logits.flatten(0, 1).float(), targets)
        loss.backward(torch.tensor(count / sum(counts)))
        losses.append(loss.detach().double())
    return joined(torch.stack(losses), counts)
