"""How samples are read, cut and put into microbatches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal, TypeAlias

from pydantic import Field

from dynmo.options import OWN, Count, Options, written

AnswersOnly: TypeAlias = bool | Literal["last"]
SourceName: TypeAlias = Annotated[
    str,
    written(
        f"(file|tokens|jsonl|parquet|hf):.+|{OWN}",
        "file:PATH, tokens:PATH, jsonl:PATH, parquet:PATH, hf:NAME or python:module:function",
    ),
]


class DataOptions(Options):
    """Options of samples. `shuffle` and `held_out` are options of text, too."""

    of: ClassVar[str] = "Loader"
    shuffle: Literal["windows", "batches"] = "windows"
    """The unit that each epoch shuffles: `windows` puts other sequences together in each epoch.
    `batches` repeats the batches of the first epoch in another order."""
    batching: Literal["rows", "grouped", "packed"] = "rows"
    """`rows` has `train.micro_batch` samples in a microbatch, padded to its longest. `grouped`
    makes microbatches alike in cost. `packed` also puts several samples in a row."""
    held_out: Annotated[float, Field(ge=0, lt=1)] | SourceName | None = None
    """What evaluations read, and training does not: a share of the data, or a source of its own, in
    the words of `source`. 0 holds out nothing. Without it a twentieth is, at most 1024."""
    answers_only: AnswersOnly = False
    """Whether the loss of samples counts what an assistant says, and completions, alone. `last`
    counts the last answer of each conversation."""
    broken: Literal["stop", "skip"] = "stop"
    """What a broken sample does: it ends the run after a checkpoint, or is left out and counted."""
    streaming: bool = False
    """Whether samples are read in order, from `hf:` or a function that returns an iterable. The
    first 128 are held out if `held_out` names no source."""
    block: Count = 1000
    """Samples of a stream that are shuffled together."""

    @property
    def held_out_share(self) -> float | None:
        return None if isinstance(self.held_out, str) else self.held_out

    @property
    def held_out_source(self) -> str | None:
        return self.held_out if isinstance(self.held_out, str) else None

    def _problems(self) -> Iterator[str]:
        if self.streaming and self.held_out_share is not None:
            yield (
                f"data.held_out = {self.held_out_share}: a stream has no end to take a share of; "
                "name a source, or leave it out, which holds out the first 128"
            )
        if self.streaming and self.shuffle == "batches":
            yield (
                'data.shuffle = "batches" needs samples that are read by number; leave out '
                "data.streaming, or data.shuffle"
            )
        if not self.streaming and self.block != type(self).model_fields["block"].default:
            yield "data.block has no effect without data.streaming; leave it out"
