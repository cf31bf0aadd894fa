"""Options of SparseAttention."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import AfterValidator, Field

from dynmo.extend import (
    CaseOptions,
    Count,
    Listed,
    RunFacts,
    Whole,
)

Blocks: TypeAlias = Listed[Whole]


def _check_ascending(value: tuple[Any, ...]) -> tuple[Any, ...]:
    for (step, _), (next_step, _) in itertools.pairwise(value):
        if next_step <= step:
            raise ValueError(f"step {next_step} after step {step}: steps must ascend")
    return value


# Values that change at given steps. The steps ascend.
if TYPE_CHECKING:
    BlocksAt: TypeAlias = Sequence[tuple[int, Sequence[int]]]
else:
    BlocksAt = Annotated[
        tuple[Annotated[tuple[Whole, Blocks], Field(strict=False)], ...],
        Field(strict=False),
        AfterValidator(_check_ascending),
    ]


class SparseAttention(CaseOptions):
    """Attention computes only a part of the pairs of queries and keys."""

    name: ClassVar[str] = "sparse_attention"
    turn: ClassVar[int] = 2
    changes: ClassVar[str] = "attention"

    kind: Literal["hash", "drop"] = "hash"
    """Pairs that are computed: those in one hash bucket, or those that a random drop leaves."""
    start: Whole = 0
    """Step from which on attention is sparse."""
    blocks: Listed[Whole] | None = None
    """Indices of the blocks that are sparse from `start` on. Not set: all blocks."""
    schedule: BlocksAt = ()
    """`[[step, [block, ...]], ...]`: from each step on, these blocks are sparse and the others
    dense."""
    buckets: Annotated[Count, Field(multiple_of=2)] = 16
    """Number of hash buckets. Even."""
    drop: Annotated[float, Field(ge=0, lt=1)] = 0.5
    """Share of the queries, and of the keys, that kind `drop` drops."""
    tile: Annotated[int, Field(ge=1, le=65536)] = 32
    """Queries that are computed together."""

    def gpt_layers(self, layers: Any) -> Any:
        return import_module(".layers", __package__).gpt_layers(layers)

    @classmethod
    def compile_ahead(cls) -> None:
        import_module(".layers", __package__).compile_ahead()

    def problems(self, run: RunFacts) -> Iterator[str]:
        key, model = "dynamism.sparse_attention", run.model
        yield from super().problems(run)
        if self.schedule and (self.start or self.blocks is not None):
            yield f"{key}.schedule says when and where, and so do start and blocks; leave them out"
        if run.compiles and model is not None and model.kind == "hf":
            yield (
                f'train.compile = true with {key} and model.kind = "hf": its attention cannot be '
                "compiled; use compile = false"
            )
        named = {block for _, blocks in self.schedule for block in blocks} | set(self.blocks or ())
        if model is not None and model.is_gpt and max(named, default=0) >= model.blocks:
            where = "schedule" if self.schedule else "blocks"
            yield (
                f"{key}.{where} names block {max(named)}, but the model has {model.blocks}, from "
                f"0 to {model.blocks - 1}"
            )
        if not named and (self.schedule or self.blocks is not None):
            yield (
                f"{key} names no block, so all attention would stay dense; name one, or leave "
                "blocks out to mean all"
            )
        first = self.schedule[0][0] if self.schedule else self.start
        if run.steps is not None and first >= run.steps:
            yield (
                f"{key} starts at step {first}, but the run has {run.steps} steps, so all "
                "attention would stay dense; start sooner"
            )
        if self.kind == "hash" and model is not None and self.buckets > model.sequence:
            most = model.sequence // 2 * 2
            yield (
                f"{key}.buckets = {self.buckets} is more than model.sequence = {model.sequence} "
                f"tokens; use {most} or fewer"
            )
