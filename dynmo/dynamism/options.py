"""Options of the dynamic cases, and the sections of [dynamism].

To add a case, add its options here and to `CASES`. Its class is in the module of this package that
has the name of the case. There a function `make(options, run)` makes the case.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, TypeAlias, cast

from pydantic import AfterValidator, Field, model_validator

from dynmo.models.options import ModelOptions
from dynmo.options import (
    BelowOne,
    Bytes,
    Count,
    Lax,
    Listed,
    NonNegative,
    Options,
    Share,
    Whole,
    check_ascending,
    written,
)


def _check_pairs(value: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
    for (step, layers), (next_step, next_layers) in itertools.pairwise(value):
        if next_step <= step or next_layers < layers:
            raise ValueError(
                f"[{next_step}, {next_layers}] after [{step}, {layers}]: steps must ascend, and "
                "frozen layers never be fewer"
            )
    return value


Shape: TypeAlias = Annotated[str, written(r"[1-9]\d*x[1-9]\d*", "rows x columns, like 256x1024")]
DenseBelow: TypeAlias = Literal["auto", "measured"] | Share | dict[Shape, Share]
Blocks: TypeAlias = Listed[Whole]
# Values that change at given steps. The steps ascend.
if TYPE_CHECKING:
    FrozenAt: TypeAlias = Sequence[Sequence[int]]
    BlocksAt: TypeAlias = Sequence[tuple[int, Sequence[int]]]
else:
    FrozenAt = Annotated[
        tuple[Annotated[tuple[Whole, Whole], Lax], ...], Lax, AfterValidator(_check_pairs)
    ]
    BlocksAt = Annotated[
        tuple[Annotated[tuple[Whole, Blocks], Lax], ...], Lax, AfterValidator(check_ascending)
    ]


@dataclass(frozen=True)
class RunFacts:
    """What is known of a run before it starts. None: not known.

    Attributes:
        micro_batch: Samples in a microbatch.
        expert: Replicas that share one set of experts.
        on_cuda: Whether the ranks may compute on CUDA.
        compiles: Whether torch.compile runs parts of the layers.
    """

    layers: int | None = None
    steps: int | None = None
    seed: int = 0
    model: ModelOptions | None = None
    micro_batch: int | None = None
    expert: int = 1
    on_cuda: bool = False
    compiles: bool = False
    cases: Mapping[str, CaseOptions] = field(default_factory=dict[str, "CaseOptions"])

    @property
    def tokens(self) -> int | None:
        """Tokens of a microbatch, if known."""
        if self.model is None or self.micro_batch is None:
            return None
        return self.micro_batch * self.model.sequence


class CaseOptions(Options):
    """Options of one dynamic case.

    Attributes:
        name: Name of the case, in the file and in messages.
    """

    name: ClassVar[str]

    def problems(self, run: RunFacts) -> Iterator[str]:
        """Yields why the options do not fit a run, a line each."""
        return iter(())


def _needs(run: RunFacts, case: str, part: str) -> Iterator[str]:
    if run.model is not None and run.model.kind == "emulated":
        yield (
            f'dynamism.{case}: model.kind = "emulated" has no {part}; use "gpt" or a model of your '
            "own"
        )
    elif run.model is not None and run.model.kind == "hf":
        yield (
            f'dynamism.cases: "{case}" changes code that model.kind = "hf" takes from '
            'transformers; leave it out, or use "gpt" or a model of your own'
        )


def _chosen_tokens(run: RunFacts, case: str) -> Iterator[str]:
    """Yields the options that exclude a case that chooses tokens."""
    if "sparse_attention" in run.cases:
        yield (
            f'dynamism.cases: "{case}" and "sparse_attention" both say what attention '
            "computes; leave one of them out"
        )
    freezing = run.cases.get("freezing")
    if isinstance(freezing, Freezing) and freezing.policy == "egeria":
        yield (
            'dynamism.freezing.policy = "egeria" compares the outputs of a layer and its '
            f'reference, which choose other tokens under "{case}"; use "autofreeze" or a schedule'
        )
    if run.compiles:
        yield (
            f'train.compile = true with "{case}": shapes vary, and each would be compiled '
            "anew; use compile = false"
        )


class Freezing(CaseOptions):
    """Leading layers stop training. A given `schedule` sets the policy to "schedule"."""

    name: ClassVar[str] = "freezing"

    policy: Literal["schedule", "autofreeze", "egeria"] = "autofreeze"
    """Who decides what is frozen. If `schedule` is given, the default is `schedule`."""
    schedule: FrozenAt = ()
    """`[[step, layers], ...]`: from each step on, this number of leading layers is frozen."""
    every: Count = 10
    """Steps between two decisions of `autofreeze` or `egeria`."""
    start: Whole = 0
    """First step at which `autofreeze` or `egeria` may freeze."""
    max_layers: Count | None = None
    """Most layers that are frozen. Not set: all but the last."""
    unit: Literal["half", "block"] = "half"
    """Layers that freeze at once: half a block (one layer) or a whole block."""
    window: Annotated[int, Field(ge=2, le=1000)] = 5
    """Readings that `egeria` looks at, one each `every` steps."""
    tolerance: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """`egeria` freezes a layer that changes less than this share of its first rate of change."""
    refresh: Count = 200
    """Largest age, in steps, of the reference model of `egeria`."""
    thaw: BelowOne = 0.1
    """`egeria` unfreezes all layers when the learning rate falls to this share of its value when
    the first layer froze."""
    cache_bytes: Bytes = 0
    """Host memory per rank for the outputs of frozen leading layers: bytes, or a size such as
    `"2GiB"`. A cached microbatch skips these layers. 0 caches nothing."""

    @model_validator(mode="before")
    @classmethod
    def _policy_of_a_schedule(cls, data: object) -> object:
        if isinstance(data, dict) and cast(dict[str, object], data).get("schedule"):
            return {"policy": "schedule", **cast(dict[str, object], data)}
        return cast(object, data)

    def problems(self, run: RunFacts) -> Iterator[str]:
        if self.policy == "schedule":
            if not self.schedule:
                yield (
                    "dynamism.freezing.schedule is empty, so nothing would freeze; give [[step, "
                    'layers], ...] or policy = "autofreeze"'
                )
            key = "dynamism.freezing.schedule"
            most = max((count for _, count in self.schedule), default=0)
        else:
            key, most = "dynamism.freezing.max_layers", self.max_layers or 0
        if run.layers is not None and most >= run.layers:
            yield (
                f"{key} freezes {most} of the model's {run.layers} layers; the last must train, so "
                f"freeze at most {run.layers - 1}"
            )
        if run.steps is not None:
            yield from self._late(run.steps)
        if self.policy == "egeria" and self.refresh < self.window * self.every:
            yield (
                f"dynamism.freezing.refresh = {self.refresh}: a reference must last a window of "
                f"{self.window} readings, one each {self.every} steps; use refresh = "
                f"{self.window * self.every} or more"
            )
        if self.cache_bytes:
            yield from self._no_cache(run)

    def _late(self, steps: int) -> Iterator[str]:
        """Yields that nothing can freeze within the run."""
        key = "dynamism.freezing"
        if self.policy == "schedule" and self.schedule[0][0] >= steps:
            yield (
                f"{key}.schedule starts at step {self.schedule[0][0]}, but the run has {steps} "
                "steps, so nothing would freeze; start sooner"
            )
        if self.policy == "autofreeze" and self.start + 2 * self.every >= steps:
            yield (
                f"{key}: two intervals end at step {self.start} + 2 x {self.every}, but the run "
                f"has {steps} steps, so nothing would freeze; lower start or every"
            )
        if (
            self.policy == "egeria"
            and self.refresh >= self.window * self.every
            and self.first_stale_step(steps) >= steps
        ):
            yield (
                f"{key}.window = {self.window}: with a reading each {self.every} steps from step "
                f"{self.start} on, and a new reference each {self.refresh}, no module can have "
                f"been stale for a window within the run's {steps} steps, so nothing would freeze; "
                "lower window, every or start, or refresh later"
            )

    def _no_cache(self, run: RunFacts) -> Iterator[str]:
        """Yields that a frozen layer gives another output each time."""
        key = f"dynamism.freezing.cache_bytes = {self.cache_bytes}"
        if run.model is not None and run.model.dropout:
            yield (
                f"{key} with model.dropout = {run.model.dropout}: what is dropped is another "
                "each time; use cache_bytes = 0 or dropout = 0"
            )
        if "sparse_attention" in run.cases:
            yield (
                f'{key} with the case "sparse_attention", which draws anew at each step; use '
                "cache_bytes = 0, or leave the case out"
            )

    def first_stale_step(self, steps: int) -> int:
        """The first step before which Egeria can freeze a module, or `steps` if none.

        Egeria needs `window` slopes after the first one, which they are compared with. A reading
        uses the last reference taken before its step. Each reference begins a new curve, whose
        first window has no slope.
        """
        slopes = readings = reference = 0
        for offset in range(self.every, steps - self.start, self.every):
            latest = (offset - 1) // self.refresh
            readings = 1 if latest != reference else readings + 1
            reference = latest
            slopes += readings >= self.window
            if slopes > self.window:
                return self.start + offset + 1
        return steps


class Pruning(CaseOptions):
    """Weights of least magnitude become zero, by a cubic schedule."""

    name: ClassVar[str] = "pruning"

    criterion: Literal["global", "local"] = "global"
    """Weights that are compared: those of all layers, or those of each layer."""
    initial_sparsity: BelowOne = 0.0
    """Share of zero weights at `start`."""
    final_sparsity: BelowOne = 0.9
    """Share of zero weights at `end`."""
    start: Whole | None = None
    """First step that prunes. Not set: after 30 % of the run."""
    end: Whole | None = None
    """Last step that prunes. Not set: after 70 % of the run."""
    every: Count | None = None
    """Steps between two prunings. Not set: a quarter of the time from `start` to `end`."""
    dense_below: DenseBelow = "auto"
    """Sparsity below which a matrix stays dense: a share, a table of shares by shape, `measured`
    (timed once per machine and shape), or `auto` (0.75 on CPU, measured on CUDA)."""

    def steps_of(self, steps: int | None) -> tuple[int, int, int]:
        """`start`, `end` and `every` in a run of so many steps."""
        if self.start is not None and self.end is not None:
            start, end = self.start, self.end
        else:
            assert steps is not None, "`problems` asks for the steps"
            start = 3 * steps // 10 if self.start is None else self.start
            end = min(steps - 1, max(start, 7 * steps // 10)) if self.end is None else self.end
        return start, end, max(1, (end - start) // 4) if self.every is None else self.every

    def problems(self, run: RunFacts) -> Iterator[str]:
        key = "dynamism.pruning"
        if run.model is not None and run.model.kind == "emulated":
            yield (
                f'{key}: an emulated model has no weights to prune; use model.kind = "gpt", or '
                "leave the case out"
            )
        if self.initial_sparsity > self.final_sparsity:
            yield (
                f"{key}.initial_sparsity = {self.initial_sparsity} is over final_sparsity = "
                f"{self.final_sparsity}; pruned weights do not return, so use at most that"
            )
        if run.steps is None and (self.start is None or self.end is None):
            yield f"{key}: give start and end, or the steps of the run (steps=)"
            return
        start, end, every = self.steps_of(run.steps)
        late = [
            (name, step)
            for name, step in (("start", start), ("end", end))
            if run.steps is not None and step >= run.steps
        ]
        if late:
            assert run.steps is not None
            name, step = late[0]
            yield (
                f"{key}.{name} = {step}: the run has {run.steps} steps, so it would not prune to "
                f"the end; use at most {run.steps - 1}"
            )
        elif start > end:
            yield f"{key}.start = {start} is after end = {end}; prune from start to end"
        elif every > max(1, end - start):
            yield (
                f"{key}.every = {every} is more than the {end - start} steps from start = {start} "
                f"to end = {end}; use a smaller one"
            )


class SparseAttention(CaseOptions):
    """Attention computes only a part of the pairs of queries and keys."""

    name: ClassVar[str] = "sparse_attention"

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
    drop: BelowOne = 0.5
    """Share of the queries, and of the keys, that kind `drop` drops."""
    tile: Annotated[int, Field(ge=1, le=65536)] = 32
    """Queries that are computed together."""

    def problems(self, run: RunFacts) -> Iterator[str]:
        key, model = "dynamism.sparse_attention", run.model
        yield from _needs(run, "sparse_attention", "attention")
        if self.schedule and (self.start or self.blocks is not None):
            yield f"{key}.schedule says when and where, and so do start and blocks; leave them out"
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


class EarlyExit(CaseOptions):
    """Tokens that a model is sure of leave it at exit heads."""

    name: ClassVar[str] = "early_exit"

    policy: Literal["calm", "adp-c"] = "calm"
    """How exits decide and learn. `calm` weighs the losses by depth, and its threshold falls over
    the sequence. `adp-c` weighs them equally, and compares the largest probability."""
    confidence: Literal["softmax", "state", "classifier"] = "softmax"
    """The value that `calm` compares with the threshold: the largest probability minus the second,
    the cosine of the states before and after the last block, or a classifier of each exit."""
    threshold: Share | None = None
    """A token exits when its confidence is over this. Not set: 0.9 for `calm`, 0.998 for
    `adp-c`."""
    exits: Listed[Whole] | None = None
    """Blocks after which an exit head stands. Not set: at a third and two thirds of the depth."""
    start: Whole | None = None
    """Step from which tokens exit. Before it, exits only learn. Not set: after 30 % of the run."""
    record_every: Count = 10
    """Steps between two records of how many tokens exit at each depth."""

    @property
    def threshold_of_policy(self) -> float:
        """The threshold, or the policy's own."""
        if self.threshold is not None:
            return self.threshold
        return 0.9 if self.policy == "calm" else 0.998

    def exits_of(self, blocks: int) -> tuple[int, ...]:
        """The blocks after which an exit head stands."""
        if self.exits is not None:
            return tuple(self.exits)
        thirds = (-(-third * blocks // 3) - 1 for third in (1, 2))
        return tuple(sorted({block for block in thirds if 0 <= block < blocks - 1}))

    def start_of(self, steps: int | None) -> int:
        """The first step at which tokens exit."""
        if self.start is not None:
            return self.start
        assert steps is not None, "`problems` asks for the steps"
        return 3 * steps // 10

    def problems(self, run: RunFacts) -> Iterator[str]:
        key, model = "dynamism.early_exit", run.model
        yield from _needs(run, "early_exit", "tokens that could exit")
        yield from _chosen_tokens(run, "early_exit")
        if model is not None and model.is_gpt:
            exits = self.exits_of(model.blocks)
            if not exits:
                yield (
                    f"{key}: a model of {model.blocks} blocks has no place for an exit; use more "
                    f"blocks, or name one in {key}.exits"
                )
            elif list(exits) != sorted(set(exits)):
                yield f"{key}.exits = {list(exits)} must ascend, each block once"
            elif exits[-1] >= model.blocks - 1:
                yield (
                    f"{key}.exits names block {exits[-1]}, but an exit can stand after the blocks "
                    f"0 to {model.blocks - 2}; behind the last block is the head"
                )
        if self.policy == "adp-c" and self.confidence != "softmax":
            yield (
                f'{key}.confidence = "{self.confidence}" is of policy "calm"; leave it out, '
                'for "adp-c" compares the largest probability'
            )
        if run.steps is None and self.start is None:
            yield f"{key}: give start, or the steps of the run (steps=)"
        elif run.steps is not None and self.start_of(run.steps) >= run.steps:
            yield (
                f"{key}.start = {self.start_of(run.steps)}, but the run has {run.steps} steps, so "
                "no token would exit; start sooner"
            )


class MixtureOfDepths(CaseOptions):
    """Some blocks let only a part of the tokens pass."""

    name: ClassVar[str] = "mixture_of_depths"

    capacity: Annotated[float, Field(gt=0, le=1)] = 0.125
    """Share of the tokens of a sequence that a routed block computes."""
    every: Count = 2
    """Every so many-th block is routed."""
    predictor: Literal["mlp", "bce"] = "mlp"
    """How the selection is predicted: by a small network with a stopped gradient, or by the
    router's own weight under a binary cross entropy."""
    predictor_weight: NonNegative = 0.01
    """Weight of the predictor's loss."""
    threshold_from: Whole | None = None
    """Step from which training selects tokens by the predictor. Not set: never, each sequence keeps
    its best tokens. Evaluation always selects by the predictor, which sees no later token."""
    record_every: Count = 10
    """Steps between two records of how many tokens each routed block computes."""

    def routed_blocks(self, blocks: int) -> tuple[int, ...]:
        return tuple(range(self.every - 1, blocks, self.every))

    def problems(self, run: RunFacts) -> Iterator[str]:
        key, model = "dynamism.mixture_of_depths", run.model
        yield from _needs(run, "mixture_of_depths", "tokens to select")
        yield from _chosen_tokens(run, "mixture_of_depths")
        if "early_exit" in run.cases:
            yield (
                'dynamism.cases: "early_exit" and "mixture_of_depths" both choose tokens for a '
                "block; leave one of them out"
            )
        if model is not None and model.is_gpt and self.every > model.blocks:
            yield (
                f"{key}.every = {self.every} routes none of the model's {model.blocks} blocks; "
                f"use {model.blocks} or less"
            )
        if model is not None and self.capacity * model.sequence < 0.5:
            least = math.ceil(5000 / model.sequence) / 10000
            yield (
                f"{key}.capacity = {self.capacity} selects no token of model.sequence = "
                f"{model.sequence}; use {least} or more"
            )
        late = self.threshold_from
        if late is not None and run.steps is not None and late >= run.steps:
            yield (
                f"{key}.threshold_from = {late}, but the run has {run.steps} steps; use less, or "
                "leave it out"
            )


class Experts(CaseOptions):
    """Measures the load of experts, and places them on the replicas that share them."""

    name: ClassVar[str] = "experts"

    record_every: Count = 10
    """Steps between two records of the experts' load."""
    place_every: Whole = 20
    """Steps between two decisions where experts go (`parallel.expert` over 1). 0: they stay."""
    redundant: Whole = 0
    """Experts that a replica may hold besides its equal part. Hot experts are copied there."""
    least_gain: BelowOne = 0.05
    """Experts move if the load of the busiest replica then falls by at least this share."""

    def problems(self, run: RunFacts) -> Iterator[str]:
        model = run.model
        if model is not None and model.kind != "moe" and not model.kind.startswith("python:"):
            yield (
                f'dynamism.cases: "experts", but model.kind = "{model.kind}" has no experts of '
                'dynmo; use model.kind = "moe"'
            )


# The options of each case. The cases act in this order, which does not depend on the order in
# which a run names them.
CASES: dict[str, type[CaseOptions]] = {
    options.name: options
    for options in (Pruning, SparseAttention, EarlyExit, MixtureOfDepths, Experts, Freezing)
}
