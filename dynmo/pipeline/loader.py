"""Samples for a pipeline, read ahead of need."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, Literal, cast

from dynmo.counterparts import names_checked
from dynmo.data.batches import Ahead, Microbatch, SampleBatches, padding_of
from dynmo.data.options import AnswersOnly, DataOptions
from dynmo.data.order import Order, held_out_of, held_out_text
from dynmo.data.records import (
    BrokenSampleError,
    Records,
    Source,
    WithHeldOut,
    digest_of,
    open_records,
)
from dynmo.data.stream import HELD_OUT, Position, Stream, open_stream
from dynmo.errors import ConfigError
from dynmo.events import DataEvent
from dynmo.models.rows import batches_of
from dynmo.pipeline.pipeline import Pipeline
from dynmo.runtime.comm.agreement import raised_on_all, share_texts

_DEFAULT = DataOptions()


class Loader:
    """The batches of a training from samples, one a step.

    The data, the seed and the number of the step determine a batch. Any ranks therefore train on
    the same batches, and a training goes on with the next sample wherever it stopped. All ranks
    iterate together. A rank that needs no batch gets None. The mesh of the pipeline may change.

    Args:
        pipeline: What trains on the batches. Its events get a `DataEvent` each step.
        source: "jsonl:PATH", "parquet:PATH", "hf:NAME" or "python:module:function", or a sequence
            of records. With `streaming` "hf:NAME" or "python:module:function", or a function that
            returns an iterable of records, for a pass.
        tokenizer: A tokenizer of transformers. None if the records have token ids.
        micro_batch: Samples in a microbatch, on average.
        sequence: Tokens after which a sample is cut.
        seed: Seed of the order.
        shuffle: "batches" repeats the batches of the first epoch in another order in each epoch.
            "windows" puts other samples together.
        batching: "rows" has `micro_batch` samples in each microbatch. "grouped" makes the
            microbatches of a step alike in cost. "packed" also puts several samples in a row. The
            layers of a model of Hugging Face are then loaded once more, and tested for it.
        answers_only: Whether the loss counts what an assistant says, and completions, alone.
            "last" counts the last answer of each conversation.
        broken: "stop" raises at a broken sample. "skip" leaves it out, and counts it.
        streaming: Whether samples are read in order. The first 128 are held out
            if `held_out` names no source.
        block: Samples of a stream that are shuffled together.
        held_out: What `held_out` reads: a share of the samples, or a source of its own. 0 holds
            out nothing. None is a twentieth, at most 1024.
        epochs: Passes over the samples after which the batches end. None means without an end.
        state: What `state_dict` returned, to go on from there.

    Attributes:
        steps: Batches in these epochs. None without an end.
        fault: Why there is no next batch. None if there is one.
        evaluates_on: What `held_out` reads, in words.

    Raises:
        ConfigError: The source cannot be read, or its first record is no sample.
        RunError: Ranks read different data.

    Example:
        >>> loader = dynmo.Loader(pipeline, "jsonl:chats.jsonl", tokenizer, micro_batch=2,
        ...                       sequence=2048, batching="grouped")
        >>> for batch in loader:
        ...     pipeline.step(batch)
    """

    @names_checked
    def __init__(  # noqa: PLR0913
        self,
        pipeline: Pipeline,
        source: Source,
        tokenizer: Any = None,
        *,
        micro_batch: int,
        sequence: int,
        seed: int = 0,
        shuffle: Literal["windows", "batches"] = _DEFAULT.shuffle,
        batching: Literal["rows", "grouped", "packed"] = _DEFAULT.batching,
        answers_only: AnswersOnly = _DEFAULT.answers_only,
        broken: Literal["stop", "skip"] = _DEFAULT.broken,
        streaming: bool = _DEFAULT.streaming,
        block: int = _DEFAULT.block,
        epochs: float | None = None,
        held_out: float | Source | None = _DEFAULT.held_out,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        self._own_source = None if isinstance(held_out, float | int) else held_out
        self._options = DataOptions(
            held_out=held_out if isinstance(held_out, float | int | str) else None,
            shuffle=shuffle,
            batching=batching,
            answers_only=answers_only,
            broken=broken,
            streaming=streaming,
            block=block,
        )
        if tokenizer is not None and not callable(tokenizer):
            raise ConfigError(
                f"tokenizer is a {type(tokenizer).__name__}; give what "
                "AutoTokenizer.from_pretrained returns"
            )
        self._pipeline, self._source, self._tokenizer = pipeline, source, tokenizer
        self._sequence, self._seed = sequence, seed
        self._global_batch = micro_batch * pipeline.options.all_microbatches
        if epochs is not None and (streaming or not epochs > 0):
            why = "a stream has no known length" if streaming else "give a number over 0"
            raise ConfigError(f"epochs = {epochs}: {why}")
        self._epochs = epochs
        self.steps: int | None = None
        self.fault: BaseException | None = None
        self._waited = 0.0
        self._records: Records | None = None
        self._held_out: Records | None = None
        self._batches: SampleBatches | None = None
        self._ahead: Ahead[list[Microbatch]] | None = None
        self._met = 0  # the generation in which the ranks have compared their data last
        # The last batches that were drawn, by the step of the pipeline that they were drawn for. A
        # fault goes back by up to two copies.
        self._kept = 2 * pipeline.options.elastic.recover_every + 2
        self._drawn: dict[int, int] = {}
        self._can_pack = batching != "packed"
        self._open(state or {"step": 0}, is_new=True)

    def __repr__(self) -> str:
        source = f'"{self._source}"' if isinstance(self._source, str) else "records"
        return f"Loader({source}, {self._options.batching}, step {self._step})"

    def _check_packing(self) -> None:
        """Raises ConfigError on every rank if a layer mixes the samples of a packed row."""
        from dynmo.models.huggingface.rows import check_packing

        mesh = self._pipeline.mesh
        options = mesh.model.options
        with raised_on_all(mesh.world, ConfigError, "whether samples can be packed"):
            if not self._can_pack and options is not None and options.kind == "hf":
                check_packing(cast(Any, mesh.model), list(mesh.modules))

    def _place(self) -> tuple[int, ...]:
        """What the batches of this rank depend on, besides the step. It changes on all ranks."""
        mesh = self._pipeline.mesh
        return (*mesh.shape, mesh.microbatches, *mesh.ends, mesh.replica)

    def _open(self, state: Mapping[str, Any], *, is_new: bool = False) -> None:
        """Begins to read, where rank 0 says if the ranks compare their data.

        They do if some rank has read nothing so far, and call it together. After a fault all have,
        and a rank goes on by itself: another one may have drawn its next batch already.
        """
        self.close()
        pipeline, options = self._pipeline, self._options
        mesh, place, generation = pipeline.mesh, self._place(), pipeline.mesh.world.generation
        elastic = pipeline.options.elastic
        compares = is_new or elastic.recover == "none" or mesh.grown > self._met
        if compares and options.batching == "packed":
            mesh.together(self._check_packing)
            self._can_pack = True
        if compares:
            text, what = json.dumps(state), "the position in the data"
            state = json.loads(mesh.together(lambda: share_texts(mesh.world, text, what)[0]))
        self._step, position = int(state["step"]), state.get("position")
        if is_new:
            self._drawn.clear()
        digest, length, others = None, 0, 0
        if pipeline.needs_data:
            if self._held_out is None and self._own_source is not None:
                self._held_out = open_records(self._own_source, "data.held_out")
            if options.streaming:
                at = None if position is None else Position(*position)
                count = HELD_OUT if self._held_out is None else 0
                self._records = open_stream(self._source, options.block, self._seed, at, count)
            elif self._records is None:
                self._records = open_records(self._source)
            length, digest = len(self._records), _digest(self._records)
            if self._held_out is not None:
                others, digest = len(self._held_out), digest + _digest(self._held_out)
        if compares:
            length, others = mesh.compared(digest, (length, others))
            self._met = generation
        if not options.streaming:
            shares = options.held_out_share, others
            order = Order(length, self._global_batch, 1, self._seed, options.shuffle, *shares)
            self.steps = None if self._epochs is None else order.steps(self._epochs)
        if pipeline.needs_data:
            assert self._records is not None
            self._batches = batches_of(
                self._records
                if self._held_out is None
                else WithHeldOut(self._records, self._held_out),
                self._tokenizer,
                pipeline.mesh.model,
                options,
                global_batch=self._global_batch,
                micro_batch=self._global_batch // pipeline.options.all_microbatches,
                sequence=self._sequence,
                seed=self._seed,
            )
            # A thread reads ahead. It must not look at a mesh that changes meanwhile.
            make = partial(self._batches.train, part=self._part)
            self._ahead, self._waited = Ahead(make), 0.0
        count = HELD_OUT if options.streaming else held_out_of(length, options.held_out_share)
        source = self._own_source or self._source
        self.evaluates_on = held_out_text(source, others or count, "samples")
        self._opened = place

    @property
    def _part(self) -> slice:
        """The microbatches of this rank's replica among those of a step."""
        count, replica = self._pipeline.mesh.microbatches, self._pipeline.mesh.replica
        return slice(replica * count, (replica + 1) * count)

    def __iter__(self) -> Iterator[list[Microbatch] | None]:
        return self

    def __next__(self) -> list[Microbatch] | None:
        """Returns this replica's microbatches of the next step, on the device.

        Raises:
            ConfigError: A sample is broken, or the source cannot be read any more.
        """
        if self._place() != self._opened or self._pipeline.mesh.grown > self._met:
            self._open(self._position(self._step))
        step, ahead = self._step, self._ahead
        if self.steps is not None and step >= self.steps:
            raise StopIteration
        self._drawn = dict([*self._drawn.items(), (self._pipeline.steps, step)][-self._kept :])
        if ahead is None or self._batches is None:
            self._step += 1
            return None
        found = ahead.take(step)
        self._step += 1
        # All ranks must know one step ahead, since others may compute before they need a batch.
        self.fault = ahead.error(step + 1)
        padding = padding_of(found)
        waited, self._waited = ahead.waited - self._waited, ahead.waited
        event = DataEvent(step, waited, padding.tokens, padding.padded, self._batches.skipped)
        self._pipeline.measured.tell(event)
        return [self._to_device(each) for each in found]

    def drawn(self, step: int) -> list[Microbatch] | None:
        """Returns the batch once more that was drawn for a step, for the present mesh.

        None if it was drawn too long ago, or by a stream.
        """
        if step not in self._drawn or self._batches is None or self._options.streaming:
            return None
        batch = self._batches.train(self._drawn[step], self._part)
        return [self._to_device(each) for each in batch]

    def held_out(self, microbatches: int) -> list[Microbatch] | None:
        """Returns so many microbatches to evaluate on, the same every time."""
        if self._options.held_out == 0:
            raise ConfigError("held_out = 0 holds out nothing; leave it out, or give a share")
        if self._batches is None:
            return None
        return [self._to_device(self._batches.held_out(i)) for i in range(microbatches)]

    def _to_device(self, given: Microbatch) -> Microbatch:
        device = self._pipeline.mesh.world.device
        if device.type != "cuda":
            return given
        return {
            name: each.pin_memory().to(device, non_blocking=True) for name, each in given.items()
        }

    def state_dict(self) -> dict[str, Any]:
        """Returns the position in the data, as JSON. That of rank 0 is enough for all.

        Batches that were drawn, but that no step has trained yet, come next.
        """
        return self._position(self._drawn.get(self._pipeline.steps, self._step))

    def _position(self, step: int) -> dict[str, Any]:
        position = None
        if isinstance(self._records, Stream):
            position = self._records.position(self._records.held_out + step * self._global_batch)
        return {"step": step, "position": position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from a position. All ranks call it together. That of rank 0 counts.

        `{"step": n}` is enough. A stream is then read from the beginning.
        """
        self._open(state, is_new=True)

    def close(self) -> None:
        """Ends reading ahead."""
        if self._ahead is not None:
            self._ahead.close()
        self._ahead = self._batches = None


def _digest(records: Records) -> bytes:
    def end(at: int) -> str:
        try:
            return digest_of(records[at])
        except BrokenSampleError as error:
            return str(error)

    return f"{len(records)} {end(0)} {end(len(records) - 1)}".encode()
