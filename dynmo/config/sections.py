"""The configuration of a run, a section a class: frozen, every key with a default, so that an empty file is a valid small run."""

from __future__ import annotations

from typing import Annotated, cast

import tomli_w
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from dynmo.config.values import (
    BelowOne,
    BlocksAt,
    Buckets,
    Bytes,
    Cases,
    Count,
    DataSource,
    DenseBelow,
    Every,
    FrozenAt,
    Lax,
    LossScale,
    MemoryLimit,
    ModelKind,
    NonNegative,
    NothingYet,
    Positive,
    Recompute,
    RunName,
    Seconds,
    ShapesAt,
    Share,
    Threads,
    Timeout,
    Whole,
    only,
    word,
)
from dynmo.schedule.catalogue import SCHEDULES, chunks_of


class Section(BaseModel):
    """Frozen; unknown keys, strings for numbers, and infinities are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


# Keys of [model] that only one kind has. All kinds have the others.
KEYS_OF_KIND = {
    "gpt": ("blocks", "hidden", "heads", "dropout", "tied", "init_std"),
    "emulated": ("layers", "f", "b", "w", "bytes"),
}


def keys_of_other_kinds(kind: str) -> frozenset[str]:
    """The keys of [model] that a model of this kind does not have."""
    return frozenset(key for owner, keys in KEYS_OF_KIND.items() if owner != kind for key in keys)


class Model(Section):
    """What is trained. `sequence` counts tokens. `layers`, `f`, `b`, `w` (seconds, one number or one per layer) and `bytes` (of an
    activation message) belong to the emulated kind, `blocks` to `init_std` to the gpt (`KEYS_OF_KIND`). `reading.parse` refuses
    keys of another kind, and a model that is written down leaves them out."""

    kind: ModelKind = "gpt"
    blocks: Count = 8
    hidden: Count = 256
    heads: Count = 4
    vocab: Count = 256
    sequence: Count = 256
    dropout: BelowOne = 0.0
    tied: bool = False
    init_std: Positive = 0.02
    layers: Count = 8
    f: Seconds = 0.01
    b: Seconds = 0.01
    w: Seconds = 0.01
    bytes: Count = 65536

    @model_serializer(mode="wrap")
    def _without_other_kinds(self, write: SerializerFunctionWrapHandler) -> dict[str, object]:
        others = keys_of_other_kinds(self.kind)
        return {key: value for key, value in write(self).items() if key not in others}

    @property
    def layer_count(self) -> int | None:
        """The number of layers as placements count them; None where only the user's own function knows."""
        if self.kind == "gpt":
            return 2 * self.blocks + 2  # embedding, an attention and a feed-forward half per block, head
        return self.layers if self.kind == "emulated" else None


class Data(Section):
    """Where the bytes come from: "stdlib" (the running Python's own sources) or "file:PATH". What every epoch shuffles anew: the "windows",
    or the "batches" that the first epoch made of them, so that all microbatches come again."""

    source: DataSource = "stdlib"
    shuffle: Annotated[str, word(("windows", "batches"))] = "windows"


class Train(Section):
    """`global_batch` and `micro_batch` are sequences per step (over all replicas) and per microbatch; `max_grad_norm` 0 clips nothing,
    by the norm of all layers, or with clip_scope "local" each layer by its own; `betas` and `eps` are AdamW's, `momentum` is SGD's;
    `eval_every` 0 never evaluates; `warmup` counts steps; `compile`: torch.compile runs the layers between their linears;
    `deterministic`: on CUDA only kernels that give the same bits in every run. Gradients are added up in `reduction_slots` parts (None:
    one per replica): at equally many, any number of replicas gives the same bits. precision "bfloat16" and "float16" keep float32 masters
    and gradients. loss_scale: a power of two, or "dynamic": halved where gradients overflow, whose step is skipped, doubled after
    `loss_scale_window` good steps (None: dynamic for float16, else none). recompute: the layers whose activations are not kept but computed
    again in B: "none", "all", a list of their indices, or "auto": as many as the memory limit makes necessary."""

    steps: Count = 100
    global_batch: Count = 32
    micro_batch: Count = 4
    optimizer: Annotated[str, word(("adamw", "sgd"), ("adam", "muon"))] = "adamw"
    lr: NonNegative = 3e-4
    warmup: Whole = 0
    decay: Annotated[str, word(("cosine", "linear", "constant"))] = "cosine"
    min_lr_ratio: Share = 0.1
    weight_decay: NonNegative = 0.1
    betas: Annotated[tuple[BelowOne, BelowOne], Lax] = (0.9, 0.95)
    eps: Positive = 1e-8
    momentum: BelowOne = 0.9
    max_grad_norm: NonNegative = 1.0
    clip_scope: Annotated[str, word(("global", "local"))] = "global"
    precision: Annotated[str, word(("float32", "bfloat16", "float16"))] = "float32"
    loss_scale: LossScale = None
    loss_scale_window: Count = 2000
    recompute: Recompute = "none"
    reduction_slots: Count | None = None
    compile: bool = False
    deterministic: bool = False
    eval_every: Whole = 0
    eval_batches: Count = 4


