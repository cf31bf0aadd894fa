"""Reads the samples of a rank ahead of need."""

from __future__ import annotations

import hashlib
import json

from dynmo import Pipeline
from dynmo.config import Config
from dynmo.data.ahead import Ahead
from dynmo.data.records import Records, open_records
from dynmo.data.sample_batches import Microbatch, SampleBatches, padding_of
from dynmo.errors import ConfigError
from dynmo.events import DataEvent
from dynmo.models.model import Model
from dynmo.runtime.comm.agreement import agree, maxima
from dynmo.runtime.comm.world import World
from dynmo.train.loader import Batch
from dynmo.train.sample_batches import batches_of


class SampleLoader:
    """The samples of one mesh. A reshape makes it anew.

    Only the ranks that hold the first or the last layer read samples.

    Attributes:
        fault: Why the next step has no batch. The present step is the last then.
    """

    def __init__(self, config: Config, world: World, pipeline: Pipeline, model: Model) -> None:
        if pipeline.caches:
            raise ConfigError(
                "dynamism.freezing.cache_bytes needs windows of text, which come again with the "
                "same others; leave it out with samples"
            )
        self._device, self._pipeline = world.device, pipeline
        self.fault: BaseException | None = None
        self._batches: SampleBatches | None = None
        digest, length = None, 0
        records: Records | None = None
        if pipeline.needs_data:
            records = open_records(config.data.source)
            length = len(records)
            digest = _digest(records)
        agree(world, digest, "the data (data.source)")
        if int(maxima(world, (length,))[0]) < 2:
            raise ConfigError(
                f'data.source = "{config.data.source}" has one record; one to train on and one '
                "held out are needed"
            )
        if records is not None:
            self._batches = batches_of(config, model, records)
            self._ahead = Ahead(self._make)
        self._waited = 0.0

    def _make(self, step: int) -> list[Microbatch]:
        assert self._batches is not None
        own, replica = self._pipeline.microbatches, self._pipeline.replica
        return self._batches.train(step, slice(replica * own, (replica + 1) * own))

    def train(self, step: int) -> Batch:
        """Returns this replica's microbatches of a step."""
        if self._batches is None:
            return Batch(None, None, None)
        found = self._ahead.take(step)
        # All ranks must know one step ahead, since others may compute before they need a batch.
        self.fault = self._ahead.error(step + 1)
        return Batch([self._to_device(each) for each in found], None, None)

    def event(self, step: int) -> DataEvent | None:
        """Returns what the last batch of this rank was like, for the log."""
        if self._batches is None:
            return None
        padding, waited = padding_of(self._ahead.take(step)), self._ahead.waited
        waited, self._waited = waited - self._waited, waited
        return DataEvent(step, waited, padding.tokens, padding.padded, self._batches.skipped)

    def held_out(self, microbatches: int) -> Batch:
        """Returns so many microbatches to evaluate on, the same every time."""
        if self._batches is None:
            return Batch(None, None, None)
        several = [self._batches.held_out(i) for i in range(microbatches)]
        return Batch([self._to_device(each) for each in several], None, None)

    def _to_device(self, given: Microbatch) -> Microbatch:
        if self._device.type != "cuda":
            return given
        return {
            name: each.pin_memory().to(self._device, non_blocking=True)
            for name, each in given.items()
        }

    def close(self) -> None:
        if self._batches is not None:
            self._ahead.close()


def _digest(records: Records) -> bytes:
    ends = (json.dumps(records[at], default=str) for at in (0, len(records) - 1))
    return hashlib.sha256("\n".join((str(len(records)), *ends)).encode()).digest()
