"""The parts of a model, and the blocks that a probe cuts into halves."""

from __future__ import annotations

import functools
import re

import pytest
import torch

from dynmo.models.huggingface.halves import halves_of
from dynmo.models.huggingface.model import meta_model
from dynmo.models.huggingface.probe import ModelStructure, UnfitModelError, structure_of
from tests.combinations import mostly_matrix
from tests.models.huggingface.tiny import config


@functools.cache
def structure(kind: str) -> ModelStructure:
    return structure_of(meta_model(kind, config(kind), trust_remote_code=False))


BLOCKS = [
    ("llama", "model.layers"),
    ("gpt2", "transformer.h"),
    ("bart", "model.decoder.layers"),
    ("longcat_flash", "model.layers"),  # each block has two attentions: the config counts six
    ("granite_swa", "model.layers"),  # a second list has modules without weights
    ("llama4", "model.layers"),  # the prefix of its class is no attribute
]


@pytest.mark.parametrize(("kind", "blocks"), mostly_matrix(BLOCKS, BLOCKS[:2]))
def test_blocks_are_found(kind: str, blocks: str) -> None:
    found = structure(kind)
    assert (found.blocks, found.count) == (blocks, 3)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("roformer", "block 0 takes sinusoidal_pos, which depends on hidden states or weights"),
        ("hy_v4", "block 1 takes prev_topk_indices, which depends on the ids or on another block"),
        ("gemma4_unified_text", "takes shared_kv_states, a KVSharingDict, which blocks may share"),
        ("xlnet", "the parameter transformer.mask_emb belongs to no module that could be moved"),
        ("recurrent_gemma", "it keeps model.layers.0.temporal_block.rg_lru.recurrent_states"),
        ("xlm", "not one list of blocks, but transformer.attentions, transformer.layer_norm1, 2"),
        ("cpmant", "its code does not run from inputs_embeds alone, without weights"),
    ],
)
def test_unfit_models_are_refused(kind: str, reason: str) -> None:
    with pytest.raises(UnfitModelError, match=re.escape(reason)):
        structure(kind)


def test_blocks_that_are_skipped_at_random_are_refused() -> None:
    made = config("opt")
    made.layerdrop = 0.1
    with pytest.raises(UnfitModelError, match=r"layerdrop = 0\.1 skips blocks at random"):
        structure_of(meta_model("opt", made, trust_remote_code=False))


@pytest.mark.matrix
def test_rare_models_have_a_structure() -> None:
    norm = structure("nanochat")  # without weights, on both sides of the blocks
    assert "model.norm" in norm.before
    assert "model.norm" in norm.after
    positions = structure("openai-gpt").model.get_buffer("transformer.position_ids")
    assert torch.equal(positions, torch.arange(len(positions))), "buffers have values"
    assert structure("jetmoe").elements == (None,) * 3, "experts that count need no memory"


WHOLE = [
    ("phi", "resid_dropout runs twice"),
    ("cohere", "its two modules take the same hidden states (parallel attention)"),
    ("beam", "the hidden states change even where a module adds nothing"),
    ("doge", "the block has parameters of its own"),
]


@pytest.mark.parametrize(("kind", "reason"), mostly_matrix(WHOLE, WHOLE[1::2]))
def test_blocks_stay_whole(kind: str, reason: str) -> None:
    assert halves_of(structure(kind), 0) == reason