class Parallel(Section):
    """Sizes of the mesh: `data` replicas of a pipeline of `pipeline` ranks; `zero` 1 shards the optimizer's state over the replicas;
    `slices`: the ranks of a pipeline are slices of one GPU, in one process; `threads` of one rank on CPU (at most 1024); `timeout` in
    seconds is the limit of every wait (at most 1e9). `backend`: "auto" is NCCL between CUDA ranks and gloo between CPU ranks. "gloo" sends
    CUDA tensors through host memory: slower, but ranks may share a GPU."""

    pipeline: Count = 1
    data: Count = 1
    expert: Annotated[Count, only(1)] = 1
    zero: Annotated[int, Field(ge=0, le=1)] = 0
    slices: bool = False
    threads: Threads = 1
    timeout: Timeout = 120.0
    device: Annotated[str, word(("auto", "cpu", "cuda"))] = "auto"
    backend: Annotated[str, word(("auto", "gloo"))] = "auto"

    @property
    def staged(self) -> bool:
        """Whether all messages pass through host memory."""
        return self.backend == "gloo"


class Pipeline(Section):
    """The schedule; `chunks` is stages per rank (None: the schedule's own), `memory_limit` in bytes per rank (None: the device's).
    `post_validation`: no barrier at a step's end; a step that overflows or must be clipped is taken back, and `rollback` says how: "exact"
    keeps a copy of weights and optimizer state for as long, "in-place" inverts the update, which is not quite bit for bit.
    `w_granularity`: a W runs "whole", where the schedule has it; or a "linear" of it at a time may run earlier, while a message is late."""

    schedule: Annotated[str, word(SCHEDULES)] = "zb-h1"
    post_validation: bool = False
    rollback: Annotated[str, word(("exact", "in-place"))] = "exact"
    chunks: Count | None = None
    memory_limit: MemoryLimit = None
    w_granularity: Annotated[str, word(("whole", "linear"))] = "whole"


# The words of dynmo/balance/balancers.py, a floor above this file; a test holds the two together.
BALANCERS = (
    "none",
    "uniform",
    "exact",
    "schedule-aware",
    "diffusion",
    "random",
    "deepspeed-uniform",
    "deepspeed-parameters",
    "deepspeed-time",
    "megatron-uniform",
    "megatron-embedding-loss",
    "algorithm-3",
)


class Balance(Section):
    """Who decides where layers live, from which cost, every how many steps ("auto": when the work or the ranks' imbalance has changed).
    `initial` is the first placement, in layer counts (None: as even as can be). A move must gain `margin` times its cost, and at least
    `hysteresis` of the step (a share)."""

    balancer: Annotated[str, word(BALANCERS)] = "exact"
    cost: Annotated[str, word(("time", "parameters"))] = "time"
    every: Every = 10
    initial: Annotated[tuple[Count, ...] | None, Lax] = None
    margin: NonNegative = 1.0
    hysteresis: NonNegative = 0.02


class Freezing(Section):
    """Leading layers stop training. policy "schedule": `schedule` lists [step, layers], from that step on so many leading layers are
    frozen. policies "autofreeze" and "egeria": decided every `every` steps from step `start` on, by halves or whole blocks (`unit`), at
    most `max_layers` (None: all but the last). Egeria compares with a reference of up to `refresh` steps ago; it freezes what has changed
    less than `tolerance` times as fast as at first for `window` readings, one each `every` steps, and unfreezes all when the learning rate
    falls to `thaw` times what it was. `cache_bytes`: of host memory, per rank, for the outputs of frozen leading layers, which need not run
    then where a microbatch comes again (0: none). The policy is "schedule" where a schedule is given and no policy named."""

    policy: Annotated[str, word(("schedule", "autofreeze", "egeria"))] = "autofreeze"
    schedule: FrozenAt = ()
    every: Count = 10
    start: Whole = 0
    max_layers: Count | None = None
    unit: Annotated[str, word(("half", "block"))] = "half"
    window: Annotated[int, Field(ge=2, le=1000)] = 5
    tolerance: Annotated[float, Field(gt=0, lt=1)] = 0.2
    refresh: Count = 200
    thaw: BelowOne = 0.1
    cache_bytes: Bytes = 0

    @model_validator(mode="before")
    @classmethod
    def _policy_of_a_schedule(cls, data: object) -> object:
        if isinstance(data, dict) and cast(dict[str, object], data).get("schedule"):
            return {"policy": "schedule", **cast(dict[str, object], data)}
        return cast(object, data)


