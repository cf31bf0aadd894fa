"""The batches of samples that a model trains on, and what their rows cost it by arithmetic."""

from __future__ import annotations

from typing import Any

import torch

from dynmo.data.batches import SampleBatches, check_first
from dynmo.data.grouping import RowCost
from dynmo.data.options import DataOptions
from dynmo.data.order import Order, StreamOrder
from dynmo.data.records import Records, WithHeldOut
from dynmo.data.samples import Encoder
from dynmo.data.stream import HELD_OUT
from dynmo.models.model import Model
from dynmo.options import LARGEST


def row_cost(model: Model, weights: int) -> RowCost:
    """Returns the cost of a row: 2 a weight for a token, 4 a channel of attention for a pair.

    Args:
        model: Its attention counts if dynmo or transformers knows the width of its blocks.
        weights: Number of weights that each token meets.
    """
    width, options = 0, model.options
    config: Any = getattr(model, "config", None)
    if config is not None:
        text = config.get_text_config()
        width = getattr(text, "hidden_size", 0) * getattr(text, "num_hidden_layers", 0)
    elif options is not None and options.is_gpt:
        width = options.hidden * options.blocks
    # A token attends to half of its row on average.
    return RowCost(2 * max(1, weights), 2 * width)


def batches_of(
    records: Records,
    tokenizer: Any,
    model: Model,
    options: DataOptions,
    *,
    global_batch: int,
    micro_batch: int,
    sequence: int,
    seed: int,
) -> SampleBatches:
    """Returns the batches that records give, which may be `WithHeldOut`.

    Raises:
        ConfigError: There is one record only, or the first one cannot be encoded.
    """
    own = model.options
    vocab = own.vocab if own is not None and own.kind == "hf" else LARGEST
    encoder = Encoder(tokenizer, sequence, vocab, options.answers_only)
    others = 0
    if isinstance(records, WithHeldOut):
        check_first(records.held_out, encoder, options.broken)
        others = len(records.held_out)
    check_first(records, encoder, options.broken)
    pad = getattr(tokenizer, "pad_token_id", None)
    if pad is None:
        pad = getattr(tokenizer, "eos_token_id", None) or 0
    sizes = global_batch, micro_batch
    order = (
        StreamOrder(0 if others else HELD_OUT, *sizes, others)
        if options.streaming
        else Order(len(records), *sizes, seed, options.shuffle, options.held_out_share, others)
    )
    with torch.device("meta"):
        weights = sum(p.numel() for layer in model.build(()) for p in layer.parameters())
    return SampleBatches(
        records,
        encoder,
        order,
        micro_batch=micro_batch,
        batching=options.batching,
        broken=options.broken,
        pad=pad,
        cost=row_cost(model, weights),
    )
