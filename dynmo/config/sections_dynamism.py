"""[dynamism]: the dynamic cases of a run, and one section of options each."""

from __future__ import annotations

from typing import Annotated, cast

from pydantic import Field, model_validator

from dynmo.config.section import Section
from dynmo.config.values import (
    BelowOne,
    BlocksAt,
    Buckets,
    Bytes,
    Cases,
    Count,
    DenseBelow,
    FrozenAt,
    Lax,
    NonNegative,
    Whole,
    word,
)


class FreezingSection(Section):
    """Leading layers stop training. A given `schedule` sets the policy to "schedule"."""

    policy: Annotated[str, word(("schedule", "autofreeze", "egeria"))] = "autofreeze"
    """Who decides what is frozen. If `schedule` is given, the default is `schedule`."""
    schedule: FrozenAt = ()
    """`[[step, layers], ...]`: from each step on, this number of leading layers is frozen."""
    every: Count = 10
    """Steps between two decisions of `autofreeze` or `egeria`."""
    start: Whole = 0
    """First step at which `autofreeze` or `egeria` may freeze."""
    max_layers: Count | None = None
    """Most layers that are frozen. Not set: all but the last."""
    unit: Annotated[str, word(("half", "block"))] = "half"
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


class PruningSection(Section):
    """Weights of least magnitude become zero, by a cubic schedule."""

    criterion: Annotated[str, word(("global", "local"))] = "global"
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
    (timed once per machine and shape), or `auto` (0.6 on CPU, measured on CUDA)."""

    def steps_of(self, steps: int) -> tuple[int, int, int]:
        """`start`, `end` and `every` in a run of this number of steps."""
        start = 3 * steps // 10 if self.start is None else self.start
        end = min(steps - 1, max(start, 7 * steps // 10)) if self.end is None else self.end
        return start, end, max(1, (end - start) // 4) if self.every is None else self.every


class SparseAttentionSection(Section):
    """Attention computes only a part of the pairs of queries and keys."""

    kind: Annotated[str, word(("hash", "drop"))] = "hash"
    """Pairs that are computed: those in one hash bucket, or those that a random drop leaves."""
    start: Whole = 0
    """Step from which on attention is sparse."""
    blocks: Annotated[tuple[Whole, ...] | None, Lax] = None
    """Indices of the blocks that are sparse from `start` on. Not set: all blocks."""
    schedule: BlocksAt = ()
    """`[[step, [block, ...]], ...]`: from each step on, these blocks are sparse and the others
    dense."""
    buckets: Buckets = 16
    """Number of hash buckets. Even."""
    drop: BelowOne = 0.5
    """Share of the queries, and of the keys, that kind `drop` drops."""
    tile: Annotated[int, Field(ge=1, le=65536)] = 32
    """Queries that are computed together."""


class EarlyExitSection(Section):
    """Tokens that a model is sure of leave it at exit heads."""

    policy: Annotated[str, word(("calm", "adp-c"))] = "calm"
    """How exits decide and learn. `calm` weighs the losses by depth, and its threshold falls over
    the sequence. `adp-c` weighs them equally, and compares the largest probability."""
    confidence: Annotated[str, word(("softmax", "state", "classifier"))] = "softmax"
    """The value that `calm` compares with the threshold: the largest probability minus the second,
    the cosine of the states before and after the last block, or a classifier of each exit."""
    threshold: Annotated[float, Field(ge=0, le=1)] | None = None
    """A token exits when its confidence is over this. Not set: 0.9 for `calm`, 0.998 for
    `adp-c`."""
    exits: Annotated[tuple[Whole, ...] | None, Lax] = None
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
        """The blocks after which an exit head stands, in a model of `blocks` blocks."""
        if self.exits is not None:
            return self.exits
        thirds = (-(-third * blocks // 3) - 1 for third in (1, 2))
        return tuple(sorted({block for block in thirds if 0 <= block < blocks - 1}))

    def start_of(self, steps: int) -> int:
        """The first step at which tokens exit, in a run of `steps` steps."""
        return 3 * steps // 10 if self.start is None else self.start


class MixtureOfDepthsSection(Section):
    """Some blocks let only a part of the tokens pass."""

    capacity: Annotated[float, Field(gt=0, le=1)] = 0.125
    """Share of the tokens of a sequence that a routed block computes."""
    every: Count = 2
    """Every so many-th block is routed."""
    predictor: Annotated[str, word(("mlp", "bce"))] = "mlp"
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
        """The blocks that only some tokens pass, in a model of `blocks` blocks."""
        return tuple(range(self.every - 1, blocks, self.every))


class MoeSection(Section):
    """Measures the load of experts, and places them on the replicas that share them."""

    record_every: Count = 10
    """Steps between two records of the experts' load."""
    place_every: Whole = 20
    """Steps between two decisions where experts go (`parallel.expert` over 1). 0: they stay."""
    redundant: Whole = 0
    """Experts that a replica may hold besides its equal part. Hot experts are copied there."""
    least_gain: BelowOne = 0.05
    """Experts move if the load of the busiest replica then falls by at least this share."""


class DynamismSection(Section):
    """The dynamic cases of the run, and the options of each."""

    cases: Cases = ()
    """Cases that run: `freezing`, `pruning`, `sparse_attention`, `early_exit`,
    `mixture_of_depths`, `moe`, or your own: `python:package.module:Class`."""
    freezing: FreezingSection = FreezingSection()
    """Options of the case `freezing`."""
    pruning: PruningSection = PruningSection()
    """Options of the case `pruning`."""
    sparse_attention: SparseAttentionSection = SparseAttentionSection()
    """Options of the case `sparse_attention`."""
    early_exit: EarlyExitSection = EarlyExitSection()
    """Options of the case `early_exit`."""
    mixture_of_depths: MixtureOfDepthsSection = MixtureOfDepthsSection()
    """Options of the case `mixture_of_depths`."""
    moe: MoeSection = MoeSection()
    """Options of the case `moe`."""
