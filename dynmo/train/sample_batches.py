"""The batches of a run from samples, as its config asks for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from dynmo.config import Config
from dynmo.data.grouping import RowCost
from dynmo.data.order import Order
from dynmo.data.records import Records
from dynmo.data.sample_batches import SampleBatches, check_first
from dynmo.data.samples import Encoder
from dynmo.data.tokenizer import has_tokenizer, load_tokenizer
from dynmo.errors import ConfigError
from dynmo.models.model import Model
from dynmo.models.options import ModelOptions


def batches_of(config: Config, model: Model, records: Records) -> SampleBatches:
    """Returns the batches of a run.

    Raises:
        ConfigError: The model has no tokenizer, or the first record cannot be encoded.
    """
    options, train, data = model.options or config.model, config.train, config.data
    if options.kind != "hf":
        raise ConfigError(
            f"data.source has samples, which need a model of kind hf, not {options.kind}; use text "
            "(file:PATH)"
        )
    tokenizer = _tokenizer_of(options, needed="input_ids" not in records[0])
    encoder = Encoder(tokenizer, config.model.sequence, options.vocab, data.answers_only)
    check_first(records, encoder)
    pad = getattr(tokenizer, "pad_token_id", None)
    if pad is None:
        pad = getattr(tokenizer, "eos_token_id", None) or 0
    return SampleBatches(
        records,
        encoder,
        Order(len(records), train.global_batch, train.micro_batch, config.seed, data.shuffle),
        micro_batch=train.micro_batch,
        batching=data.batching,
        broken=data.broken,
        pad=pad,
        cost=row_cost(model),
    )


def _tokenizer_of(options: ModelOptions, needed: bool) -> Any:
    folder = Path(options.path)
    if not has_tokenizer(folder):
        if not needed:
            return None
        raise ConfigError(
            f"data.source has samples, which need a tokenizer, and {folder} has none; save it "
            "there, or give token ids (input_ids)"
        )
    return load_tokenizer(folder, options.vocab, options.trust_remote_code)


def row_cost(model: Model) -> RowCost:
    """Returns what rows cost by arithmetic: 2 a weight for a token, 4 a channel for a pair."""
    with torch.device("meta"):
        layers = model.build(())
    weights = sum(p.numel() for layer in layers for p in layer.parameters())
    config: Any = getattr(model, "config", None)
    width = getattr(config, "hidden_size", 0) * getattr(config, "num_hidden_layers", 0)
    # A token attends to half of its row on average.
    return RowCost(2 * max(1, weights), 2 * width)
