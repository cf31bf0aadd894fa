"""The samples of a run, as its config asks for them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dynmo import Loader, Pipeline
from dynmo.config import Config
from dynmo.data.options import DataOptions
from dynmo.data.records import WithHeldOut, open_records
from dynmo.data.sample_batches import SampleBatches
from dynmo.data.stream import HELD_OUT, open_stream
from dynmo.data.tokenizer import has_tokenizer, load_tokenizer
from dynmo.errors import ConfigError
from dynmo.models.model import Model
from dynmo.models.options import ModelOptions
from dynmo.models.sample_batches import batches_of


def loader_of(config: Config, pipeline: Pipeline, model: Model, state: Mapping[str, Any]) -> Loader:
    """Returns the loader of a run, which goes on from a state.

    Raises:
        ConfigError: The model cannot be trained on samples, or the first one cannot be encoded.
    """
    return Loader(
        pipeline,
        config.data.source,
        tokenizer_of(config, model),
        micro_batch=config.train.micro_batch,
        sequence=config.model.sequence,
        seed=config.seed,
        **_options(config).model_dump(),
        state=state,
    )


def open_batches(config: Config, model: Model) -> SampleBatches:
    """Returns all batches of a run. Raises the errors that its loader would raise."""
    options, source = _options(config), config.data.source
    other = options.held_out_source
    count = HELD_OUT if other is None else 0
    records = (
        open_stream(source, options.block, config.seed, held_out=count)
        if options.streaming
        else open_records(source)
    )
    if other is not None:
        records = WithHeldOut(records, open_records(other, "data.held_out"))
    return batches_of(
        records,
        tokenizer_of(config, model),
        model,
        options,
        global_batch=config.train.global_batch,
        micro_batch=config.train.micro_batch,
        sequence=config.model.sequence,
        seed=config.seed,
    )


def _options(config: Config) -> DataOptions:
    return DataOptions(**config.data.model_dump(include=set(DataOptions.model_fields)))


def tokenizer_of(config: Config, model: Model) -> Any:
    """Returns the tokenizer of the model's folder. None if there is none."""
    options: ModelOptions = model.options or config.model
    if options.kind != "hf":
        raise ConfigError(
            f"data.source has samples, which need a model of kind hf, not {options.kind}; use text "
            "(file:PATH)"
        )
    folder = Path(options.path)
    if not has_tokenizer(folder):
        return None
    return load_tokenizer(folder, options.vocab, options.trust_remote_code)
