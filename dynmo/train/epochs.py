"""The number of steps of a run whose length is in epochs."""

from __future__ import annotations

import logging
import os

from dynmo.config import Config, with_options
from dynmo.data.batches import windows_in
from dynmo.data.order import Order
from dynmo.data.records import open_records
from dynmo.errors import ConfigError
from dynmo.train.setup import model_of
from dynmo.train.text import open_text

_logger = logging.getLogger(__name__)


def with_steps(config: Config) -> Config:
    """Returns the config with the steps that `train.epochs` gives. Reads the length of the data.

    Raises:
        ConfigError: The length is unknown, or the steps do not fit the other options.
    """
    train, data = config.train, config.data
    if train.epochs is None:
        return config
    if data.streaming:
        raise ConfigError(
            f'train.epochs = {train.epochs:g}: the length of data.source = "{data.source}" is '
            "unknown with data.streaming; give train.steps"
        )
    if data.has_samples:
        windows, *others = (len(open_records(each)) for each in data.sources)
        own = sum(others)
    else:
        options = model_of(config).options or config.model
        lengths = [len(open_text(each, options)) for each in data.sources]
        windows, own = windows_in(config.model.sequence, *lengths)
    batch = train.global_batch, train.micro_batch
    order = Order(windows, *batch, config.seed, data.shuffle, data.held_out_share, own)
    steps = order.steps(train.epochs)
    if os.environ.get("RANK", "0") == "0":
        _logger.warning(
            f"train.epochs = {train.epochs:g} with {order.windows} samples: {steps} steps"
        )
    return with_options(config, ("train",), {"epochs": None, "steps": steps})
