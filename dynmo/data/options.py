"""How samples are read, cut and put into microbatches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, TypeAlias

from dynmo.options import Count, Options

AnswersOnly: TypeAlias = bool | Literal["last"]


class DataOptions(Options):
    """Options of samples. `shuffle` is one of text, too."""

    shuffle: Literal["windows", "batches"] = "windows"
    """The unit that each epoch shuffles: `windows` puts other sequences together in each epoch.
    `batches` repeats the batches of the first epoch in another order."""
    batching: Literal["rows", "grouped", "packed"] = "rows"
    """`rows` has `train.micro_batch` samples in a microbatch, padded to its longest. `grouped`
    makes microbatches alike in cost. `packed` also puts several samples in a row."""
    answers_only: AnswersOnly = False
    """Whether the loss of samples counts what an assistant says, and completions, alone. `last`
    counts the last answer of each conversation."""
    broken: Literal["stop", "skip"] = "stop"
    """What a broken sample does: it ends the run after a checkpoint, or is left out and counted."""
    streaming: bool = False
    """Whether samples are read in order, from `hf:` or a function that returns an iterable. The
    first 128 are held out."""
    block: Count = 1000
    """Samples of a stream that are shuffled together."""

    def _problems(self) -> Iterator[str]:
        if self.streaming and self.shuffle == "batches":
            yield (
                'data.shuffle = "batches" needs samples that are read by number; leave out '
                "data.streaming, or data.shuffle"
            )
        if not self.streaming and self.block != type(self).model_fields["block"].default:
            yield "data.block has no effect without data.streaming; leave it out"
