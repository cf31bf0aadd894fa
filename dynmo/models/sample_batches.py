"""The batches of samples that a model trains on."""

from __future__ import annotations

from typing import Any

import torch

from dynmo.data.batches import SampleBatches, check_first
from dynmo.data.options import DataOptions
from dynmo.data.order import Order, StreamOrder
from dynmo.data.records import Records, WithHeldOut
from dynmo.data.samples import Encoder
from dynmo.data.stream import HELD_OUT
from dynmo.models.model import Model
from dynmo.models.row_cost import row_cost
from dynmo.options import LARGEST


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
    order = (
        StreamOrder(0 if others else HELD_OUT, global_batch, micro_batch, others)
        if options.streaming
        else Order(
            len(records),
            global_batch,
            micro_batch,
            seed,
            options.shuffle,
            options.held_out_share,
            others,
        )
    )
    return SampleBatches(
        records,
        encoder,
        order,
        micro_batch=micro_batch,
        batching=options.batching,
        broken=options.broken,
        pad=pad,
        cost=row_cost(model, _weights(model)),
    )


def _weights(model: Model) -> int:
    with torch.device("meta"):
        layers = model.build(())
    return sum(p.numel() for layer in layers for p in layer.parameters())