class Pruning(Section):
    """Weights of least magnitude leave, until `final_sparsity` of them are gone: at step `start`, every `every` steps, and at `end`, by a
    cubic schedule (where not given: from 30 % to 70 % of the run, in four intervals). criterion "global" compares the weights of all
    layers, "local" those of each. A matrix that has lost less than the share `dense_below` stays dense, which saves nothing. "measured":
    the share is timed once per machine and shape as a run first prunes, and kept in the run's checkpoints and its config (as a table by
    shape; another machine may find others, and so round differently). "auto": 0.6 on CPU, measured on CUDA."""

    criterion: Annotated[str, word(("global", "local"))] = "global"
    initial_sparsity: BelowOne = 0.0
    final_sparsity: BelowOne = 0.9
    start: Whole | None = None
    end: Whole | None = None
    every: Count | None = None
    dense_below: DenseBelow = "auto"

    def steps_of(self, steps: int) -> tuple[int, int, int]:
        """start, end, every in a run of so many steps."""
        start = 3 * steps // 10 if self.start is None else self.start
        end = min(steps - 1, max(start, 7 * steps // 10)) if self.end is None else self.end
        return start, end, max(1, (end - start) // 4) if self.every is None else self.every


class SparseAttention(Section):
    """Attention computes only a part of the pairs. kind "hash": those in one of `buckets` hash buckets; "drop": those of the queries and
    keys that stay when the share `drop` of each is dropped. From step `start` on in these `blocks` (None: all), dense before. Or by
    `schedule`, [step, [block, ...]]: from that step on these blocks are sparse and the others dense. `tile`: queries computed together."""

    kind: Annotated[str, word(("hash", "drop"))] = "hash"
    start: Whole = 0
    blocks: Annotated[tuple[Whole, ...] | None, Lax] = None
    schedule: BlocksAt = ()
    buckets: Buckets = 16
    drop: BelowOne = 0.5
    tile: Annotated[int, Field(ge=1, le=65536)] = 32


class Dynamism(Section):
    """Which dynamic cases run ("python:package.module:Class" is one of your own), and the options of each."""

    cases: Cases = ()
    freezing: Freezing = Freezing()
    pruning: Pruning = Pruning()
    sparse_attention: SparseAttention = SparseAttention()


class Elastic(Section):
    """Fewer or more ranks while training. `reshape`: when the work has changed and it pays, the same ranks become a shorter pipeline of
    more replicas, or the reverse, among the meshes that `train.reduction_slots` fit. Or `reshape_at` lists [step, pipeline, data]: from
    that step on they are a mesh of these sizes."""

    repack: Annotated[bool, only(False)] = False
    reshape: bool = False
    reshape_at: ShapesAt = ()
    min_ranks: Annotated[Count, only(1)] = 1
    target_ranks: NothingYet = None


class Checkpoint(Section):
    """Save every so many steps (0: never), and keep so many."""

    every: Whole = 0
    keep: Count = 2


class Trace(Section):
    """How many recent steps the trace keeps around each change."""

    steps: Whole = 3


class Config(Section):
    """A whole run. `runs/<name>/` is its folder.

    Each value is valid by itself. `load` and `parse` also check that the values fit together.
    """

    name: RunName = "quickstart"
    seed: Annotated[int, Field(ge=0, le=2**63 - 1)] = 0
    model: Model = Model()
    data: Data = Data()
    train: Train = Train()
    parallel: Parallel = Parallel()
    pipeline: Pipeline = Pipeline()
    balance: Balance = Balance()
    dynamism: Dynamism = Dynamism()
    elastic: Elastic = Elastic()
    checkpoint: Checkpoint = Checkpoint()
    trace: Trace = Trace()

    @property
    def microbatches(self) -> int:
        """Microbatches per step of one replica: what a schedule calls m."""
        return self.train.global_batch // (self.train.micro_batch * self.parallel.data)

    @property
    def all_microbatches(self) -> int:
        """Microbatches per step of all replicas."""
        return self.train.global_batch // self.train.micro_batch

    @property
    def accumulation_groups(self) -> int:
        """The number of parts in which the gradients of a step are summed, over all replicas."""
        return self.train.reduction_slots or self.parallel.data

    def shape_at(self, step: int) -> tuple[int, int]:
        """The mesh at this step: ranks of a pipeline, and how many pipelines."""
        shapes = [(pipeline, data) for at, pipeline, data in self.elastic.reshape_at if at <= step]
        return shapes[-1] if shapes else (self.parallel.pipeline, self.parallel.data)

    @property
    def chunks(self) -> int:
        """Stages per rank."""
        return chunks_of(self.pipeline.schedule, self.pipeline.chunks)

    @property
    def slices(self) -> int | None:
        """Into how many slices each GPU is cut; None: into none."""
        return self.parallel.pipeline if self.parallel.slices else None

    @property
    def stages(self) -> int:
        """Stages of the pipeline."""
        return self.parallel.pipeline * self.chunks

    @property
    def ranks(self) -> int:
        """The size of the world: pipeline x data x expert; a pipeline of slices is one rank of it."""
        return (1 if self.parallel.slices else self.parallel.pipeline) * self.parallel.data * self.parallel.expert

    def to_toml(self) -> str:
        """TOML that `load` reads back as the same config. A key that is None is left out."""
        return tomli_w.dumps(self.model_dump(exclude_none=True))
